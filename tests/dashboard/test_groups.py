import pytest

from penstock.dashboard import GroupFilter, list_groups
from penstock.dashboard.groups import RunCounts, count_rollouts
from penstock.dashboard.observation import ObservedRun
from penstock.dashboard.rollout_pages import group_list
from penstock.rundir import JsonLinesLog, RunDirectory, RunViews
from penstock.types import ConfigError
from tests.dashboard.sample_run import write_run


def ids(views, limit=None, **wanted) -> list[str]:
    return [group.group_id for group in list_groups(views, GroupFilter(**wanted), limit).groups]


def test_groups_that_wait_come_first_then_the_newest_steps(views):
    assert ids(views) == ["cats-0-2", "cats-0-10", "cats-0-3", "tools-0-0", "cats-0-1", "cats-0-0"]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"step": 1}, ["tools-0-0", "cats-0-1"]),
        ({"step": 2}, ["cats-0-10", "cats-0-3"]),
        ({"step": 7}, []),
        ({"lesson_id": "tools"}, ["tools-0-0"]),
        ({"state": "waiting"}, ["cats-0-2"]),
        ({"state": "trained", "lesson_id": "cats"}, ["cats-0-1", "cats-0-0"]),
        ({"state": "training", "step": 2}, ["cats-0-10"]),
    ],
)
def test_filters(views, wanted, found):
    assert ids(views, **wanted) == found


def test_a_page_knows_how_many_there_are(views):
    page = list_groups(views, GroupFilter(), 2)
    assert [group.group_id for group in page.groups] == ["cats-0-2", "cats-0-10"] and page.total == 6


def test_a_summary(views):
    (group,) = list_groups(views, GroupFilter(step=0), None).groups
    assert group.to_json() == {
        "group_id": "cats-0-0", "lesson_id": "cats", "group_key": "cats_env:7", "step": 0, "rollouts": 4,
        "reward_mean": 0.625, "reward_min": 0.0, "reward_max": 1.0, "rewards": [0.0, 0.5, 1.0, 1.0],
        "advantage_min": pytest.approx(-0.8), "advantage_max": 0.5, "response_tokens": pytest.approx(2.25),
        "oldest_weight_step": 0, "newest_weight_step": 0, "staleness": 0, "states": {"trained": 4}, "timestamp": 1000.0,
    }  # fmt: skip


def test_staleness_is_counted_from_the_oldest_weights(views):
    (group,) = list_groups(views, GroupFilter(state="trained", lesson_id="cats"), 1).groups
    assert (group.oldest_weight_step, group.newest_weight_step, group.staleness) == (0, 1, 1)
    (tools,) = list_groups(views, GroupFilter(lesson_id="tools"), None).groups
    assert (tools.step, tools.oldest_weight_step, tools.staleness) == (1, 1, 0)
    (waiting,) = list_groups(views, GroupFilter(state="waiting"), None).groups
    assert waiting.step is waiting.staleness is None and waiting.advantages == ()


def test_a_group_of_versions_that_a_resume_took_back_has_no_staleness(tmp_path):
    directory = write_run(tmp_path / "run")
    with RunViews(directory.path) as views:
        (waiting,) = list_groups(views, GroupFilter(state="waiting"), None).groups
    fates = JsonLinesLog(directory.fates_path)
    for member in range(len(waiting.rewards)):
        fates.append({"rollout_id": f"{waiting.group_id}/{member}", "fate": "rolled_back", "reason": "",
                      "step": waiting.oldest_weight_step - 1, "lineage": 1, "time": 2.0})  # fmt: skip
    fates.close()
    with RunViews(directory.path) as views:
        (group,) = list_groups(views, GroupFilter(state="rolled_back"), None).groups
    assert group.step == waiting.oldest_weight_step - 1 and group.staleness is None
    run = ObservedRun(directory.path)
    run.catch_up()
    (row,) = [row for row in group_list(run, {"limit": "99"})["groups"] if row["group_id"] == waiting.group_id]
    run.close()
    assert row["step"] == group.step and row["staleness"] is None


def test_every_rollout_that_was_started_is_counted_once(views):
    counts = count_rollouts(views)
    assert counts == RunCounts(
        {"trained": 8, "waiting": 2, "training": 2, "stale_step": 2}, {"in_flight": 3, "aborted": 2}
    )


def test_a_group_that_was_used_twice_is_found_at_both_updates(tmp_path):
    directory = write_run(tmp_path / "run")
    from penstock.rundir import write_examples
    from tests.dashboard.sample_run import example, group

    again = group("cats-0-0", [("dog", 0.0)])
    write_examples(directory.batches / "batch_1_9.parquet", [example(again, (-0.8,))], "batch_1_9", 1, 0)
    with RunViews(directory.path) as views:
        assert "cats-0-0" in ids(views, step=0) and "cats-0-0" in ids(views, step=1)
        assert list_groups(views, GroupFilter(step=0), None).groups[0].step == 1


def test_a_lesson_without_rollouts_is_answered_with_those_that_have_some(views, tmp_path):
    with pytest.raises(ConfigError, match="--lesson is 'dogs', .* there are some of cats, "):
        list_groups(views, GroupFilter(lesson_id="dogs"), None)
    with RunViews(RunDirectory.create(tmp_path / "new", {}).path) as empty:
        assert list_groups(empty, GroupFilter(lesson_id="dogs"), None).total == 0
