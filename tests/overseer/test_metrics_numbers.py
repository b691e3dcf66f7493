import pytest

from penstock.overseer.metrics import IdleShares, RolloutMetrics, merge
from penstock.overseer.supervisor.messages import ComponentStatus, Identity, Report


def report(role: str, index: int = 0, incarnation: int = 0, **condition: object) -> Report:
    return Report(Identity(role, index, incarnation), 1, "here", ComponentStatus("running", "working", **condition))  # type: ignore[arg-type]


def test_counts_and_rates_add_up_times_take_the_slowest_shares_the_mean_and_each_lag_stands():
    first = {"inference/tokens_per_s": 100.0, "inference/kv_used": 0.2, "weights/fetch_s": 0.5, "weights/lag": 0.0}
    second = {"inference/tokens_per_s": 50.0, "inference/kv_used": 0.4, "weights/fetch_s": 2.0, "weights/lag": 1.0}
    first["inference/proven_bytewise"] = second["inference/proven_bytewise"] = 1.0
    first["inference_client/servers"] = second["inference_client/servers"] = 2.0
    merged = merge([report("inference", 0, metrics=first), report("inference", 1, metrics=second)])
    assert merged == {
        "inference/proven_bytewise": 1.0,
        "inference_client/servers": 2.0,
        "inference/tokens_per_s": 150.0,
        "inference/kv_used": pytest.approx(0.3),
        "weights/fetch_s": 2.0,
        "weights/lag": 1.0,
        "weights/lag/inference-0": 0.0,
        "weights/lag/inference-1": 1.0,
    }


def test_idle_shares_are_those_since_the_last_window():
    now = 0.0
    shares = IdleShares(window_s=3.0, clock=lambda: now)
    now = 4.0
    shares.look([report("learner", busy_s=3.0, idle_s=1.0), report("rollout", busy_s=0.0, idle_s=0.0)])
    assert shares.of_roles == {"learner": 0.25} and shares.of_components == {"learner-0": 0.25}
    now = 5.0  # too soon: the last window's
    shares.look([report("learner", busy_s=3.0, idle_s=2.0)])
    assert shares.of_roles == {"learner": 0.25}
    now = 8.0
    shares.look([report("learner", busy_s=4.0, idle_s=4.0)])
    assert shares.of_roles == {"learner": 0.75}
    now = 12.0  # another incarnation counts from its own start; two of a role count together, and apart
    shares.look([report("learner", 0, 1, busy_s=1.0, idle_s=0.0), report("learner", 1, busy_s=0.0, idle_s=1.0)])
    assert shares.of_roles == {"learner": 0.5}
    assert shares.of_components == {"learner-0": 0.0, "learner-1": 1.0}


def test_environment_metrics_are_means_over_groups_and_failures_are_counts():
    tally = RolloutMetrics({"easy": 0.5, "hard": 0.5})
    tally.add_environment("easy", {"tool_calls": 1.0, "failed_groups": 0.0, "failed_rollouts": 0.0})
    tally.add_environment("easy", {"tool_calls": 0.5, "failed_groups": 0.0, "failed_rollouts": 0.0})
    tally.add_environment("easy", {"failed_groups": 1.0, "failed_rollouts": 8.0})
    tally.add_environment("hard", {"failed_groups": 1.0, "failed_rollouts": 4.0})
    assert tally.take() == {
        "env/easy/tool_calls": 0.75,
        "env/easy/failed_groups": 1.0,
        "env/easy/failed_rollouts": 8.0,
        "env/hard/failed_groups": 1.0,
        "env/hard/failed_rollouts": 4.0,
    }
    assert tally.take() == {}
