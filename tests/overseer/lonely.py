"""What surrounds a component that is tested by itself."""

from typing import Any

from penstock.overseer.supervisor.messages import Identity, Membership
from penstock.types import UnreachableError


class Lonely:
    """A host that knows nobody else."""

    view = Membership()

    def __init__(self, name: str) -> None:
        self.identity = Identity(name, 0, 0)

    def caller(self, name: str) -> "Lonely":
        return self

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        raise UnreachableError(f"{method}: nobody is there")

    def event(self, kind: str, step: int = 0, **fields: Any) -> None: ...

    def metrics(self, step: int, values: Any) -> None: ...

    def samples(self, step: int, conversations: list[Any]) -> None: ...
