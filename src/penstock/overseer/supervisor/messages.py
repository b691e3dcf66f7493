"""What the overseer and the components of a run send each other: views, conditions, reports, messages, replies.

Plain values only, so that any launcher can carry them. Times are seconds; counters only grow within one incarnation. A
reply holds a value, or an error by its type's name and its words: what another process raised may not be loadable here,
and of its own fields only those of `SupersededVersionError` are needed. An error that is none of `penstock.types`
arrives as `PenstockError` with its type in the message; its traceback is in the log of the component that raised it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import penstock.types.errors as known
from penstock.types import CheckpointError, ConfigError, PenstockError, SupersededVersionError


@dataclass(frozen=True, slots=True)
class Reply:
    """One call's outcome.

    Attributes:
        value: What the method returned.
        error: Name of the type that it raised; empty where it raised nothing.
        message: What that said.
        details: Fields of the error besides its message.
    """

    value: Any = None
    error: str = ""
    message: str = ""
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, error: Exception) -> "Reply":
        """The answer that raises `error` at the caller's."""
        if not isinstance(error, PenstockError):
            return cls(error=PenstockError.__name__, message=f"{type(error).__name__}: {error}")
        details = {"newest": error.newest} if isinstance(error, SupersededVersionError) else {}
        return cls(error=_known_type(type(error)).__name__, message=str(error), details=details)

    def result(self) -> Any:
        """The value.

        Raises:
            PenstockError: what the method raised, by its own type.
        """
        if not self.error:
            return self.value
        raise getattr(known, self.error, PenstockError)(self.message, **self.details)


def _known_type(error: type[PenstockError]) -> type[PenstockError]:
    """The nearest base that `penstock.types` has: both sides know those."""
    return next(base for base in error.__mro__ if getattr(known, base.__name__, None) is base)


REFUSALS = (ConfigError, CheckpointError)
"""What a component raises where it is given bad input, or what does not fit."""

State = Literal["starting", "running", "drained", "finished", "failed"]
"""`drained`: it has finished what it began and takes nothing new; `finished`: its task is done."""


@dataclass(frozen=True, slots=True, order=True)
class Identity:
    """One incarnation of one component.

    Attributes:
        role: What it does: `learner`, `replay`, `curriculum`, `inference`, `rollout` or `evaluator`.
        index: Which of the role's components.
        incarnation: How often it was started before; the larger one is the living one.
    """

    role: str
    index: int
    incarnation: int

    @property
    def name(self) -> str:
        """The component, whatever its incarnation, such as ``rollout-2``."""
        return f"{self.role}-{self.index}"

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation}"


@dataclass(frozen=True, slots=True)
class Peer:
    """A component that others may speak to.

    Attributes:
        identity: Who.
        address: What it announced of itself, such as ``{"url": "http://…"}``.
    """

    identity: Identity
    address: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Membership:
    """Who lives, as the overseer sees it; every component is told with each heartbeat.

    Attributes:
        number: Grows with every change.
        lineage: The run's present lineage.
        peers: Every component that was started and is not known to be dead, by name.
    """

    number: int = 0
    lineage: int = 0
    peers: tuple[Peer, ...] = ()

    def peer(self, name: str) -> Peer | None:
        """The living incarnation of a component; None where there is none."""
        return next((peer for peer in self.peers if peer.identity.name == name), None)

    def of(self, role: str) -> tuple[Peer, ...]:
        """All components of a role."""
        return tuple(peer for peer in self.peers if peer.identity.role == role)


@dataclass(frozen=True, slots=True)
class ComponentMessage:
    """Something for the run's logs; kept by its sender until the overseer has acknowledged it.

    Attributes:
        number: Counts the sender's messages from 1.
        kind: Where it goes: metrics.jsonl, events.jsonl, or the trackers' sample conversations.
        step: Weight step that it belongs to.
        name: An event's kind; empty otherwise.
        fields: Metric values, an event's fields, or ``{"conversations": […]}``.
    """

    number: int
    kind: Literal["metrics", "event", "samples"]
    step: int
    name: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ComponentStatus:
    """How a component is, in its own words.

    Attributes:
        state: See `State`.
        doing: What it does or waits for.
        progress: Grows while it works; None where it owes none at present (it waits for others).
        busy_s: Seconds of work since its start.
        idle_s: Seconds of waiting for others since its start.
        address: How to reach it.
        metrics: ``<group>/<name>`` numbers of this moment.
        facts: JSON values for status.json.
        error: With state `failed`: what happened.
        refused: With state `failed`: it never came to work, for what it was given is bad input or does not fit.
        worked: Whether it ever came to work on what it was given; an inference server does with its first weights.
    """

    state: State
    doing: str
    progress: float | None = None
    busy_s: float = 0.0
    idle_s: float = 0.0
    address: Mapping[str, Any] = field(default_factory=dict[str, Any])
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    error: str = ""
    refused: bool = False
    worked: bool = True


@dataclass(frozen=True, slots=True)
class Report:
    """A heartbeat's answer.

    Attributes:
        identity: Whose.
        pid: Its process.
        host: Its machine.
        condition: How it is.
        messages: All that the overseer has not acknowledged, oldest first.
    """

    identity: Identity
    pid: int
    host: str
    condition: ComponentStatus
    messages: tuple[ComponentMessage, ...] = ()
