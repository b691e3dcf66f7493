"""Calls from the overseer to whichever incarnation of a component lives."""

from typing import Any, Protocol


class Calls(Protocol):
    """Has living components by name."""

    def call(self, name: str, method: str, *args: Any, timeout_s: float) -> Any:
        """Calls a method of one."""
        ...


class NamedCaller:
    """A `Caller` bound to a name, resolved at each call.

    Args:
        calls: Knows who lives.
        name: Such as ``replay-0``.
    """

    def __init__(self, calls: Calls, name: str) -> None:
        self._calls = calls
        self._name = name

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """See `Caller.call`."""
        return self._calls.call(self._name, method, *args, timeout_s=timeout_s)
