"""Films of a worker's chosen episodes: a pool that takes pictures along with its actions, and hears of every batch.

Every so many episodes that begin in a worker, the slot of that one is chosen, and its *next* episode is filmed from its
first observation to its last: a simulator must know before an episode begins that it is to draw it. One film at a time;
where the last one is not written yet, the choice is skipped and counted. An episode that a fault or a restart cuts ends
its film there.

Frame t shows observation t, the reward that led to it, and the policy's value of it. Pictures are copied out of the
shared block just before the process acts again. Without films a worker's pool is not wrapped, and nothing of this runs.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from penstock.fleet.arrivals import Arrival, Leaves, StepBatch
from penstock.fleet.config import VideoConfig
from penstock.fleet.film_area import Mark, Shot
from penstock.fleet.pool import SimulatorPool
from penstock.fleet.runner import OnEvent
from penstock.fleet.video import VideoWriter
from penstock.types import Spaces

CLOSE_S = 10.0
"""For the last film to be written when a worker ends."""


class FilmedPool:
    """A `SimulatorPool` that is filmed. Its `note` is to be told of each batch, in the thread that acts.

    Args:
        pool: Of a fleet with ``video.every_episodes``.
        video: What is filmed.
        folder: Where films appear.
        name: Of the worker's life: the begin of each film's name.
        on_event: Told of ``film_written`` and ``film_failed``.
        writer: Of films; None: one of its own.

    Raises:
        ConfigError: a package is missing; says how to install it.
    """

    def __init__(
        self, pool: SimulatorPool, video: VideoConfig, folder: Path, name: str,
        on_event: OnEvent = lambda kind, values: None, writer: VideoWriter | None = None,
    ) -> None:  # fmt: skip
        self._pool, self._video, self._name, self._on_event = pool, video, name, on_event
        self._writer = writer or VideoWriter(folder, name, video.fps, on_event)
        self._rows = pool.num_slots // len(pool.process_ids())
        self._begun = 0
        self._numbers = np.zeros(pool.num_slots, np.int64)  # of the episode each slot plays
        self._skipped = 0
        self._failed = 0  # since a simulator did not draw
        self._slot: int | None = None  # chosen
        self._filming = False
        self._stopping = False  # its simulator still draws, and need not
        self._shot = Shot()
        self._frames = 0
        self._return = 0.0

    @property
    def spaces(self) -> Spaces:
        """The pool's."""
        return self._pool.spaces

    @property
    def tasks(self) -> tuple[str, ...]:
        """The pool's."""
        return self._pool.tasks

    @property
    def env_names(self) -> tuple[str, ...]:
        """The pool's."""
        return self._pool.env_names

    @property
    def num_slots(self) -> int:
        """The pool's."""
        return self._pool.num_slots

    @property
    def live_slots(self) -> int:
        """The pool's."""
        return self._pool.live_slots

    def given_up(self) -> Mapping[int, str]:
        """The pool's."""
        return self._pool.given_up()

    def start(self, timeout_s: float) -> None:
        """Starts the pool."""
        self._pool.start(timeout_s)

    def poll(self, timeout_s: float) -> list[Arrival]:
        """Polls the pool."""
        return self._pool.poll(timeout_s)

    def act(self, process: int, actions: Leaves, part: int = 0) -> None:
        """Takes the picture that came with the process's arrival, and acts."""
        if self._slot is not None and process == self._slot // self._rows:
            self._look(process, self._slot % self._rows)
        self._pool.act(process, actions, part)

    def counts(self) -> dict[str, int]:
        """The pool's, the films' (`VideoWriter.counts`), and ``films_skipped``."""
        counts = self._writer.counts()
        counts["films_failed"] += self._failed
        return self._pool.counts() | counts | {"films_skipped": self._skipped}

    def close(self) -> None:
        """Closes the pool, and waits for the film that is being written; an unfinished one is thrown away."""
        self._pool.close()
        if not self._writer.close(CLOSE_S):
            self._on_event("film_failed", {"worker": self._name, "reason": f"it was not written within {CLOSE_S:g} s"})

    def note(self, batch: StepBatch) -> None:
        """Takes a batch in: what to say about the picture, where an episode ended, and whose turn comes."""
        if self._slot is not None and not self._stopping:
            rows = np.flatnonzero(batch.slots == self._slot)
            if len(rows):
                self._follow(batch, int(rows[0]))
        if batch.first.any():
            self._count(batch)

    def _look(self, process: int, row: int) -> None:
        area = self._pool.film_area(process)
        if area is None:  # the process is gone
            self._shot = Shot()
        elif self._stopping:
            area.ask(None)
        else:
            self._shot = area.take()
            if self._shot.mark is Mark.NOTHING and not self._filming:
                area.ask(row)  # again for every life of the process
        if self._stopping:
            self._slot, self._stopping = None, False

    def _count(self, batch: StepBatch) -> None:
        self._numbers[batch.slots[batch.first & batch.acted]] += 1
        begun = batch.slots[batch.first]
        every = self._video.every_episodes
        turn = every - 1 - self._begun % every  # which of these is the next to choose
        self._begun += len(begun)
        if turn >= len(begun):
            return
        if self._slot is None:
            self._slot = int(begun[turn])
        else:
            self._skipped += 1

    def _follow(self, batch: StepBatch, row: int) -> None:
        shot, self._shot = self._shot, Shot()
        if shot.mark is Mark.FAILED:
            self._give_up(shot.trouble)
        elif self._filming and (batch.first[row] or shot.mark in (Mark.LAST, Mark.FIRST)):
            self._end(batch, row, shot)
        elif self._filming or shot.mark is Mark.FIRST:
            self._go_on(batch, row, shot)

    def _go_on(self, batch: StepBatch, row: int, shot: Shot) -> None:
        if not self._filming:
            if not self._writer.begin():
                self._skipped, self._stopping = self._skipped + 1, True
                return
            self._filming, self._frames, self._return = True, 0, 0.0
        else:
            self._return += float(batch.rewards[row])
        reward = float(batch.rewards[row]) if self._frames else 0.0
        self._add(shot, reward, f"value {float(batch.decision.values[row]):.3f}")
        if self._frames >= self._video.most_frames:
            self._stopping = True
            self._finish(self._return)

    def _end(self, batch: StepBatch, row: int, shot: Shot) -> None:
        fault = bool(batch.faults[row])
        if not fault:
            self._return += float(batch.rewards[row])
            if shot.mark is Mark.LAST:
                self._add(shot, float(batch.rewards[row]), "the end")
        known = not fault and bool(batch.has_final[row])
        self._finish(float(batch.returns[row]) if known else self._return)
        self._slot = None

    def _add(self, shot: Shot, reward: float, value: str) -> None:
        if shot.picture is not None:
            words = (f"step {self._frames}  {value}", f"reward {reward:g}  return {self._return:g}")
            self._writer.add(shot.picture, words)
        self._frames += 1

    def _finish(self, episode_return: float) -> None:
        slot = self._slot
        assert slot is not None
        task = re.sub(r"[^\w.-]", "_", self._pool.tasks[slot])
        self._writer.end(f"{self._name}_{task}_slot{slot}_episode{self._numbers[slot]}_return{episode_return:g}.mp4")
        self._filming = False

    def _give_up(self, trouble: str) -> None:
        assert self._slot is not None
        self._failed += 1
        self._on_event("film_failed", {"worker": self._name, "task": self._pool.tasks[self._slot], "reason": trouble})
        if self._filming:
            self._writer.end(None)
        self._filming, self._slot = False, None
