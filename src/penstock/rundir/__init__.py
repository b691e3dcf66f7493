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
    from penstock.rundir.parquet import read_parquet, read_rows, write_parquet
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
    "EVALUATION_SCHEMA": "evaluation_rows",
    "EXAMPLE_SCHEMA": "example_rows",
    "EventLog": "logs",
    "FRAGMENT_SCHEMA": "fragment_rows",
    "FRAGMENT_USE_SCHEMA": "fragment_rows",
    "JsonLinesLog": "logs",
    "KeptReplay": "replayed_updates",
    "MetricsLog": "logs",
    "QueryResult": "views",
    "ROLLOUT_SCHEMA": "rollout_rows",
    "RescoredRollout": "rescored_rows",
    "RunDirectory": "directory",
    "RunViews": "views",
    "examples_from_table": "example_rows",
    "fragments_from_table": "fragment_rows",
    "read_events": "logs",
    "read_examples": "example_rows",
    "read_json_lines": "logs",
    "read_metrics": "logs",
    "read_parquet": "parquet",
    "read_records": "rollout_rows",
    "read_replays": "replayed_updates",
    "read_rescored": "rescored_rows",
    "read_rows": "parquet",
    "read_status": "logs",
    "records_from_table": "rollout_rows",
    "replaced_atomically": "storage",
    "table_from_evaluation": "evaluation_rows",
    "table_from_examples": "example_rows",
    "table_from_fragments": "fragment_rows",
    "table_from_records": "rollout_rows",
    "table_from_uses": "fragment_rows",
    "uses_from_table": "fragment_rows",
    "write_atomically": "storage",
    "write_evaluation": "evaluation_rows",
    "write_examples": "example_rows",
    "write_parquet": "parquet",
    "write_records": "rollout_rows",
    "write_replay": "replayed_updates",
    "write_rescored": "rescored_rows",
}

__all__ = [
    "EVALUATION_SCHEMA", "EXAMPLE_SCHEMA", "EventLog", "FRAGMENT_SCHEMA", "FRAGMENT_USE_SCHEMA", "JsonLinesLog",
    "KeptReplay", "MetricsLog", "QueryResult", "ROLLOUT_SCHEMA", "RescoredRollout", "RunDirectory", "RunViews",
    "examples_from_table", "fragments_from_table", "read_events", "read_examples", "read_json_lines", "read_metrics",
    "read_parquet", "read_records", "read_replays", "read_rescored", "read_rows", "read_status", "records_from_table",
    "replaced_atomically", "table_from_evaluation", "table_from_examples", "table_from_fragments", "table_from_records",
    "table_from_uses", "uses_from_table", "write_atomically", "write_evaluation", "write_examples", "write_parquet",
    "write_records", "write_replay", "write_rescored",
]  # fmt: skip

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
