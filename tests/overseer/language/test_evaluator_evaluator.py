"""Which versions are evaluated, and when an evaluation counts as done."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.overseer.language.evaluator import Evaluator, metrics_of
from penstock.overseer.results import read_stats, require_results, write_stats
from penstock.overseer.terminal import interval_text
from penstock.rundir import RunDirectory, read_records
from penstock.types import (
    EnvironmentFailure,
    InvalidRolloutError,
    RolloutBatch,
    RolloutBatchStats,
    RolloutGroup,
    RunFailed,
    Stopped,
    WeightVersion,
)
from tests.dashboard.sample_run import rollout
from tests.overseer.conftest import tiny
from tests.overseer.lonely import Lonely

STATS = RolloutBatchStats("cats", 4, 4, 0.5, 0.5, 0.5, 3.0, 0.0)
EMPTY = RolloutBatch(())
GONE = RunDirectory("gone")


class FakeManager:
    """Evaluates by calling `behave(lesson, kind)`, which may raise."""

    def __init__(self, behave=lambda lesson_id, eval_type: None, said=EMPTY, lineage=0) -> None:
        config = SimpleNamespace(lessons=["cats", "dogs"], eval_frequency=4, micro_eval_frequency=2)
        config.micro_eval_lessons = "all"
        self.curriculum = SimpleNamespace(config=config)
        self.lineage = lineage
        self.behave, self.said = behave, said

    def evaluate_lesson(self, lesson_id, n_examples, eval_type, step, label):
        self.behave(lesson_id, eval_type)
        return STATS, self.said


class Around(Lonely):
    """Keeps what the evaluator tells."""

    def __init__(self) -> None:
        super().__init__("evaluator")
        self.logged: list[tuple[int, Any]] = []
        self.told: list[tuple[str, int, Any]] = []

    def metrics(self, step: int, values: Any) -> None:
        self.logged.append((step, values))

    def event(self, kind: str, step: int = 0, **fields: Any) -> None:
        self.told.append((kind, step, fields))

    def samples(self, step: int, conversations: list[Any]) -> None:
        self.told.append(("samples", step, [(c["mode"], c["lesson_id"], c["rollout_id"]) for c in conversations]))


def evaluator_of(manager: FakeManager, directory=GONE, sampled=None) -> tuple[Evaluator, Around]:
    ctx, settings = Around(), SimpleNamespace(config=tiny({}), directory=directory)
    return Evaluator(ctx, settings, manager, lambda: sampled), ctx


def test_an_evaluation_that_a_checkpoint_interrupts_is_still_owed():
    states = []
    evaluator, _ = evaluator_of(FakeManager(lambda lesson_id, kind: states.append((kind, evaluator.state()))))
    evaluator(WeightVersion(0, 4))
    assert states == [("eval", {"evaluated_step": 0, "glanced_step": 0})] * 2
    assert evaluator.state() == {"evaluated_step": 4, "glanced_step": 4}
    resumed, ctx = evaluator_of(FakeManager())
    resumed.restore(states[0][1])
    resumed(WeightVersion(1, 5))  # a multiple of the frequency was passed
    assert [step for step, _ in ctx.logged] == [5]


@pytest.mark.parametrize("failure", [EnvironmentFailure("broken"), InvalidRolloutError("reward is NaN")])
def test_a_lesson_that_fails_costs_its_own_numbers_only(failure: Exception):
    def behave(lesson_id: str, eval_type: str) -> None:
        if lesson_id == "cats":
            raise failure

    evaluator, ctx = evaluator_of(FakeManager(behave))
    evaluator(WeightVersion(0, 4))
    assert ctx.told == [("evaluation_failed", 0, {"lesson": "cats", "error": str(failure)})]
    assert {name.split("/")[1] for name in ctx.logged[0][1]} == {"dogs"}


def test_a_stopped_evaluation_logs_nothing_and_is_still_owed():
    evaluator, ctx = evaluator_of(FakeManager(lambda lesson_id, eval_type: evaluator.stop()))
    with pytest.raises(Stopped, match="cut short"):
        evaluator(WeightVersion(0, 4))
    assert (ctx.logged, ctx.told, evaluator.state()["evaluated_step"]) == ([], [], 0)
    with pytest.raises(Stopped):
        evaluator.evaluate(4)


@pytest.mark.attack
def test_a_lesson_that_failed_has_its_reason_and_no_numbers():
    def behave(lesson_id: str, eval_type: str) -> None:
        if lesson_id == "cats":
            raise EnvironmentFailure("the verifier went away")

    evaluator, _ = evaluator_of(FakeManager(behave))
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


def files_of(directory: RunDirectory) -> set[str]:
    return {path.name for path in directory.evaluations.glob("*")}


def test_what_was_said_is_kept_under_the_name_of_the_evaluation_once_it_is_over(tmp_path):
    directory = RunDirectory.create(tmp_path / "run", {})
    evaluator, _ = evaluator_of(FakeManager(said=said_in("cats")[0]), directory)
    evaluator(WeightVersion(0, 2))
    evaluator(WeightVersion(0, 4))
    evaluator.evaluate(0, "untrained")
    evaluator.evaluate(6)
    names = {"micro_eval-0-2", "eval-0-4", "untrained-0-0", "report-0-6"}
    assert files_of(directory) == {f"{name}.parquet" for name in names}


def test_an_evaluation_that_is_cut_short_leaves_nothing(tmp_path):
    directory = RunDirectory.create(tmp_path / "run", {})
    manager = FakeManager(lambda lesson_id, kind: evaluator.stop(), said_in("cats")[0])
    evaluator, ctx = evaluator_of(manager, directory)
    with pytest.raises(Stopped):
        evaluator.evaluate(4, "after")
    assert files_of(directory) == set() and ctx.told == []


def said_in(*lessons: str) -> list[RolloutBatch]:
    """Two groups of each lesson, and of another one none."""
    batches = [RolloutBatch(())]
    for name in reversed(lessons):
        records = [rollout(f"eval-{name}-0-4-{n}/0", [("user", "?"), ("assistant", "!")], 1.0) for n in (0, 1)]
        made = [(record, replace(record.rollout, lesson_id=name)) for record in records]
        groups = (RolloutGroup(record.group_key, (done,), record.group_id) for record, done in made)
        batches.insert(0, RolloutBatch(tuple(groups)))
    return batches


def test_trackers_are_given_one_conversation_of_each_lesson_and_files_all(tmp_path):
    directory = RunDirectory.create(tmp_path / "run", {})
    manager = FakeManager(said=said_in("cats")[0])
    evaluator, ctx = evaluator_of(manager, directory)
    evaluator.evaluate(4, "before")
    assert ctx.told == [("samples", 4, [("eval", "cats", "eval-cats-0-4-0/0")] * 2)]
    assert len(read_records(directory.evaluations / "before-0-4.parquet")) == 4
    manager.said = EMPTY
    evaluator.evaluate(5, "after")
    assert len(ctx.told) == 1 and files_of(directory) == {"before-0-4.parquet"}


def test_what_cannot_be_written_is_an_event_and_ends_no_run(tmp_path):
    evaluator, ctx = evaluator_of(FakeManager(said=said_in("cats")[0], lineage=1), RunDirectory(tmp_path / "gone"))
    evaluator.evaluate(4, "after")
    kind, step, fields = ctx.told[-1]
    assert (kind, step, fields["evaluation"]) == ("evaluation_not_kept", 4, "after")
    assert "No such file" in fields["reason"]


@pytest.mark.parametrize(
    ("asked", "sampled", "looked_at"),
    [("all", "dogs", ["cats", "dogs"]), ("sampled", "dogs", ["dogs"]), ("sampled", None, ["cats", "dogs"])],
)
def test_a_micro_evaluation_looks_at_the_lesson_just_sampled_where_that_is_asked_for(asked, sampled, looked_at):
    seen: list[tuple[str, str]] = []
    manager = FakeManager(lambda lesson_id, kind: seen.append((kind, lesson_id)))
    manager.curriculum.config.micro_eval_lessons = asked
    evaluator, _ = evaluator_of(manager, sampled=sampled)
    evaluator(WeightVersion(0, 2))
    evaluator(WeightVersion(0, 4))
    assert seen == [*(("micro_eval", name) for name in looked_at), ("eval", "cats"), ("eval", "dogs")]


def test_what_is_reported_is_not_what_is_decided_by():
    """Results before and after training are about problems that no evaluation in between sees."""
    asked = []
    evaluator, _ = evaluator_of(FakeManager(lambda lesson_id, eval_type: asked.append(eval_type)))
    evaluator.evaluate(0, "before")
    evaluator(WeightVersion(0, 4))
    evaluator.evaluate(4, "after")
    assert asked == ["report"] * 2 + ["eval"] * 2 + ["report"] * 2


def test_problems_that_are_kept_for_reports_have_metrics_of_their_own_name():
    apart = replace(STATS, lesson_id="dogs", reports=True)
    found = read_stats(json.loads(json.dumps(write_stats({"cats": STATS, "dogs": apart}))))
    names = set(metrics_of(found, "eval"))
    assert {"eval/cats/reward_mean", "eval_report/dogs/reward_mean"} <= names
    assert not any(name.startswith(("eval/dogs", "eval_report/cats")) for name in names)
