import json
import os
import subprocess
import time

import pytest
from rich.cells import cell_len

from penstock.dashboard.groups import GroupFilter, GroupSummary, group_table, list_groups, print_groups
from penstock.rundir import JsonLinesLog, RunDirectory, RunViews


def heading(views, printed, width: int) -> list[str]:
    groups = list_groups(views, GroupFilter(), None).groups
    return printed(group_table(groups, width), width=width).splitlines()[0].split()


def test_a_wide_screen_shows_every_column(views, printed):
    assert heading(views, printed, 120) == [
        "step", "lesson", "group", "n", "reward", "min", "max", "rewards", "advantage", "tokens", "weights", "age",
        "state",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [40, 60, 70, 80, 100, 120])
def test_the_table_fits_and_ids_are_whole(views, printed, width):
    groups = list_groups(views, GroupFilter(), None).groups
    lines = printed(group_table(groups, width), width=width).splitlines()
    assert max(map(cell_len, lines)) <= width and len(lines) == 7
    assert all(group.group_id in line for group, line in zip(groups, lines[1:], strict=True))


def test_a_narrow_screen_loses_the_least_telling_columns(views, printed):
    assert heading(views, printed, 80) == [
        "step", "group", "n", "reward", "min", "max", "rewards", "tokens", "weights", "age", "state",
    ]  # fmt: skip
    assert heading(views, printed, 50) == ["step", "group", "n", "reward", "tokens", "weights", "state"]


def test_an_id_too_long_for_the_screen_is_folded_not_cut(printed):
    name = "a_lesson_with_an_uncommonly_long_name_" * 2 + "-0-123456"
    group = GroupSummary(name, "x", "k", 3, (0.0, 1.0), (), 10.0, 2, 3, 1, {"trained": 2}, 0.0)
    shown = printed(group_table([group], 60), width=60)
    column = "".join(line[5:].split(" ")[0] if i else "" for i, line in enumerate(shown.splitlines()))
    assert column.startswith(name[:4]) and "…" not in shown
    assert "".join(shown.split())[-6:] in name + "trained"


def test_rows(views, printed):
    lines = printed(lambda console: print_groups(views, GroupFilter(), None, console), width=80).splitlines()
    assert lines[0].endswith("dead, step 2 of 10")  # it says that it goes on, and when is long ago
    assert lines[2].split() == ["–", "cats-0-2", "2", "0.50", "0.50", "0.50", "▆▆", "40", "2", "–", "waiting"]
    assert lines[5].split()[:8] == ["1", "tools-0-0", "2", "0.25", "-0.50", "1.00", "▁█", "6"]
    assert lines[7].split() == ["0", "cats-0-0", "4", "0.62", "0.00", "1.00", "▃▆██", "2", "0", "0", "trained"]
    text = " ".join(" ".join(lines).split())
    assert (
        "14 rollouts stored: 8 trained, 2 " in text
        and "not stored: 3 in_flight, 2 aborted (in_flight when the run ended: a resume" in text
    )
    assert lines[-2] == "a step is the version that it trained: the log calls the update by the next"
    assert lines[-1].endswith("--show cats-0-2")


def test_a_limit_says_what_is_left(views, printed):
    text = printed(lambda console: print_groups(views, GroupFilter(), 2, console))
    assert "4 older groups are not shown: --limit 6" in text


def test_members_of_different_fates_are_counted(printed):
    group = GroupSummary("g", "", "k", 3, (0.0, 1.0, 1.0), (), 10.0, 2, 3, 1, {"trained": 2, "invalid": 1}, 0.0)
    assert "trained 2/3" in printed(group_table([group], 80))


def test_an_empty_run_has_one_helpful_line(tmp_path, printed):
    directory = RunDirectory.create(tmp_path / "new", {})
    with RunViews(directory.path) as views:
        lines = printed(lambda console: print_groups(views, GroupFilter(), None, console), width=300).splitlines()
    assert lines[1:] == ["No rollouts yet: the run has started no group so far."]
    offline = RunDirectory.create(tmp_path / "offline", {"replay": {"from_rollouts": "runs/cats-1"}})
    with RunViews(offline.path) as views:
        text = printed(lambda console: print_groups(views, GroupFilter(), None, console), width=300)
    assert text.splitlines()[1:] == ["No rollouts of its own: the run trains on those of runs/cats-1."]
    tickets = JsonLinesLog(directory.tickets_path)
    tickets.append({"ticket_id": "cats-0-0", "rollouts": 4})
    tickets.close()
    with RunViews(directory.path) as views:
        lines = printed(lambda console: print_groups(views, GroupFilter(), None, console), width=300).splitlines()
    assert lines[1:] == ["No rollouts are stored yet: 4 in_flight."]
    directory.status_path.write_text('{"state": "failed", "step": 0, "steps": 10}')
    with RunViews(directory.path) as views:
        lines = printed(lambda console: print_groups(views, GroupFilter(), None, console), width=300).splitlines()
    ended = "(in_flight when the run ended: a resume counts them as aborted)"
    assert lines[1:] == [f"No rollouts are stored yet: 4 in_flight {ended}."]
    gone = subprocess.Popen(["true"])
    gone.wait()
    for pid, state, words in ((os.getpid(), "running", ""), (gone.pid, "dead", f" {ended}")):
        said = {"state": "running", "step": 0, "steps": 10, "time": time.time(), "pid": pid}
        directory.status_path.write_text(json.dumps(said))
        with RunViews(directory.path) as views:
            lines = printed(lambda console: print_groups(views, GroupFilter(), None, console), width=300).splitlines()
        assert lines[0].endswith(f"{state}, step 0 of 10")
        assert lines[1:] == [f"No rollouts are stored yet: 4 in_flight{words}."]
    fates = JsonLinesLog(directory.fates_path)
    for number in range(4):
        fate = {"rollout_id": f"cats-0-0/{number}", "fate": "trained", "step": 1, "lineage": 0, "time": 2.0}
        fates.append(fate)
    fates.close()
    with RunViews(directory.path) as views:  # their files were removed
        lines = printed(lambda console: print_groups(views, GroupFilter(), None, console), width=300).splitlines()
    assert lines[1:] == ["No rollouts are stored: 4 trained."]


def test_a_filter_without_groups_says_so(views, printed):
    wanted = GroupFilter(step=9, state="trained")
    text = printed(lambda console: print_groups(views, wanted, None, console), width=300)
    assert "No groups match --step 9 --fate trained; there are 14 rollouts stored" in text


def test_a_broken_status_is_an_unknown_state(tmp_path, printed):
    directory = RunDirectory.create(tmp_path / "new", {})
    directory.status_path.write_bytes(b"")
    with RunViews(directory.path) as views:
        lines = printed(lambda console: print_groups(views, GroupFilter(), None, console), width=300).splitlines()
    assert lines[0].endswith("new  unknown state, step ?")
