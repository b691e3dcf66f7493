"""What components are told of their run."""

from penstock.overseer import RunConfig, load_config
from penstock.overseer.component import Settings
from penstock.rundir import RunDirectory


def settings(path):
    return Settings(load_config("cats", ["runtime=ray"]), RunDirectory(path), "a secret")


def test_runs_in_folders_of_the_same_name_are_different_jobs(tmp_path):
    one, other = settings(tmp_path / "a" / "run"), settings(tmp_path / "b" / "run")
    assert one.job != other.job
    assert one.job.startswith("run-")
    assert one.job == Settings.of(one.dump(), RunConfig).job
