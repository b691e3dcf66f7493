"""All simulators of a fleet share one form of observations and of actions: whoever differs is refused by name."""

from typing import Any

from penstock.types import ConfigError, LeafSpace, RunFailed, Spaces


class SpaceAgreement:
    """The spaces of the first simulator that was made, and which tasks agreed so far.

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
        self._spaces = self._spaces or spaces
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


def same_form(spaces: Spaces, others: Spaces) -> bool:
    """Whether both are the same arrays: a policy for the one is one for the other. Bounds and starts may differ."""
    return all(_forms(spaces, side) == _forms(others, side) for side in ("observations", "actions"))


def _forms(spaces: Spaces, side: str) -> list[tuple[Any, ...]]:
    return [_form(leaf) for leaf in getattr(spaces, side)]


def _form(leaf: LeafSpace) -> tuple[Any, ...]:
    return leaf.name, leaf.kind, leaf.shape, leaf.dtype, leaf.n
