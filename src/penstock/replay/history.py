"""What a run's files say about its rollouts: started, sealed, trained in which batches, ended how.

`ExperienceFormat` is what replay must know of a kind of experience: its folders, how records become rows, and how it
travels. Language rollouts and simulator fragments go through one store, each in a format of its own. Whatever else they
hold, rows have `rollout_id`, `group_id`, `lineage` and `newest_weight_step`, and batch rows `lineage`, `step` and
`rollout_ids`: the ledger is rebuilt from these. Rows that may lack something to be trained again have `complete`. Of
stored files the ledger and retention read a few columns, never the arrays.
"""

# pyarrow comes without types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.replay.draws import Place
from penstock.replay.messages import (
    BatchMessage,
    fragments_from_buffer,
    fragments_to_buffer,
    rollouts_from_buffer,
    rollouts_to_buffer,
)
from penstock.rundir import (
    RunDirectory,
    examples_from_table,
    fragments_from_table,
    read_json_lines,
    records_from_table,
    table_from_examples,
    table_from_fragments,
    table_from_records,
    table_from_uses,
    uses_from_table,
)
from penstock.rundir.live_files import read_live
from penstock.rundir.parquet import read_columns
from penstock.rundir.storage import Storage
from penstock.types import ConfigError, RolloutGroup, RunDirectoryError, TrainingBatch, WeightVersion

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True, slots=True)
class SealedRollout:
    """One row of a rollout file.

    Attributes:
        rollout_id: The rollout.
        group_id: Its ticket.
        newest_version: The newest weights behind any of its tokens.
        complete: Whether the row has all that is needed to train on it again.
    """

    rollout_id: str
    group_id: str
    newest_version: WeightVersion
    complete: bool = True


@dataclass(frozen=True, slots=True)
class LoggedFate:
    """One line of the fate log.

    Attributes:
        fate: A fate, or `waiting` where a recovery took one back.
        version: The life of the run that decided it, and the update that was next; for `trained`, the update that
            used the rollout last.
    """

    fate: str
    version: WeightVersion


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """One batch file: the intent of an update, which only a later checkpoint makes a fact.

    Attributes:
        batch_id: File name without its suffix.
        version: The lineage, and the update; it starts from these weights.
        rollout_ids: What it trains on.
    """

    batch_id: str
    version: WeightVersion
    rollout_ids: tuple[str, ...]

    @property
    def outcome(self) -> WeightVersion:
        """The version that the update makes."""
        return WeightVersion(self.version.lineage, self.version.step + 1)


@dataclass(frozen=True, slots=True)
class Damage:
    """Which rollouts were lost with files that could not be read.

    Attributes:
        ids: Those that are known.
        more: Whether a file did not even say which rollouts it held: any that nothing is known of may have been in it.
    """

    ids: frozenset[str] = frozenset()
    more: bool = False

    def may_hold(self, rollout_id: str) -> bool:
        """Whether a rollout that is in no file, and of no fate, was lost with one."""
        return self.more or rollout_id in self.ids


NO_DAMAGE = Damage()
"""All files could be read."""


@dataclass(frozen=True, slots=True)
class History:
    """Everything the ledger is rebuilt from.

    Attributes:
        started: Rollouts per ticket that was handed out.
        sealed: Sealed rollouts by id.
        fates: The last line of the fate log by rollout id.
        batches: Every batch file.
        damage: What was lost with files that were put aside.
        places: Epoch and position of the problem, of every ticket that had one.
    """

    started: dict[str, int]
    sealed: dict[str, SealedRollout]
    fates: dict[str, LoggedFate]
    batches: list[StoredBatch]
    damage: Damage = NO_DAMAGE
    places: Mapping[str, Place] = field(default_factory=dict[str, Place])

    def uses(self, survives: Callable[[WeightVersion], bool], step: int) -> Counter[str]:
        """How often each rollout was used by updates that a life at version `step` has behind it."""
        return Counter(
            rollout_id
            for batch in self.batches
            if batch.outcome.step <= step and survives(batch.outcome)
            for rollout_id in batch.rollout_ids
        )

    def lost(self) -> dict[str, int]:
        """Groups that were started and of which nothing was stored or decided: their sizes."""
        stored = {sealed.group_id for sealed in self.sealed.values()}
        return {
            group_id: size
            for group_id, size in self.started.items()
            if group_id not in stored and not any(self._is_settled(f"{group_id}/{i}") for i in range(size))
        }

    def _is_settled(self, rollout_id: str) -> bool:
        return rollout_id in self.fates or self.damage.may_hold(rollout_id)

    def tickets(self) -> dict[str, list[str]]:
        """The rollout ids of every group that was started, or sealed where its start was lost with the machine."""
        groups = {ticket: [f"{ticket}/{i}" for i in range(size)] for ticket, size in self.started.items()}
        for sealed in self.sealed.values():
            if sealed.group_id not in self.started:
                groups.setdefault(sealed.group_id, []).append(sealed.rollout_id)
        return groups


def _no_message(what: object) -> Any:
    raise ConfigError("this ExperienceFormat has no messages: give it to_message and from_message")


def _as_it_is(batch: TrainingBatch[Any]) -> TrainingBatch[Any]:
    return batch


@dataclass(frozen=True, slots=True)
class ExperienceFormat:
    """One kind of experience.

    Attributes:
        folder: Of the sealed parts, in the run directory.
        to_table: Rows of records, in their order. Its schema is made by `penstock.rundir.parquet.versioned`.
        from_table: The records of such a table, of any version; takes the file's name without its suffix too.
        batch_folder: Of the batches.
        batch_to_table: Rows of a batch: takes examples, batch id, step and lineage.
        batch_from_table: The examples of such a table; takes the file's name too.
        to_message: Groups as one message between processes; an error where it is not given.
        from_message: The groups of such a message.
        batch_to_message: A training batch as it goes to the learner's process; `RemoteBatches` reads it.
        most_bytes: Groups are sent together up to about so many bytes of arrays; None: batch by batch, as they come.
        when_full: What to look at where a sink finds no room for too long.
        batches_refer: Whether a batch names its rollouts only, so that it is worth nothing without them.
        frugal: The same without what takes most of the space, for ``replay.store.observations: false``; None where it
            has no such form.
    """

    folder: str
    to_table: Callable[[Sequence[Any]], pa.Table]
    from_table: Callable[[pa.Table, str], list[Any]]
    batch_folder: str
    batch_to_table: Callable[[Sequence[Any], str, int, int], pa.Table]
    batch_from_table: Callable[[pa.Table, str], list[Any]]
    to_message: Callable[[Sequence[RolloutGroup[Any]]], "Buffer"] = _no_message
    from_message: Callable[["Buffer"], Sequence[RolloutGroup[Any]]] = _no_message
    batch_to_message: Callable[[TrainingBatch[Any]], TrainingBatch[Any] | BatchMessage] = _as_it_is
    most_bytes: int | None = None
    when_full: str = "see that the learner runs"
    batches_refer: bool = False
    frugal: "ExperienceFormat | None" = None


LANGUAGE = ExperienceFormat(
    folder="rollouts",
    to_table=table_from_records,
    from_table=records_from_table,
    batch_folder="batches",
    batch_to_table=table_from_examples,
    batch_from_table=examples_from_table,
    to_message=rollouts_to_buffer,
    from_message=rollouts_from_buffer,
    when_full="see what its receiver waits for",
)
"""Rollouts of language policies, and the `RLExample` of their updates."""

_FRAGMENTS = ExperienceFormat(
    folder="fragments",
    to_table=table_from_fragments,
    from_table=fragments_from_table,
    batch_folder="batches",
    batch_to_table=table_from_uses,
    batch_from_table=uses_from_table,
    to_message=fragments_to_buffer,
    from_message=fragments_from_buffer,
    batch_to_message=BatchMessage.of,
    most_bytes=8 * 1024 * 1024,
    when_full="see that the learner runs (replay.max_waiting, replay.max_waiting_s)",
    batches_refer=True,
)

FRAGMENTS = replace(_FRAGMENTS, frugal=replace(_FRAGMENTS, to_table=partial(table_from_fragments, observations=False)))
"""Fragments of simulators; what is read of a batch is the ids of its fragments, in order."""


_SEALED = ("rollout_id", "group_id", "lineage", "newest_weight_step", "complete")


def read_history(
    directory: RunDirectory,
    storage: Storage,
    experience: ExperienceFormat,
    on_damage: Callable[[str, Exception], None] | None = None,
) -> History:
    """What all files say about every rollout; safe while they are written, merged and deleted.

    Args:
        directory: The run's.
        storage: Where its rollouts and batches are.
        experience: Which they are.
        on_damage: Told of files that cannot be read, which do not count then; None makes that an error.

    Raises:
        SchemaVersionError: a newer Penstock wrote a file.
        RunDirectoryError: a file is not one of ours.
    """

    def read_batch(file: pq.ParquetFile, name: str) -> StoredBatch:
        return _stored_batch(file, name, storage.locate(name))

    parts = read_live(storage, experience.folder, lambda file, _: list(_sealed(file)), on_damage)
    batches = read_live(storage, experience.batch_folder, read_batch, on_damage)
    tickets = {str(row["ticket_id"]): row for row in read_json_lines(directory.tickets_path)}
    return History(
        started={name: int(row["rollouts"]) for name, row in tickets.items()},
        sealed={sealed.rollout_id: sealed for rows in parts.values() for sealed in rows},
        fates={
            str(row["rollout_id"]): LoggedFate(str(row["fate"]), WeightVersion(int(row["lineage"]), int(row["step"])))
            for row in read_json_lines(directory.fates_path)
        },
        batches=list(batches.values()),
        places={name: (int(row["epoch"]), int(row["position"])) for name, row in tickets.items() if "epoch" in row},
    )


def groups_of_part(file: pq.ParquetFile) -> set[str]:
    """The groups of a part; none for rows of the original form, which have no ids."""
    return set(read_columns(file, ["group_id"]).to_pydict().get("group_id", ()))


def ids_of_part(table: pa.Table, name: str) -> list[str]:
    """Row by row what tells a rollout from every other; rows of the original form are told apart by file and place."""
    if "rollout_id" in table.column_names:
        return table.column("rollout_id").to_pylist()
    return [f"{name} {row}" for row in range(table.num_rows)]


def groups_of_batch(file: pq.ParquetFile) -> set[str]:
    """The groups that a batch trains on."""
    ids = read_columns(file, ["rollout_ids"]).to_pydict().get("rollout_ids", ())
    return {str(rollout_id).rpartition("/")[0] for row in ids for rollout_id in row}


def stem_of(name: str) -> str:
    """A file's name without folder and suffix."""
    return name.rpartition("/")[2].removesuffix(".parquet")


def _sealed(file: pq.ParquetFile) -> Iterable[SealedRollout]:
    columns = read_columns(file, _SEALED).to_pydict()
    if "rollout_id" not in columns:
        return []  # rows of the original form have no ids, so there is no ledger to rebuild
    versions = map(WeightVersion, columns["lineage"], columns["newest_weight_step"])
    complete = columns.get("complete", repeat(True))
    return map(SealedRollout, columns["rollout_id"], columns["group_id"], versions, complete)


def _stored_batch(file: pq.ParquetFile, name: str, where: str) -> StoredBatch:
    columns = read_columns(file, ["lineage", "step", "rollout_ids"]).to_pydict()
    if not columns.get("step"):
        raise RunDirectoryError(f"{where} holds no examples: it is not a batch of this run")
    ids = tuple(str(rollout_id) for row in columns["rollout_ids"] for rollout_id in row)
    return StoredBatch(stem_of(name), WeightVersion(columns["lineage"][0], columns["step"][0]), ids)
