"""What a launcher starts, and what it gives back: components, their surroundings, handles, and room for them.

`penstock.overseer.ray.RayLauncher` implements `Launcher`. A component is made in its process by a `Factory`, and calls
others through its surroundings alone, so it does not know which launcher runs it.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, final

from penstock.overseer.config import RoleConfig
from penstock.overseer.supervisor.messages import ComponentStatus, Identity, Membership, Report
from penstock.types import Caller, ConfigError


class Component(Protocol):
    """One component of a distributed run. Its public methods may be called by others, from any thread.

    It is made in its process by a `Factory`, started once, told of every new view, and asked for its condition.
    """

    def start(self) -> None:
        """Begins its work in threads of its own and returns soon."""
        ...

    def look(self, view: Membership) -> None:
        """Takes a new view; returns at once."""
        ...

    def condition(self) -> ComponentStatus:
        """How it is; returns at once, and never raises."""
        ...

    def drain(self) -> None:
        """Takes nothing new and finishes what it began; its state becomes `drained`. Returns at once."""
        ...

    def stop(self, timeout_s: float) -> None:
        """Ends its threads, within the limit."""
        ...


class ComponentContext(Protocol):
    """What a component is given by its host."""

    @property
    def identity(self) -> Identity:
        """Its own."""
        ...

    @property
    def view(self) -> Membership:
        """The newest view."""
        ...

    def caller(self, name: str) -> Caller:
        """Calls the living incarnation of another component, whichever that is at the time of each call."""
        ...

    def event(self, kind: str, step: int = 0, **fields: Any) -> None:
        """Something for events.jsonl."""
        ...

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """A line for metrics.jsonl."""
        ...

    def samples(self, step: int, conversations: list[Any]) -> None:
        """Sample conversations for the trackers."""
        ...


@final
class PeerCaller:
    """Implements `penstock.types.Caller` for one component.

    Args:
        name: The component's.
        call: (name, method, arguments, limit in seconds) → what the living incarnation's method returned.
    """

    def __init__(self, name: str, call: Callable[[str, str, tuple[Any, ...], float], Any]) -> None:
        self._name = name
        self._call = call

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Calls it; errors as of `Caller.call`."""
        return self._call(self._name, method, args, timeout_s)


Factory = Callable[[ComponentContext, Mapping[str, Any]], Component]
"""Makes a component in its own process, from settings of plain values; a function of a module."""


class Handle(Protocol):
    """One incarnation of a component, seen from the overseer."""

    @property
    def identity(self) -> Identity:
        """Who it is."""
        ...

    def beat(self, view: Membership | None, acknowledged: int) -> Future[Report]:
        """Tells it the view and asks how it is; never blocks.

        The future fails with `UnreachableError` when the process is dead or could not be made. That it does not answer
        is for the caller to notice.

        Args:
            view: The newest; None where it has been told of that before.
            acknowledged: Number of its last message that was logged.
        """
        ...

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Calls one of the component's methods.

        Raises:
            UnreachableError: it is dead, or did not answer within the limit.
            PenstockError: what the method raised.
        """
        ...

    def kill(self, timeout_s: float) -> None:
        """Ends the process, stopped or hung as it may be, and returns when it is gone.

        Raises:
            UnreachableError: that could not be established within the limit.
        """
        ...


class Launcher(Protocol):
    """Starts components. Thread-safe."""

    def spawn(
        self, identity: Identity, factory: Factory, settings: Mapping[str, Any], resources: RoleConfig, view: Membership
    ) -> Handle:
        """Starts an incarnation, and returns before it runs.

        Args:
            identity: Nobody else's, ever.
            factory: Called in the new process.
            settings: Its second argument.
            resources: Where it may run.
            view: What it sees at first.
        """
        ...

    def check_room(self, newcomers: Sequence[tuple[Identity, RoleConfig]], others: Sequence[RoleConfig]) -> None:
        """Looks whether there is room for components that are not started yet; changes nothing.

        Args:
            newcomers: Whose, and where they may run.
            others: Of components that wait for their start too.

        Raises:
            ConfigError: there is none, as far as can be known now.
        """
        ...

    def close(self, timeout_s: float) -> None:
        """Ends every process it started."""
        ...


Amounts = Mapping[str, float]
"""Resources by the names that Ray gives them: ``CPU``, ``GPU``, and custom ones."""

_FIELDS = {"CPU": "num_cpus", "GPU": "num_gpus"}


def amounts(wanted: RoleConfig) -> dict[str, float]:
    """What a role's component reserves."""
    named = {"CPU": wanted.num_cpus, "GPU": wanted.num_gpus, **wanted.resources}
    return {name: amount for name, amount in named.items() if amount > 0}


def check_fits(
    identity: Identity, wanted: RoleConfig, machines: Sequence[Amounts], reserved: Sequence[Amounts]
) -> None:
    """Looks whether a component can be placed at all.

    That all together fit does not mean that they can be packed: what is reserved is compared with the cluster's sums
    only.

    Args:
        identity: Whose.
        wanted: Of its role.
        machines: What each living machine has in all.
        reserved: What each of the run's other components has reserved.

    Raises:
        ConfigError: no machine has so much, or the others leave too little.
    """
    asked = amounts(wanted)
    for name, amount in asked.items():
        field = f"roles.{identity.role}.{_field(name)}"
        largest = max((machine.get(name, 0.0) for machine in machines), default=0.0)
        if amount > largest:
            raise ConfigError(
                f"{field} is {amount:g}, but no machine of the cluster has more than {largest:g}: "
                "ask for less, or start Ray on a machine that has it"
            )
        total = sum(machine.get(name, 0.0) for machine in machines)
        taken = sum(other.get(name, 0.0) for other in reserved)
        if amount > total - taken + 1e-6:
            raise ConfigError(
                f"{field} is {amount:g}, but of the cluster's {total:g} the run's other components reserve {taken:g}: "
                f"{identity.name} has no room; ask for less, start fewer, or add machines"
            )
    if asked and not any(
        all(machine.get(name, 0.0) >= amount for name, amount in asked.items()) for machine in machines
    ):
        words = ", ".join(f"{amount:g} {name}" for name, amount in asked.items())
        raise ConfigError(
            f"roles.{identity.role} asks for {words}, and no single machine of the cluster has all of it: "
            "ask for less, or start Ray on a machine that has it"
        )


def _field(name: str) -> str:
    return _FIELDS.get(name, f"resources.{name}")
