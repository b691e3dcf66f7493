import subprocess
import sys

import pytest
from pydantic import ValidationError

from penstock.replay import ReplayBufferConfig


def test_the_defaults_are_those_of_the_documentation():
    config = ReplayBufferConfig()
    assert (config.capacity, config.max_samples, config.max_rollout_timestamp_delay) == (4096, 1, 3600.0)
    assert config.max_rollout_step_delay == config.staleness_budget == config.step_delay("cats") == 1
    assert config.store.buffer_size is None and config.store.compression == "zstd"
    maker = config.batch_maker
    assert (maker.name, maker.alpha, maker.balance, maker.unit, maker.retention) == (
        "deadline", 3.0, "size", "group", "newest",
    )  # fmt: skip
    assert config.filtered_limit == 32 * config.groups_per_batch
    assert not config.synchronous and not maker.filter_zero_variance


def test_a_step_delay_below_the_budget_is_refused_with_both_numbers():
    with pytest.raises(ValidationError, match="max_rollout_step_delay is 1, below staleness_budget = 2"):
        ReplayBufferConfig(staleness_budget=2, max_rollout_step_delay=1)
    assert ReplayBufferConfig(staleness_budget=2, max_rollout_step_delay=3).step_delay("cats") == 3


def test_where_one_of_delay_and_budget_is_set_the_other_follows():
    assert ReplayBufferConfig(staleness_budget=3).max_rollout_step_delay == 3
    assert ReplayBufferConfig(max_rollout_step_delay=0).staleness_budget == 0
    assert ReplayBufferConfig(max_rollout_step_delay=9).staleness_budget == 1


def test_a_lessons_own_tolerance_wins_and_brings_its_deadline_forward():
    config = ReplayBufferConfig(
        staleness_budget=2,
        max_rollout_timestamp_delay=60,
        tolerances={"strict": {"max_rollout_step_delay": 1}, "lax": {"max_rollout_timestamp_delay": -1}},
    )
    assert [config.step_delay(lesson) for lesson in ("strict", "lax", "other")] == [1, 2, 2]
    assert [config.budget(lesson) for lesson in ("strict", "lax", "other")] == [1, 2, 2]
    assert [config.timestamp_delay_s(lesson) for lesson in ("strict", "lax", "other")] == [60, None, 60]


@pytest.mark.parametrize(
    ("config", "limit_s"),
    [
        (dict(), 3600.0),
        (dict(max_rollout_timestamp_delay=-1), None),
        (dict(max_rollout_timestamp_delay=0.0), 0.0),
        (dict(staleness_budget=0), 3600.0),
    ],
)
def test_the_time_limit_is_off_when_negative(config, limit_s):
    assert ReplayBufferConfig(**config).timestamp_delay_s("cats") == limit_s


def test_the_time_limit_is_off_where_paced_and_synchronous():
    tolerances = {"old": {"max_rollout_timestamp_delay": 60.0, "max_rollout_step_delay": 3}}
    synchronous = ReplayBufferConfig(staleness_budget=0, tolerances=tolerances).when_paced()
    assert [synchronous.timestamp_delay_s(lesson) for lesson in ("old", "other")] == [None, None]
    assert synchronous.step_delay("old") == 3 and synchronous.longest_step_delay == 3
    other = ReplayBufferConfig(staleness_budget=1, tolerances=tolerances)
    assert other.when_paced() is other and other.timestamp_delay_s("old") == 60.0


@pytest.mark.parametrize("value", [0, -2])
def test_a_use_count_that_means_nothing_is_refused(value):
    with pytest.raises(ValidationError, match="at least 1, or -1"):
        ReplayBufferConfig(max_samples=value)


def test_an_unknown_key_is_refused():
    with pytest.raises(ValidationError, match="groups_per_batches"):
        ReplayBufferConfig(groups_per_batches=3)  # pyright: ignore[reportCallIssue]


def test_importing_the_config_loads_neither_arrow_nor_jax():
    code = (
        "import sys, penstock.replay.config; "
        "sys.exit(', '.join(m for m in ('jax', 'pyarrow', 'numpy') if m in sys.modules) or 0)"
    )
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert outcome.returncode == 0, outcome.stderr
