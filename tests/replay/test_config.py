import subprocess
import sys

import pytest
from pydantic import ValidationError

from penstock.replay import ReplayConfig


def test_the_defaults_are_those_of_the_documentation():
    config = ReplayConfig()
    assert (config.capacity, config.max_samples, config.max_rollout_timestamp_delay) == (4096, 1, 3600.0)
    assert config.step_delay == config.staleness_budget == 1
    assert config.filtered_limit == 32 * config.groups_per_batch
    assert not config.synchronous and not config.filter_zero_variance


def test_a_step_delay_below_the_budget_is_refused_with_both_numbers():
    with pytest.raises(ValidationError, match="max_rollout_step_delay is 1, below staleness_budget = 2"):
        ReplayConfig(staleness_budget=2, max_rollout_step_delay=1)
    assert ReplayConfig(staleness_budget=2, max_rollout_step_delay=3).step_delay == 3


@pytest.mark.parametrize(
    ("config", "limit_s"),
    [
        (dict(), 3600.0),
        (dict(max_rollout_timestamp_delay=-1), None),
        (dict(max_rollout_timestamp_delay=0.0), 0.0),
        (dict(staleness_budget=0), None),
    ],
)
def test_time_staleness_is_off_when_negative_and_at_staleness_zero(config, limit_s):
    assert ReplayConfig(**config).timestamp_delay_s == limit_s


@pytest.mark.parametrize("value", [0, -2])
def test_a_use_count_that_means_nothing_is_refused(value):
    with pytest.raises(ValidationError, match="at least 1, or -1"):
        ReplayConfig(max_samples=value)


def test_an_unknown_key_is_refused():
    with pytest.raises(ValidationError, match="groups_per_batches"):
        ReplayConfig(groups_per_batches=3)  # pyright: ignore[reportCallIssue]


def test_importing_the_config_loads_neither_arrow_nor_jax():
    code = (
        "import sys, penstock.replay.config; "
        "sys.exit(', '.join(m for m in ('jax', 'pyarrow', 'penstock.batch') if m in sys.modules) or 0)"
    )
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert outcome.returncode == 0, outcome.stderr
