"""Rollout and example rows: round trips, versions, and what other readers see."""

import dataclasses
import json

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.rundir import (
    EXAMPLE_SCHEMA,
    ROLLOUT_SCHEMA,
    examples_from_table,
    read_parquet,
    records_from_table,
    table_from_examples,
    table_from_records,
    write_parquet,
)
from penstock.rundir import parquet as columns
from penstock.types import (
    Decoding,
    InvalidRolloutError,
    RLExample,
    Rollout,
    RolloutMetadata,
    RolloutRecord,
    RunDirectoryError,
    SchemaVersionError,
    Turn,
)


def of_two_samples(record: RolloutRecord) -> RolloutRecord:
    return dataclasses.replace(record, rollout=dataclasses.replace(record.rollout, sample_starts=(0, 4)))


def test_samples_come_back_beside_rollouts_of_one(records):
    written = [of_two_samples(records[0]), *records]
    table = table_from_records(written)
    assert table.column("sample_starts").to_pylist() == [[0, 4], [0], [0]]
    for left, right in zip(written, records_from_table(table), strict=True):
        assert_same(left, right)
    for chosen in (table.slice(1), table.slice(0, 1)):
        assert [r.rollout.rollout_id for r in records_from_table(chosen)] == chosen.column("rollout_id").to_pylist()


def test_rows_from_before_there_were_samples_are_of_one_each(records):
    older = table_from_records(records).drop_columns(["sample_starts"])
    assert [record.rollout.sample_starts for record in records_from_table(older)] == [(0,), (0,)]


def test_half_a_surrogate_pair_is_written_as_its_escape(records):
    first, *others = records
    turns = tuple(dataclasses.replace(turn, content=f"{turn.content} \ud83d ☃") for turn in first.rollout.turns)
    rollout = dataclasses.replace(first.rollout, turns=turns, env_example_id="x\udcff")
    table = table_from_records([dataclasses.replace(first, rollout=rollout, group_key="toy:x\udcff"), *others])
    back = records_from_table(table)[0]
    assert (back.group_key, back.rollout.env_example_id) == ("toy:x\\udcff", "x\\udcff")
    assert [turn.content for turn in back.rollout.turns] == [f"{t.content} \\ud83d ☃" for t in first.rollout.turns]


def test_what_turns_took_comes_back_and_those_of_older_files_say_nothing(records):
    took = (("wait_s", 0.5), ("decode_s", 0.25))
    first, *others = records
    turns = tuple(
        dataclasses.replace(turn, timings=took if turn.role == "assistant" else ()) for turn in first.rollout.turns
    )
    first = dataclasses.replace(first, rollout=dataclasses.replace(first.rollout, turns=turns))
    table = table_from_records([first, *others])
    assert [turn.timings for turn in records_from_table(table)[0].rollout.turns] == [(), took]
    plain = [[{k: v for k, v in turn.items() if k != "timings"} for turn in row] for row in table["turns"].to_pylist()]
    kind = pa.list_(pa.struct([field for field in table.schema.field("turns").type.value_type][:4]))
    older = table.set_column(table.schema.get_field_index("turns"), "turns", pa.array(plain, kind))
    back = records_from_table(older)[0].rollout.turns
    assert [turn.timings for turn in back] == [(), ()] and [turn.content for turn in back] == [t.content for t in turns]


def test_what_each_reward_function_gave_comes_back_and_older_files_have_none(records):
    parts = (("right", 1.0), ("brief", None))
    scored = dataclasses.replace(records[0].rollout, rewards_by_function=parts)
    table = table_from_records([dataclasses.replace(records[0], rollout=scored), *records])
    assert table.column("rewards_by_function").to_pylist() == [[*parts], [], []]
    for chosen in (table, table.slice(0, 1), table.slice(1)):
        found = [record.rollout.rewards_by_function for record in records_from_table(chosen)]
        assert found == [parts, (), ()][-chosen.num_rows :] if chosen.num_rows != 1 else found == [parts]
    older = table.drop_columns(["rewards_by_function"])
    assert [record.rollout.rewards_by_function for record in records_from_table(older)] == [()] * 3


def test_samples_that_cannot_be_are_refused_by_row_and_field(records):
    table = table_from_records(records)
    for starts, message in (([0, 5], "begins with a sampled"), ([1], "must begin with 0"), ([0, 99], "must begin")):
        column = pa.array([starts, [0]], pa.list_(pa.int32()))
        wrong = table.set_column(table.schema.get_field_index("sample_starts"), "sample_starts", column)
        with pytest.raises(InvalidRolloutError, match=f"row 0: .*{message}"):
            records_from_table(wrong)


def assert_same(left, right):
    """Equality of records field by field, arrays with dtype and values."""
    assert type(left) is type(right)
    for field in dataclasses.fields(left):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype and np.array_equal(a, b), field.name
        elif dataclasses.is_dataclass(a):
            assert_same(a, b)
        else:
            assert a == b, field.name


def example(**changes) -> RLExample:
    fields = dict(
        tokens=np.array([5, 6, 8, 9], np.int32),
        loss_mask=np.array([False, False, True, True]),
        segment_ids=np.ones(4, np.int32),
        position_ids=np.arange(4, dtype=np.int32),
        advantage=np.array([0, 0, -0.5, -0.5], np.float32),
        generator_log_probs=np.array([0, 0, -1.5, -0.25], np.float32),
        reference_log_probs=None,
        temperature=np.full(4, 0.7, np.float32),
        weight_steps=np.array([-1, -1, 3, 4], np.int32),
        rollout_ids=("cats-0-3/1",),
    )
    return RLExample(**(fields | changes))


def test_rollouts_come_back_exactly(tmp_path, records):
    write_parquet(tmp_path / "part-1.parquet", table_from_records(records))
    back = records_from_table(read_parquet(tmp_path / "part-1.parquet"))
    for before, after in zip(records, back, strict=True):
        assert_same(before, after)


def test_log_probabilities_are_not_rounded(tmp_path, records):
    rng = np.random.default_rng(0)
    logprobs = rng.standard_normal(3).astype(np.float32)
    rollout = dataclasses.replace(records[0].rollout, response_logprobs=logprobs)
    write_parquet(tmp_path / "p.parquet", table_from_records([RolloutRecord(rollout, "cats-0-3")]))
    [back] = records_from_table(read_parquet(tmp_path / "p.parquet"))
    assert back.rollout.response_logprobs.tobytes() == logprobs.tobytes()


def test_the_newest_version_looks_at_sampled_tokens_only(records):
    assert [record.rollout.newest_weight_step for record in records] == [6, 0]
    steps = np.array([4, 99, 5], np.int32)  # 99 stands at a tool's token
    assert dataclasses.replace(records[0].rollout, response_weight_steps=steps).newest_weight_step == 5


def test_files_are_zstd_with_dictionaries_for_strings_and_split_floats(tmp_path, records):
    write_parquet(tmp_path / "p.parquet", table_from_records(records))
    group = pq.ParquetFile(tmp_path / "p.parquet").metadata.row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    assert {column.compression for column in columns.values()} == {"ZSTD"}
    assert "RLE_DICTIONARY" in columns["env_name"].encodings
    assert "BYTE_STREAM_SPLIT" in columns["response_logprobs.list.element"].encodings


def test_a_rollout_without_metadata_is_refused(records):
    rollout = dataclasses.replace(records[0].rollout, metadata=None)
    with pytest.raises(InvalidRolloutError, match="cats-0-3/1.*no metadata"):
        table_from_records([RolloutRecord(rollout, "cats-0-3")])


def test_examples_come_back_exactly(tmp_path):
    before = [
        example(),
        example(reference_log_probs=np.array([0, 0, -1, -2], np.float32), rollout_ids=("a-0-1/0", "a-0-1/1")),
    ]
    write_parquet(tmp_path / "b.parquet", table_from_examples(before, "batch_x", 7, 2))
    table = read_parquet(tmp_path / "b.parquet")
    for left, right in zip(before, examples_from_table(table), strict=True):
        assert_same(left, right)
    assert table.column("rollout_id").to_pylist() == ["cats-0-3/1", None]
    assert table.column("group_id").to_pylist() == ["cats-0-3", None]
    assert table.column("rollout_advantage").to_pylist() == [-0.5, None]
    assert set(table.column("step").to_pylist()) == {7} and set(table.column("lineage").to_pylist()) == {2}


def test_pandas_and_duckdb_read_the_columns(tmp_path, records):
    write_parquet(tmp_path / "part-1.parquet", table_from_records(records))
    write_parquet(tmp_path / "batch_1.parquet", table_from_examples([example()], "batch_1", 0, 0))
    frame = pd.read_parquet(tmp_path / "part-1.parquet")
    assert frame["response_tokens"][0].tolist() == [8, 9, 2]
    assert frame["turns"][0][0]["content"] == "Say “cat”"
    assert frame["response_mask"][0].tolist() == [True, False, True]
    rows = duckdb.sql(
        f"""select r.env_name, r.decoding.top_k, r.timings['generate_s'], list_sum(r.response_logprobs),
        b.rollout_advantage from '{tmp_path}/part-*.parquet' r
        left join '{tmp_path}/batch_*.parquet' b using (rollout_id) order by r.rollout_id"""
    ).fetchall()
    assert rows[0] == ("cats", 40, 0.4, -2.75, -0.5)
    assert rows[1][4] is None


def write_with_version(path, table, version):
    pq.write_table(table.replace_schema_metadata({b"penstock.schema_version": str(version)}), path)


def test_a_newer_schema_is_refused_with_what_to_do(tmp_path, records):
    write_with_version(tmp_path / "p.parquet", table_from_records(records), 2)
    with pytest.raises(SchemaVersionError, match="schema version 2, this Penstock reads up to 1"):
        read_parquet(tmp_path / "p.parquet")


def test_rows_of_the_original_form_are_read(tmp_path):
    table = pa.table(
        {
            "env_name": ["cats", "cats"],
            "env_example_id": ["1", "2"],
            "prompt_tokens": pa.array([[1, 2], [3]], pa.list_(pa.int64())),
            "response_tokens": pa.array([[4, 5], [6]], pa.list_(pa.int64())),
            "response_logprobs": pa.array([[-1.0, -2.0], [-3.0]], pa.list_(pa.float64())),
            "token_rewards": pa.array([[0.0, 1.0], [0.0]], pa.list_(pa.float32())),
            "episode_reward": [1.0, 0.0],
        }
    )
    stamp = json.dumps({"worker_id": "w", "timestamp": 9.5, "weight_step": 3})
    pq.write_table(table.replace_schema_metadata({"penstock.batch_metadata": stamp}), tmp_path / "old.parquet")
    first, second = records_from_table(read_parquet(tmp_path / "old.parquet"), "old")
    assert first.rollout.metadata is not None
    assert (first.rollout.metadata.weight_step, first.rollout.metadata.timestamp) == (3, 9.5)
    assert first.rollout.metadata.schema_version == 0
    assert first.rollout.response_mask.tolist() == [True, True]
    assert first.rollout.response_weight_steps is None
    assert first.rollout.prompt_tokens.dtype == np.int32
    assert first.rollout.rollout_id == "old-1/0" and first.group_id == first.rollout.group_id == "old-1"
    assert first.group_key == "cats:1"
    assert second.rollout.response_logprobs.tolist() == [-3.0]


@pytest.mark.parametrize("content", [b"", b"PAR1 and then nothing"])
def test_a_file_that_is_not_parquet_is_one_clear_error(tmp_path, content):
    (tmp_path / "p.parquet").write_bytes(content)
    with pytest.raises(RunDirectoryError, match="p.parquet cannot be read as Parquet"):
        read_parquet(tmp_path / "p.parquet")
    with pytest.raises(RunDirectoryError, match="missing.parquet"):
        read_parquet(tmp_path / "missing.parquet")


def test_a_slice_of_a_table_makes_its_own_rows(records):
    table = table_from_records([*records, *records, records[0]])
    for start, length in [(1, 3), (4, 1), (2, 0), (3, 2)]:
        back = records_from_table(table.slice(start, length))
        assert len(back) == length
        for before, after in zip(records_from_table(table)[start : start + length], back, strict=True):
            assert_same(before, after)


def test_arrays_are_read_only_views_of_the_table(records):
    table = table_from_records(records)
    [first, _] = records_from_table(table)
    buffer = table.column("response_logprobs").chunk(0).values.buffers()[1]
    address = first.rollout.response_logprobs.__array_interface__["data"][0]
    assert buffer.address <= address < buffer.address + buffer.size
    for name in ("prompt_tokens", "response_tokens", "response_mask", "response_weight_steps"):
        assert not getattr(first.rollout, name).flags.writeable, name


def test_rows_with_the_same_decoding_share_it(records):
    back = records_from_table(table_from_records(records * 2))
    assert back[0].rollout.decoding is back[2].rollout.decoding
    assert back[0].rollout.decoding == records[0].rollout.decoding != back[1].rollout.decoding


def changed(records, column, values):
    table = table_from_records(records)
    field = table.schema.field(column)
    return table.set_column(table.schema.get_field_index(column), field, pa.array(values, field.type))


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("prompt_tokens", [[1], []], "row 1: prompt_tokens is empty"),
        ("prompt_tokens", [[1, -4], [1]], r"row 0: prompt_tokens holds a negative token id \(-4\)"),
        ("response_tokens", [[1, 2, -3], []], r"row 0: response_tokens holds a negative token id \(-3\)"),
        ("response_logprobs", [[-1, -1], []], "row 0: response_logprobs has 2 entries but response_tokens has 3"),
        ("response_logprobs", [[-1, float("nan"), 0], []], "row 0: response_logprobs holds a value that is not finite"),
        ("token_rewards", [[0, 0, float("inf")], []], "row 0: token_rewards holds a value that is not finite"),
        ("token_rewards", [[0, 0, 0.5], []], "row 0: token_rewards sum to 0.5 but episode_reward is 0.75"),
        ("episode_reward", [0.75, float("nan")], "row 1: episode_reward is nan"),
        ("response_mask", [[True] * 3, [True]], "row 1: response_mask has 1 entries but response_tokens has 0"),
        ("response_weight_steps", [[4], None], "row 0: response_weight_steps has 1 entries"),
    ],
)
def test_a_wrong_row_is_named_with_its_field(records, column, values, message):
    with pytest.raises(InvalidRolloutError, match=f"part-9, {message}"):
        records_from_table(changed(records, column, values), "part-9")


def test_a_null_element_is_no_token(records):
    with pytest.raises(InvalidRolloutError, match="part-9 holds no rollouts: there is a null among the elements"):
        records_from_table(changed(records, "response_tokens", [[1, None, 2], []]), "part-9")


def test_columns_may_stand_in_any_order_and_be_wider(records):
    table = table_from_records(records)
    wide = pa.list_(pa.int64())
    index = table.schema.get_field_index("prompt_tokens")
    table = table.set_column(index, "prompt_tokens", table.column("prompt_tokens").cast(wide))
    table = table.select(sorted(table.column_names)).replace_schema_metadata(ROLLOUT_SCHEMA.metadata)
    for before, after in zip(records, records_from_table(table), strict=True):
        assert_same(before, after)


def test_a_table_of_something_else_is_one_clear_error(records):
    table = table_from_records(records)
    with pytest.raises(RunDirectoryError, match="part-9 has no column turns: it holds no rollouts"):
        records_from_table(table.drop_columns(["turns"]), "part-9")
    index = table.schema.get_field_index("lineage")
    with pytest.raises(RunDirectoryError, match="part-9: column lineage is string, it must be int32"):
        records_from_table(table.set_column(index, "lineage", pa.array(["a", "b"])), "part-9")
    with pytest.raises(RunDirectoryError, match="batch_9 has no column tokens: it holds no training examples"):
        examples_from_table(table, "batch_9")


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_rollouts_come_back_and_have_their_newest_version(data):
    records = [a_record(data.draw, number) for number in range(data.draw(st.integers(1, 5)))]
    table = table_from_records(records)
    assert table.column("newest_weight_step").to_pylist() == [r.rollout.newest_weight_step for r in records]
    for before, after in zip(records, records_from_table(table), strict=True):
        assert_same(before, after)


def a_record(draw, number):
    length = draw(st.integers(0, 6))
    ints = st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)
    floats = st.lists(st.floats(-4, 4, width=32), min_size=length, max_size=length)
    rewards = np.array(draw(floats), np.float32)
    rollout = Rollout(
        env_name=draw(st.sampled_from(["cats", "dogs", ""])),
        env_example_id=str(number),
        prompt_tokens=np.array(draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)), np.int32),
        response_tokens=np.array(draw(ints), np.int32),
        response_logprobs=np.array(draw(floats), np.float32),
        token_rewards=rewards,
        episode_reward=float(rewards.sum(dtype=np.float64)),
        metadata=RolloutMetadata("w", draw(st.floats(0, 2e9)), draw(st.integers(0, 9)), draw(st.integers(0, 3))),
        rollout_id=f"g-0-{number}/0",
        response_mask=np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)), np.bool_),
        response_weight_steps=draw(st.none() | ints.map(lambda steps: np.array(steps, np.int32))),
        oldest_weight_step=draw(st.none() | st.integers(0, 9)),
        turns=tuple(Turn("user", text, 0, 1) for text in draw(st.lists(st.text(max_size=5), max_size=3))),
        decoding=draw(
            st.sampled_from([Decoding(), Decoding(0.0, 3), Decoding(1.0, None, 0.5, 7, (1, 2), ("a",)), Decoding(1)])
        ),
        finish_reason=draw(st.sampled_from(["stop", "length", "aborted"])),
        timings=draw(st.dictionaries(st.sampled_from("ab"), st.floats(0, 1))),
    )
    return RolloutRecord(rollout, f"g-0-{number}", "k")


def test_only_the_asked_columns_are_read_and_absent_ones_left_out(tmp_path, records):
    write_parquet(tmp_path / "p.parquet", table_from_records(records))
    table = read_parquet(tmp_path / "p.parquet", ["rollout_id", "prompt_tokens", "no_such"])
    assert table.column_names == ["rollout_id", "prompt_tokens"]


def test_no_rows_make_a_readable_file(tmp_path):
    write_parquet(tmp_path / "p.parquet", table_from_records([]))
    write_parquet(tmp_path / "b.parquet", table_from_examples([], "b", 0, 0))
    assert records_from_table(read_parquet(tmp_path / "p.parquet")) == []
    assert examples_from_table(read_parquet(tmp_path / "b.parquet")) == []
    assert read_parquet(tmp_path / "p.parquet").schema.equals(ROLLOUT_SCHEMA)
    assert read_parquet(tmp_path / "b.parquet").schema.equals(EXAMPLE_SCHEMA)


def test_metadata_that_a_file_does_not_have_yet_is_the_fields_default(records, monkeypatch):
    monkeypatch.setitem(columns._ADDED, "lineage", 0)  # as if the field had been added after the file was written
    older = table_from_records(records).drop_columns(["lineage"])
    after = records_from_table(older, "part-9")
    assert [record.rollout.metadata for record in after] == [
        dataclasses.replace(record.rollout.metadata, lineage=0) for record in records
    ]
    table = table_from_records(records)  # a scan over older and newer files gives nulls instead
    nulls = table.set_column(table.schema.get_field_index("lineage"), "lineage", pa.nulls(len(table), pa.int32()))
    assert [record.rollout.metadata.lineage for record in records_from_table(nulls, "part-9")] == [0, 0]


def test_columns_of_a_record_follow_its_annotations():
    @dataclasses.dataclass
    class Made:
        name: str
        count: int
        share: float | None
        ids: tuple[int, ...]
        added: str = "before"

    assert [(field.name, field.type, field.nullable) for field in columns.columns_of(Made)] == [
        ("name", pa.string(), False), ("count", pa.int32(), False), ("share", pa.float64(), True),
        ("ids", pa.list_(pa.int32()), False), ("added", pa.string(), False),
    ]  # fmt: skip
    rows = {"name": ["a", "b"], "count": [1, 2], "share": [None, 0.5], "ids": [[], [3, 4]], "added": [None, "now"]}
    stored = pa.table(rows, pa.schema([field.with_nullable(True) for field in columns.columns_of(Made)]))
    (batch,) = stored.to_batches()
    made = list(map(Made, *columns.fields_from_columns(Made, batch.column)))
    assert made == [Made("a", 1, None, (), "before"), Made("b", 2, 0.5, (3, 4), "now")]


def test_old_rows_of_two_environments_with_equal_ids_stay_two_groups(tmp_path):
    table = pa.table(
        {
            "env_name": ["cats", "dogs", "cats", "dogs"],
            "env_example_id": ["1", "1", "1", "2"],
            **{name: pa.array([[1]] * 4, pa.list_(pa.int64())) for name in ("prompt_tokens", "response_tokens")},
            **{name: pa.array([[0.0]] * 4, pa.list_(pa.float32())) for name in ("response_logprobs", "token_rewards")},
            "episode_reward": [0.0] * 4,
        }
    )
    pq.write_table(table, tmp_path / "old.parquet")
    records = records_from_table(read_parquet(tmp_path / "old.parquet"), "old")
    assert [(record.group_id, record.group_key) for record in records] == [
        ("old-cats-1", "cats:1"),
        ("old-dogs-1", "dogs:1"),
        ("old-cats-1", "cats:1"),
        ("old-2", "dogs:2"),
    ]
