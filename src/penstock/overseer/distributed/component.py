"""What runs inside an actor, and what it is given there."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from penstock.overseer.distributed.records import Condition, Identity, View
from penstock.types import Caller


class Component(Protocol):
    """One component of a distributed run. Its public methods may be called by others, from any thread.

    It is made in its process by a `Factory`, started once, told of every new view, and asked for its condition.
    """

    def start(self) -> None:
        """Begins its work in threads of its own and returns soon."""
        ...

    def look(self, view: View) -> None:
        """Takes a new view; returns at once."""
        ...

    def condition(self) -> Condition:
        """How it is; returns at once, and never raises."""
        ...

    def drain(self) -> None:
        """Takes nothing new and finishes what it began; its state becomes `drained`. Returns at once."""
        ...

    def stop(self, timeout_s: float) -> None:
        """Ends its threads, within the limit."""
        ...


class Surroundings(Protocol):
    """What a component is given by its host."""

    @property
    def identity(self) -> Identity:
        """Its own."""
        ...

    @property
    def view(self) -> View:
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


Factory = Callable[[Surroundings, Mapping[str, Any]], Component]
"""Makes a component in its own process, from settings of plain values; a function of a module."""
