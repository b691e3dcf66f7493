"""What a call between two components comes back with: a value, or an error by its type's name and its words.

An exception object is not sent: what another process raised may not be loadable here, and of its own fields only those
of `SupersededVersionError` are needed. An error that is none of `penstock.types` arrives as `PenstockError` with its
type in the message; its traceback is in the log of the component where it was raised.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import penstock.types.errors as known
from penstock.types import PenstockError, SupersededVersionError


@dataclass(frozen=True, slots=True)
class Answer:
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
    def of(cls, error: Exception) -> "Answer":
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
