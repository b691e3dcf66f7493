"""A pool without processes: simulators stepped one after the other, in the caller's thread, inside `act`.

It has the surface of `SimulatorPool` and the same seeds, so a fleet and a serial loop with one seed play the same
trajectories; it is what they are compared with, and where one debugs a simulator. Nothing is caught: an exception of a
simulator is the caller's.

Not covered: deadlines, restarts, replacement after `restart_interval_s`, and more than one core.
"""

import os
import time
from collections.abc import Mapping

from penstock.fleet.config import FleetConfig, assign_tasks
from penstock.fleet.env_worker import Maker, SimulatorRow
from penstock.fleet.messages import EnvWorkerSpec
from penstock.fleet.shared_block import SharedBlock, block_bytes, create_memory
from penstock.fleet.spaces import spaces_of
from penstock.fleet.steps import Leaves, StepArrival
from penstock.types import RunFailed, Spaces


class SerialPool:
    """Simulators of this process.

    Args:
        config: Tasks and how many simulators; limits do not apply.
        worker_id: A part of every seed.
        seed: Of the run.
        worker_index: Which of the fleet's workers, for its part of the tasks.

    Attributes:
        tasks: Task of each slot.
        env_names: Environment id of each slot.
        num_slots: n.
    """

    def __init__(self, config: FleetConfig, worker_id: str, seed: int, *, worker_index: int = 0) -> None:
        rows, self._parts = config.envs_per_part, config.parts_per_process
        by_process = assign_tasks(config, worker_index)
        self._specs = [
            EnvWorkerSpec(
                worker_id, seed, number, 0, tuple(range(group * rows, (group + 1) * rows)), task,
                config.tasks[task].id, config.tasks[task].kwargs, config.limits.max_fast_resets, None,
                config.decorrelate_steps,
            )
            for number, task in enumerate(by_process)
            for group in range(number * self._parts, (number + 1) * self._parts)
        ]  # fmt: skip
        self._groups: list[_Group] = []
        self._arrived: list[StepArrival] = []
        self.tasks = tuple(task for task in by_process for _ in range(config.envs_per_process))
        self.env_names = tuple(config.tasks[task].id for task in self.tasks)
        self.num_slots = len(self.tasks)

    @property
    def spaces(self) -> Spaces:
        """Of all simulators.

        Raises:
            RunFailed: before `start`.
        """
        if not self._groups:
            raise RunFailed("the simulators' spaces are not known yet: start the pool first")
        return self._groups[0].spaces

    @property
    def live_slots(self) -> int:
        """All of them."""
        return self.num_slots

    def given_up(self) -> Mapping[int, str]:
        """None: a simulator that raises is the caller's."""
        return {}

    def start(self, timeout_s: float) -> None:
        """Makes and resets all simulators, however long it takes."""
        from penstock.environments.simulators import make_simulator  # loads Gymnasium

        self._groups = [_Group(spec, make_simulator, number % self._parts) for number, spec in enumerate(self._specs)]
        self._arrived = [group.begin() for group in self._groups]

    def poll(self, timeout_s: float) -> list[StepArrival]:
        """What the last actions led to. Where there is nothing, nothing can come meanwhile: it waits all the same."""
        if not self._arrived:
            time.sleep(timeout_s)
        arrived, self._arrived = self._arrived, []
        return arrived

    def act(self, process: int, actions: Leaves, part: int = 0) -> None:
        """Steps the simulators of a part of a process."""
        self._arrived.append(self._groups[process * self._parts + part].step(actions))

    def counts(self) -> dict[str, int]:
        """All are live."""
        return {"live": len(self._groups) // self._parts, "respawning": 0, "quarantined": 0, "restarts": 0, "faults": 0}

    def close(self) -> None:
        """Closes every simulator. May be called twice."""
        groups, self._groups = self._groups, []
        for group in groups:
            group.close()


class _Group:
    """What one part of a process would hold."""

    def __init__(self, spec: EnvWorkerSpec, make: Maker, part: int) -> None:
        self._spec, self._part = spec, part
        self._rows = [SimulatorRow(spec, row, make) for row in range(len(spec.slots))]
        env = self._rows[0].env
        self.spaces = spaces_of(env.observation_space, env.action_space)
        fd = create_memory(block_bytes(self.spaces, len(self._rows)))
        try:
            self._block = SharedBlock(fd, self.spaces, len(self._rows))
        finally:
            os.close(fd)
        self._block.slots[:] = spec.slots
        for simulator in self._rows:
            simulator.bind(self._block)

    def begin(self) -> StepArrival:
        for simulator in self._rows:
            simulator.begin_episode()
        if self._spec.decorrelate_steps > 0:
            for simulator in self._rows:
                simulator.decorrelate(self._spec.decorrelate_steps)
        self._block.first[:] = True
        self._block.clear_results()
        return self._arrival(acted=False, seconds=0.0)

    def step(self, actions: Leaves) -> StepArrival:
        began_s = time.monotonic()
        for leaf, array in self._block.actions.items():
            array[:] = actions[leaf]
        for simulator in self._rows:
            if simulator.step():
                simulator.begin_episode()
        return self._arrival(acted=True, seconds=time.monotonic() - began_s)

    def close(self) -> None:
        for simulator in self._rows:
            simulator.env.close()

    def _arrival(self, acted: bool, seconds: float) -> StepArrival:
        block = self._block
        block.acted[:] = acted
        return StepArrival(
            self._spec.process, block.rows, block.observations, block.final_observations, seconds, self._part
        )
