import os
from pathlib import Path

import pytest
from tests.small_disk import fill, small_disk

from penstock.rundir import JsonLinesLog, RunDirectory, read_status
from penstock.types import ConfigError, RunDirectoryError, RunFailed


def test_a_new_run_has_its_folders_and_its_config(tmp_path):
    config = {"seed": 1, "model": {"init": {"hidden_size": 8}}, "steps": 3}
    run = RunDirectory.create(tmp_path / "runs" / "a", config)
    assert run.rollouts.is_dir() and run.batches.is_dir() and run.checkpoints.is_dir()
    assert RunDirectory.open_existing(run.path).read_config() == config
    assert run.config_path.read_text().splitlines()[0] == "seed: 1"  # in the order given


def test_an_existing_run_is_not_overwritten(tmp_path):
    run = RunDirectory.create(tmp_path / "a", {"seed": 1})
    with pytest.raises(RunDirectoryError, match="exists already.*--resume"):
        RunDirectory.create(run.path, {"seed": 2})
    assert run.read_config() == {"seed": 1}
    assert issubclass(RunDirectoryError, ConfigError)  # exit code 2


def test_neither_is_anything_else(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunDirectoryError, match="exists already"):
        RunDirectory.create(tmp_path, {})
    with pytest.raises(RunDirectoryError, match="exists already"):
        RunDirectory.create(tmp_path / "notes.txt", {})
    (tmp_path / "empty").mkdir()
    RunDirectory.create(tmp_path / "empty", {})


def test_what_is_no_run_is_not_opened(tmp_path):
    with pytest.raises(RunDirectoryError, match="has no config.yaml"):
        RunDirectory.open_existing(tmp_path)


@pytest.mark.parametrize("text", ["- a\n", "a: [", ""])
def test_a_broken_config_is_one_clear_error(tmp_path, text):
    run = RunDirectory.create(tmp_path / "a", {})
    run.config_path.write_text(text)
    with pytest.raises(RunDirectoryError, match="config.yaml"):
        run.read_config()


def test_the_status_is_replaced(tmp_path):
    run = RunDirectory.create(tmp_path / "a", {})
    run.write_status({"step": 1})
    run.write_status({"step": 2})
    assert read_status(run.status_path) == {"step": 2}


@pytest.mark.attack
def test_a_run_has_one_writer_at_a_time(tmp_path):
    directory = RunDirectory.create(tmp_path / "run", {})
    with directory.locked():
        with pytest.raises(RunDirectoryError, match="being written by another process"):
            with RunDirectory(directory.path).locked():
                pass
    with directory.locked():
        pass


def test_a_status_holds_whatever_an_error_message_says(tmp_path):
    run = RunDirectory.create(tmp_path / "a", {})
    run.write_status({"last_failure": "boom \udcff", "rate": float("inf")})
    assert read_status(run.status_path) == {"last_failure": "boom \\udcff", "rate": float("inf")}


@pytest.mark.attack
def test_what_a_killed_creation_left_is_created_again(tmp_path):
    for folder in ("rollouts", "batches"):
        (tmp_path / "a" / folder).mkdir(parents=True)
    (tmp_path / "a" / ".config.yaml.0123456789ab.tmp").write_text("se")
    (tmp_path / "a" / ".lock").touch()
    run = RunDirectory.create(tmp_path / "a", {"seed": 1})
    assert run.read_config() == {"seed": 1} and not list(run.path.glob(".*.tmp"))


@pytest.mark.parametrize("name", ["rollouts/part-1.parquet", "notes.txt", "checkpoints/step-1"])
def test_what_may_be_somebodys_is_not(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(RunDirectoryError, match="exists already"):
        RunDirectory.create(tmp_path, {})
    assert len(list(tmp_path.iterdir())) == 1


def test_the_next_writer_removes_what_a_killed_one_left_unfinished(tmp_path):
    run = RunDirectory.create(tmp_path / "a", {})
    unfinished = [run.path / f".{name}.0123456789ab.tmp" for name in ("status.json", "config.yaml")]
    mine = run.path / ".export.jsonl.0123456789ab.tmp"
    for path in (*unfinished, mine):
        path.write_text("{")
    RunDirectory.open_existing(run.path)
    assert all(path.exists() for path in unfinished)  # the writer may be alive
    with run.locked():
        assert not any(path.exists() for path in unfinished) and mine.exists()
        unfinished[0].write_text("{")
        with pytest.raises(RunDirectoryError, match="another process"), RunDirectory(run.path).locked():
            pass
        assert unfinished[0].exists()


@pytest.fixture
def umask():
    """Sets the process's; what it was comes back."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def modes(run: RunDirectory) -> dict[str, int]:
    paths = [run.path, run.checkpoints, run.rollouts, run.config_path, run.status_path, run.metrics_path]
    return {path.name: path.stat().st_mode & 0o777 for path in paths}


@pytest.mark.attack
@pytest.mark.parametrize(
    ("mask", "private", "folders", "files"),
    [(0o022, False, 0o755, 0o644), (0o077, False, 0o700, 0o600), (0o002, False, 0o775, 0o664)]
    + [(mask, True, 0o700, 0o666 & ~mask) for mask in (0o022, 0o077)],
)
def test_who_may_read_follows_the_umask_or_is_nobody(tmp_path, umask, mask, private, folders, files):
    umask(mask)
    run = RunDirectory.create(tmp_path / "a", {"seed": 1}, private)
    run.write_status({"step": 1})
    JsonLinesLog(run.metrics_path).close()
    assert modes(run) == {
        "a": folders, "checkpoints": folders, "rollouts": folders, "config.yaml": files, "status.json": files,
        "metrics.jsonl": files,
    }  # fmt: skip


def test_an_empty_folder_becomes_private_too(tmp_path):
    (tmp_path / "a").mkdir(mode=0o755)
    assert modes_of_folders(RunDirectory.create(tmp_path / "a", {}, private=True)) == {0o700}


def modes_of_folders(run: RunDirectory) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in (run.path, run.checkpoints, run.rollouts, run.batches)}


@pytest.mark.attack
@pytest.mark.parametrize("name", ["line\nbreak", "bytes\udcff", "bell\a"])
def test_a_run_directory_that_cannot_be_printed_is_refused_and_not_made(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot be printed: choose another path"):
        RunDirectory.create(tmp_path / name, {})
    assert not list(tmp_path.iterdir())
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match="cannot be printed"), RunDirectory(tmp_path / name).locked():
        pass


@pytest.mark.attack
def test_a_run_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "run", Path("/proc/none/run"), tmp_path / ("x" * 300)):
        with pytest.raises(RunDirectoryError, match="cannot be written: .*: choose another place"):
            RunDirectory.create(place, {})


def test_a_folder_that_is_a_link_to_a_disk_that_is_away_is_told(tmp_path):
    run = RunDirectory.create(tmp_path / "a", {})
    run.rollouts.rmdir()
    run.rollouts.symlink_to(tmp_path / "away" / "rollouts")
    with pytest.raises(RunDirectoryError, match=r"a/rollouts cannot be used: .* link to none; restore it"):
        RunDirectory.open_existing(run.path)


@pytest.mark.attack
def test_a_run_whose_lock_cannot_be_opened_is_refused(tmp_path):
    run = RunDirectory.create(tmp_path / "a", {})
    (run.path / ".lock").unlink()
    (run.path / ".lock").mkdir()
    with pytest.raises(RunDirectoryError, match="is no plain file"), run.locked():
        pass


@pytest.mark.attack
def test_on_a_full_disk_the_status_goes_on_telling_the_truth(tmp_path):
    with small_disk(tmp_path / "disk", "512k") as disk:
        run = RunDirectory.create(disk / "run", {})
        run.write_status({"step": 0})
        ballast = fill(disk)
        for step in range(1, 4):
            run.write_status({"step": step, "waiting_for": "no room on the disk: " + "x" * 5000})
            assert read_status(run.status_path)["step"] == step
        ballast.unlink()
        run.write_status({"step": 4})
        assert run.status_path.read_text() == '{\n "step": 4\n}\n'


@pytest.mark.attack
def test_a_full_disk_from_the_start_is_refused(tmp_path):
    with small_disk(tmp_path / "disk", "64k") as disk:
        fill(disk)
        with pytest.raises(RunDirectoryError, match="cannot be written: No space left"):
            RunDirectory.create(disk / "run", {"key": "x" * 5000})


@pytest.mark.attack
def test_a_directory_that_is_gone_is_told(tmp_path):
    run = RunDirectory.create(tmp_path / "a", {})
    run.check_is_there()
    run.path.rename(tmp_path / "b")
    with pytest.raises(RunFailed, match="a is gone: it was deleted or moved"):
        run.check_is_there()
