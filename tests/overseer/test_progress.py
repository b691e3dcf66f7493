"""What the view is told, and what it remembers of it."""

import pytest

from penstock.overseer.progress import MOST_POINTS, TRUNCATED, Progress, Sample, Series, range_text


def test_a_history_stays_bounded_and_spans_all_values():
    series = Series()
    for value in range(10 * MOST_POINTS):
        series.add(float(value))
        assert len(series.points()) <= MOST_POINTS
    points = series.points()
    assert series.last == 10 * MOST_POINTS - 1
    steps = {right - left for left, right in zip(points, points[1:-1], strict=False)}
    assert steps == {16.0} and points[0] == 7.5, "each point is the mean of sixteen values"


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_not_finite_is_in_no_history(broken):
    series = Series()
    series.extend([1.0, broken])
    assert series.points() == [1.0] and series.last == 1.0


@pytest.mark.parametrize(
    ("least_s", "most_s", "words"),
    [
        (1.0, 2.0, "~5 s"),
        (24.0, 36.0, "25–35 s"),
        (29.0, 31.0, "~30 s"),
        (50.0, 100.0, "50 s–2 min"),
        (118.0, 128.0, "~2 min"),
        (600.0, 740.0, "10–12 min"),
        (3000.0, 5400.0, "50 min–1.5 h"),
        (3580.0, 3590.0, "~1 h"),
        (4 * 3600.0, 5.6 * 3600, "4–5.5 h"),
        (47.7 * 3600, 50 * 3600, "47.5 h–2 days"),
        (10 * 86400.0, 13 * 86400.0, "10–13 days"),
    ],
)
def test_a_forecast_is_no_finer_than_it_deserves(least_s, most_s, words):
    assert range_text(least_s, most_s) == words


def test_the_truncated_share_is_of_all_groups_and_rewards_are_by_lesson():
    progress = Progress("t", 10, 1)
    progress.note_rollouts(
        {
            "rollout/a/b/reward_mean": 0.5, "rollout/a/b/groups": 3.0, "rollout/a/b/truncated_fraction": 1.0,
            "rollout/c/reward_mean": 0.25, "rollout/c/groups": 1.0, "rollout/c/truncated_fraction": 0.0,
            "env/c/moves": 3.0,
        }
    )  # fmt: skip
    assert progress.reward == {"a/b": 0.5, "c": 0.25}
    assert progress.history[TRUNCATED].last == 0.75


def test_of_an_evaluation_one_line_is_told_and_other_metrics_are_none():
    progress = Progress("t", 10, 1)
    progress.note_evaluation(3, {"micro_eval/cats/reward_mean": 0.1, "train/loss": 1.0})
    assert not progress.lines and not progress.held_out
    progress.note_evaluation(
        4, {"eval_report/cats/reward_mean": 0.25, "eval_report/cats/pass_at_k": 1.0, "eval/dogs/reward_mean": 1.0}
    )
    assert progress.held_out == {"cats (report)": [(4, 0.25)], "dogs": [(4, 1.0)]}
    (line,) = progress.lines
    assert line.endswith("] held-out reward at step 4: cats (report) 0.250, dogs 1.000")
    progress.note_evaluation(6, {"eval/cats/reward_mean": 0.75})
    assert progress.held_out["cats"] == [(6, 0.75)]  # other problems: no point of that curve


def test_phases_are_told_in_the_order_in_which_they_come_between_updates():
    progress = Progress("t", 10, 1)
    for words in ("starting components", "starting components", "training"):
        progress.begin_phase(words)
    progress.note_update(1, 0.5, 0.0, {})
    progress.begin_phase("evaluating the trained policy")
    progress.note_evaluation(1, {"eval/cats/reward_mean": 0.25})
    told = [line.split("] ")[1].split("  ")[0] for line in progress.lines]
    assert told == [
        "starting components", "step 1/10", "evaluating the trained policy", "held-out reward at step 1: cats 0.250",
    ]  # fmt: skip


def test_a_stretch_without_signal_is_told_once_and_kept_as_of_its_end():
    progress = Progress("t", 10, 1)
    assert progress.note_signal("ten") and not progress.note_signal("eleven")
    assert not progress.note_signal("") and progress.no_signal == ""
    assert progress.note_signal("other")
    assert list(progress.stretches) == ["eleven", "other"]
    assert [line.split("] ")[1] for line in progress.lines] == ["ten", "other"]


def test_a_forecast_stands_in_the_line_once_it_can_be_made():
    progress = Progress("t", 100, 1)
    now = progress.started
    for step in range(1, 8):
        progress.note_update(step, 0.5, 0.0, {}, at=now + 1e6 + 60.0 * step)  # a clock that no test waits for
    lines = list(progress.lines)
    assert "ETA" not in lines[4] and lines[5].endswith("step 6/100  reward 0.500  staleness 0.00  ETA ~1.5 h")
    assert progress.status()["left_s"] == [93 * 60.0, 93 * 60.0] and progress.status()["step_s"] == 60.0


def test_the_status_has_the_numbers_of_the_view():
    progress = Progress("t", 10, 1, units_per_s=12.5)
    assert progress.status()["words"] == ""
    progress.note_evaluation(0, {"eval/cats/reward_mean": 0.25})
    progress.note_update(1, 0.5, 0.0, {"train/entropy": 1.25, "train/loss": 0.5, "time/update": 3.0})
    status = progress.status()
    assert status["words"] == "reward 0.500  entropy 1.25  12 tok/s  staleness 0.00"
    assert status["metrics"] == {"train/entropy": 1.25, "train/loss": 0.5}
    assert status["held_out"] == {"cats": {"step": 0, "score": 0.25}}
    assert (status["score"], status["units_per_s"], status["left_s"], status["no_signal"]) == (0.5, 12.5, None, "")


def test_a_sample_names_its_evaluation():
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    made = Sample.of({"turns": turns, "reward": 1, "lesson_id": "cats", "mode": "eval"})
    assert made == Sample((("user", "a"), ("assistant", "b")), 1.0, "cats (eval)")
