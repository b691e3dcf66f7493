import numpy as np
import pytest

from penstock.dashboard import find_rollouts
from penstock.rundir import RunDirectory, RunViews, write_examples
from penstock.types import ConfigError
from tests.dashboard.sample_run import example, group, write_run


def names(views, name: str) -> list[str]:
    return [rollout.rollout_id for rollout in find_rollouts(views, name)]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("cats-0-0/2", ["cats-0-0/2"]),
        ("cats-0-3", ["cats-0-3/0", "cats-0-3/1"]),
        ("cats-0-1", ["cats-0-1/0", "cats-0-1/1"]),  # also the beginning of cats-0-10
        ("tools", ["tools-0-0/0", "tools-0-0/1"]),
        ("cats-0-10/1", ["cats-0-10/1"]),
    ],
)
def test_an_id_or_its_beginning(views, name, found):
    assert names(views, name) == found


def test_members_come_in_their_order(tmp_path):
    directory = RunDirectory.create(tmp_path / "run", {})
    from penstock.rundir import write_records

    write_records(directory.rollouts / "part-a.parquet", group("g-0-0", [("cat", 0.0)] * 12))
    with RunViews(directory.path) as views:
        assert names(views, "g-0-0") == [f"g-0-0/{index}" for index in range(12)]
        assert names(views, "g-0-0/1") == ["g-0-0/1"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "cats",
            r"--show cats: 5 ids begin so \(cats-0-0, cats-0-1, cats-0-10, .*-3\): write more of it",
        ),
        ("cats-0-0/", r"4 ids begin so \(cats-0-0/0, cats-0-0/1, cats-0-0/2, cats-0-0/3\)"),
        ("dogs", "there is no rollout or group with this id; the newest groups are cats-0-2, cats-0-10, tools-0-0"),
        ("cats-0-4", "--show cats-0-4: it was started, but has not been stored yet"),
        ("cats-0-4/1", "it was started, but has not been stored yet"),
        ("cats-0-5/1", "its tokens are not stored; it was aborted at step 1: the update waited too long"),
        ("cats-0-5", "its tokens are not stored; it was aborted at step 1"),
    ],
)
def test_what_cannot_be_shown_is_explained(views, name, message):
    with pytest.raises(ConfigError, match=message):
        find_rollouts(views, name)


def test_many_candidates_are_not_all_named(tmp_path):
    directory = RunDirectory.create(tmp_path / "run", {})
    from penstock.rundir import write_records

    records = [record for i in range(10, 30) for record in group(f"g-0-{i}", [("cat", 0.0)])]
    write_records(directory.rollouts / "part-a.parquet", records)
    with RunViews(directory.path) as views, pytest.raises(ConfigError, match=r"20 ids begin so \(g-0-10, .*, …\)"):
        find_rollouts(views, "g-")


def test_the_story_of_a_rollout(views):
    (stored,) = find_rollouts(views, "cats-0-0/2")
    assert (stored.state, stored.fate_step, stored.fate_reason) == ("trained", 0, "trained by update 0")
    assert [(use.step, use.survives) for use in stored.uses] == [(0, True)]
    assert stored.advantage == 0.5 and stored.advantages.tolist() == [0.5, 0.5]
    plain = stored.to_json()
    assert plain["token_advantages"] == [0.5, 0.5] and plain["turns"][1]["content"] == "cat"


def test_advantages_of_a_shared_batch_row_are_told_apart(views):
    first, second = find_rollouts(views, "tools-0-0")
    assert first.advantage == 1.5 and second.advantage == -1.5
    mask = first.record.rollout.response_mask
    assert first.advantages.tolist() == np.where(mask, 1.5, 0).tolist() and not mask.all()
    assert len(second.advantages) == len(second.record.rollout.response_tokens)


def test_without_a_batch_there_is_no_advantage(views):
    for stored in find_rollouts(views, "cats-0-2"):
        assert stored.uses == () and stored.advantage is stored.advantages is None


def test_a_response_that_the_update_cut_off_has_no_advantage_at_its_end(tmp_path):
    directory = write_run(tmp_path / "run")
    records = group("cats-0-2", [("a cat and a dog", 0.5)], (2,))
    whole = example(records, (0.25,))
    cut = type(whole)(**{
        name: getattr(whole, name)[:-2] if isinstance(getattr(whole, name), np.ndarray) else getattr(whole, name)
        for name in whole.__slots__
    })  # fmt: skip
    write_examples(directory.batches / "batch_3_1.parquet", [cut], "batch_3_1", 3, 0)
    with RunViews(directory.path) as views:
        (stored,) = find_rollouts(views, "cats-0-2/0")
    assert len(stored.advantages) == len(stored.record.rollout.response_tokens)
    assert stored.advantages[0] == 0.25 and stored.advantages[-1] == 0


def test_a_part_that_is_merged_meanwhile_is_found_in_its_new_file(tmp_path):
    directory = write_run(tmp_path / "run")
    with RunViews(directory.path) as views:
        (directory.rollouts / "part-a.parquet").rename(directory.rollouts / "part-z.parquet")
        (directory.batches / "batch_0_1.parquet").rename(directory.batches / "batch_0_9.parquet")
        assert [stored.advantage for stored in find_rollouts(views, "cats-0-0/2")] == [0.5]
