"""One run with so many simulated workers: started, measured for a while, ended, and its books checked."""

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.scale.components import make_learner, make_server
from benchmarks.scale.counting import Books, Window, cpu_seconds, descendants, machine_seconds
from benchmarks.scale.farm import FarmLauncher
from benchmarks.scale.making import GROUP_SIZE
from penstock.overseer import RunConfig, load_config
from penstock.overseer.component import Settings
from penstock.overseer.language.kind import LanguageKind
from penstock.overseer.metrics import merge
from penstock.overseer.ray import RayLauncher
from penstock.overseer.supervisor.member import ComponentSpec
from penstock.overseer.supervisor.messages import ComponentMessage, Identity
from penstock.overseer.supervisor.supervisor import Supervisor
from penstock.rundir import RunDirectory, write_atomically

FARMS, SERVERS = 2, 2
TURN_S, LOOK_S = 0.05, 0.5
"""As in `penstock.overseer.run`."""
START_S, END_S, CALL_S = 300.0, 120.0, 60.0
COUNTED = ("overseer", "replay", "curriculum", "learner", "inference")
"""Processes that a run has once, or a few times, however many workers there are."""


def configuration(workers: int) -> RunConfig:
    """Batches grow with the workers, so that updates come equally often; two tickets wait for each worker."""
    batch = max(4, workers // 2)
    return load_config(
        "cats",
        [
            "runtime=ray",
            "steps=1000000",
            f"rollout.workers={workers}",
            f"inference.servers={SERVERS}",
            "inference.max_seq_len=512",
            "learner.row_length=512",
            "curriculum.lessons.cats.sampling_params.max_output_tokens=256",
            f"replay.groups_per_batch={batch}",
            "replay.staleness_budget=3",
            f"replay.capacity={64 * batch}",
            "replay.store.buffer_size=256",
            "overseer.stop_timeout_s=30",
        ],
    )


def specifications(settings: Settings) -> list[ComponentSpec]:
    """Of all components but the evaluator, which would have nothing to do."""
    kind = LanguageKind(factories={"learner": make_learner, "inference": make_server})
    return [spec for spec in kind.components(settings, None) if spec.role != "evaluator"]


class Phase:
    """A run that is under way; the supervisor has the calling thread's turns.

    Args:
        launcher: With its farms.
        path: A new run directory.
        workers: How many.
    """

    def __init__(self, launcher: FarmLauncher, path: Path, workers: int) -> None:
        self.workers = workers
        self._launcher = launcher
        self._config = configuration(workers)
        self._directory = RunDirectory.create(path, self._config.dump())
        self._settings = Settings(self._config, self._directory, secrets.token_hex(16))
        self.events: list[tuple[str, Mapping[str, Any]]] = []
        self.messages = 0
        self._supervisor = Supervisor(launcher, self._config.overseer, self)
        self._look_due = 0.0
        self._delivered: set[str] = set()
        self.started_s = 0.0

    def on_message(self, identity: Identity, message: ComponentMessage) -> None:
        self.messages += 1
        if message.kind == "metrics":
            merge(self._supervisor.reports.values())  # as for a line of metrics.jsonl

    def on_event(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    def on_loss(self, identity: Identity, reason: str) -> None:
        raise RuntimeError(f"{identity} died during the measurement: {reason}")

    # --- the overseer's turns ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts everything, and returns when all workers run."""
        began = time.monotonic()
        for spec in specifications(self._settings):
            self._supervisor.add(spec)
        self._turn_until(self._all_run, "all components run", START_S)
        self.started_s = time.monotonic() - began

    def _all_run(self) -> bool:
        reports = self._supervisor.reports
        return len(reports) == self.workers + SERVERS + 3 and all(
            report.condition.state == "running" for report in reports.values()
        )

    def turn(self, seconds: float) -> None:
        """Oversees for so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._tick()

    def _turn_until(self, holds: Callable[[], bool], what: str, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not holds():
            if time.monotonic() > deadline:
                who = self._supervisor.stalled_components()
                raise RuntimeError(f"not within {limit_s:g} s: {what}; {who}; last events {self.events[-3:]}")
            self._tick()

    def _tick(self) -> None:
        """What the conductor does in one turn, and the overseer every two seconds."""
        self._supervisor.tick()
        if time.monotonic() >= self._look_due:
            self._look_due = time.monotonic() + LOOK_S
            told = self._supervisor.describe(), self._supervisor.counters(), self._supervisor.stalled_components()
            write_atomically(self._directory.status_path, json.dumps(told), durable=False)
        time.sleep(TURN_S)

    # --- measuring ---------------------------------------------------------------------------------------------------

    def measure(self, seconds: float, speed: float = 1.0) -> Window:
        """One window of time."""
        self._take()
        before, began = self._processors(), time.monotonic()
        busy, everything = machine_seconds()
        deaths = self._supervisor.metrics()["overseer/deaths_total"]
        self.turn(seconds)
        lasted, after = time.monotonic() - began, self._processors()
        busy_now, everything_now = machine_seconds()
        latencies, groups = self._take()
        replay = self._supervisor.reports["replay-0"].condition.metrics
        return Window(
            self.workers,
            lasted,
            latencies,
            {role: after[role] - before[role] for role in before},
            (busy_now - busy) / (everything_now - everything),
            groups,
            replay.get("rollout_storage/depth", 0.0),
            sum(report.condition.facts.get("full", 0) for report in self._supervisor.reports.values()),
            self._supervisor.metrics()["overseer/deaths_total"] - deaths,
            (self.workers + SERVERS + 3) * lasted / (self._config.overseer.heartbeat_s + TURN_S),
            speed,
        )

    def _take(self) -> tuple[dict[str, list[float]], int]:
        latencies, groups = self._launcher.take()
        self._delivered |= groups
        for index in range(SERVERS):
            fetched = self._call(f"inference-{index}", "fetches")
            latencies["fetch"] = [*latencies.get("fetch", []), *fetched]
        return latencies, len(groups)

    def _processors(self) -> dict[str, float]:
        reports = self._supervisor.reports.values()
        seconds = {role: 0.0 for role in COUNTED}
        own = {report.identity.role: [] for report in reports}
        for report in reports:
            own[report.identity.role].append(report.pid)
        for role in COUNTED[1:]:
            seconds[role] = sum(cpu_seconds(pid) for pid in own.get(role, []))
        seconds["overseer"] = cpu_seconds(os.getpid())
        seconds["farms"] = sum(cpu_seconds(pid) for pid in self._launcher.pids)
        named = descendants(os.getpid())
        seconds["Ray"] = sum(cpu_seconds(pid) for pid, name in named.items() if name in ("raylet", "gcs_server"))
        return seconds

    def _call(self, name: str, method: str, *args: Any) -> Any:
        return self._supervisor.call(name, method, *args, timeout_s=CALL_S)

    # --- the end -----------------------------------------------------------------------------------------------------

    def finish(self) -> list[str]:
        """Workers deliver what they began, the learner ends; returns what is wrong with the books."""
        self._launcher.hurry()
        self._turn_until(self._delivered_all, "all workers have delivered", END_S)
        self._turn_until(
            lambda: self._replay_metrics().get("rollout_storage/depth", 0.0) == 0.0, "no group waits", END_S
        )
        self._call("learner-0", "finish")
        self._turn_until(lambda: self._state("learner-0") == "finished", "the learner has finished", END_S)
        self.turn(2.5 * self._config.overseer.heartbeat_s)
        self._take()
        trained = self._call("learner-0", "trained")
        ledger = self._supervisor.reports["replay-0"].condition.facts["ledger"]
        given_up = [f"{fields['component']} was given up: {fields['reason']}" for kind, fields in self.events
                    if kind == "component_death"]  # fmt: skip
        return [*given_up[:5], *Books(self._delivered, trained, ledger, GROUP_SIZE).check()]

    def _state(self, name: str) -> str:
        report = self._supervisor.reports.get(name)
        return "" if report is None else report.condition.state

    def _delivered_all(self) -> bool:
        return all(
            report.condition.facts.get("done")
            for name, report in self._supervisor.reports.items()
            if name.startswith("rollout")
        )

    def _replay_metrics(self) -> Mapping[str, float]:
        return self._supervisor.reports["replay-0"].condition.metrics

    def close(self) -> None:
        """Ends all its components."""
        self._supervisor.stop(self._config.overseer.stop_timeout_s)


@dataclass(frozen=True)
class Run:
    """A phase whose workers run, and the farms that they live in."""

    farms: FarmLauncher
    phase: Phase


@contextmanager
def farmed(ray: RayLauncher, path: Path, workers: int) -> Iterator[Run]:
    """Farms and a phase whose workers run; all is ended afterwards."""
    farms = FarmLauncher(ray, FARMS, 1.0)
    phase = Phase(farms, path, workers)
    try:
        phase.start()
        yield Run(farms, phase)
    finally:
        phase.close()
        farms.close()
