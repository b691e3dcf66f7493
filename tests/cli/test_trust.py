"""A run directory is data: what commands on one import, connect to and hang on, and what ``--trust`` lifts."""

import json
import os

import pytest
from tests.dashboard.sample_run import write_run
from tests.rundir.test_foreign import Listener, make_foreign
from tests.rundir.test_yaml_documents import LAUGHS

from penstock.overseer.config_loading import load_config
from penstock.rundir import RunDirectory

ENV_CLASS = "curriculum.lessons.cats.environment.env_class"
EVIL = "import pathlib\npathlib.Path({marker!r}).write_text('imported')\nclass X: ...\n"
pytestmark = pytest.mark.attack


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "imported"


@pytest.fixture
def evil(tmp_path, marker) -> RunDirectory:
    """``mine``: a run whose environment is a file that leaves a mark when it is imported."""
    (tmp_path / "evil.py").write_text(EVIL.format(marker=str(marker)))
    config = load_config("cats", [f"{ENV_CLASS}={tmp_path}/evil.py:X"])
    directory = RunDirectory.create(tmp_path / "mine", config.dump())
    (directory.checkpoints / "step-1").mkdir()
    return directory


COMMANDS = [("train", "--resume", "mine"), ("eval", "mine/checkpoints/step-1")]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_code_of_a_foreign_run_is_not_imported(penstock, tmp_path, evil, marker, words):
    reason = make_foreign(evil)
    done = penstock(*words)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and reason in line and "give --trust if you know who wrote it" in line
    assert f"{ENV_CLASS}: {tmp_path}/evil.py:X ({tmp_path}/evil.py)" in line
    assert not marker.exists()


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_code_of_a_run_is_said_before_it_is_imported(penstock, tmp_path, evil, marker, words, foreign):
    if foreign:
        make_foreign(evil)
    done = penstock(*words, *(["--trust"] if foreign else []))
    first, second, *_ = done.stderr.splitlines()
    assert first.endswith("mine/config.yaml names code that is imported:")
    assert second == f"  {ENV_CLASS}: {tmp_path}/evil.py:X ({tmp_path}/evil.py)"
    assert marker.exists() == (words[0] == "train") and done.returncode == 2  # there is no checkpoint to evaluate


def test_a_recipe_of_ones_own_needs_no_trust(penstock, tmp_path, evil):
    make_foreign(evil)
    (tmp_path / "recipe.yaml").write_text(evil.config_path.read_text())
    assert "trust" not in penstock("eval", "mine/checkpoints/step-1", "--recipe", "cats").stderr
    for words in (["train", "recipe.yaml"], ["eval", "mine/checkpoints/step-1", "--recipe", "cats"]):
        done = penstock(*words, "--trust")
        assert done.returncode == 2 and "--trust goes with" in done.stderr


@pytest.mark.parametrize("words", [*COMMANDS, ("status", "mine"), ("rollouts", "mine")], ids=lambda words: words[0])
def test_a_config_of_nothing_but_references_hangs_nobody(penstock, tmp_path, words):
    run = RunDirectory.create(tmp_path / "mine", {})
    (run.checkpoints / "step-1").mkdir()
    run.config_path.write_text(f"{LAUGHS}\nruntime: *a8\nreplay: {{store: {{url: *a8}}}}\n")
    done = penstock(*words)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and "config.yaml, line " in line and "more than 100000 entries when" in line


@pytest.mark.parametrize("words", [("status", "mine"), ("rollouts", "mine"), ("rollouts", "mine", "--trust")])
def test_looking_connects_nowhere(penstock, tmp_path, words):
    listener = Listener()
    run = write_run(tmp_path / "mine")
    run.write_config({"replay": {"store": {"url": f"ftp://user:secret@127.0.0.1:{listener.port}/x"}}})
    done = penstock(*words)
    listener.close()
    assert listener.heard == [] and "secret" not in done.stdout + done.stderr
    if words[0] == "rollouts":
        assert done.returncode == 2 and "replay.store.url is 'ftp://***@127.0.0.1:" in done.stderr
    else:
        assert done.returncode == 0 and done.stderr == ""


def test_a_run_is_not_begun_where_it_could_not_be_looked_at(penstock, tmp_path):
    done = penstock("train", "cats", "replay.store.url=ftp://user:secret@host/x")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and "replay.store.url: url is 'ftp://***@host/x': name no user, password" in line
    assert "secret" not in line and list(tmp_path.iterdir()) == []
    assert "that begins with file, local, s3" in penstock("train", "cats", "replay.store.url=sftp://host/x").stderr


def test_a_foreign_store_needs_trust(penstock, tmp_path):
    run = RunDirectory.create(tmp_path / "mine", {"replay": {"store": {"url": "memory://nothing"}}})
    assert penstock("rollouts", "mine").returncode == 0
    make_foreign(run)
    done = penstock("rollouts", "mine")
    assert done.returncode == 2 and "memory://nothing" in done.stderr and "give --trust" in done.stderr
    assert penstock("rollouts", "mine", "--trust").returncode == 0


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "fates.jsonl"])
def test_resume_writes_through_no_link(penstock, tmp_path, name):
    run = RunDirectory.create(tmp_path / "mine", load_config("cats").dump())
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).symlink_to(victim)
    done = penstock("train", "--resume", "mine")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and f"mine/{name} is a link, and a run does not write through links" in line
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("name", ["with space", "☃", "'\"", "$(touch pwned)", "-n", "; id"])
def test_a_run_is_looked_at_under_any_name(penstock, tmp_path, name):
    write_run(tmp_path / name)
    place = f"./{name}"
    assert json.loads(penstock("status", place, "--json").stdout)["step"] == 2
    assert penstock("rollouts", place, "--sql", "select count(*) as n from rollouts", "--json").stdout == '{"n": 14}\n'
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", ["status.json", "events.jsonl", "metrics.jsonl", "rollouts/part-x.parquet"])
def test_a_pipe_in_a_run_hangs_nobody(penstock, tmp_path, name):
    run = write_run(tmp_path / "mine")
    (run.path / name).unlink(missing_ok=True)
    os.mkfifo(run.path / name)
    assert penstock("status", "mine").returncode == 0
    done = penstock("rollouts", "mine")
    if name.endswith("jsonl"):
        assert done.returncode == 2 and f"mine/{name} is no plain file" in done.stderr
    else:
        assert done.returncode == 0 and "14 rollouts stored" in done.stdout


def test_a_status_of_a_terabyte_is_not_read(penstock, tmp_path):
    run = write_run(tmp_path / "mine")
    with run.status_path.open("wb") as file:
        file.truncate(1 << 40)  # which takes no room
    assert penstock("status", "mine").returncode == 0 and penstock("rollouts", "mine").returncode == 0
