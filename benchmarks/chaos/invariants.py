"""What must be true of the files of any run, whatever was done to it: the books, the updates, what they trained on.

Read from the run directory alone, of a run of any kind that has ended, however it ended. The newest checkpoint is the
horizon: what lies behind it is a fact, what lies beyond was an intent that a resume undoes.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.learner.checkpoints import find_checkpoints, read_states
from penstock.replay import FATES, FRAGMENTS, LANGUAGE, ExperienceFormat, History, RolloutStore
from penstock.replay.config import StoreConfig
from penstock.replay.draws import parse_ticket_id
from penstock.replay.history import StoredBatch
from penstock.rundir import RunDirectory, read_json_lines
from penstock.rundir.live_files import read_live
from penstock.rundir.parquet import read_columns
from penstock.rundir.storage import DAMAGED, open_storage
from penstock.types import WeightVersion

SHOWN = 3
"""So many examples of each violation are named."""
TAKEN_BACK = ("rolled_back", "aborted")
"""Fates that a resume may put in another one's place without `waiting` between: nobody gets the rollout again."""


@dataclass(frozen=True)
class Books:
    """Every rollout that the files know of, by state.

    Attributes:
        started: So many were begun.
        states: How many are in which state; what has no fate waits if it is sealed, else it is in flight.
        of: The state by rollout.
    """

    started: int
    states: dict[str, int]
    of: dict[str, str]

    @property
    def closed(self) -> bool:
        """Whether what was started is the sum over the states, and no state is unknown."""
        return self.started == sum(self.states.values()) and self.states.keys() <= {*FATES, "waiting", "in_flight"}


def books(history: History) -> Books:
    """The ledger, from the files alone: starts, sealed rollouts, fates."""
    started = {f"{ticket}/{index}" for ticket, size in history.started.items() for index in range(size)}
    known = started | history.sealed.keys() | history.fates.keys()
    of = {rollout_id: _state(history, rollout_id) for rollout_id in known}
    return Books(len(started), dict(Counter(of.values())), of)


def _state(history: History, rollout_id: str) -> str:
    logged = history.fates.get(rollout_id)
    if logged is not None and logged.fate != "waiting":
        return logged.fate
    return "waiting" if rollout_id in history.sealed or logged is not None else "in_flight"


def violations(
    directory: RunDirectory, damaged: Collection[str] = (), step: int | None = None, uses: float | None = None
) -> list[str]:
    """Every rule that the run's files break, in a line with a few examples; none of a run as it should be.

    Args:
        directory: Of a run that has ended.
        damaged: Rollouts in files that were damaged on purpose: their rows may be gone.
        step: The horizon; None takes the newest checkpoint's.
        uses: How often a rollout may be trained; None takes what the config says.
    """
    found = _Files.read(directory, step, uses)
    checks = {
        "rollouts that have two rows": found.rows_twice(),
        "updates without a batch": found.updates_missing(),
        "updates with two batches": found.updates_twice(),
        "rollouts trained too often": found.trained_too_often(),
        "trained rollouts without a row": found.trained_without_row(damaged),
        "trained rollouts without the fate": found.trained_without_fate(),
        "rollouts trained on weights of a dead lineage or of later ones": found.trained_on_wrong_weights(),
        "rollouts of the fate that no batch has": found.fate_without_training(),
        "rollouts that ended twice": found.ended_twice(),
        "tickets that were handed out twice": found.tickets_twice(),
        "rollouts that nobody started": found.never_started(),
        "rollouts of no known state": found.unknown_states(),
        "lessons' groups that two tickets trained": found.groups_twice(),
    }
    return [f"{rule}: {_some(broken)}" for rule, ids in checks.items() if (broken := sorted(map(str, ids)))]


def _some(names: list[str]) -> str:
    return f"{len(names)} ({', '.join(names[:SHOWN])}{', …' if len(names) > SHOWN else ''})"


@dataclass(frozen=True)
class _Files:
    """What a run's files say, and which updates count.

    Attributes:
        directory: See there.
        history: Without rows that are there twice.
        rows: How many rows each rollout has.
        surviving: Batches of the newest life, and of those it descends from, beyond the horizon too.
        lineage: The newest life.
        step: The horizon.
        most_uses: Of one rollout.
        keeps_all: Whether no file may expire.
        paced: Whether groups have tickets of their own.
        store: Of the files.
    """

    directory: RunDirectory
    history: History
    rows: Counter[str]
    surviving: list[StoredBatch]
    lineage: int
    step: int
    most_uses: float
    keeps_all: bool
    paced: bool
    store: RolloutStore

    @classmethod
    def read(cls, directory: RunDirectory, step: int | None, uses: float | None) -> "_Files":
        config = directory.read_config()
        replay: Mapping[str, Any] = config.get("replay", {})
        kept: Mapping[str, Any] = replay.get("store", {})
        experience = FRAGMENTS if "fleet" in config else LANGUAGE
        store = RolloutStore(directory, StoreConfig(url=kept.get("url")), experience=experience)
        history, checkpoints = store.history(), find_checkpoints(directory.checkpoints)
        lineage = max([store.lineages.newest, *(batch.version.lineage for batch in history.batches)])
        if checkpoints:  # a life that went back to the very beginning has a number, but no fork
            lineage = max(lineage, int(read_states(checkpoints[-1])["run"]["lineage"]))
        reached = int(checkpoints[-1].name.removeprefix("step-")) if checkpoints else 0
        most = replay.get("max_samples", 1) if uses is None else uses
        return cls(
            directory,
            history,
            _rows(directory, kept.get("url"), experience),
            [batch for batch in history.batches if store.lineages.survives(batch.outcome, lineage)],
            lineage,
            reached if step is None else step,
            math.inf if most < 0 else most,
            kept.get("max_bytes") is None,
            experience is LANGUAGE,
            store,
        )

    def _survives(self, version: WeightVersion) -> bool:
        return self.store.lineages.survives(version, self.lineage)

    @property
    def _trained(self) -> Counter[str]:
        """How often each rollout was trained, as far as the horizon."""
        return self.history.uses(self._survives, self.step)

    def rows_twice(self) -> Iterable[str]:
        return [rollout_id for rollout_id, count in self.rows.items() if count > 1]

    def updates_missing(self) -> Iterable[int]:
        """What was put aside was of some update that nobody knows."""
        missing = sorted(set(range(self.step)) - {batch.version.step for batch in self.surviving})
        aside = len(list((self.directory.path / DAMAGED).glob("batches/*.parquet")))
        return missing if self.keeps_all and len(missing) > aside else ()

    def updates_twice(self) -> Iterable[int]:
        counted = Counter(batch.version.step for batch in self.surviving)
        return [update for update, count in counted.items() if count > 1]

    def trained_too_often(self) -> Iterable[str]:
        every = Counter(rollout_id for batch in self.surviving for rollout_id in batch.rollout_ids)
        return [rollout_id for rollout_id, count in every.items() if count > self.most_uses]

    def trained_without_row(self, damaged: Collection[str]) -> Iterable[str]:
        return self._trained.keys() - self.rows.keys() - set(damaged) if self.keeps_all else ()

    def trained_without_fate(self) -> Iterable[str]:
        """One that may be used again waits meanwhile."""
        for rollout_id, count in self._trained.items():
            logged = self.history.fates.get(rollout_id)
            waits = count < self.most_uses and (logged is None or logged.fate == "waiting")
            if not waits and (logged is None or logged.fate != "trained"):
                yield rollout_id

    def trained_on_wrong_weights(self) -> Iterable[str]:
        for batch in self.surviving:
            for rollout_id in batch.rollout_ids if batch.outcome.step <= self.step else ():
                sealed = self.history.sealed.get(rollout_id)
                if sealed is not None and not (
                    sealed.newest_version.step <= batch.version.step and self._survives(sealed.newest_version)
                ):
                    yield rollout_id

    def fate_without_training(self) -> Iterable[str]:
        if not self.keeps_all or self.updates_missing() or (self.directory.path / DAMAGED / "batches").exists():
            return
        trained = self._trained
        for rollout_id, logged in self.history.fates.items():
            outcome = WeightVersion(logged.version.lineage, logged.version.step + 1)
            counts = outcome.step <= self.step and self._survives(outcome)
            if logged.fate == "trained" and counts and rollout_id not in trained:
                yield rollout_id

    def ended_twice(self) -> Iterator[str]:
        ended: dict[str, int] = {}
        for row in read_json_lines(self.directory.fates_path):
            rollout_id, fate, lineage = str(row["rollout_id"]), str(row["fate"]), int(row["lineage"])
            before = ended.pop(rollout_id, None)
            if before is not None and fate != "waiting" and not (lineage > before and fate in TAKEN_BACK):
                yield rollout_id
            if fate != "waiting":
                ended[rollout_id] = lineage

    def tickets_twice(self) -> Iterable[str]:
        counted = Counter(str(row["ticket_id"]) for row in read_json_lines(self.directory.tickets_path))
        return [ticket for ticket, count in counted.items() if count > 1]

    def never_started(self) -> Iterable[str]:
        started = {f"{ticket}/{index}" for ticket, size in self.history.started.items() for index in range(size)}
        return (self.history.sealed.keys() | self.history.fates.keys()) - started

    def unknown_states(self) -> Iterable[str]:
        return [logged.fate for logged in self.history.fates.values() if logged.fate not in (*FATES, "waiting")]

    def groups_twice(self) -> Iterable[str]:
        """Where tickets are drawn: simulators draw none."""
        tickets: dict[str, set[str]] = defaultdict(set)
        for ticket in {rollout_id.rpartition("/")[0] for rollout_id in self._trained if self.paced}:
            lesson, _, index = parse_ticket_id(ticket)
            tickets[f"{lesson} {index}"].add(ticket)
        return [name for name, ids in tickets.items() if len(ids) > 1]


def _rows(directory: RunDirectory, url: str | None, experience: ExperienceFormat) -> Counter[str]:
    """Rows by rollout; a file that was merged into another does not count, as for every reader."""
    parts = read_live(
        open_storage(directory.path, url),
        experience.folder,
        lambda file, _: read_columns(file, ["rollout_id"]).column(0).to_pylist(),
    )
    return Counter(rollout_id for ids in parts.values() for rollout_id in ids)


def some(ids: Collection[str]) -> str:
    """A few of many."""
    return _some(sorted(ids)) if ids else "none"
