"""What the store must know of a kind of experience: its folders, and how records become rows.

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
from typing import Any

import pyarrow as pa

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
    batches_refer: bool = False
    frugal: "ExperienceFormat | None" = None


LANGUAGE = ExperienceFormat(
    folder="rollouts",
    to_table=table_from_records,
    from_table=records_from_table,
    batch_folder="batches",
    batch_to_table=table_from_examples,
    batch_from_table=examples_from_table,
)
"""Rollouts of language policies, and the `RLExample` of their updates."""

_FRAGMENTS = ExperienceFormat(
    folder="fragments",
    to_table=table_from_fragments,
    from_table=fragments_from_table,
    batch_folder="batches",
    batch_to_table=table_from_uses,
    batch_from_table=uses_from_table,
    batches_refer=True,
)

FRAGMENTS = replace(_FRAGMENTS, frugal=replace(_FRAGMENTS, to_table=partial(table_from_fragments, observations=False)))
"""Fragments of simulators; what is read of a batch is the ids of its fragments, in order."""
