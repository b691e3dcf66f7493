"""`overseer.keep_best`: which metrics there are, and whole runs of both kinds that keep their best version."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.overseer import train
from penstock.overseer.results import EvaluationLog
from penstock.rundir import read_events, read_metrics
from penstock.types import ConfigError
from tests.overseer.conftest import tiny
from tests.overseer.lonely import Lonely
from tests.overseer.test_fleet_training import tiny as tiny_control


@pytest.mark.parametrize("metric", ["reward_mean", "eval/dogs/reward_mean", "eval/cats/truncated_fraction"])
def test_a_metric_that_no_evaluation_gives_is_refused_with_those_that_there_are(metric: str):
    with pytest.raises(ConfigError, match="no such metric of an evaluation.*there are eval/cats/pass_at_k, eval/cats/"):
        tiny({"overseer": {"keep_best": metric}})


def test_the_last_version_alone_is_no_choice():
    changes = {"curriculum": {"eval_frequency": 0, "eval_before": False}}
    with pytest.raises(ConfigError, match="last version is the only one evaluated .*: set a frequency"):
        tiny({**changes, "overseer": {"keep_best": "eval/cats/reward_mean"}})


class Told(Lonely):
    """A component's surroundings, and the learner that it calls."""

    def __init__(self) -> None:
        super().__init__("evaluator")
        self.calls: list[Any] = []
        self.logged: list[tuple[int, int]] = []

    def call(self, method: str, *args: Any, timeout_s: float) -> None:
        self.calls.append((method, *args))

    def metrics(self, step: int, values: Any) -> None:
        self.logged.append((step, len(self.calls)))


def test_the_learner_hears_of_an_evaluation_before_its_numbers_are_logged():
    told = Told()
    log = EvaluationLog(told, "eval/cats/reward_mean")
    log.begin(4)
    log.metrics(4, {"eval/cats/reward_mean": 0.5})
    log.metrics(6, {"micro_eval/cats/reward_mean": 0.9})
    log.metrics(8, {"eval/dogs/reward_mean": 0.9})  # its lesson failed
    assert told.calls == [("expect_evaluation", 4), ("note_evaluation", 4, 0.5), ("note_evaluation", 8, None)]
    assert told.logged == [(4, 2), (6, 2), (8, 3)]
    silent = Told()
    EvaluationLog(silent, None).begin(4)
    EvaluationLog(silent, None).metrics(4, {"eval/cats/reward_mean": 0.5})
    assert silent.calls == [] and silent.logged == [(4, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["language", "synchronous", "control"])
def test_a_run_keeps_the_checkpoint_of_its_best_evaluation(tmp_path: Path, kind: str):
    overseer: dict[str, Any] = {"checkpoint_every": 1, "keep_checkpoints": 1}
    if kind == "control":
        metric = next(f"eval/{task}/return_mean" for task in tiny_control({}).fleet.tasks)
        config = tiny_control({"steps": 5, "evaluation": {"every": 1}, "overseer": overseer | {"keep_best": metric}})
    else:
        metric = "eval/cats/reward_mean"
        changes = {"steps": 5, "curriculum": {"eval_frequency": 1}, "overseer": overseer | {"keep_best": metric}}
        config = tiny(changes | {"async": kind == "language"})
    train(config, tmp_path / "run", quiet=True)
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if metric in row]
    values = [row[metric] for row in rows]
    folder = tmp_path / "run" / "checkpoints"
    record = json.loads((folder / "best.json").read_text())
    assert record["value"] == max(values) and record["metric"] == metric
    assert record["evaluated_step"] == record["step"] == rows[values.index(max(values))]["step"], "of equals the first"
    assert (folder / "best").resolve() == folder / f"step-{record['step']}"
    kept = {path.name for path in folder.glob("step-*")}
    wanted = {"step-5", f"step-{record['step']}"}
    assert wanted <= kept and len(kept - wanted) <= 1, "one more, where an evaluation went on at the last checkpoint"
    events = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["event"] == "best_checkpoint"]
    told = {"step": record["step"], "metric": metric, "value": record["value"], "evaluated": record["evaluated_step"]}
    assert told.items() <= events[-1].items()
