"""What a run directory shows: its rollouts as tables, conversations, queries and data sets; the run may be dead."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.dashboard.datasets import DatasetRequest, export_dataset
    from penstock.dashboard.groups import GroupFilter, GroupPage, GroupSummary, list_groups
    from penstock.dashboard.lookup import StoredRollout, find_rollouts
    from penstock.dashboard.rollouts import RolloutsRequest, show_rollouts
    from penstock.dashboard.status import RunStatus, print_status, print_status_json, read_run_status

_EXPORTS = {
    "DatasetRequest": "datasets",
    "GroupFilter": "groups",
    "GroupPage": "groups",
    "GroupSummary": "groups",
    "RolloutsRequest": "rollouts",
    "RunStatus": "status",
    "StoredRollout": "lookup",
    "export_dataset": "datasets",
    "find_rollouts": "lookup",
    "list_groups": "groups",
    "print_status": "status",
    "print_status_json": "status",
    "read_run_status": "status",
    "show_rollouts": "rollouts",
}

__all__ = [
    "DatasetRequest", "GroupFilter", "GroupPage", "GroupSummary", "RolloutsRequest", "RunStatus",
    "StoredRollout", "export_dataset", "find_rollouts", "list_groups", "print_status", "print_status_json",
    "read_run_status", "show_rollouts",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
