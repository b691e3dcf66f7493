"""Rows of fragments: any leaves come back exactly, other readers see plain columns, and what is broken is named."""

import subprocess
import sys
from dataclasses import fields, replace

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.fragments_made import make_fragment

from penstock.rundir import (
    FRAGMENT_SCHEMA,
    fragments_from_table,
    read_parquet,
    table_from_fragments,
    table_from_uses,
    uses_from_table,
    write_parquet,
)
from penstock.types import (
    FragmentExample,
    InvalidRolloutError,
    RolloutRecord,
    RunDirectoryError,
    SampleFragment,
    SchemaVersionError,
)

LEAF_DTYPES = [np.uint8, np.int8, np.bool_, np.float16, np.float32, np.float64, np.int32, np.int64, np.complex64]


def record(fragment: SampleFragment) -> RolloutRecord[SampleFragment]:
    return RolloutRecord(fragment, fragment.group_id, group_key="CartPole-v1:3")


def assert_same(before: SampleFragment, after: SampleFragment) -> None:
    for field in fields(SampleFragment):
        left, right = getattr(before, field.name), getattr(after, field.name)
        if isinstance(left, np.ndarray):
            assert_same_array(left, right)
        elif isinstance(left, dict):
            assert list(left) == list(right), field.name
            for name in left:
                if isinstance(left[name], float):
                    assert left[name] == right[name], name
                else:
                    assert_same_array(left[name], right[name])
        else:
            assert left == right, field.name


def assert_same_array(left: np.ndarray, right: np.ndarray) -> None:
    assert (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
    assert not right.flags.writeable and right.flags.aligned


@st.composite
def leaves(draw, length: int | None):
    """Named arrays with the same first axis, or of any shape."""
    names = draw(st.lists(st.text(max_size=6), max_size=3, unique=True))
    shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
    made = {}
    for name in names:
        shape = draw(shapes) if length is None else (length, *draw(shapes))
        made[name] = draw(hnp.arrays(draw(st.sampled_from(LEAF_DTYPES)), shape))
    return made


@st.composite
def fragment_fields(draw):
    """Length, weight step, and arrays; made into fragments outside, since run-time type checks look at random items."""
    steps = draw(st.integers(1, 5))
    finals = np.array(sorted(draw(st.sets(st.integers(0, steps - 1)))), np.int32)
    arrays = dict(
        rewards=draw(hnp.arrays(np.float32, steps)),
        terminated=draw(hnp.arrays(np.bool_, steps)),
        episodes=draw(hnp.arrays(np.int64, steps)),
        values=draw(hnp.arrays(np.float32, steps + 1)),
        final_steps=finals,
        observations=draw(leaves(steps + 1)),
        actions=draw(leaves(steps)),
        final_observations=draw(leaves(len(finals))),
        initial_state=draw(leaves(None)),
    )
    return steps, draw(st.integers(0, 9)), arrays


@settings(max_examples=60, deadline=None)
@given(st.lists(fragment_fields(), min_size=1, max_size=4), st.data())
def test_any_fragments_come_back_exactly(drawn, data):
    before = [
        replace(make_fragment(f"cart-w0-0-{number}", steps, weight_step), **arrays)
        for number, (steps, weight_step, arrays) in enumerate(drawn)
    ]
    sink = pa.BufferOutputStream()
    pq.write_table(table_from_fragments(list(map(record, before))), sink)
    with pq.ParquetFile(pa.BufferReader(sink.getvalue())) as file:
        table = file.read()
    after = fragments_from_table(table)
    start = data.draw(st.integers(0, len(before)))
    sliced = fragments_from_table(table.slice(start))
    assert len(after) == len(before) and len(sliced) == len(before) - start
    for left, right in [*zip(before, after, strict=True), *zip(before[start:], sliced, strict=True)]:
        assert_same(left, right.rollout)
        assert (right.group_id, right.group_key) == (left.group_id, "CartPole-v1:3")


def test_infinite_rewards_are_stored_whatever_they_add_up_to(tmp_path):
    fragment = replace(make_fragment(steps=2), rewards=np.array([np.inf, -np.inf], np.float32))
    assert np.isnan(fragment.episode_reward)
    write_parquet(tmp_path / "p.parquet", table_from_fragments([record(fragment)]))
    [back] = fragments_from_table(read_parquet(tmp_path / "p.parquet"))
    assert back.rollout.rewards.tolist() == [np.inf, -np.inf]


def test_arrays_in_any_layout_are_stored_in_c_order(tmp_path):
    image = np.asfortranarray(np.arange(5 * 2 * 3, dtype=np.uint8).reshape(5, 2, 3))
    fragment = replace(make_fragment(), observations={"a": image, "b": np.arange(10.0)[::2]})
    write_parquet(tmp_path / "p.parquet", table_from_fragments([record(fragment)]))
    [back] = fragments_from_table(read_parquet(tmp_path / "p.parquet"))
    assert back.rollout.observations["a"].tolist() == image.tolist()
    assert back.rollout.observations["b"].tolist() == [0, 2, 4, 6, 8]


def test_duckdb_and_pandas_read_the_columns(tmp_path):
    path = tmp_path / "part-1.parquet"
    fragment = make_fragment(weight_steps=[3, 3, 4, 5], faults=(2,), reward=0.5)
    write_parquet(path, table_from_fragments([record(fragment)]))
    [row] = duckdb.sql(
        f"""select task, slot, weight_step, newest_weight_step, steps, trainable_steps, episode_reward,
        list_sum(rewards), terminated, faults, weight_steps, final_steps, observations[1].shape, observations[1].dtype,
        octet_length(observations[1].data), initial_state[1].name from '{path}'"""
    ).fetchall()
    assert row[:8] == ("cart", 3, 3, 5, 4, 3, 1.5, 2.0)
    assert row[8:12] == ([False, True, False, False], [False, False, True, False], [3, 3, 4, 5], [1])
    assert row[12:] == ([5, 4], "<f4", 80, "hidden")
    frame = pd.read_parquet(path)
    leaf = frame["observations"][0][0]
    assert np.array_equal(np.frombuffer(leaf["data"], leaf["dtype"]).reshape(leaf["shape"]), fragment.observations[""])
    assert frame["rewards"][0].tolist() == [0.5] * 4


def test_without_observations_all_else_is_there(tmp_path):
    whole = make_fragment()
    write_parquet(tmp_path / "p.parquet", table_from_fragments([record(whole)], observations=False))
    table = read_parquet(tmp_path / "p.parquet")
    assert table.column("complete").to_pylist() == [False]
    assert table.column("observations").to_pylist() == table.column("final_observations").to_pylist() == [None]
    [back] = fragments_from_table(table)
    assert back.rollout.observations == back.rollout.final_observations == {}
    assert_same(replace(whole, observations={}, final_observations={}), back.rollout)


def test_older_files_say_nothing_of_seconds():
    table = table_from_fragments([record(make_fragment())])
    [now], [older] = fragments_from_table(table), fragments_from_table(table.drop_columns(["timings"]))
    assert now.rollout.timings == {"generate_s": 2.0, "policy_s": 0.5, "simulate_s": 1.25}
    assert older.rollout.timings == {}


def test_no_rows_make_a_readable_file(tmp_path):
    write_parquet(tmp_path / "p.parquet", table_from_fragments([]))
    table = read_parquet(tmp_path / "p.parquet")
    assert fragments_from_table(table) == [] and table.schema.equals(FRAGMENT_SCHEMA)


def test_what_cannot_be_stored_is_refused():
    with pytest.raises(InvalidRolloutError, match="fragment 'cart-w0-0-0/0' has no metadata"):
        table_from_fragments([record(replace(make_fragment(), metadata=None))])
    odd = replace(make_fragment(), initial_state={"thought": np.array(["a"], object)})
    with pytest.raises(InvalidRolloutError, match="leaf 'thought' is of dtype object: only numbers"):
        table_from_fragments([record(odd)])


def changed(column, value):
    table = table_from_fragments([record(make_fragment())])
    field = table.schema.field(column)
    return table.set_column(table.schema.get_field_index(column), field, pa.array([value], field.type))


def leaf(dtype="<f4", shape=(5, 4), size=80):
    return [{"name": "", "dtype": dtype, "shape": list(shape), "data": bytes(size)}]


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("rewards", [1.0], r"part-9, row 0: terminated is bool\[4\]: it must be bool\[1\]"),
        ("observations", leaf(shape=(4, 5)), r"part-9, row 0: observations\[''\] has 4 rows: it must have 5"),
        ("observations", leaf(size=76), "part-9 holds no fragments: cannot reshape array of size 19"),
        ("observations", leaf(dtype="O"), "part-9 holds no fragments: a leaf is of dtype 'O'"),
        ("observations", leaf(dtype="nonsense"), "part-9 holds no fragments: data type 'nonsense' not understood"),
        ("observations", leaf(dtype=",<f4"), "part-9 holds no fragments: ',<f4' is no name of a dtype"),
        ("logprobs", [None] * 4, "part-9 holds no fragments: there is a null among the elements"),
        ("timestamp", None, "part-9: column timestamp has 1 nulls where none may be: write its rows again"),
        ("task", None, "part-9: column task has 1 nulls"),
        ("actions", None, "part-9: column actions has 1 nulls"),
    ],
)
def test_a_wrong_row_is_named(column, value, message):
    with pytest.raises(InvalidRolloutError, match=message):
        fragments_from_table(changed(column, value), "part-9")


def test_other_versions_and_other_tables_are_one_clear_error(tmp_path):
    table = table_from_fragments([record(make_fragment())])
    pq.write_table(table.replace_schema_metadata({b"penstock.schema_version": b"2"}), tmp_path / "p.parquet")
    with pytest.raises(SchemaVersionError, match="schema version 2, this Penstock reads up to 1"):
        read_parquet(tmp_path / "p.parquet")
    with pytest.raises(RunDirectoryError, match="part-9 has no schema version: it holds no fragments"):
        fragments_from_table(table.replace_schema_metadata(None), "part-9")
    with pytest.raises(RunDirectoryError, match="part-9 has no column values: it holds no fragments"):
        fragments_from_table(table.drop_columns(["values"]), "part-9")
    wide = table.set_column(6, "slot", table.column("slot").cast(pa.int64()))
    assert fragments_from_table(wide.select(sorted(wide.column_names)))[0].rollout.slot == 3
    with pytest.raises(RunDirectoryError, match="part-9: column slot is string, it must be int32"):
        fragments_from_table(table.set_column(6, "slot", pa.array(["a"])), "part-9")


def test_rows_of_a_batch_name_its_fragments(tmp_path):
    examples = [FragmentExample(make_fragment(f"cart-w0-0-{number}")) for number in (4, 2)]
    write_parquet(tmp_path / "b.parquet", table_from_uses(examples, "batch_x", 7, 2))
    table = read_parquet(tmp_path / "b.parquet")
    assert uses_from_table(table) == ["cart-w0-0-4/0", "cart-w0-0-2/0"]
    assert table.column("group_id").to_pylist() == ["cart-w0-0-4", "cart-w0-0-2"]
    assert (table.column("step").to_pylist(), table.column("lineage").to_pylist()) == ([7, 7], [2, 2])
    with pytest.raises(RunDirectoryError, match="part-9 has no column batch_id: it is no batch of fragments"):
        uses_from_table(table_from_fragments([]), "part-9")


def test_a_process_without_pandas_does_not_import_it_with_arrow():
    code = (
        "import sys; from penstock.rundir.parquet import WithoutPandas, pairs_column;"
        "sys.meta_path.insert(0, WithoutPandas());"
        "print(pairs_column([[('a', 1.0)], []]).to_pylist(), 'pandas' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[[('a', 1.0)], []] False\n"
