"""Updates from which nothing is learned: when they are told, with which numbers, and what is said to help."""

import pytest

from penstock.overseer.metrics import NO_SIGNAL_UPDATES, SignalWatch


def update(reward: float, **more: float) -> dict[str, float]:
    flat = {"train/zero_variance_groups": 1.0, "train/advantage_zero_fraction": 1.0, "train/groups": 16.0}
    return {**flat, "train/reward_mean": reward, "train/reward_std": 0.0, **{f"train/{k}": v for k, v in more.items()}}


def told(updates: list[dict[str, float]], truncated: float | None = None, first: int = 11) -> list[str]:
    watch = SignalWatch(success_threshold=0.5)
    return [watch.note(step, metrics, truncated) for step, metrics in enumerate(updates, start=first)]


def test_ten_updates_in_a_row_are_told_with_their_numbers():
    words = told([update(0.0)] * 12)
    assert words[:9] == [""] * 9 and NO_SIGNAL_UPDATES == 10
    assert words[9] == (
        "no signal: all 160 groups of 10 updates (11–20) had equal rewards: 0. What helps: an easier lesson, a reward "
        "that grades steps on the way, or a warm start (learner.warm_start)"
    )
    assert "all 192 groups of 12 updates (11–22)" in words[11]


@pytest.mark.parametrize(
    ("updates", "expected"),
    [
        ([update(1.0)] * 10, "rewards: 1. What helps: a harder lesson"),
        ([update(0.1), update(0.3)] * 5, "rewards, 0.1 to 0.3 on average. What helps: an easier lesson"),
        (
            [update(0.0), update(1.0)] * 5,
            "rewards, 0 to 1 on average. What helps: problems that are solved now and then",
        ),
        (
            [update(0.5, reward_std=0.5)] * 10,
            "rewards, 0.5 to 0.5 on average. What helps: problems that are solved now",
        ),
        ([update(-1.0)] * 10, "rewards: -1. What helps: an easier lesson"),
    ],
)
def test_what_helps_depends_on_the_rewards(updates, expected):
    assert expected in told(updates)[-1]


@pytest.mark.parametrize(("truncated", "said"), [(None, False), (0.49, False), (0.95, True)])
def test_answers_that_are_cut_are_named_first(truncated, said):
    words = told([update(0.0)] * 10, truncated)[-1]
    assert ("; 95% of the answers are cut: first raise sampling_params.max_output_tokens" in words) == said


@pytest.mark.parametrize(
    "some",
    [
        update(0.0, zero_variance_groups=0.9),
        update(1.0, advantage_zero_fraction=0.5),  # compared with other groups, or turn by turn
        {"train/reward_mean": 0.0},  # a user's batch maker that says nothing of groups
    ],
)
def test_any_signal_ends_a_stretch(some):
    words = told([update(0.0)] * 9 + [some] + [update(0.0)] * 10)
    assert words[:19] == [""] * 19 and "(21–30)" in words[19]


def test_a_run_that_goes_back_to_a_checkpoint_counts_anew():
    watch = SignalWatch(0.5)
    steps = [*range(1, 10), *range(5, 15)]
    words = [watch.note(step, update(0.0), None) for step in steps]
    assert words[:18] == [""] * 18 and "10 updates (5–14)" in words[18]
