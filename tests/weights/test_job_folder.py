import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from penstock.types import WeightsError
from penstock.weights import job_folder as job_folders
from penstock.weights.job_folder import OwnedFolder, find_abandoned, free_abandoned, is_own_folder, job_folder

DIES = """
import os, sys
from penstock.weights.job_folder import OwnedFolder
folder = OwnedFolder(sys.argv[1], 5.0)
(folder.path / "segment").write_bytes(b"left behind")
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(job_folders, "memory_folder", lambda: tmp_path)
    return "a job"


def test_a_folder_is_made_for_this_user_and_removed(job: str):
    folder = OwnedFolder(job, 1.0)
    assert folder.path == job_folder(job) and is_own_folder(folder.path)
    (folder.path / "segment").write_bytes(b"x")
    folder.remove()
    assert not folder.path.exists()


def test_two_jobs_have_two_folders(job: str):
    assert job_folder(job) != job_folder("another")


@pytest.mark.attack
def test_a_second_broadcaster_of_the_job_is_refused_in_time(job: str):
    first = OwnedFolder(job, 1.0)
    with pytest.raises(WeightsError, match="another broadcaster of this job lives"):
        OwnedFolder(job, 0.1)
    first.remove()
    OwnedFolder(job, 1.0).remove()


@pytest.mark.attack
def test_the_next_broadcaster_of_the_job_frees_what_a_killed_one_left():
    job = uuid.uuid4().hex
    died = subprocess.run([sys.executable, "-c", DIES, job], timeout=60)
    assert died.returncode == -9
    assert [path.name for path in job_folder(job).iterdir() if path.name == "segment"] == ["segment"]
    folder = OwnedFolder(job, 5.0)
    assert not (folder.path / "segment").exists()
    folder.remove()


@pytest.mark.attack
def test_the_next_broadcaster_of_any_job_frees_it_too_but_nothing_of_the_living(job: str):
    abandoned, alive = job_folder("abandoned"), OwnedFolder("alive", 1.0)
    abandoned.mkdir(mode=0o700)
    (abandoned / "broadcaster.lock").touch()
    (abandoned / "segment").write_bytes(b"left behind")
    (alive.path / "segment").write_bytes(b"in use")
    OwnedFolder(job, 1.0).remove()
    assert not abandoned.exists()
    assert (alive.path / "segment").exists()
    alive.remove()


@pytest.mark.attack
def test_a_folder_that_others_may_write_to_is_refused(job: str):
    path = job_folder(job)
    path.mkdir()
    os.chmod(path, 0o777)
    with pytest.raises(WeightsError, match="not a folder of this user alone"):
        OwnedFolder(job, 0.1)


@pytest.mark.attack
def test_a_link_in_its_place_is_refused(job: str, tmp_path: Path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    job_folder(job).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WeightsError, match="not a folder of this user alone"):
        OwnedFolder(job, 0.1)


@pytest.mark.attack
def test_what_a_killed_broadcaster_left_is_found_and_freed_without_another_broadcaster():
    job = uuid.uuid4().hex
    died = subprocess.run([sys.executable, "-c", DIES, job], timeout=60)
    assert died.returncode == -9
    found = [folder for folder in find_abandoned() if folder.path == job_folder(job)]
    assert [folder.nbytes for folder in found] == [4096] and job_folder(job).is_dir(), "nothing is removed by looking"
    assert found[0] in free_abandoned()
    assert not job_folder(job).exists()


@pytest.mark.attack
def test_nothing_of_the_living_is_freed_not_even_of_one_that_is_stopped(job: str):
    alive = OwnedFolder(job, 1.0)
    (alive.path / "segment").write_bytes(b"in use")
    assert find_abandoned() == free_abandoned() == []
    assert (alive.path / "segment").exists()
    alive.remove()


def test_what_was_killed_as_it_came_or_went_leaves_no_folder(job: str):
    empty, foreign = job_folder("empty"), job_folder("foreign")
    for folder in (empty, foreign):
        folder.mkdir(mode=0o700)
    foreign.chmod(0o777)
    assert free_abandoned() == []
    assert not empty.exists() and foreign.exists(), "others may write there: it is nobody's"
