import pytest

from penstock.overseer.fleet_pace import FleetPace, find_bottleneck


def update(steps: float, blocked_s: float = 0.0, wait_s: float = 1.0, update_s: float = 1.0) -> dict[str, float]:
    return {
        "time/wait_for_batch": wait_s, "time/update": update_s, "fleet/steps_total": steps, "fleet/workers": 2.0,
        "fleet/batch_slots_mean": 8.0, "fleet/inference_p50_s": 0.01, "fleet/blocked_s": blocked_s,
        "fleet/step_p50_s": 0.02,
    }  # fmt: skip


def test_counters_are_compared_with_the_update_before():
    pace = FleetPace()
    pace.note(update(1000.0, blocked_s=5.0))
    found = pace.note(update(2600.0, blocked_s=6.0))
    # 1,600 steps in 2 s; 200 batches of 10 ms by two workers; blocked for 1 of 4 worker-seconds
    assert found == {
        "fleet/steps_per_s": 800.0,
        "time/idle/learner": 0.5,
        "time/idle/inference": 0.5,
        "fleet/blocked_fraction": 0.25,
    }
    assert pace.steps_per_s == 800.0
    assert pace.bottleneck.words.startswith("learner idle 50%: simulators set the pace, 20 ms")


def test_an_update_without_time_says_nothing():
    assert FleetPace().note(update(10.0, wait_s=0.0, update_s=0.0)) == {}


@pytest.mark.parametrize(
    ("learner_idle", "inference_busy", "part", "words"),
    [
        (0.05, 0.9, "learner", "learner busy 95%: it sets the pace"),
        (0.5, 0.8, "inference", "learner idle 50%: inference is busy 80%"),
        (0.5, 0.7, "simulators", "learner idle 50%: simulators set the pace, 20 ms for a process's step"),
    ],
)
def test_the_bottleneck_in_words(learner_idle, inference_busy, part, words):
    found = find_bottleneck(learner_idle, inference_busy, 0.02)
    assert found.part == part and found.words.startswith(words)
