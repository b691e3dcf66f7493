"""What replay must know of a kind of experience: its folders, how records become rows, and how it travels.

Language rollouts and simulator fragments go through one store, each in a format of its own. Whatever else they hold,
rows have `rollout_id`, `group_id`, `lineage` and `newest_weight_step`, and batch rows `lineage`, `step` and
`rollout_ids`: the ledger is rebuilt from these. Rows that may lack something to be trained again have `complete`.
"""

# pyarrow comes without types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.replay.messages import (
    BatchMessage,
    fragments_from_buffer,
    fragments_to_buffer,
    rollouts_from_buffer,
    rollouts_to_buffer,
)
from penstock.rundir import (
    examples_from_table,
    fragments_from_table,
    records_from_table,
    table_from_examples,
    table_from_fragments,
    table_from_records,
    table_from_uses,
    uses_from_table,
)
from penstock.types import ConfigError, RolloutGroup, TrainingBatch

if TYPE_CHECKING:
    from typing_extensions import Buffer


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
