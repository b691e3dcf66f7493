"""What a run in one process keeps alive."""

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from penstock.overseer import train
from penstock.overseer.kind import RunStart
from penstock.overseer.language.kind import LanguageKind, Updates
from penstock.overseer.language.local import LocalInference
from penstock.rundir import read_events, read_metrics
from penstock.types import WeightVersion
from tests.overseer.conftest import tiny


@pytest.mark.slow
@pytest.mark.parametrize("resumed", [False, True])
def test_the_policy_that_a_run_begins_with_is_let_go_when_its_successor_is_served(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, resumed: bool
):
    first: list[weakref.ref[Any]] = []
    alive: dict[int, int] = {}
    name, begun = ("resume", 2) if resumed else ("begin", 0)
    make, add = getattr(LanguageKind, name), Updates.add

    def made(*arguments: Any) -> RunStart:
        start = make(*arguments)
        first.extend(weakref.ref(array) for array in jax.tree.leaves(start.policy))
        if start.checkpoint is not None:  # with the optimiser's state
            first.append(weakref.ref(start.checkpoint))
        return start

    def added(self: Updates, step: int, *arguments: Any) -> None:
        gc.collect()
        alive[step] = sum(array() is not None for array in first)
        add(self, step, *arguments)

    config = {"async": False, "curriculum": {"eval_frequency": 0, "micro_eval_frequency": 0}}
    if resumed:
        train(tiny({**config, "steps": begun}), run_dir, quiet=True)
    monkeypatch.setattr(LanguageKind, name, made)
    monkeypatch.setattr(Updates, "add", added)
    train(tiny({**config, "steps": begun + 3}), run_dir, resume=resumed, quiet=True)
    assert alive[begun + 1] > 0  # still served: the next version is published after this line
    assert (alive[begun + 2], alive[begun + 3]) == (0, 0)


def test_what_nothing_before_the_first_update_needs_is_compiled_after_it(run_dir: Path):
    train(tiny({"async": False, "steps": 3}), run_dir, quiet=True)
    first = next(row["time"] for row in read_metrics(run_dir / "metrics.jsonl") if "train/loss" in row)
    told = [event for event in read_events(run_dir / "events.jsonl") if event["event"] == "compiled"]
    names = [event["program"] for event in told]
    before = [event["program"] for event in told if event["time"] < first]
    assert len(names) == len(set(names))  # each once
    kinds = {name.partition(",")[0] for name in before}
    assert {"decode", "prefill", "insert", "log-probabilities", "gradient", "optimiser step"} <= kinds
    assert sum(name.startswith("prefill") for name in before) == 1


@pytest.mark.parametrize(
    ("version", "training", "expected"), [(0, True, []), (1, True, ["rest"]), (1, False, ["no more"])]
)
def test_from_the_first_version_to_the_end_of_the_training_the_rest_is_compiled_ahead(
    version: int, training: bool, expected: list[str]
):
    """After it the end of the process would wait for that."""
    asked: list[str] = []
    engine = SimpleNamespace(compile_rest=lambda: asked.append("rest"), compile_no_more=lambda: asked.append("no more"))
    weights = SimpleNamespace(latest=lambda: WeightVersion(0, version))
    learner = SimpleNamespace(address={"training": training})
    inference: Any = SimpleNamespace(_engine=engine, _weights=weights, _first=WeightVersion(0, 0), state="starting")
    view: Any = SimpleNamespace(peer={"learner-0": learner}.get)
    LocalInference.look(inference, view)
    assert asked == expected
