"""What a run directory shows, in a terminal and in a browser; the run may be dead."""

from typing import TYPE_CHECKING

from penstock.types.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from penstock.dashboard.bundle import write_bundle
    from penstock.dashboard.datasets import DatasetRequest, export_dataset
    from penstock.dashboard.groups import GroupFilter, GroupPage, GroupSummary, list_groups
    from penstock.dashboard.lookup import StoredRollout, find_rollouts
    from penstock.dashboard.plot import PlotRequest, plot_runs
    from penstock.dashboard.rollouts import RolloutsRequest, show_rollouts
    from penstock.dashboard.status import RunStatus, print_status, print_status_json, read_run_status
    from penstock.dashboard.web import DashboardSettings, serve_dashboard

_EXPORTS = {
    "bundle": ["write_bundle"],
    "datasets": ["DatasetRequest", "export_dataset"],
    "groups": ["GroupFilter", "GroupPage", "GroupSummary", "list_groups"],
    "lookup": ["StoredRollout", "find_rollouts"],
    "plot": ["PlotRequest", "plot_runs"],
    "rollouts": ["RolloutsRequest", "show_rollouts"],
    "status": ["RunStatus", "print_status", "print_status_json", "read_run_status"],
    "web": ["DashboardSettings", "serve_dashboard"],
}

__all__ = [
    "DashboardSettings", "DatasetRequest", "GroupFilter", "GroupPage", "GroupSummary", "PlotRequest", "RolloutsRequest",
    "RunStatus", "StoredRollout", "export_dataset", "find_rollouts", "list_groups", "plot_runs", "print_status",
    "print_status_json", "read_run_status", "serve_dashboard", "show_rollouts", "write_bundle",
]  # fmt: skip

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
