"""Which versions are evaluated, and when an evaluation counts as done."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.overseer.language.evaluator import Evaluator, metrics_of
from penstock.overseer.results import read_stats, require_results, write_stats
from penstock.overseer.terminal import interval_text
from penstock.types import EnvironmentFailure, InvalidRolloutError, RolloutBatchStats, RunFailed, Stopped, WeightVersion

STATS = RolloutBatchStats("cats", 4, 4, 0.5, 0.5, 0.5, 3.0, 0.0)


class FakeManager:
    """Evaluates by calling `behave(lesson, kind)`, which may raise."""

    def __init__(self, behave=lambda lesson_id, eval_type: None) -> None:
        config = SimpleNamespace(lessons=["cats", "dogs"], eval_frequency=4, micro_eval_frequency=2)
        self.curriculum = SimpleNamespace(config=config)
        self.behave = behave

    def evaluate_lesson(self, lesson_id, n_examples, eval_type, step):
        self.behave(lesson_id, eval_type)
        return STATS, None


def evaluator_of(manager: FakeManager) -> tuple[Evaluator, list, list]:
    logged, failed = [], []
    evaluator = Evaluator(manager, lambda step, values: logged.append((step, values)), lambda *f: failed.append(f))
    return evaluator, logged, failed


def test_an_evaluation_that_a_checkpoint_interrupts_is_still_owed():
    states = []
    evaluator, _, _ = evaluator_of(FakeManager(lambda lesson_id, kind: states.append((kind, evaluator.state()))))
    evaluator(WeightVersion(0, 4))
    assert states == [("eval", {"evaluated_step": 0, "glanced_step": 0})] * 2
    assert evaluator.state() == {"evaluated_step": 4, "glanced_step": 4}
    resumed, logged, _ = evaluator_of(FakeManager())
    resumed.restore(states[0][1])
    resumed(WeightVersion(1, 5))  # a multiple of the frequency was passed
    assert [step for step, _ in logged] == [5]


@pytest.mark.parametrize("failure", [EnvironmentFailure("broken"), InvalidRolloutError("reward is NaN")])
def test_a_lesson_that_fails_costs_its_own_numbers_only(failure: Exception):
    def behave(lesson_id: str, eval_type: str) -> None:
        if lesson_id == "cats":
            raise failure

    evaluator, logged, failed = evaluator_of(FakeManager(behave))
    evaluator(WeightVersion(0, 4))
    assert failed == [("cats", failure)]
    assert {name.split("/")[1] for name in logged[0][1]} == {"dogs"}


def test_a_stopped_evaluation_logs_nothing_and_is_still_owed():
    evaluator, logged, failed = evaluator_of(FakeManager(lambda lesson_id, eval_type: evaluator.stop()))
    with pytest.raises(Stopped, match="cut short"):
        evaluator(WeightVersion(0, 4))
    assert (logged, failed, evaluator.state()["evaluated_step"]) == ([], [], 0)
    with pytest.raises(Stopped):
        evaluator.evaluate(4)


@pytest.mark.attack
def test_a_lesson_that_failed_has_its_reason_and_no_numbers():
    def behave(lesson_id: str, eval_type: str) -> None:
        if lesson_id == "cats":
            raise EnvironmentFailure("the verifier went away")

    evaluator, _, _ = evaluator_of(FakeManager(behave))
    found = evaluator.evaluate(4)
    assert (found["cats"].failure, found["dogs"].failure) == ("the verifier went away", "")
    assert {name.split("/")[1] for name in metrics_of(found, "eval")} == {"dogs"}
    assert interval_text(found["cats"]) == "failed"
    assert read_stats(json.loads(json.dumps(write_stats(found))))["cats"].failure == "the verifier went away"
    with pytest.raises(
        RunFailed, match="last evaluation of cats has no result: the verifier went away; .*--resume run"
    ):
        require_results(found, Path("run"))
    require_results({"dogs": found["dogs"]}, Path("run"))
