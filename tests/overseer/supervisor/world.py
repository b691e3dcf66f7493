"""A supervisor with nothing real around it: scripted components, a clock that is turned by hand, no threads."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from penstock.overseer import OverseerConfig
from penstock.overseer.config import RoleConfig
from penstock.overseer.supervisor.member import ComponentSpec
from penstock.overseer.supervisor.messages import ComponentMessage, ComponentStatus, Identity, Membership, Report
from penstock.overseer.supervisor.supervisor import Supervisor
from penstock.types import ConfigError, PenstockError, UnreachableError

WORKING = ComponentStatus("running", "working")
LIMITS: dict[str, Any] = {
    "heartbeat_s": 1.0, "heartbeat_timeout_s": 10.0, "start_timeout_s": 60.0, "stop_timeout_s": 20.0,
    "no_progress_s": 100.0, "max_restarts": 3, "restart_window_s": 300.0, "backoff_s": 2.0, "max_backoff_s": 5.0,
}  # fmt: skip


class Component:
    """One incarnation. Tests set `condition`, `mode`, `stuck_kills`; `calls` and `killed` say what was done to it."""

    def __init__(self, identity: Identity, settings: Any, view: Membership) -> None:
        self.identity = identity
        self.settings = settings
        self.views = [view]
        self.condition = WORKING
        self.mode = "starting"
        self.stuck_kills = 0
        self.killed = False
        self.calls: list[tuple[Any, ...]] = []
        self.failing_calls: set[str] = set()
        self.outbox: list[ComponentMessage] = []
        self.unanswered: list[Future[Report]] = []

    def say(self, kind: str, **fields: Any) -> None:
        number = self.outbox[-1].number + 1 if self.outbox else 1
        self.outbox.append(ComponentMessage(number, "event", 0, kind, fields))

    def report(self) -> Report:
        return Report(self.identity, 1000 + self.identity.incarnation, "host-a", self.condition, tuple(self.outbox))

    def beat(self, view: Membership | None, acknowledged: int) -> Future[Report]:
        self.views.append(view)
        self.acknowledged = acknowledged
        answer: Future[Report] = Future()
        if self.mode == "running":
            answer.set_result(self.report())
        elif self.mode == "dead":
            answer.set_exception(UnreachableError(f"{self.identity} is dead"))
        else:
            self.unanswered.append(answer)
        return answer

    def answer_at_last(self) -> None:
        for answer in self.unanswered:
            answer.set_result(self.report())
        self.unanswered.clear()

    def die(self) -> None:
        self.mode = "dead"
        for answer in self.unanswered:
            answer.set_exception(UnreachableError(f"{self.identity} died"))
        self.unanswered.clear()

    def run(self) -> None:
        self.mode = "running"
        self.answer_at_last()

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        self.calls.append((method, *args))
        if method in self.failing_calls or self.mode == "dead":
            raise UnreachableError(f"{self.identity} does not answer {method}")
        return f"{method} by {self.identity}"

    def kill(self, timeout_s: float) -> None:
        if self.stuck_kills > 0:
            self.stuck_kills -= 1
            raise UnreachableError(f"{self.identity} is still there")
        self.killed = True
        self.mode = "dead"


class World:
    """Also the launcher. `autorun`: new incarnations answer at once."""

    def __init__(self, **limits: Any) -> None:
        self.unplaceable: set[str] = set()
        self.looked_for_room: list[tuple[list[str], int]] = []
        self.now = 0.0
        self.autorun = True
        self.spawned: list[Component] = []
        self.messages: list[tuple[str, str]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.losses: list[tuple[str, str]] = []
        self.when_lost: Callable[[Identity, str], None] = lambda identity, reason: None
        self.config = OverseerConfig(**{**LIMITS, **limits})
        self.supervisor = Supervisor(self, self.config, self, clock=lambda: self.now, background=at_once)

    def spawn(
        self, identity: Identity, factory: Any, settings: Any, resources: RoleConfig, view: Membership
    ) -> Component:
        assert view.peer(identity.name) is not None, "it sees itself"
        if identity.name in self.unplaceable:
            raise ConfigError(f"there is no room for {identity.name}")
        alive = [c for c in self.spawned if c.identity.name == identity.name and not c.killed]
        assert alive == [], "nobody is replaced who is not known to be gone"
        self.spawned.append(Component(identity, settings, view))
        if self.autorun:
            self.spawned[-1].run()
        return self.spawned[-1]

    def check_room(self, newcomers: Any, others: Any) -> None:
        self.looked_for_room.append(([identity.name for identity, _ in newcomers], len(others)))
        for identity, _ in newcomers:
            if identity.name in self.unplaceable:
                raise ConfigError(f"there is no room for {identity.name}")

    def close(self, timeout_s: float) -> None: ...

    def on_message(self, identity: Identity, message: ComponentMessage) -> None:
        self.messages.append((str(identity), message.name))

    def on_event(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    def on_loss(self, identity: Identity, reason: str) -> None:
        self.losses.append((str(identity), reason))
        self.when_lost(identity, reason)

    def add(self, *names: str, essential: bool = False) -> None:
        for name in names:
            self.supervisor.add(spec(name, essential))
        self.advance(1.0)

    def advance(self, seconds: float, tick_s: float = 0.5) -> None:
        for _ in range(round(seconds / tick_s)):
            self.now += tick_s
            self.supervisor.tick()

    def newest(self, name: str) -> Component:
        return [component for component in self.spawned if component.identity.name == name][-1]

    def started(self, name: str) -> list[int]:
        return [c.identity.incarnation for c in self.spawned if c.identity.name == name]

    def change(self, name: str, **fields: Any) -> None:
        component = self.newest(name)
        component.condition = replace(component.condition, **fields)

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [fields for what, fields in self.events if what == kind]


def at_once(function: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(function())
    except PenstockError as error:
        future.set_exception(error)
    return future


def spec(name: str, essential: bool = False, **fields: Any) -> ComponentSpec:
    role, _, index = name.partition("-")
    return ComponentSpec(role, int(index), lambda ctx, settings: ctx, {"of": name}, essential=essential, **fields)
