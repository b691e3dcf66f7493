"""The run directory: its paths, its atomic writes, its logs, and the schemas of its Parquet files."""

from typing import TYPE_CHECKING

from penstock.types.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from penstock.rundir.directory import RunDirectory
    from penstock.rundir.evaluation_rows import EVALUATION_SCHEMA, table_from_evaluation, write_evaluation
    from penstock.rundir.example_rows import (
        EXAMPLE_SCHEMA,
        examples_from_table,
        read_examples,
        table_from_examples,
        write_examples,
    )
    from penstock.rundir.fragment_rows import (
        FRAGMENT_SCHEMA,
        FRAGMENT_USE_SCHEMA,
        fragments_from_table,
        table_from_fragments,
        table_from_uses,
        uses_from_table,
    )
    from penstock.rundir.logs import (
        EventLog,
        JsonLinesLog,
        MetricsLog,
        read_events,
        read_json_lines,
        read_metrics,
        read_status,
    )
    from penstock.rundir.parquet import read_parquet, write_parquet
    from penstock.rundir.replayed_updates import KeptReplay, read_replays, write_replay
    from penstock.rundir.rescored_rows import RescoredRollout, read_rescored, write_rescored
    from penstock.rundir.rollout_rows import (
        ROLLOUT_SCHEMA,
        read_records,
        records_from_table,
        table_from_records,
        write_records,
    )
    from penstock.rundir.storage import replaced_atomically, write_atomically
    from penstock.rundir.views import QueryResult, RunViews

_EXPORTS = {
    "directory": ["RunDirectory"],
    "evaluation_rows": ["EVALUATION_SCHEMA", "table_from_evaluation", "write_evaluation"],
    "example_rows": ["EXAMPLE_SCHEMA", "examples_from_table", "read_examples", "table_from_examples", "write_examples"],
    "fragment_rows": [
        "FRAGMENT_SCHEMA", "FRAGMENT_USE_SCHEMA", "fragments_from_table", "table_from_fragments", "table_from_uses",
        "uses_from_table",
    ],
    "logs": ["EventLog", "JsonLinesLog", "MetricsLog", "read_events", "read_json_lines", "read_metrics", "read_status"],
    "parquet": ["read_parquet", "write_parquet"],
    "replayed_updates": ["KeptReplay", "read_replays", "write_replay"],
    "rescored_rows": ["RescoredRollout", "read_rescored", "write_rescored"],
    "rollout_rows": ["ROLLOUT_SCHEMA", "read_records", "records_from_table", "table_from_records", "write_records"],
    "storage": ["replaced_atomically", "write_atomically"],
    "views": ["QueryResult", "RunViews"],
}  # fmt: skip

__all__ = [
    "EVALUATION_SCHEMA", "EXAMPLE_SCHEMA", "EventLog", "FRAGMENT_SCHEMA", "FRAGMENT_USE_SCHEMA", "JsonLinesLog",
    "KeptReplay", "MetricsLog", "QueryResult", "ROLLOUT_SCHEMA", "RescoredRollout", "RunDirectory", "RunViews",
    "examples_from_table", "fragments_from_table", "read_events", "read_examples", "read_json_lines", "read_metrics",
    "read_parquet", "read_records", "read_replays", "read_rescored", "read_status", "records_from_table",
    "replaced_atomically", "table_from_evaluation", "table_from_examples", "table_from_fragments", "table_from_records",
    "table_from_uses", "uses_from_table", "write_atomically", "write_evaluation", "write_examples", "write_parquet",
    "write_records", "write_replay", "write_rescored",
]  # fmt: skip

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
