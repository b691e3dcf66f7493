"""What the log of a run tells the user at once."""

import io

import numpy as np
from rich.console import Console

from penstock.overseer import load_config
from penstock.overseer.control_config import FleetRunConfig
from penstock.overseer.progress import Progress
from penstock.overseer.run_log import RunLog
from penstock.overseer.terminal import TerminalView
from penstock.rundir import RunDirectory, read_events
from penstock.types import CompiledProgram, Decoding, Rollout, RolloutGroup


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


def test_what_is_wrong_with_a_server_of_another_make_is_told_at_once(tmp_path):
    log = _log(tmp_path / "run")
    log.event("external_engine", server="inference-0#0", url="http://a:1", version="0.32.0")
    log.event("external_engine_failed", server="inference-0#0", reason="it ended: no such\n flag")
    log.event("external_engine_relaunches", server="inference-0#0", reason="its output matrix stays old")
    log.close()
    assert list(log.progress.notes) == [
        "the server of inference-0#0 failed: it ended: no such flag",
        "the server of inference-0#0 is started anew for each version: its output matrix stays old",
    ]


def test_that_a_run_goes_back_is_told_at_once_whatever_died_before_and_after(tmp_path):
    log = _log(tmp_path / "run")
    console = Console(file=io.StringIO(), width=200)
    view = TerminalView(log.progress, console)
    log.event("component_death", component="rollout-1", incarnation=0, reason="killed")
    view.tick()
    log.event("component_death", component="learner-0", incarnation=0, reason="killed")
    log.event("rewind", reason="learner-0#0: killed", lineage=1, checkpoint="step-6")
    log.event("rewind", reason="replay-0#1: killed", lineage=2, checkpoint=None)
    log.event("component_death", component="evaluator-0", incarnation=0, reason="to be started anew")
    view.tick()
    log.close()
    told = [line.partition("] ")[2] for line in console.file.getvalue().splitlines()]
    assert told == [
        "rollout-1 died: killed",
        "the run goes back to its checkpoint step-6: learner-0#0: killed",
        "the run goes back to its beginning: replay-0#1: killed",
    ]


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


def test_what_ends_the_training_early_is_kept_and_leaves_nothing_to_forecast(tmp_path):
    log = _log(tmp_path)
    log.progress.steps = 60
    for step in range(1, 9):
        log.progress.note_update(step, 1.0, 0.0, {}, at=float(step))
    assert "ETA" in log.progress.status()["words"]
    log.event("goal_reached", 8, reason="every lesson has graduated")
    assert log.progress.goal == "every lesson has graduated"
    assert "ETA" not in log.progress.status()["words"] and log.progress.status()["left_s"] is None


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
        log.event("nursery_ready", worker=worker, troubles={"own.py:make": "it starts a thread"})
    assert log.progress.noted == 1 and log.failures == 0
    log.event("simulator_failed", task="own", reason="it was ended by SIGSEGV")
    log.event("simulator_fault", task="own", steps=3, reason="its reward is nan")
    log.close()
    assert log.failures == 4 and log.last_failure == "a simulator failed (task own): its reward is nan"
    assert log.progress.noted == 3


def test_an_answer_that_its_prompt_left_no_room_for_is_told_once_per_lesson(tmp_path):
    config = load_config("cats", ["inference.max_seq_len=24", "learner.row_length=24"])
    log = RunLog(RunDirectory.create(tmp_path / "run", config.dump()), config, Progress("test", 1, 1))

    def group(prompt: int, response: int, finish: str = "length", lesson: str = "long", **changes) -> RolloutGroup:
        one = Rollout(
            env_name="own", env_example_id="0", lesson_id=lesson, finish_reason=finish,
            prompt_tokens=np.zeros(prompt, np.int32), response_tokens=np.zeros(response, np.int32),
            response_logprobs=np.zeros(response, np.float32), token_rewards=np.zeros(response, np.float32),
            response_mask=np.arange(response) != 2, episode_reward=0.0,
            decoding=Decoding(max_output_tokens=16), **changes,
        )  # fmt: skip
        return RolloutGroup("own/0", (one,))

    whole, stopped, merged = group(7, 16), group(20, 4, "stop"), group(12, 15, sample_starts=(0, 14))
    for told_nothing in (whole, stopped, merged):
        log.group(told_nothing)
    assert not log.progress.notes
    for _ in range(2):
        log.group(group(20, 4))
    log.group(group(14, 10, lesson="other"))
    log.close()
    first, second = log.progress.notes
    assert first.startswith(
        "lesson long: an answer was cut after 4 of 16 tokens: a prompt (here of 20) and its response share "
        "inference.max_seq_len = 24; raise it"
    )
    assert second.startswith("lesson other: an answer was cut after 10 of 16 tokens: a prompt (here of 14)")
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert [event["lesson"] for event in events if event["event"] == "answer_cut"] == ["long", "other"]
