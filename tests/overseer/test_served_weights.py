"""Engines that serve other arrays than the learner made: found at once, their answers never trained, replaced."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from penstock.inference import InferenceEngine
from penstock.overseer import train
from penstock.rundir import read_events, read_json_lines, read_metrics
from penstock.types import MismatchError, WeightVersion
from tests.overseer.conftest import tiny
from tests.overseer.test_run import running

Arrays = Mapping[str, Any]
Fault = Callable[[Arrays, Arrays], Arrays]
FAULTS: dict[str, tuple[Fault, str, str]] = {
    "one left old": (lambda new, old: {**new, "layers.down": old["layers.down"]}, "1", "layers.down"),
    "two swapped": (
        lambda new, old: {**new, "layers.gate": new["layers.up"], "layers.up": new["layers.gate"]},
        "2",
        "layers.gate, layers.up",
    ),
}  # fmt: skip


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int, Fault], None]:
    """Has one engine, by name and incarnation, swap in something else from a version on."""

    def break_(engine: str, step: int, fault: Fault) -> None:
        set_weights, before = InferenceEngine.set_weights, list[Arrays]()

        def swapped(self: InferenceEngine, version: WeightVersion, weights: Arrays) -> None:
            if self._name == engine and version.step >= step:
                weights = fault(weights, before[-1])
            elif self._name == engine:
                before[:] = [weights]
            set_weights(self, version, weights)

        monkeypatch.setattr(InferenceEngine, "set_weights", swapped)

    return break_


def engines_of(run_dir: Path, fate: str) -> list[tuple[tuple[str, ...], int, str]]:
    """Of all rollouts that met a fate: engines, newest version, reason."""
    reasons = {
        row["rollout_id"]: row["reason"] for row in read_json_lines(run_dir / "fates.jsonl") if row["fate"] == fate
    }
    rows: list[dict[str, Any]] = []
    for path in (run_dir / "rollouts").glob("*.parquet"):
        rows += pq.read_table(path, columns=["rollout_id", "engines", "newest_weight_step"]).to_pylist()
    return [
        (tuple(row["engines"]), row["newest_weight_step"], reasons[row["rollout_id"]])
        for row in rows
        if row["rollout_id"] in reasons
    ]


@pytest.mark.parametrize("name", [pytest.param("one left old", marks=pytest.mark.slow), "two swapped"])
def test_in_one_process_the_run_ends_at_the_first_such_version_with_a_checkpoint(run_dir: Path, broken, name: str):
    fault, count, names = FAULTS[name]
    broken("inference-0#0", 2, fault)
    changes = {"steps": 50, "overseer": {"checkpoint_every": 100}, "learner": {"parity": {"every": 1000}}}
    with pytest.raises(MismatchError) as failure:
        train(tiny(changes), run_dir, quiet=True)
    found = re.fullmatch(
        r"inference-0#0 serves version (\d+) with other weights than the learner made: the digests of (\d) of 11 "
        r"arrays differ \((.+)\)",
        str(failure.value),
    )
    assert found is not None and (found[2], found[3]) == (count, names), failure.value
    first = int(found[1])
    assert first >= 2  # some may have been passed over, since there were newer ones
    updates = [row for row in read_metrics(run_dir / "metrics.jsonl") if "train/loss" in row]
    assert len(updates) <= first + 2 and all(row["replay/unverified"] == 0 for row in updates)
    trained = engines_of(run_dir, "trained")
    assert trained and all(engines == ("inference-0#0",) and newest < first for engines, newest, _ in trained)
    assert [path.name for path in (run_dir / "checkpoints").glob("step-*") if path.name != "step-0"]
    (event,) = [event for event in read_events(run_dir / "events.jsonl") if event["event"] == "failure"]
    assert event["error"] == "MismatchError"


@pytest.mark.slow
def test_a_server_with_a_stale_tensor_is_replaced_and_nothing_of_it_is_trained(run_dir: Path, broken):
    broken("inference-1#0", 3, FAULTS["one left old"][0])
    with running(run_dir, {"steps": 10}) as run:
        run.until(lambda: run.launcher.incarnations("inference-1") == [0, 1], "replacement")
        run.end()
    assert run.conductor.complete and run.conductor.lineage == 0
    (event,) = run.events("weights_differ")
    assert event["component"] == "inference-1"
    reason = event["reason"]
    found = re.match(r"inference-1#0 serves version (\d+) with other weights than .* \(layers.down\)$", reason)
    assert found is not None and int(found[1]) >= 3, reason
    deaths = [event for event in run.events("component_death") if event["component"] == "inference-1"]
    assert len(deaths) == 1 and reason in deaths[0]["reason"]
    trained = engines_of(run_dir, "trained")
    assert len(trained) == 90 and all(engines for engines, *_ in trained)
    assert not [newest for engines, newest, _ in trained if "inference-1#0" in engines and newest >= int(found[1])]
    invalid = engines_of(run_dir, "invalid")
    assert all("inference-1#0" in engines for engines, *_ in invalid)
    ledger = run.conductor.status()["ledger"]
    assert ledger["started"] == sum(count for state, count in ledger.items() if state != "started")
