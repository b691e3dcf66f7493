"""What status.json and lineages.jsonl say, and what holds where they are broken."""

import json

import pytest

from penstock.rundir import RunDirectory
from penstock.rundir.views import RunViews, horizons, known_status, next_step
from penstock.types import RunDirectoryError


@pytest.fixture
def directory(tmp_path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", {})


def write_forks(directory: RunDirectory, *forks: tuple) -> None:
    lines = [dict(zip(("lineage", "parent", "step"), fork, strict=False)) for fork in forks]
    directory.lineages_path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_updates_count_up_to_the_earliest_fork_after_them(directory):
    assert horizons(directory).to_pydict() == {"lineage": [0], "before": [2**62]}
    write_forks(directory, (1, 0, 5), (2, 1, 9), (3, 1, 7))
    assert dict(zip(*horizons(directory).to_pydict().values(), strict=True)) == {3: 2**62, 1: 7, 0: 5}
    write_forks(directory, (1, 0, 5), (2, 1, 3))
    assert dict(zip(*horizons(directory).to_pydict().values(), strict=True)) == {2: 2**62, 1: 3, 0: 3}


@pytest.mark.parametrize("fork", [(0, 0, 1), (1, 1, 3), (1, 2, 3), (1, -1, 3), (2**40, 0, 3), (1, 0, 2**70)])
def test_a_life_that_is_not_younger_than_its_parent_is_refused(directory, fork):
    write_forks(directory, (1, 0, 5), fork, (2, 1, 6))
    with pytest.raises(RunDirectoryError, match=r"lineages\.jsonl, line 2: lineage .* cannot begin from lineage"):
        RunViews(directory.path)


@pytest.mark.parametrize("fork", [(1, 0), (1, None, 3), ("1", 0, 3)])
def test_a_fork_without_its_numbers_is_refused(directory, fork):
    write_forks(directory, fork)
    with pytest.raises(RunDirectoryError, match=r"lineages\.jsonl, line 1: lineage, parent and step must be whole"):
        horizons(directory)


@pytest.mark.parametrize("content", ["", "{", "[1]", "\udcff"])
def test_a_broken_status_says_nothing(directory, content):
    assert known_status(directory) is None
    directory.status_path.write_text(content, errors="surrogateescape")
    assert known_status(directory) == {} and next_step(directory) is None
    with RunViews(directory.path) as views:
        assert list(views.select("SELECT count(*) FROM rollouts").rows()) == [(0,)]


@pytest.mark.parametrize(
    ("step", "known"), [("3", 3), ("3.0", 3), ("null", None), ('"x"', None), ("NaN", None), ("1e999", None)]
)
def test_the_step_that_is_next(directory, step, known):
    directory.status_path.write_text(f'{{"step": {step}}}')
    assert next_step(directory) == known
