"""What starts components in processes of their own; implemented by `penstock.overseer.ray.RayLauncher`."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from penstock.overseer.config import RoleConfig
from penstock.overseer.distributed.component import Factory
from penstock.overseer.distributed.records import Identity, Report, View


class Handle(Protocol):
    """One incarnation of a component, seen from the overseer."""

    @property
    def identity(self) -> Identity:
        """Who it is."""
        ...

    def beat(self, view: View | None, acknowledged: int) -> Future[Report]:
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
        self, identity: Identity, factory: Factory, settings: Mapping[str, Any], resources: RoleConfig, view: View
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
