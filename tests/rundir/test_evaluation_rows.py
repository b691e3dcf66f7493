"""What evaluations leave: whole files apart from training's, which any Parquet reader and our own views can read."""

from dataclasses import replace

import duckdb
import pandas
import pytest
from tests.rundir.conftest import bare_record, full_record

from penstock.rundir import EVALUATION_SCHEMA, ROLLOUT_SCHEMA, RunDirectory, RunViews, read_records, write_evaluation
from penstock.types import RolloutBatch, RolloutGroup


def batch(*rollout_ids: str, reward: float = 0.75) -> RolloutBatch:
    made = [full_record(rollout_id).rollout for rollout_id in rollout_ids]
    scaled = [replace(r, episode_reward=reward, token_rewards=r.token_rewards * (reward / 0.75)) for r in made]
    return RolloutBatch(tuple(RolloutGroup("cats:17", (r,), r.group_id) for r in scaled))


@pytest.fixture
def directory(tmp_path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", {})


def test_one_file_holds_every_lesson_of_an_evaluation(directory):
    path = write_evaluation(directory, [batch("eval-cats-1-4-0/0"), batch("eval-dogs-1-4-0/0")], "eval", 1, 4)
    assert path == directory.path / "evaluations" / "eval-1-4.parquet"
    rows = pandas.read_parquet(path)
    assert rows[["rollout_id", "mode", "evaluation", "weight_step", "episode_reward"]].values.tolist() == [
        ["eval-cats-1-4-0/0", "eval", "eval", 4, 0.75],
        ["eval-dogs-1-4-0/0", "eval", "eval", 4, 0.75],
    ]
    assert duckdb.sql(f"select list_sum(token_rewards), turns[1].content from '{path}'").fetchall() == [
        (0.75, "Say “cat”"),
        (0.75, "Say “cat”"),
    ]
    assert EVALUATION_SCHEMA.names[: len(ROLLOUT_SCHEMA)] == ROLLOUT_SCHEMA.names
    assert [record.group_key for record in read_records(path)] == ["cats:17", "cats:17"]


def test_the_same_evaluation_made_again_takes_its_place_and_an_empty_one_leaves_nothing(directory):
    write_evaluation(directory, [batch("eval-cats-0-4-0/0")], "eval", 0, 4)
    again = write_evaluation(directory, [batch("eval-cats-0-4-0/0", reward=0.25)], "eval", 0, 4)
    assert write_evaluation(directory, [RolloutBatch(())], "eval", 0, 6) is None
    assert list(directory.evaluations.iterdir()) == [again]
    assert [record.rollout.episode_reward for record in read_records(again)] == [0.25]


def test_what_a_killed_writer_left_is_seen_by_nobody_and_goes_with_the_next_one(directory):
    write_evaluation(directory, [batch("eval-cats-0-4-0/0")], "eval", 0, 4)
    unfinished = directory.evaluations / ".eval-0-8.parquet.0123456789ab.tmp"
    unfinished.write_bytes(b"PAR1 half of it")
    with RunViews(directory.path, mode="eval") as views:
        assert views.select("select count(*) from rollouts").rows().__next__() == (1,)
    with directory.locked():
        assert not unfinished.exists()
    assert (directory.evaluations / "eval-0-4.parquet").exists()


def test_a_run_directory_that_is_gone_is_not_made_anew(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_evaluation(RunDirectory(tmp_path / "gone"), [batch("eval-cats-0-4-0/0")], "eval", 0, 4)
    assert list(tmp_path.iterdir()) == []


def test_views_keep_training_and_evaluations_apart(directory):
    from penstock.rundir import write_records

    write_records(directory.rollouts / "part-a.parquet", [full_record(), bare_record()])
    write_evaluation(directory, [batch("eval-cats-1-4-0/0")], "micro_eval", 1, 4)
    with RunViews(directory.path) as views:
        assert [*views.select("select rollout_id, state from rollouts order by 1").rows()] == [
            ("cats-0-3/1", "waiting"),
            ("cats-0-4/0", "waiting"),
        ]
        assert [*views.select("select rollout_id, mode, evaluation from evaluations").rows()] == [
            ("eval-cats-1-4-0/0", "eval", "micro_eval")
        ]
        assert list(views.files.read_rollouts(["eval-cats-1-4-0/0"])) == []
    with RunViews(directory.path, mode="eval") as views:
        assert [*views.select("select rollout_id, state, fate, fate_step, uses from rollouts").rows()] == [
            ("eval-cats-1-4-0/0", "micro_eval", None, 4, 0)
        ]
        assert [*views.select("select distinct rollout_id from turns").rows()] == [("eval-cats-1-4-0/0",)]
        assert list(views.files.read_rollouts(["eval-cats-1-4-0/0", "cats-0-3/1"])) == ["eval-cats-1-4-0/0"]
