import pytest

from penstock.overseer.metrics import Bottleneck, find_bottleneck, idle_shares


@pytest.mark.parametrize(
    ("idle", "budget", "local", "part", "said"),
    [
        ({"learner": 0.03, "inference": 0.0}, 2, False, "learner", ["learner busy 97%", "roles.learner"]),
        (
            {"learner": 0.41, "inference": 0.05, "replay": 0.0, "rollout": 0.0},
            2,
            False,
            "inference",
            ["learner idle 41%", "inference.servers"],
        ),
        (
            {"learner": 0.41, "inference": 0.6, "replay": 0.04, "rollout": 0.0},
            2,
            False,
            "replay",
            ["learner idle 41%", "the replay buffer is busy 96%", "roles.replay"],
        ),
        (
            {"learner": 0.41, "inference": 0.6, "replay": 0.9, "rollout": 0.03},
            2,
            False,
            "rollout",
            ["learner idle 41%", "97%", "rollout.workers"],
        ),
        (
            {"learner": 0.41, "inference": 0.6, "replay": 0.9, "rollout": 0.5},
            2,
            False,
            "admission",
            ["not enough to do", "replay.staleness_budget"],
        ),
        ({"learner": 0.41, "inference": 0.05}, 0, False, "staleness", ["at staleness zero it takes turns"]),
        ({"learner": 0.41, "inference": 0.05}, 2, True, "inference", ["inference.max_slots", "runtime: ray"]),
        ({"learner": 0.41}, 2, False, "admission", ["not enough to do"]),
    ],
)
def test_the_sentence_names_who_sets_the_pace_and_what_to_do(idle, budget, local, part, said):
    found, _ = find_bottleneck(idle, budget == 0, local)
    assert found.part == part
    assert [words for words in said if words not in found.words] == []


def test_idle_shares_are_metrics_by_role():
    _, metrics = find_bottleneck({"learner": 0.25, "inference": 0.5})
    assert metrics == {"time/idle/inference": 0.5, "time/idle/learner": 0.25}


def test_idle_shares_of_one_process():
    times = {"time/wait_for_batch": 3.0, "time/update": 0.5, "time/checkpoint": 0.25, "weights/publish_s": 0.25}
    assert idle_shares(times, 3.0) == {"learner": 0.75, "inference": 0.25}
    assert idle_shares(times, 5.0) == {"learner": 0.75, "inference": 0.0}
    assert idle_shares({}, 1.0) == {}


def test_without_a_learner_nothing_is_said():
    assert find_bottleneck({"inference": 0.5}) == (Bottleneck(None, ""), {"time/idle/inference": 0.5})
