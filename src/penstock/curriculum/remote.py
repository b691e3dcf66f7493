"""The curriculum in another process: where lessons are drawn and results come in, and the service that answers there.

What is recorded goes into a log at the caller's side and is pushed by a thread; lessons are drawn by the probabilities
that are known there. So nobody who holds a lock waits for another process, and a curriculum that died costs nothing but
news: the service keeps nothing that the log's owner could not send again, and one that was started anew asks for a base
state. The same log makes the same state, whenever and however often its parts arrive. The log's base moves on with
every checkpoint.

At staleness zero lessons must not depend on how fast answers come: there nobody draws before the curriculum has
answered to everything that was recorded (`may_draw`).
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.curriculum.config import CurriculumConfig
from penstock.curriculum.curriculum import Curriculum, CurriculumBase, CurriculumLog, CurriculumUpdate, make_curriculum
from penstock.curriculum.progress import CurriculumEvent, choose
from penstock.types import (
    Caller,
    PenstockError,
    RetryingCaller,
    RolloutBatch,
    RolloutBatchStats,
    RolloutGroup,
    Stopped,
    SupersededError,
    fold,
    generator,
)


@dataclass(frozen=True, slots=True)
class CurriculumReply:
    """How the curriculum stands.

    Attributes:
        applied: Number of the last update that is part of it; None where a base is needed first.
        probabilities: Of the lessons that may be sampled, in the configuration's order.
        events: What changed, with the number of the update that did it, for the numbers that were asked about.
        metrics: ``curriculum/…``.
        lessons: Each lesson's status in words.
        complete: Whether every lesson has graduated.
    """

    applied: int | None
    probabilities: dict[str, float] = field(default_factory=dict[str, float])
    events: tuple[tuple[int, CurriculumEvent], ...] = ()
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    lessons: dict[str, str] = field(default_factory=dict[str, str])
    complete: bool = False


class CurriculumService:
    """Applies a log. Thread-safe.

    Args:
        config: The same lessons on both sides of the connection.
    """

    def __init__(self, config: CurriculumConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._lineage = -1
        self._applied = 0
        self._curriculum: Curriculum | None = None
        self._events: list[tuple[int, CurriculumEvent]] = []

    def apply(
        self, lineage: int, first_number: int, updates: Sequence[CurriculumUpdate], base: CurriculumBase | None = None
    ) -> CurriculumReply:
        """Takes updates in; those that were applied before change nothing.

        Args:
            lineage: Of the run; a newer one begins with a base.
            first_number: Of the first update; the answer's events begin with it.
            updates: In order, without gaps.
            base: Begin anew from here; `first_number` follows it.

        Raises:
            SupersededError: the log is of an older lineage.
        """
        with self._lock:
            if lineage < self._lineage:
                raise SupersededError(f"the log is of lineage {lineage}, and the run's is {self._lineage}")
            if base is not None:
                self._lineage, self._applied = lineage, base.number
                self._curriculum, self._events = make_curriculum(self._config, base), []
            curriculum = self._curriculum
            if curriculum is None or lineage != self._lineage or first_number > self._applied + 1:
                return CurriculumReply(None)
            self._events = [(number, event) for number, event in self._events if number >= first_number]
            for number, update in enumerate(updates, start=first_number):
                if number > self._applied:
                    self._events += [(number, event) for event in update.apply(curriculum)]
                    self._applied = number
            return _standing(curriculum, self._applied, tuple(self._events))

    def metrics(self) -> dict[str, float]:
        """``curriculum/…`` numbers; none before the first base."""
        with self._lock:
            return {} if self._curriculum is None else self._curriculum.metrics()

    def status(self) -> dict[str, Any]:
        """For status.json."""
        with self._lock:
            lessons = {} if self._curriculum is None else self._curriculum.describe()
            return {"lineage": self._lineage, "applied": self._applied, "lessons": lessons}

    @property
    def progress(self) -> float:
        """Updates applied."""
        return float(self._applied)


CALL_S = 30.0
"""Longest wait for an answer."""
GATHER_S = 0.1
"""What comes in so soon after a push goes with the next one; not where drawing waits for the answer."""
LAST_PUSH_S = 2.0
"""So long the end waits for what was not pushed yet."""


class RemoteCurriculum:
    """Implements `LessonChooser`, `CurriculumRecord` and `Checkpointable`. Thread-safe; `start` and `stop` it.

    Args:
        config: The same lessons on both sides of the connection.
        caller: Reaches a `CurriculumService`.
        lineage: Of this life of the run.
        strict: Nothing is drawn before everything that was recorded is known to the curriculum (staleness zero).
        on_event: Called with lessons that unlock, graduate or come back, each once; in the pushing thread, but for what
            `restore` finds.
        limit_s: So long the curriculum may be out of reach.
    """

    def __init__(
        self,
        config: CurriculumConfig,
        caller: Caller,
        lineage: int,
        *,
        strict: bool = False,
        on_event: Callable[[CurriculumEvent], None] = lambda event: None,
        limit_s: float = 300.0,
    ) -> None:
        self.config = config
        self._calls = RetryingCaller(caller, "curriculum-0", limit_s)
        self._lineage = lineage
        self._strict = strict
        self._on_event = on_event
        self._on_news: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._log = CurriculumLog(config)
        self._answer = _standing(Curriculum(config), 0)
        self._pushed: int = 0
        self._needs_base = True
        self._news = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.failure: Exception | None = None

    def start(self, on_news: Callable[[], None] = lambda: None) -> None:
        """Starts the pushing thread.

        Args:
            on_news: Called when probabilities may have changed: whoever waits for `may_draw` looks again.
        """
        self._on_news = on_news
        self._news.set()  # the curriculum is told the base at once
        self._thread = threading.Thread(target=self._run, name="replay-curriculum", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread; returns whether it ended within the limit."""
        self._stopping.set()
        self._news.set()
        if self._thread is None:
            return True
        self._thread.join(min(LAST_PUSH_S, timeout_s / 2))
        self._calls.stop()
        self._thread.join(timeout_s / 2)
        return not self._thread.is_alive()

    # --- drawing -------------------------------------------------------------------------------------------------

    def sample_lesson(self, seed: int) -> str:
        """A lesson by the probabilities that are known here; as `Curriculum.sample_lesson`."""
        return choose(self._answer.probabilities, generator(fold(seed, "sample_lesson")))

    def may_draw(self) -> bool:
        """Whether lessons may be drawn now; without `strict`, always."""
        return not self._strict or self.behind == 0

    @property
    def behind(self) -> int:
        """Updates that the curriculum has not answered to."""
        return self._log.number - self._pushed

    # --- recording -----------------------------------------------------------------------------------------------

    def update_group(self, group: RolloutGroup) -> None:
        """Records one training group; the replay pool's `on_group`."""
        self.update_training(RolloutBatchStats.of(group.rollouts[0].lesson_id, RolloutBatch.of((group,))))

    def update_training(self, stats: RolloutBatchStats) -> None:
        """Records training groups."""
        self._record(CurriculumUpdate(stats))

    def update_evaluation(self, stats: RolloutBatchStats, step: int) -> None:
        """Records a full evaluation.

        Raises:
            PenstockError: the lesson is unknown.
        """
        self._record(CurriculumUpdate(stats, step))

    def _record(self, update: CurriculumUpdate) -> None:
        if update.stats.lesson_id not in self.config.lessons:
            raise PenstockError(
                f"lesson {update.stats.lesson_id!r} is unknown: there are {', '.join(self.config.lessons)}"
            )
        with self._lock:
            self._log.append(update)
        self._news.set()

    # --- how it stands -------------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether every lesson has graduated, by the last answer."""
        return self._answer.complete

    def probabilities(self) -> dict[str, float]:
        """Of the lessons that may be sampled, by the last answer."""
        return dict(self._answer.probabilities)

    def metrics(self) -> dict[str, float]:
        """``curriculum/…``, by the last answer; ``curriculum/behind`` is `behind`."""
        return {**self._answer.metrics, "curriculum/behind": float(self.behind)}

    def describe(self) -> dict[str, str]:
        """Each lesson's status in words, by the last answer."""
        return dict(self._answer.lessons)

    def state(self) -> dict[str, Any]:
        """See `Checkpointable`: the state of a `Curriculum` that was told everything."""
        with self._lock:
            return self._log.fold(self._pushed)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes such a state back, before `start`.

        Raises:
            CheckpointError: the state is not one of a curriculum.
        """
        curriculum = Curriculum(self.config)
        curriculum.restore(state)
        with self._lock:
            self._log = CurriculumLog(self.config, curriculum.state())
            self._answer = _standing(curriculum, 0)
        for event in curriculum.restored_events:
            self._on_event(event)

    # --- pushing -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._news.wait(CALL_S)
                self._news.clear()
                while not self._stopping.is_set() and (self._needs_base or self.behind):
                    self._push()
                    if not self._strict:
                        self._stopping.wait(GATHER_S)
            if self.behind:  # for its events; the checkpoint knows it all
                self._push()
        except Stopped:
            return
        except Exception as error:  # whatever it is, the run must not go on without
            self.failure = error

    def _push(self) -> None:
        with self._lock:
            base = self._log.base if self._needs_base else None
            first = (self._pushed if base is None else base.number) + 1
            updates = self._log.since(first - 1)
        answer: CurriculumReply = self._calls.call("apply", self._lineage, first, updates, base, timeout_s=CALL_S)
        if answer.applied is None:
            self._needs_base = True
            return
        for number, event in answer.events:
            if number > self._pushed:
                self._on_event(event)
        with self._lock:
            self._needs_base = False
            self._answer = answer
            self._pushed = answer.applied
        self._on_news()


def _standing(
    curriculum: Curriculum, number: int, events: tuple[tuple[int, CurriculumEvent], ...] = ()
) -> CurriculumReply:
    metrics, lessons = curriculum.metrics(), curriculum.describe()
    return CurriculumReply(number, curriculum.probabilities(), events, metrics, lessons, curriculum.complete)
