"""What the overseer and the components of a distributed run tell each other.

Plain values only, so that any launcher can carry them. Times are seconds; counters only grow within one incarnation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

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
class View:
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
class Message:
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
class Condition:
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
    condition: Condition
    messages: tuple[Message, ...] = ()
