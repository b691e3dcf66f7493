"""The curriculum in another process: nobody waits for it, and its death costs nothing but news."""

import threading
import time

import numpy as np
import pytest
from tests.waiting import wait_until

from penstock.curriculum import Curriculum, CurriculumConfig, CurriculumService, RemoteCurriculum
from penstock.curriculum import remote as remote_module
from penstock.types import (
    Checkpointable,
    CheckpointError,
    CurriculumRecord,
    LessonChooser,
    NoProgressError,
    PenstockError,
    Rollout,
    RolloutGroup,
    UnreachableError,
    fold,
)

from .conftest import a_way_through, lesson, results, two_lessons

LIMIT_S = 280.0


class Wire:
    """Calls a service of this process; loses what `fault` says, waits while `open` is clear."""

    def __init__(self, service=None, fault=lambda: None):
        self.service, self.fault = service, fault
        self.open = threading.Event()
        self.open.set()
        self.calls = self.sent = 0

    def call(self, method, *args, timeout_s):
        self.calls, self.sent = self.calls + 1, len(args[2])
        assert self.open.wait(LIMIT_S)
        service, fault = self.service, self.fault()
        if service is None or fault == "request":
            raise UnreachableError("the request was lost")
        answer = getattr(service, method)(*args)
        if fault == "answer":
            raise UnreachableError("the answer was lost")
        return answer


@pytest.fixture
def remote_of():
    made = []

    def make(caller, lineage=0, config=None, **fields):
        made.append(RemoteCurriculum(config or two_lessons(), caller, lineage, **fields))
        return made[-1]

    yield make
    for each in made:
        if isinstance(each._calls._caller, Wire):
            each._calls._caller.open.set()
        assert each.stop(LIMIT_S)


def tell(target, updates):
    for update in updates:
        if update.evaluation_step is None:
            target.update_training(update.stats)
        else:
            target.update_evaluation(update.stats, update.evaluation_step)


def local(count=16):
    curriculum = Curriculum(two_lessons())
    tell(curriculum, a_way_through()[:count])
    return curriculum


def test_it_is_what_replay_asks_for(remote_of):
    remote = remote_of(Wire())
    for protocol in (LessonChooser, CurriculumRecord, Checkpointable):
        assert isinstance(remote, protocol)


def test_it_draws_and_reports_as_the_curriculum_itself(remote_of):
    events, news = [], threading.Event()
    remote = remote_of(Wire(CurriculumService(two_lessons())), on_event=lambda e: events.append((e.kind, e.lesson_id)))
    seeds = [fold(7, "lesson", i) for i in range(64)]
    assert [remote.sample_lesson(s) for s in seeds] == [local(0).sample_lesson(s) for s in seeds]  # before any answer
    remote.start(news.set)
    tell(remote, a_way_through())
    wait_until(lambda: remote.behind == 0)
    expected = local()
    assert [remote.sample_lesson(s) for s in seeds] == [expected.sample_lesson(s) for s in seeds]
    assert remote.metrics() == {**expected.metrics(), "curriculum/behind": 0.0}
    assert (remote.describe(), remote.complete) == (expected.describe(), False)
    assert remote.probabilities() == expected.probabilities()
    assert remote.state() == expected.state()
    assert events == [("unlocked", "b"), ("graduated", "a"), ("regressed", "a")] and news.is_set()


def test_nobody_waits_for_a_slow_curriculum_but_where_it_is_strict(remote_of):
    wire = Wire(CurriculumService(two_lessons()))
    wire.open.clear()
    loose, strict = remote_of(wire), remote_of(wire, strict=True)
    for remote in (loose, strict):
        remote.start()
        tell(remote, a_way_through())
        assert remote.behind == 16 and remote.sample_lesson(3) == "a"
        assert remote.metrics()["curriculum/behind"] == 16.0
        assert remote.state() == local().state()  # a checkpoint knows what was recorded, answered or not
    assert loose.may_draw() and not strict.may_draw()
    wire.open.set()
    wait_until(strict.may_draw)
    assert strict.probabilities() == local().probabilities()


def test_a_curriculum_that_died_is_told_the_log_again_and_events_are_told_once(remote_of):
    events, lost = [], ["answer", "request", None, "answer"]
    wire = Wire(CurriculumService(two_lessons()), lambda: lost.pop(0) if lost else None)
    remote = remote_of(wire, on_event=lambda event: events.append(event.kind))
    remote.start()
    way = a_way_through()
    for cut in (5, 6, 9, 16):
        tell(remote, way[:cut][remote._log.number :])
        wait_until(lambda: remote.behind == 0)
        if cut == 6:
            remote.state()  # a checkpoint: the base moves on
        assert remote.metrics()["curriculum/behind"] == 0.0
        assert {**remote.metrics()} == {**local(cut).metrics(), "curriculum/behind": 0.0}
        if cut == 9:
            assert wire.sent == 3, "since the checkpoint's base"
        wire.service = CurriculumService(two_lessons())  # the old one is dead
    assert events == ["unlocked", "graduated", "regressed"]


def test_events_of_what_was_checkpointed_unanswered_are_not_lost(remote_of):
    events = []
    remote = remote_of(wire := Wire(), on_event=lambda event: events.append(event.kind))
    remote.start()
    tell(remote, a_way_through()[:8])
    assert remote.state() == local(8).state()
    wire.service = CurriculumService(two_lessons())
    wait_until(lambda: remote.behind == 0)
    assert events == ["unlocked", "graduated", "regressed"]


def test_a_resumed_run_goes_on_from_the_checkpoint(remote_of):
    service = CurriculumService(two_lessons())
    first = remote_of(Wire(service))
    first.start()
    tell(first, a_way_through()[:7])
    wait_until(lambda: first.behind == 0)
    state = first.state()
    second = remote_of(Wire(service), lineage=1)
    second.restore(state)
    assert second.probabilities() == local(7).probabilities()
    second.start()
    tell(second, a_way_through()[7:])
    wait_until(lambda: second.behind == 0)
    assert second.state() == local().state()
    with pytest.raises(CheckpointError):
        remote_of(Wire()).restore({})


def test_lessons_that_were_added_since_the_checkpoint_are_told(remote_of):
    events = []
    state = Curriculum(two_lessons()).state()
    del state["lessons"]["b"]
    remote = remote_of(Wire(), on_event=lambda event: events.append((event.kind, event.lesson_id)))
    remote.restore(state)
    assert events == [("added", "b")]


def test_what_comes_soon_after_a_push_goes_with_the_next_one_and_at_the_latest_with_the_end(remote_of, monkeypatch):
    monkeypatch.setattr(remote_module, "GATHER_S", 3600.0)
    events, wire = [], Wire(CurriculumService(two_lessons()))
    remote = remote_of(wire, on_event=lambda event: events.append(event.kind))
    remote.start()
    wait_until(lambda: not remote._needs_base)
    for update in a_way_through():
        tell(remote, [update])
    assert (wire.calls, remote.behind) == (1, 16)
    assert remote.stop(LIMIT_S)
    assert (wire.calls, remote.behind) == (2, 0) and events == ["unlocked", "graduated", "regressed"]


def test_where_drawing_waits_for_the_answer_nothing_is_gathered(remote_of, monkeypatch):
    monkeypatch.setattr(remote_module, "GATHER_S", 3600.0)
    remote = remote_of(wire := Wire(CurriculumService(two_lessons())), strict=True)
    remote.start()
    wait_until(lambda: not remote._needs_base)
    for update in a_way_through():
        wire.open.clear()
        tell(remote, [update])
        assert remote.behind == 1 and not remote.may_draw()
        wire.open.set()
        wait_until(remote.may_draw)
        assert wire.sent == 1, "what was answered before does not go again"


def test_the_end_does_not_wait_long_for_a_curriculum_that_stays_away(remote_of, monkeypatch):
    monkeypatch.setattr(remote_module, "LAST_PUSH_S", 0.2)
    remote = remote_of(Wire())
    remote.start()
    tell(remote, a_way_through()[:3])
    began = time.monotonic()
    assert remote.stop(60.0) and time.monotonic() - began < 20.0
    assert remote.behind == 3 and remote.failure is None


def test_the_end_says_whether_a_call_still_hangs(remote_of):
    remote = remote_of(wire := Wire(CurriculumService(two_lessons())))
    wire.open.clear()
    remote.start()
    wait_until(lambda: wire.calls)
    assert not remote.stop(0.1)
    wire.open.set()
    assert remote.stop(LIMIT_S)


def test_it_is_complete_once_every_lesson_has_graduated(remote_of):
    remote = remote_of(Wire(CurriculumService(two_lessons())))
    remote.start()
    for lesson_id in "ab":
        for _ in range(5):
            remote.update_training(results(lesson_id, [1.0, 1.0]))
        remote.update_evaluation(results(lesson_id, [1.0, 1.0]), 10)
        wait_until(lambda: remote.behind == 0)
        assert remote.complete is (lesson_id == "b")


def test_a_group_counts_by_the_success_threshold_of_its_lesson(remote_of):
    def group(lesson_id, *rewards):
        nothing, token = np.zeros(0, np.float32), np.zeros(1, np.int32)
        rollouts = [
            Rollout("toy", "x", token, token[:0], nothing, nothing, each, lesson_id=lesson_id) for each in rewards
        ]
        return RolloutGroup("toy:x", tuple(rollouts))

    config = CurriculumConfig.model_validate({"lessons": {"a": lesson(), "b": lesson(success_threshold=0.9)}})
    remote = remote_of(Wire(CurriculumService(config)), config=config)
    remote.start()
    for lesson_id in "ab":
        remote.update_group(group(lesson_id, 1.0, 0.6))
    wait_until(lambda: remote.behind == 0)
    assert [remote.metrics()[f"curriculum/{lesson_id}/success"] for lesson_id in "ab"] == [1.0, 0.5]
    with pytest.raises(PenstockError, match="lesson 'z' is unknown: there are a, b"):
        remote.update_group(group("z", 1.0))


def test_a_curriculum_that_stays_away_ends_the_pushing_with_its_name(remote_of):
    remote = remote_of(Wire(), limit_s=0.0)
    remote.start()
    wait_until(lambda: remote.failure)
    assert isinstance(remote.failure, NoProgressError) and "curriculum-0 has not answered" in str(remote.failure)


def test_an_unknown_lesson_is_refused_where_it_is_recorded(remote_of):
    with pytest.raises(PenstockError, match="lesson 'z' is unknown: there are a, b"):
        remote_of(Wire()).update_training(results("z", [1.0]))
