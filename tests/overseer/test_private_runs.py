"""``overseer.private``: from the start, and from the resume that sets it."""

import os

import pytest

from penstock.overseer.progress import Progress
from penstock.overseer.training import create_run, open_log
from penstock.rundir import RunDirectory
from tests.overseer.conftest import tiny

pytestmark = pytest.mark.attack


def mode(directory: RunDirectory) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in (directory.path, directory.checkpoints)}


@pytest.fixture(autouse=True)
def umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_a_run_is_closed_from_the_start_where_its_config_says_so(tmp_path):
    assert mode(create_run(tiny(), tmp_path / "open", "tiny")) == {0o755}
    assert mode(create_run(tiny({"overseer": {"private": True}}), tmp_path / "closed", "tiny")) == {0o700}


def test_a_resume_closes_it_and_leaves_it_closed(tmp_path):
    directory = create_run(tiny(), tmp_path / "run", "tiny")
    for private in (True, False):
        config = tiny({"overseer": {"private": private}})
        open_log(config, directory, Progress("tiny", 3, 1), []).close()
        assert mode(directory) == {0o700}
