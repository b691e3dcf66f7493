import json
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from penstock.overseer.evaluation_report import Difference, Estimate, EvaluationReport, LessonReport
from penstock.types import Rollout, RolloutBatch, RolloutGroup
from penstock.types.intervals import proportion_interval, wilson_interval


def group(key: str, *rewards: float, tokens: int = 2) -> RolloutGroup:
    return RolloutGroup(key, tuple(rollout(reward, tokens) for reward in rewards))


def rollout(reward: float, tokens: int) -> Rollout:
    token_rewards = np.zeros(tokens, np.float32)
    token_rewards[-1] = reward
    return Rollout(
        env_name="cats",
        env_example_id="1",
        prompt_tokens=np.array([1], np.int32),
        response_tokens=np.ones(tokens, np.int32),
        response_logprobs=np.zeros(tokens, np.float32),
        token_rewards=token_rewards,
        episode_reward=reward,
        finish_reason="length" if tokens > 4 else "stop",
    )


BATCH = RolloutBatch.of(
    (group("a", 1.0, 0.0, 0.0), group("b", 0.0, 0.0, 0.0), group("c", 1.0, 1.0, 0.5), group("d", 0, 0, 0, tokens=6))
)


def test_a_lesson_is_summed_up_with_intervals_over_prompts():
    report = LessonReport.of("easy", BATCH, success_threshold=1.0)
    assert (report.prompts, report.rollouts) == (4, 12)
    assert report.reward_mean.value == pytest.approx(3.5 / 12)
    rewards = [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.5, 0.0, 0.0, 0.0]
    per_prompt = proportion_interval(rewards, [key for key in "abcd" for _ in range(3)])
    assert (report.reward_mean.low, report.reward_mean.high) == pytest.approx(tuple(per_prompt))
    assert report.success_rate.value == report.pass_at[1].value == pytest.approx(0.25)
    # pass@2 of 1, 0, 2, 0 successes in 3: 2/3, 0, 1, 0; pass@3: 1, 0, 1, 0
    assert {k: estimate.value for k, estimate in report.pass_at.items()} == pytest.approx({1: 0.25, 2: 5 / 12, 3: 0.5})
    assert (report.pass_at[3].low, report.pass_at[3].high) == pytest.approx(tuple(wilson_interval(0.5, 4)))
    assert report.response_tokens == 3.0 and report.truncated_fraction == 0.25


def test_a_prompt_drawn_twice_is_one_prompt():
    report = LessonReport.of("easy", RolloutBatch.of((group("a", 1.0), group("a", 0.0), group("b", 0.0, 0.0))), 1.0)
    assert report.prompts == 2 and list(report.pass_at) == [1, 2]
    assert report.pass_at[2].value == 0.5


def test_an_empty_batch_is_a_defined_result():
    report = LessonReport.of("easy", RolloutBatch(()), 1.0)
    assert (report.prompts, report.rollouts, report.pass_at) == (0, 0, {})
    assert report.reward_mean == Estimate(0.0, -math.inf, math.inf)
    assert report.success_rate == Estimate(0.0, 0.0, 1.0)


def test_json_has_no_numbers_that_json_lacks():
    one = LessonReport.of("easy", RolloutBatch.of((group("a", 3.0),)), 1.0)
    report = EvaluationReport(Path("runs/x/checkpoints/step-3"), {"easy": one}, 1.5, Path("rollouts"))
    read = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert read["checkpoint"] == "runs/x/checkpoints/step-3" and read["seconds"] == 1.5
    assert read["lessons"]["easy"]["reward_mean"] == {"value": 3.0, "low": None, "high": None}
    assert read["lessons"]["easy"]["pass_at"]["1"]["value"] == 1.0


def test_the_table_has_one_column_per_lesson_and_a_row_for_pass_at_each_k():
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        reports = {"easy": LessonReport.of("easy", BATCH, 1.0), "hard": LessonReport.of("hard", BATCH, 2.0)}
        EvaluationReport(Path("here"), reports, 1.0, Path("out")).print(console)
    text = console.export_text()
    assert "pass@3" in text and "0.292 [" in text and "0.500 [" in text
    rows = [line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│ ")]
    assert rows == ["prompts", "rollouts", "mean reward", "pass@1", "pass@2", "pass@3", "tokens"]
    assert "rollouts  out" in text


BASELINE = RolloutBatch.of((group("a", 0.0, 0.0, 0.0), group("b", 1.0, 0.0, 0.0), group("c", 0.0, 1.0, 1.0)))


def test_a_difference_is_paired_by_prompt_and_clustered():
    """a: 1, 0, 0; b: −1, 0, 0; c: 1, 0, −.5; d has no counterpart. Mean .5 / 9, sums of residuals 5/6, −7/6, 1/3."""
    found = LessonReport.of("easy", BATCH, 1.0, baseline=BASELINE).difference
    assert found is not None and (found.prompts, found.unpaired) == (3, 3)
    assert found.reward_mean.value == pytest.approx(1 / 18)
    deviation = math.sqrt(3 / 2 * ((5 / 6) ** 2 + (7 / 6) ** 2 + (1 / 3) ** 2) / 81)
    assert found.reward_mean.high - found.reward_mean.value == pytest.approx(4.302653 * deviation, abs=1e-5)
    # successes: a 1, 0, 0; b −1, 0, 0; c 1, 0, −1
    assert found.success_rate.value == 0.0


def test_a_checkpoint_beside_itself_differs_in_nothing():
    found = LessonReport.of("easy", BATCH, 1.0, baseline=BATCH).difference
    none = Estimate(0.0, 0.0, 0.0)
    assert found == Difference(4, none, none, 0, {1: none, 2: none, 3: none})


def test_pass_at_k_differs_prompt_by_prompt_over_those_that_both_answered_often_enough():
    """pass@2: a 2/3 beside 0, b 1 beside 2/3; c was answered once by the baseline. Their mean 1/2, either 1/6 off."""
    ours = RolloutBatch.of((group("a", 1.0, 0.0, 0.0), group("b", 1.0, 1.0, 0.0), group("c", 1.0, 1.0, 1.0)))
    theirs = RolloutBatch.of((group("a", 0.0, 0.0, 0.0), group("b", 0.0, 1.0, 0.0), group("c", 0.0)))
    found = LessonReport.of("easy", ours, 1.0, ks=[2], baseline=theirs).difference
    assert found is not None and list(found.pass_at) == [2] and found.pass_at[2].value == pytest.approx(1 / 2)
    assert found.pass_at[2].high - found.pass_at[2].value == pytest.approx(12.7062 / 6, abs=1e-4)  # t of one degree


def test_nothing_in_common_is_no_difference_of_zero():
    found = LessonReport.of("easy", BATCH, 1.0, baseline=RolloutBatch.of((group("z", 1.0),))).difference
    assert found is not None and found.prompts == 0 and math.isnan(found.reward_mean.value) and found.unpaired == 13


def test_the_ks_that_are_asked_for_and_no_k_beyond_the_responses():
    report = LessonReport.of("easy", BATCH, 1.0, ks=(3, 2, 3))
    assert {k: estimate.value for k, estimate in report.pass_at.items()} == pytest.approx({2: 5 / 12, 3: 0.5})
    with pytest.raises(ValueError, match="pass@4 of 1 successes in 3 samples"):
        LessonReport.of("easy", BATCH, 1.0, ks=(4,))


def test_a_report_with_a_baseline_shows_both_and_what_failed():
    ours = LessonReport.of("easy", BATCH, 1.0, failed_groups=2, baseline=BASELINE)
    theirs = EvaluationReport(Path("step-1"), {"easy": LessonReport.of("easy", BASELINE, 1.0)}, 1.0)
    report = EvaluationReport(Path("step-2"), {"easy": ours}, 1.0, None, theirs)
    read = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert read["baseline"]["checkpoint"] == "step-1" and read["lessons"]["easy"]["failed_groups"] == 2
    assert read["lessons"]["easy"]["difference"]["reward_mean"]["value"] == pytest.approx(1 / 18)
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        report.print(console)
    text = console.export_text()
    rows = [line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│ ")]
    whose = ["baseline", "difference"]
    each = [["mean reward", *whose], *([f"pass@{k}", *whose] for k in (1, 2, 3))]
    assert rows[2:] == ["failed groups", *(row for rows in each for row in rows), "tokens"]
    assert "0.056 [" in text and "baseline  step-1" in text


def test_one_prompt_has_no_interval_and_says_so():
    report = LessonReport.of("easy", RolloutBatch.of((group("a", 3.0),)), 1.0)
    assert str(report.reward_mean) == "3.000 (one alone: no interval)"
