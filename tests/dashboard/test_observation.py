"""Runs that are watched: what is read anew, and how seldom."""

import sys
import threading
import time
from pathlib import Path

import pytest

from penstock import cli
from penstock.dashboard import observation
from penstock.dashboard.observation import LONGEST_REST_S, LOOK_S, REST, ObservedRun, ObservedRuns
from penstock.dashboard.web import KeptPages
from penstock.rundir import EventLog, MetricsLog, RunDirectory, write_records
from penstock.types import ConfigError
from tests.dashboard.sample_run import group, write_run


def test_a_config_is_parsed_once_and_again_where_a_resume_has_replaced_it(tmp_path, monkeypatch):
    directory = write_run(tmp_path / "mine")
    parsed = []
    original = type(directory).read_config
    monkeypatch.setattr(type(directory), "read_config", lambda self: parsed.append(1) or original(self))
    run = ObservedRun(directory.path)
    states = {run.status().state for _ in range(5)}
    assert len(parsed) == 1 and states == {run.status().state} and not run.is_of_simulators
    directory.write_config({"fleet": {}, "runtime": "ray"})
    assert run.is_of_simulators and run.status().runtime == "ray" and len(parsed) == 2
    directory.config_path.write_text("- broken")
    assert run.config == {} and run.status().state == "dead" and "config.yaml" in run.status().why
    directory.config_path.unlink()
    assert run.config == {} and run.status().state == "dead"


@pytest.mark.parametrize(
    ("spent", "rest", "reads"), [(0.0, LOOK_S, 2), (0.05, 0.05 * REST, 2), (9.0, LONGEST_REST_S, 2), (9.0, LOOK_S, 1)]
)
def test_a_run_that_was_read_on_is_let_alone_for_many_times_as_long(tmp_path, monkeypatch, spent, rest, reads):
    write_run(tmp_path / "mine")
    now, looks = [100.0], []
    runs = ObservedRuns(tmp_path / "mine", clock=lambda: now[0])
    run = runs.find("mine")
    run.reads = reads
    processor = iter([0.0, spent])
    monkeypatch.setattr(observation.time, "thread_time", lambda: next(processor))
    monkeypatch.setattr(run, "look", lambda: looks.append(1) or False)
    runs._read_one(run)
    assert run.rests_until == pytest.approx(100.0 + rest) and looks == [1]


def test_a_run_that_goes_on_has_news_once_a_look_and_not_for_each_piece(tmp_path):
    directory = write_run(tmp_path / "mine")
    run, seen = ObservedRun(directory.path), set()
    while run.look():
        seen.add(run.version)
    assert len(seen) == run.version > 2  # at first for each piece, as a page shows how far it is
    first = run.version
    assert not run.look() and run.version == first
    metrics = MetricsLog(directory.metrics_path)
    metrics.append(9, {"train/loss": 0.5})
    metrics.close()
    records = group("cats-0-77", [("a cat", 1.0), ("dog", 0.0)], (2,), timestamp=2e9)
    write_records(directory.rollouts / "part-z.parquet", records)
    assert run.look() and run.look() and run.version == first and run.progress
    run.catch_up()
    assert run.version == first + 1 and not run.progress
    metrics = MetricsLog(directory.metrics_path)
    metrics.append(10, {"train/loss": 0.5})
    metrics.close()
    with directory.fates_path.open("a") as file:
        file.write("no fate\n")
    run.catch_up()
    assert run.problem and run.version == first + 2  # what could be read is news, too
    run.catch_up()
    assert run.version == first + 2
    run.close()


def test_whoever_asks_does_not_have_it_read_on_sooner(tmp_path, monkeypatch):
    monkeypatch.setattr(observation, "LOOK_S", 0.3)
    directory = write_run(tmp_path / "mine")
    with ObservedRuns(directory.path) as runs:
        run, read = runs.find("mine"), threading.Event()
        original = run.look
        monkeypatch.setattr(run, "look", lambda: original() or (read.set(), False)[1])
        assert read.wait(20)
        begun, read_again = time.monotonic(), threading.Event()
        monkeypatch.setattr(run, "look", lambda: read_again.set() or original())
        metrics = MetricsLog(directory.metrics_path)
        metrics.append(1, {"train/loss": 1.0})
        metrics.close()
        while not read_again.wait(0.01):
            runs.find("mine")
            assert time.monotonic() - begun < 20
        assert time.monotonic() - begun > 0.2


def has_measured(directory, step):
    metrics = MetricsLog(directory.metrics_path)
    metrics.append(step, {"train/loss": float(step)})
    metrics.close()


def test_who_lists_runs_or_comes_back_to_one_sees_what_it_wrote_meanwhile(tmp_path):
    directory, now = write_run(tmp_path / "mine"), [1000.0]
    has_measured(directory, 1)
    with ObservedRuns(tmp_path, clock=lambda: now[0]) as runs:
        (run,) = runs.all()
        for _ in range(2000):
            if run.reads:
                break
            time.sleep(0.01)
        for step, look in ((2, runs.listed), (3, lambda: [runs.find("mine")])):
            has_measured(directory, step)
            now[0] += 10 * LONGEST_REST_S
            time.sleep(0.2)
            assert run.has_grown and run.curves.last("train/loss") == step - 1  # nobody asked
            assert look() == [run]
            assert run.curves.last("train/loss") == step and not run.has_grown


def test_a_run_that_takes_the_name_of_a_deleted_one_is_another(tmp_path):
    directory = write_run(tmp_path / "mine")
    events = EventLog(directory.events_path, lambda: 5.0)
    events.append("start", step=0)
    events.close()
    runs = ObservedRuns(tmp_path)
    before = runs.find("mine")
    pages = KeptPages()
    before.catch_up()
    assert len(before.events()) == 1 and pages.answer(before, "choices", {})["lessons"] == ["cats", "tools"]
    directory.path.rename(tmp_path.parent / "elsewhere")
    with pytest.raises(ConfigError, match="it may have been deleted"):
        runs.find("mine")
    directory = RunDirectory(tmp_path / "mine")
    directory.path.mkdir()
    directory.write_config({})
    events = EventLog(directory.events_path, lambda: 6.0)
    for kind in ("start", "end"):
        events.append(kind, step=0, a_long="line")
    events.close()
    after = runs.find("mine")
    after.catch_up()
    after.version = before.version
    assert [event["time"] for event in after.events()] == [6.0, 6.0]
    assert pages.answer(after, "choices", {})["lessons"] == []


def test_a_run_that_may_not_be_read_hides_no_other(tmp_path, monkeypatch):
    write_run(tmp_path / "mine")
    (tmp_path / "theirs").mkdir()
    original = Path.is_file

    def is_file(self):
        if self.parent.name == "theirs":
            raise PermissionError(13, "Permission denied", str(self))
        return original(self)

    monkeypatch.setattr(Path, "is_file", is_file)
    assert [run.name for run in ObservedRuns(tmp_path).all()] == ["mine"]
    with pytest.raises(PermissionError, match="theirs"):
        ObservedRuns(tmp_path / "theirs")


def test_a_run_has_its_name_from_wherever_it_is_named(tmp_path, monkeypatch):
    checkpoints = write_run(tmp_path / "mine").path / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    monkeypatch.chdir(checkpoints)
    assert ObservedRuns(Path("..")).find("mine").directory.path == tmp_path / "mine"
    (tmp_path / "linked").symlink_to(tmp_path / "mine")
    assert [run.name for run in ObservedRuns(tmp_path / "linked").all()] == ["linked"]


def test_the_command_leaves_the_processor_to_runs(tmp_path, monkeypatch):
    write_run(tmp_path / "mine")
    done = []
    monkeypatch.setattr("os.nice", lambda by: done.append(("nice", by)))
    monkeypatch.setattr("sys.meta_path", [*sys.meta_path])
    monkeypatch.setattr("penstock.dashboard.web.serve_dashboard", lambda path, *_, **__: done.append(("serve", path)))
    assert cli.main(["dashboard", str(tmp_path / "mine")]) == 0
    assert done == [("nice", 10), ("serve", tmp_path / "mine")]
    with pytest.raises(ModuleNotFoundError, match="no use for pandas"):
        sys.meta_path[0].find_spec("pandas")
    assert sys.meta_path[0].find_spec("pyarrow") is None  # others find it


def test_swaps_of_engines_are_kept_apart_from_what_happened(tmp_path, monkeypatch):
    monkeypatch.setattr(observation, "_EVENT_BYTES", 64)  # less than a line, which is read whole
    directory = write_run(tmp_path / "mine")
    run, events = ObservedRun(directory.path), EventLog(directory.events_path, lambda: 5.0)
    events.append("start", step=0)
    for name, step, moment in (("inference-0", 1, 10.0), ("inference-1", 1, 11.5), ("inference-0", 3, 30.0)):
        events.append("weights_served", component=name, incarnation=0, version=[0, step], time=moment)
    assert [event["event"] for event in run.events()] == ["start"]
    for broken in ([0], [0, "1"], "x", [0, 2**60]):
        events.append("weights_served", component="inference-0", version=broken, time=1.0)
    events.append("weights_served", worker="fleet-0.0", incarnation=1, version=[0, 2], time=7.0)
    events.append("weights_served", component="inference-0", incarnation=1, version=[0, 2], time=20.0)  # told late
    events.append("end", step=3)
    events.close()
    with directory.events_path.open("ab") as file:
        file.write(b'{"time": 6.0, "eve')
    found = {who: (times.tolist(), steps.tolist()) for who, (times, steps) in run.swaps().items()}
    assert found == {
        "inference-0": ([10.0, 20.0, 30.0], [1, 2, 3]), "inference-1": ([11.5], [1]), "fleet-0.0": ([7.0], [2]),
    }  # fmt: skip
    assert [event["event"] for event in run.events()] == ["start", "end"]
    with directory.events_path.open("ab") as file:
        file.write(b'nt": "late"}\n')
    assert [event["event"] for event in run.events()] == ["start", "end", "late"]
