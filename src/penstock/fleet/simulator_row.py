"""One simulator inside its process, and its row of the shared block: step, autoreset, faults.

Autoreset mode: SAME_STEP. The step that ends an episode leaves the episode's last observation in `final_observations`
and the next episode's first one in `observations`. A step is a fault where the simulator says so (``info["error"]``),
where its reward is not a finite float32, or where its observation is not finite or outside its space: nothing can be
decided on that one, so the episode ends with it. A fault that ends an episode is a truncation without a known last
observation, never a termination. Statistics count ``info["raw_reward"]`` where there is one; what a fault was rewarded
is not in a return, nor is a raw reward that is not a finite float32.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np

from penstock.fleet.block import PHASE, ROW, SINCE, Block, Phase
from penstock.fleet.messages import EnvWorkerSpec, episode_seed
from penstock.fleet.spaces import SimulatorValueError, make_reader, make_writer
from penstock.types import fold, generator

Maker = Callable[[str, Mapping[str, Any]], gymnasium.Env[Any, Any]]
"""Makes a simulator of an id and arguments."""

_MOST_REWARD = float(np.finfo(np.float32).max)


class SimulatorRow:
    """A simulator bound to row `row` of a block.

    Args:
        spec: Of its process.
        row: Which of the process's simulators.
        make: What makes it; called at once, and again after `max_fast_resets` resets in place.

    Attributes:
        env: The simulator.
        fault: Why its last step is a fault; empty where it is none.
    """

    def __init__(self, spec: EnvWorkerSpec, row: int, make: Maker) -> None:
        self._spec = spec
        self._row = row
        self._make = make
        self._episode = 0
        self._resets: int | None = None  # in place; None: it was just made and never reset
        self._return = 0.0
        self._length = 0
        self._marked = True  # its flags in the block are not all false
        self._ended = False
        self._shortened = False  # the episode began with random steps
        self._unseen = 0  # steps in a row whose observations could not be used
        self.fault = ""
        self.env = make(spec.id, spec.kwargs)

    def bind(self, block: Block) -> None:
        """Compiles the ways into and out of a block."""
        self._block = block
        self._clock = block.clock
        self._rewards = block.rewards
        self._write = make_writer(self.env.observation_space, block.observations)
        self._write_final = make_writer(self.env.observation_space, block.final_observations)
        self._read = make_reader(self.env.action_space, block.actions)

    def begin_episode(self) -> None:
        """Resets, after building anew where it was reset in place often enough; the observation is written."""
        spec = self._spec
        if spec.max_fast_resets is not None and self._resets == spec.max_fast_resets:
            self._rebuild()
        self._enter(Phase.RESETTING)
        seed = episode_seed(spec.seed, spec.worker_id, spec.slots[self._row], spec.life, self._episode)
        observation, _ = self.env.reset(seed=seed)
        self._resets = 0 if self._resets is None else self._resets + 1
        self._episode += 1
        self._return, self._length, self._ended, self._shortened = 0.0, 0, False, False
        self._write(self._row, observation)
        self._block.first[self._row] = self._marked = True

    def decorrelate(self, most_steps: int) -> None:
        """Takes a random number of random steps in [0, most_steps), so that simulators do not run in lockstep.

        The episode that is left is marked `cut` where it ends: it is no whole one for statistics.
        """
        spec, slot = self._spec, self._spec.slots[self._row]
        seed = fold(spec.seed, spec.worker_id, "decorrelate", slot)
        self.env.action_space.seed(seed & 0x7FFFFFFF)
        for _ in range(int(generator(seed).integers(most_steps))):
            self._enter(Phase.STEPPING)
            observation, _, terminated, truncated, _ = self.env.step(self.env.action_space.sample())
            try:
                self._write(self._row, observation)
            except SimulatorValueError as error:
                self.fault, truncated = str(error), True
            if terminated or truncated:
                self.begin_episode()
        self._shortened = True

    def step(self) -> bool:
        """Takes the action in the block.

        Returns:
            Whether the episode ended; then `begin_episode` is due, or nothing more.

        Raises:
            PolicyActionError: the action is outside its space.
            SimulatorValueError: the observation is, for `max_failures_in_row` steps in a row.
        """
        row, clock = self._row, self._clock
        clock[ROW] = row
        clock[SINCE] = time.monotonic()
        clock[PHASE] = Phase.STEPPING
        if self._marked:
            self._unmark()
        observation, reward, terminated, truncated, told = self.env.step(self._read(row))
        reward = float(reward)
        raw = float(told.get("raw_reward", reward)) if told else reward
        self._length += 1
        fault = _said(told["error"]) if told and "error" in told else ""
        if not -_MOST_REWARD <= reward <= _MOST_REWARD:
            fault, reward = f"its reward is {reward}", 0.0
        ended = bool(terminated or truncated)
        try:
            if not ended:
                self._write(row, observation)
            elif not fault:
                self._write_final(row, observation)
            self._unseen = 0
        except SimulatorValueError as error:
            fault, ended = str(error), True
            self._count_unseen(error)
        if fault:
            self._block.faults[row] = self._marked = True
        elif -_MOST_REWARD <= raw <= _MOST_REWARD:  # or the return would be no number for the rest of the episode
            self._return += raw
        self.fault = fault
        self._rewards[row] = reward
        if ended:
            self._end(bool(terminated), bool(truncated), bool(fault))
        return ended

    def cut(self) -> None:
        """Truncates an episode that goes on, since its process is to be replaced; its last observation is known."""
        if self._ended or self._length == 0:
            return
        block, row = self._block, self._row
        block.truncated[row] = block.cut[row] = self._ended = self._marked = True
        if not block.faults[row]:
            for leaf, array in block.observations.items():
                block.final_observations[leaf][row] = array[row]
            self._report()

    def _count_unseen(self, error: SimulatorValueError) -> None:
        """One that shows nothing that can be used, step after step, is replaced like one that dies."""
        self._unseen += 1
        most = self._spec.max_failures_in_row
        if most is not None and self._unseen >= most:
            raise SimulatorValueError(f"{error} (in {most} steps in a row, fleet.limits.max_failures_in_row)")

    def _end(self, terminated: bool, truncated: bool, fault: bool) -> None:
        block, row = self._block, self._row
        self._ended = self._marked = True
        block.terminated[row] = terminated and not fault
        block.cut[row] = self._shortened
        block.truncated[row] = truncated or fault
        if not fault:
            self._report()

    def _report(self) -> None:
        block, row = self._block, self._row
        block.has_final[row] = True
        block.returns[row] = self._return
        block.lengths[row] = self._length

    def _unmark(self) -> None:
        block, row = self._block, self._row
        for flags in (block.terminated, block.truncated, block.faults, block.cut, block.has_final, block.first):
            flags[row] = False
        block.returns[row] = block.lengths[row] = 0
        self._marked = False

    def _rebuild(self) -> None:
        self._enter(Phase.BUILDING)
        self.env.close()
        self.env = self._make(self._spec.id, self._spec.kwargs)
        self._resets = None
        self.bind(self._block)

    def _enter(self, phase: Phase) -> None:
        self._clock[ROW] = self._row
        self._clock[SINCE] = time.monotonic()
        self._clock[PHASE] = phase


def _said(error: Any) -> str:
    """The simulator's own word for a step that went wrong; empty where none did."""
    if isinstance(error, str):
        return f"it said: {error}" if error else ""
    return "it said that the step went wrong" if bool(np.any(error)) else ""
