"""Tasks of processes."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.fleet.config import FleetConfig, assign_tasks


def _config(shares, workers=1, processes=8):
    tasks = {name: {"id": name, "share": share} for name, share in shares.items()}
    return FleetConfig(tasks=tasks, workers=workers, envs_per_worker=processes)


def test_processes_go_by_share_and_are_mixed():
    assert assign_tasks(_config({"a": 3.0, "b": 1.0})) == ("a", "a", "b", "a", "a", "a", "b", "a")
    assert assign_tasks(_config({"a": 1.0, "b": 1.0}, processes=4)) == ("a", "b", "a", "b")


def test_a_small_share_gets_a_process_all_the_same():
    assert Counter(assign_tasks(_config({"a": 1000.0, "b": 1.0}))) == {"a": 7, "b": 1}


def test_a_share_without_end_is_refused():
    with pytest.raises(ValidationError, match="share"):
        _config({"a": float("inf"), "b": 1.0})


@given(st.dictionaries(st.sampled_from("abcd"), st.floats(0.1, 10.0), min_size=1), st.integers(1, 4), st.integers(1, 9))
def test_the_workers_together_play_every_task(shares, workers, processes):
    if len(shares) > workers * processes:
        return
    config = _config(shares, workers, processes)
    played = [assign_tasks(config, worker) for worker in range(workers)]
    assert all(len(tasks) == processes for tasks in played)
    assert {task for tasks in played for task in tasks} == set(shares)
