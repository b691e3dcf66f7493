"""How much memory a fleet run will take, from its configuration, its spaces and its policy's size alone.

Pure functions; nothing is allocated. With P parameters of 4 bytes, observations of o bytes, a recurrent state of r
bytes, N = workers × envs_per_worker slots, fragments of L steps, B of them in an update and W waiting:

- *parameters* 3 · 4 P: the learner's, the published ones, and each worker's (one more set per further worker);
- *optimiser* 4 · 4 P: gradients, their clipped copy, and Adam's two moments;
- *fragments* (B + W + workers · queue + N) (L + 1) (o + r + 64): training, waiting, to be sent, being filled; twice B,
  because the learner's batch is a copy;
- *shared memory* 2 N o: what simulators write, with their final observations;
- *simulators* `SIMULATOR_BYTES` for each process, where the simulator itself is light.

An upper estimate to decide by; activations of convolutions and heavy simulators come on top.
"""

from dataclasses import dataclass, fields

from penstock.overseer.estimate import PROCESS_BYTES
from penstock.overseer.fleet_config import FleetRunConfig
from penstock.types import Spaces

SIMULATOR_BYTES = 30 * 2**20
"""Of a process with a light simulator: what it does not share with the one that it was forked from."""


@dataclass(frozen=True, slots=True)
class FleetMemoryEstimate:
    """Bytes by purpose; see the module's docstring.

    Attributes:
        parameters_bytes: All sets.
        optimizer_bytes: Gradients and moments.
        fragments_bytes: Wherever they are.
        shared_bytes: Between simulators and workers.
        simulators_bytes: Their processes.
        process_bytes: Everything else.
    """

    parameters_bytes: int
    optimizer_bytes: int
    fragments_bytes: int
    shared_bytes: int
    simulators_bytes: int
    process_bytes: int = PROCESS_BYTES

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))


def estimate_fleet_memory(
    config: FleetRunConfig, spaces: Spaces, parameters: int, state_bytes: int = 0
) -> FleetMemoryEstimate:
    """The memory of a fleet run on one machine.

    Args:
        config: The run's.
        spaces: What the policy sees and does.
        parameters: Of the policy.
        state_bytes: Of one slot's recurrent state.
    """
    fleet, replay = config.fleet, config.replay
    slots = fleet.workers * fleet.envs_per_worker
    step_bytes = sum(leaf.nbytes for leaf in (*spaces.observations, *spaces.actions)) + 64
    seen_bytes = sum(leaf.nbytes for leaf in spaces.observations)
    fragment_bytes = (fleet.fragment_length + 1) * step_bytes + state_bytes
    waiting = replay.buffer_config().capacity if replay.most_waiting is None else replay.most_waiting
    fragments = 2 * replay.fragments_per_batch + waiting + fleet.workers * fleet.queue_fragments + slots
    return FleetMemoryEstimate(
        parameters_bytes=(2 + fleet.workers) * 4 * parameters,
        optimizer_bytes=4 * 4 * parameters,
        fragments_bytes=fragments * fragment_bytes,
        shared_bytes=2 * slots * seen_bytes,
        simulators_bytes=fleet.workers * fleet.processes_per_worker * SIMULATOR_BYTES,
    )
