"""The protocols by which a rollout worker meets its neighbours: simulators on one side, a policy on the other.

Invariants of every `PolicyRunner`:

- a decision is made with the weights of exactly one version, and says which: a version belongs to its arrays;
- `set_weights` never waits for a decision and is never lost: of several between two batches the latest wins;
- recurrent state is kept by slot, on the device; it is reset where `first` is true.

Not covered: policies themselves (`penstock.model.control`) and how weights travel (`penstock.weights`).
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from penstock.fleet.steps import ActionBatch, Leaves, StepArrival
from penstock.types import Spaces, WeightVersion

OnEvent = Callable[[str, Mapping[str, Any]], None]
"""Called with what happened: its kind (``worker_failed``) and plain values."""


@runtime_checkable
class Pending(Protocol):
    """A decision that is being made."""

    def done(self) -> bool:
        """Whether `result` would return at once."""
        ...

    def result(self) -> ActionBatch:
        """Waits for the decision. Its arrays are NumPy's, except that `states` may be any lazy mapping of them."""
        ...


@runtime_checkable
class PolicyRunner(Protocol):
    """Decides for slots. `decide` is called by one thread at a time, with one decision pending; the rest by any."""

    @property
    def version(self) -> WeightVersion | None:
        """Whose weights the next decision takes; None before the first `set_weights` of a runner without its own."""
        ...

    def decide(self, slots: np.ndarray, observations: Leaves, first: np.ndarray) -> Pending:
        """Begins a decision and returns at once.

        Args:
            slots: int64 [n], each at most once.
            observations: By leaf name, [n or more, …], of which the first n count; the others may be read, and mean
                nothing. None changes before the decision has been read.
            first: bool [n], where an episode begins and recurrent state is reset.
        """
        ...

    def set_weights(self, version: WeightVersion, arrays: Mapping[str, Any]) -> None:
        """Takes new weights for the batches that begin from now on.

        Raises:
            WeightsError: they are not the policy's by name, shape or dtype.
        """
        ...


class Simulators(Protocol):
    """What drives simulators: `penstock.fleet.SimulatorPool`, or a stand-in inside this process."""

    @property
    def spaces(self) -> Spaces:
        """What is seen and done; known after `start`."""
        ...

    @property
    def tasks(self) -> tuple[str, ...]:
        """The task of each slot."""
        ...

    @property
    def env_names(self) -> tuple[str, ...]:
        """The environment of each slot."""
        ...

    @property
    def num_slots(self) -> int:
        """Slots, whatever state they are in."""
        ...

    @property
    def live_slots(self) -> int:
        """Slots whose process is up: no batch waits for more."""
        ...

    def given_up(self) -> Mapping[int, str]:
        """Slots that nothing comes from any more, with the reason."""
        ...

    def start(self, timeout_s: float) -> None:
        """Starts them all."""
        ...

    def poll(self, timeout_s: float) -> list[StepArrival]:
        """What has arrived, waiting for the first of it. A part of a process comes again only after it was acted on."""
        ...

    def act(self, process: int, actions: Leaves, part: int = 0) -> None:
        """Lets a part of a process step: [n, …] by leaf name."""
        ...

    def counts(self) -> dict[str, int]:
        """Processes that are ``live``, ``respawning``, ``quarantined``; ``restarts`` and ``faults`` so far."""
        ...

    def close(self) -> None:
        """Ends them all."""
        ...
