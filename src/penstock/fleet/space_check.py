"""All simulators of a fleet share one form of observations and of actions: whoever differs is refused by name."""

from dataclasses import replace
from typing import Any

from penstock.types import ConfigError, LeafSpace, RunFailed, Spaces


class SpaceCheck:
    """The spaces of the first simulator that was made, and which tasks agreed so far.

    Bounds of 64-bit integers are the widest of all tasks.

    Attributes:
        tasks: Tasks of which a simulator was made.
    """

    def __init__(self) -> None:
        self.tasks: list[str] = []
        self._spaces: Spaces | None = None
        self._closed = False

    @property
    def spaces(self) -> Spaces:
        """Of all simulators.

        Raises:
            RunFailed: none was made yet.
        """
        if self._spaces is None:
            raise RunFailed("the simulators' spaces are not known yet: start the pool first")
        return self._spaces

    def adopt(self, task: str, spaces: Spaces) -> None:
        """Takes the spaces of a simulator that was made.

        Raises:
            ConfigError: they need other arrays than the first one's.
        """
        if self._closed:
            return
        self._spaces = _widened(self._spaces or spaces, spaces)
        if task not in self.tasks:
            self.tasks.append(task)
        for side in ("observations", "actions"):
            first, other = _forms(self._spaces, side), _forms(spaces, side)
            if first != other:
                raise ConfigError(
                    f"task {task!r} has {side} {other}, other than {first} of task {self.tasks[0]!r}: tasks of one "
                    "fleet share their spaces; wrap one of them, or run them apart"
                )

    def close(self) -> None:
        """Nobody is refused any more: who comes now is ended, and must not keep others from being ended, too."""
        self._closed = True


def _widened(spaces: Spaces, others: Spaces) -> Spaces:
    """The spaces, with bounds of 64-bit integers that hold for both: by them a device knows how to hold the numbers."""
    by_name = {leaf.name: leaf for leaf in others.observations}
    wider = tuple(_wider(leaf, by_name.get(leaf.name, leaf)) for leaf in spaces.observations)
    return spaces if wider == spaces.observations else replace(spaces, observations=wider)


def _wider(leaf: LeafSpace, other: LeafSpace) -> LeafSpace:
    if not leaf.is_wide or leaf.low is None or leaf.high is None:
        return leaf
    if other.low is None or other.high is None:
        return replace(leaf, low=None, high=None)
    return replace(leaf, low=min(leaf.low, other.low), high=max(leaf.high, other.high))


def same_form(spaces: Spaces, others: Spaces) -> bool:
    """Whether both are the same arrays: a policy for the one is one for the other. Bounds and starts may differ."""
    return all(_forms(spaces, side) == _forms(others, side) for side in ("observations", "actions"))


def _forms(spaces: Spaces, side: str) -> list[tuple[Any, ...]]:
    return [_form(leaf) for leaf in getattr(spaces, side)]


def _form(leaf: LeafSpace) -> tuple[Any, ...]:
    return leaf.name, leaf.kind, leaf.shape, leaf.dtype, leaf.n
