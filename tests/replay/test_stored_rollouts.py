"""Batches of stored rollouts: which rollouts count, what is refused, epochs, and where a resume goes on."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.batch import BatchMakerConfig
from penstock.replay import RolloutStore, StoredBatches, StoredRollouts
from penstock.rundir import RunDirectory, write_records
from penstock.types import (
    CheckpointError,
    ConfigError,
    Decoding,
    Rollout,
    RolloutMetadata,
    RolloutRecord,
    SchemaVersionError,
    Stopped,
)


def record(group: int, member: int, reward: float = 0.0, tokens: int = 3, **changes) -> RolloutRecord:
    made = Rollout(
        env_name="e",
        env_example_id=str(group),
        prompt_tokens=np.int32([1, 2]),
        response_tokens=np.arange(3, 3 + tokens, dtype=np.int32),
        response_logprobs=np.full(tokens, -0.5, np.float32),
        token_rewards=np.float32([0] * (tokens - 1) + [reward]),
        episode_reward=reward,
        metadata=RolloutMetadata("w", 1.0, 37),
        rollout_id=f"l-0-{group}/{member}",
        lesson_id="l",
    )
    return RolloutRecord(replace(made, **changes), f"l-0-{group}", group_key=str(group))


def records(groups: int = 7) -> list[RolloutRecord]:
    return [record(group, member, float(member)) for group in range(groups) for member in range(2)]


@pytest.fixture
def part(tmp_path: Path):
    """Writes records as a folder's part and returns the folder."""

    def write(rows: list[RolloutRecord], name: str = "part-a.parquet", folder: str = "parts") -> Path:
        path = tmp_path / folder
        path.mkdir(parents=True, exist_ok=True)
        write_records(path / name, rows)
        return path

    return write


def read(source: Path, **changes) -> StoredRollouts:
    return StoredRollouts.read(source, **{"row_length": 16, "vocab_size": 32} | changes)


@pytest.fixture
def batches(tmp_path: Path, part):
    """Makes the batches of seven groups, three per update."""
    stored, made = read(part(records())), []

    def make(lineage: int = 0, seed: int = 5) -> StoredBatches:
        store = RolloutStore(RunDirectory(tmp_path / "run"))
        (tmp_path / "run" / "batches").mkdir(parents=True, exist_ok=True)
        made.append(StoredBatches(stored, 3, "rloo", store, seed, lineage))
        return made[-1]

    return make


def test_a_folder_a_file_and_a_run_directory_hold_the_same(part, tmp_path):
    rows = records()
    folder = part(rows[:6])
    part(rows[4:], "part-b.parquet")  # two of them twice
    whole = read(folder)
    assert (len(whole.groups), whole.rollouts, whole.left_out) == (7, 14, {"filtered": 0})
    assert read(part(rows, "all.parquet", "one") / "all.parquet").digest == whole.digest
    run = part(rows, folder="run/rollouts").parent
    assert read(run).digest == whole.digest
    RunDirectory(run).fates_path.write_text(
        '{"rollout_id": "l-0-0/0", "fate": "invalid"}\n{"rollout_id": "l-0-1/0", "fate": "stale_step"}\n'
    )
    known = read(run)
    assert known.rollouts == 13 and known.left_out["invalid"] == 1, "stale ones are as good as others here"


def test_what_no_row_can_hold_is_left_out_and_counted(part):
    rows = [*records(2), record(3, 0, tokens=15), record(3, 1), record(4, 0), record(4, 1)]
    stored = read(part(rows))
    assert stored.rollouts == 7 and stored.left_out == {"invalid": 1, "filtered": 0}
    flat = read(part(rows), batch_maker=BatchMakerConfig(filter_zero_variance=True))
    assert flat.rollouts == 4 and flat.left_out == {"invalid": 1, "filtered": 3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"response_tokens": np.int32([3, 40, 5])},
            "token 40, and the policy's vocabulary 32 tokens.*another tokenizer",
        ),
        ({"response_logprobs": np.zeros(3, np.float32)}, "all log-probabilities are 0"),
        ({"decoding": Decoding(top_k=5)}, "sampled with top_k=5.*learner.allow_truncated_sampling: true"),
        ({"decoding": Decoding(temperature=0)}, "none of its 2 rollouts can be trained on; the first: .*temperature 0"),
    ],
)
def test_rollouts_that_cannot_train_this_policy_are_refused_in_one_line(part, change, message):
    source = part([record(0, 0, 1.0, **change), record(0, 1, **change)])
    with pytest.raises(ConfigError, match=message) as refused:
        read(source)
    assert "\n" not in str(refused.value) and str(source) in str(refused.value)


def test_truncated_sampling_that_is_named_is_taken(part):
    source = part([record(0, member, float(member), decoding=Decoding(top_k=5)) for member in range(2)])
    assert read(source, allow_truncated_sampling=True).rollouts == 2


def test_empty_places_are_refused(tmp_path, part):
    (tmp_path / "nothing").mkdir()
    for place, message in (("nowhere", "there is nothing"), ("nothing", "no Parquet file")):
        with pytest.raises(ConfigError, match=f"{message}.*; give a run directory"):
            read(tmp_path / place)
    (tmp_path / "young" / "rollouts").mkdir(parents=True)
    with pytest.raises(ConfigError, match="it holds no rollouts yet"):
        read(tmp_path / "young")
    (tmp_path / "young" / "fragments").mkdir()
    with pytest.raises(ConfigError, match="it is a run of simulators, whose fragments train no language policy"):
        read(tmp_path / "young")
    with pytest.raises(
        ConfigError, match="none of its 2 rollouts passes the filters: all rewards of a group were equal"
    ):
        read(part([record(0, 0), record(0, 1)]), batch_maker=BatchMakerConfig(filter_zero_variance=True))


def test_the_filters_of_a_run_that_generates_act_on_stored_rollouts(part):
    cut = [record(0, member, 1.0, finish_reason="length") for member in range(2)]
    rows = [*cut, record(0, 2, 0.5), *records(3)[2:], *(record(9, member, 1.0) for member in range(2))]
    masked = read(part(rows), batch_maker=BatchMakerConfig(filter_overlong="mask"))
    assert masked.left_out["filtered"] == 2 and [len(group.rollouts) for group in masked.groups] == [1, 2, 2, 2]
    between = read(part(rows), batch_maker=BatchMakerConfig(filter_difficulty=(0.1, 0.9)))
    assert between.left_out["filtered"] == 2 and between.rollouts == 7, "0.83 and twice 0.5 stay, 1 goes"
    less = read(part(rows), batch_maker=BatchMakerConfig(filter_overlong="penalise", overlong_penalty=0.25))
    assert less.groups[0].rewards.tolist() == [0.75, 0.75, 0.5] and less.left_out == {"filtered": 0}


def test_rollouts_of_two_runs_in_one_folder_are_refused(part):
    """Their ids are the same: one of each two would be lost, or both be one group."""
    part(records())
    other = [replace(row, rollout=replace(row.rollout, response_tokens=np.int32([7, 8, 9]))) for row in records()]
    with pytest.raises(ConfigError, match="two rollouts in it have the id l-0-0/0, as those of different runs do"):
        read(part(other, "part-b.parquet"))


def test_rows_without_log_probabilities_and_newer_rows_are_refused(part):
    folder = part(records(1))
    (path,) = folder.glob("*.parquet")
    table = pq.read_table(path)
    column = table.schema.get_field_index("response_logprobs")
    empty = pa.array([[]] * len(table), pa.list_(pa.float32()))
    pq.write_table(table.set_column(column, table.schema.field(column), empty), path)
    with pytest.raises(ConfigError, match="response_logprobs.*every row needs its tokens with their log-probabilities"):
        read(folder)
    newer = {**(table.schema.metadata or {}), b"penstock_schema_version": b"99"}
    names = [name for name in newer if b"version" in name]
    pq.write_table(table.replace_schema_metadata({**newer, **dict.fromkeys(names, b"99")}), path)
    with pytest.raises(SchemaVersionError):
        read(folder)


def test_every_epoch_has_all_groups_once_but_what_is_left_of_its_last_batch(batches):
    made = batches()
    assert made.updates_per_epoch == 2
    epochs = [[made.next_batch(step, 1.0) for step in (2 * epoch, 2 * epoch + 1)] for epoch in range(12)]
    seen = [[group for batch in epoch for group in batch.group_ids] for epoch in epochs]
    assert all(len(set(groups)) == 6 for groups in seen)
    assert len({tuple(groups) for groups in seen}) == 12, "each has an order of its own"
    assert {group for groups in seen for group in groups} == {f"l-0-{index}" for index in range(7)}


def test_a_batch_has_advantages_and_no_version_and_its_file_is_there_before_it(batches, tmp_path):
    batch = batches().next_batch(0, 1.0)
    assert [example.advantage[-1] for example in batch.examples] == [-1, 1] * 3
    for example in batch.examples:
        assert (example.weight_steps == -1).all() and (example.generator_log_probs[2:] == -0.5).all()
    assert [path.stem for path in (tmp_path / "run" / "batches").iterdir()] == [batch.batch_id]
    assert batch.metrics["train/reward_mean"] == 0.5


def test_the_batch_that_was_looked_at_is_the_one_that_comes(batches, tmp_path):
    made = batches()
    made.next_batch(0, 1.0)
    assert made.peek(1) is made.peek(1) and made.peek(1).step == 1
    assert made.next_batch(1, 1.0) is not None and len(list((tmp_path / "run" / "batches").iterdir())) == 2
    made.known_ahead = False
    assert made.peek(2) is None


def test_the_ledger_closes_at_every_step(batches):
    made = batches()
    trained = set()
    for step in range(5):
        batch = made.next_batch(step, 1.0)
        before = made.ledger()
        made.finish_update(step)
        made.set_current_step(step + 1)
        trained.update(batch.group_ids)
        after = made.ledger()
        assert after["started"] == before["started"] == 14 == after["waiting"] + after["trained"]
        assert after["trained"] == 2 * len(trained)
    assert made.metrics()["replay/epoch"] == 2.5


def test_a_resumed_run_goes_on_with_the_same_batches(batches):
    made = batches()
    straight = [made.next_batch(step, 1.0).group_ids for step in range(6)]
    for step in range(4):
        made.finish_update(step)
    state = made.checkpoint_states(4, 1.0)["replay"]
    resumed = batches(lineage=1)
    resumed.restore(state)
    assert [resumed.next_batch(step, 1.0).group_ids for step in (4, 5)] == straight[4:]
    assert resumed.ledger() == made.ledger() and resumed.step == 4
    assert [batches(seed=6).next_batch(0, 1.0).group_ids] != straight[:1]


def test_other_rollouts_than_before_are_refused_at_a_resume(batches):
    state = batches().checkpoint_states(4, 1.0)["replay"]
    with pytest.raises(ConfigError, match="does not hold the rollouts that the run has trained on so far"):
        batches(lineage=1).restore(state | {"digest": "another"})
    with pytest.raises(CheckpointError, match="the run generated its rollouts until now"):
        batches(lineage=1).restore({"lineage": 0, "recorded": []})


def test_too_few_groups_and_a_stop(batches, part, tmp_path):
    with pytest.raises(ConfigError, match=r"groups_per_batch is 8, but .* has 7 groups to train on: lower it"):
        StoredBatches.check(read(part(records())), 8)
    made = batches()
    made.stop()
    with pytest.raises(Stopped):
        made.next_batch(0, 1.0)
    assert made.peek(1) is None
