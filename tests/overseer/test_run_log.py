"""What the log of a run tells the user at once."""

from penstock.overseer.control_config import FleetRunConfig
from penstock.overseer.progress import Progress
from penstock.overseer.run_log import RunLog
from penstock.rundir import RunDirectory, read_events
from penstock.types import CompiledProgram


def _log(path):
    config = FleetRunConfig.model_validate({"steps": 1, "fleet": {"tasks": {"pole": {"id": "CartPole-v1"}}}})
    return RunLog(RunDirectory.create(path, config.dump()), config, Progress("test", 1, 1))


def test_a_death_of_a_component_is_one_line(tmp_path):
    log = _log(tmp_path / "run")
    log.event("component_death", component="rollout-1", incarnation=0, reason="its process was\n killed")
    log.close()
    assert list(log.progress.notes) == ["rollout-1 died: its process was killed"]
    (event,) = read_events(tmp_path / "run" / "events.jsonl")
    assert (event["event"], event["component"], event["incarnation"]) == ("component_death", "rollout-1", 0)


def test_a_skipped_update_is_told(tmp_path):
    log = _log(tmp_path)
    log.metrics(3, {"train/non_finite": 0.0})
    log.metrics(4, {"train/non_finite": 0.5})
    log.close()
    (event,) = [each for each in read_events(tmp_path / "events.jsonl") if each["event"] == "update_skipped"]
    assert (event["step"], event["share"]) == (4, 0.5)
    assert log.progress.notes[-1].endswith(
        "50% of the update's optimiser steps skipped: the loss or gradient was not finite"
    )


def test_a_full_disk_is_told_while_the_run_waits_for_room(tmp_path):
    log = _log(tmp_path / "run")
    log.event("disk_full", reason="no room on the disk for 6 s: [Errno 28] No space left on device: 'step-50'")
    log.close()
    assert list(log.progress.notes) == ["no room on the disk for 6 s: [Errno 28] No space left on device: 'step-50'"]


def test_compilation_is_shown_until_the_last_program(tmp_path):
    log = _log(tmp_path / "run")

    def compiled(number, seconds):
        log.event("compiled", component="learner-0", program="gradient", number=number, of=3, seconds=seconds)

    compiled(1, 2.5)
    assert log.progress.compiling == {"learner-0": CompiledProgram("gradient", 1, 3, 2.5)}
    (line,) = log.progress.lines
    assert line.endswith("learner-0 compiled 1 of 3 programs: gradient (2.5 s)")
    log.event("component_death", component="learner-0", incarnation=0, reason="killed")
    assert log.progress.compiling == {}
    compiled(2, 0.1)
    assert len(log.progress.compiling) == len(log.progress.lines) == 1
    compiled(3, 0.1)
    log.close()
    assert log.progress.compiling == {}
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert [event["number"] for event in events if event["event"] == "compiled"] == [1, 2, 3]


def test_failures_of_simulators_are_counted_and_those_of_nurseries_told_once(tmp_path):
    log = _log(tmp_path / "run")
    for worker in ("fleet-0", "fleet-1"):
        log.simulators_event("nursery_ready", {"worker": worker, "troubles": {"own.py:make": "it starts a thread"}})
    assert log.progress.noted == 1 and log.failures == 0
    log.simulators_event("simulator_failed", {"task": "own", "reason": "it was ended by SIGSEGV"})
    log.simulators_event("simulator_fault", {"task": "own", "steps": 3, "reason": "its reward is nan"})
    log.close()
    assert log.failures == 4 and log.last_failure == "a simulator failed (task own): its reward is nan"
    assert log.progress.noted == 3
