"""The replay benchmark at tiny sizes: what it checks can fail, and what it prints are the marks. Nothing is timed."""

import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.replay import __main__ as benchmark
from benchmarks.replay import memory, parquet, rates
from benchmarks.replay.list_design import ListReplay
from benchmarks.replay.workload import ROUND, SHAPES, Workload

from penstock.batch import example_from_rollout
from penstock.types import RLExample, RolloutBatch

ARRAYS = ("prompt_tokens", "response_tokens", "response_logprobs", "token_rewards", "response_mask",
          "response_weight_steps")  # fmt: skip


@pytest.fixture(scope="module")
def workload():
    return Workload(SHAPES[256])


def tiny(*more):
    return ["--sizes", "128,256", "--repeats", "1", "--rows", "64", *more]


def test_the_arrays_of_a_rollout_are_as_large_as_its_shape_says(workload):
    rollout = workload.rollout(9, 0.0)
    assert sum(getattr(rollout, name).nbytes for name in ARRAYS) == SHAPES[256].array_bytes == 3936
    assert len(rollout.prompt_tokens) + len(rollout.response_tokens) == 256
    assert rollout.rollout_id == "lesson-0-1/1" and rollout.metadata.weight_step == 0


def test_a_rollout_that_is_not_what_was_put_in_is_noticed(workload):
    example = example_from_rollout(workload.rollout(8 + 257, 0.0), 4 / 7, 256)
    assert workload.is_right(example)
    assert not workload.is_right(replace(example, rollout_ids=("lesson-0-1/0",)))
    assert not workload.is_right(replace(example, advantage=-example.advantage))
    assert not workload.is_right(replace(example, generator_log_probs=example.generator_log_probs * 2))


def test_the_list_design_keeps_fresh_ones_up_to_its_capacity_and_prefers_new_ones(workload):
    lists = ListReplay(capacity=96, max_step_delay=1, max_age_s=60.0, alpha=3.0, max_tokens=256)
    assert lists.sample(8) is None
    for step in range(3):
        lists.set_current_step(step)
        lists.add_batches(workload.round(step))
    assert len(lists) == 128  # steps 1 and 2, 64 of each environment
    lists.add_batches(workload.round(2))
    assert len(lists) == 2 * 96
    drawn = [example for _ in range(40) for example in lists.sample(16)]
    assert all(workload.is_right(example) for example in drawn)
    older = np.mean([example.weight_steps.max() == 1 for example in drawn])
    assert 0.0 < older < 0.1  # 1/3 of the list, the oldest: (1/3)^4 of the weight
    lists.set_current_step(9)
    assert len(lists) == 0


def test_the_list_design_retires_what_was_used_often_enough(workload):
    lists = ListReplay(64, 9, 60.0, alpha=0.0, max_tokens=256, max_samples=1)
    lists.add_batches(workload.round(0))
    first, second = lists.sample(32), lists.sample(32)
    assert {e.rollout_ids for e in first}.isdisjoint({e.rollout_ids for e in second}) and len(lists) == 0


def test_lost_rollouts_and_wrong_books_are_noticed(workload):
    buffer = rates.make_buffer(workload, 3)
    filled = rates.fill(buffer, workload, 3)
    rates.measure([filled], workload, 2)  # checks the books itself
    with pytest.raises(AssertionError):
        rates.check_books(buffer, filled.rollouts, filled.step + 1)
    with pytest.raises(AssertionError):
        rates.check_books(buffer, filled.rollouts + ROUND, filled.step)
    buffer.add_batches([RolloutBatch(group.groups[:0]) for group in workload.round(99)])
    rates.check_books(buffer, filled.rollouts, filled.step)
    buffer.close()


def test_a_buffer_that_returns_something_else_fails_the_benchmark(workload):
    class Swapping(ListReplay):
        def sample(self, batch_size: int) -> list[RLExample] | None:
            drawn = super().sample(batch_size)
            return drawn and [replace(drawn[0], rollout_ids=drawn[1].rollout_ids), *drawn[1:]]

    filled = rates.fill(Swapping(64, 1, 60.0, 3.0, 256), workload, 2)
    with pytest.raises(AssertionError, match="not what was put in"):
        rates.measure([filled], workload, 1)


def test_both_parquet_files_are_compared(workload, tmp_path):
    records = parquet.make_records(workload, 8)
    paths = [tmp_path / name for name in ("ours.parquet", "theirs.parquet")]
    for path in paths:
        parquet.write_records(path, records)
    parquet.check_files(*paths, records)
    with pytest.raises(AssertionError):
        parquet.check_files(*paths, [replace(records[0], group_id="other"), *records[1:]])
    parquet.pq.write_table(parquet.table_from_records(records), paths[1], compression="snappy")
    with pytest.raises(AssertionError):
        parquet.check_files(*paths, records)


@pytest.mark.slow
def test_every_mark_is_printed_and_a_missed_one_is_the_exit_code(monkeypatch, capsys):
    sizes = {256: 1.2 * SHAPES[256].array_bytes, 4096: 1.1 * SHAPES[4096].array_bytes}
    monkeypatch.setattr(memory, "bytes_per_rollout", lambda tokens, rollouts, maker: sizes[tokens])
    monkeypatch.setattr(benchmark, "FLAT", 1e9)
    monkeypatch.setattr(benchmark, "PARQUET", 0.0)
    monkeypatch.setattr(benchmark, "PEER", 0.0)
    assert benchmark.main(tiny("--reverb-python", sys.executable)) == 1
    printed = capsys.readouterr().out
    marks = dict(re.findall(r"^  (.*?) +[\d.]+  at (?:most|least) [\d.e+]+ +(reached|MISSED)$", printed, re.MULTILINE))
    operations = ("add_batches", "set_current_step", "sample")
    assert {f"{n} tokens: {name} at 256 / at 128" for n in (256, 4096) for name in operations} <= marks.keys()
    assert {name for name, found in marks.items() if found == "MISSED"} == {
        f"256 tokens: memory / arrays' bytes, {maker}" for maker in ("recency", "deadline", "grpo")
    }
    assert marks["list design over penstock at 256"] == "reached"
    assert marks["4096 tokens: write a table / pyarrow: write and flush"] == "reached"
    assert f"dm-reverb               not installed for {sys.executable}: skipped" in printed


@pytest.mark.slow
def test_memory_is_measured_in_a_process_of_its_own():
    assert 1.0 < memory.bytes_per_rollout(256, 2000, "deadline") / SHAPES[256].array_bytes < 3.0


def test_what_the_machine_has_no_memory_for_is_skipped_aloud(monkeypatch, capsys):
    monkeypatch.setattr(memory, "available_bytes", lambda: 10_000_000)
    assert benchmark.fitting(SHAPES[256], [1000, 100_000]) == [1000]
    assert "100,000 rollouts of 256 tokens: skipped" in capsys.readouterr().out
