import pytest

from penstock.replay import Lineages
from penstock.types import CheckpointError, RunDirectoryError, WeightVersion


def survives(lineages, lineage, step, now):
    return lineages.survives(WeightVersion(lineage, step), now)


def test_an_older_lineage_is_valid_up_to_the_fork(tmp_path):
    lineages = Lineages(tmp_path / "lineages.jsonl")
    assert lineages.newest == 0 and survives(lineages, 0, 9, now=0)
    lineages.begin(1, parent=0, step=5)
    assert survives(lineages, 0, 5, now=1) and not survives(lineages, 0, 6, now=1)
    assert survives(lineages, 1, 6, now=1) and survives(lineages, 1, 5, now=1)


def test_forks_are_durable(tmp_path):
    Lineages(tmp_path / "lineages.jsonl").begin(1, 0, 5)
    again = Lineages(tmp_path / "lineages.jsonl")
    assert again.newest == 1 and not survives(again, 0, 6, now=1)


def test_the_lowest_fork_on_the_way_counts(tmp_path):
    lineages = Lineages(tmp_path / "lineages.jsonl")
    lineages.begin(1, parent=0, step=5)
    lineages.begin(2, parent=1, step=8)
    assert [survives(lineages, 0, step, now=2) for step in (5, 6)] == [True, False]
    assert [survives(lineages, 1, step, now=2) for step in (8, 9)] == [True, False]


def test_a_dead_branch_is_not_an_ancestor(tmp_path):
    """Lineage 1 forked at 3; then the run was resumed from lineage 0's own checkpoint 6."""
    lineages = Lineages(tmp_path / "lineages.jsonl")
    lineages.begin(1, parent=0, step=3)
    lineages.begin(2, parent=0, step=6)
    assert [survives(lineages, 1, step, now=2) for step in (3, 4)] == [True, False]  # (1, 3) is (0, 3)
    assert [survives(lineages, 0, step, now=2) for step in (6, 7)] == [True, False]


def test_an_unknown_lineage_is_never_valid(tmp_path):
    lineages = Lineages(tmp_path / "lineages.jsonl")
    lineages.begin(1, parent=0, step=3)
    assert not survives(lineages, 7, 0, now=1)


@pytest.mark.parametrize(("lineage", "parent"), [(1, 0), (2, 2), (2, 3)])
def test_a_number_is_used_once_and_grows(tmp_path, lineage, parent):
    lineages = Lineages(tmp_path / "lineages.jsonl")
    lineages.begin(1, parent=0, step=3)
    with pytest.raises(CheckpointError, match=f"lineage {lineage} of .* cannot begin from lineage {parent}"):
        lineages.begin(lineage, parent, 4)


@pytest.mark.parametrize("line", ['{"lineage": 1, "parent": 1, "step": 1}', '{"lineage": 1, "parent": 2, "step": 1}'])
@pytest.mark.attack
def test_a_file_whose_forks_lead_in_a_circle_is_refused(tmp_path, line):
    path = tmp_path / "lineages.jsonl"
    path.write_text('{"lineage": 2, "parent": 1, "step": 4}\n' + line + "\n")
    with pytest.raises(RunDirectoryError, match=r"lineages.jsonl, line 2: lineage 1 cannot begin from lineage [12] at"):
        Lineages(path)


def test_a_fork_without_a_step_is_refused(tmp_path):
    path = tmp_path / "lineages.jsonl"
    path.write_text('{"lineage": 1, "parent": 0}\n')
    with pytest.raises(RunDirectoryError, match=r"line 1: .* whole numbers, but it is {'lineage': 1, 'parent': 0}"):
        Lineages(path)
