"""How one component calls another, wherever that runs."""

from typing import Any, Protocol


class Caller(Protocol):
    """Calls the methods of one other component. Thread-safe.

    Arguments and results are plain values, records and bytes. A call may have been carried out although it raised
    `UnreachableError`: whoever repeats one relies on the other side to notice.
    """

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Calls a method and waits for its result.

        Raises:
            UnreachableError: nobody of that name lives, it died, or it did not answer within the limit.
            SupersededError: the caller itself was replaced: it should end.
            PenstockError: what the method raised, by its own type.
        """
        ...
