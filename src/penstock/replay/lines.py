"""What waits for the reader: one line per writer, served in turn.

Each line keeps its order, and a writer with much to give delays the others by one item at a time. In memory only,
without locks.
"""

from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """First in, first out for each writer; round robin among them."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[Item]] = {}
        self._turns: deque[str] = deque()

    def __len__(self) -> int:
        """How many items wait, of all writers."""
        return sum(len(line) for line in self._lines.values())

    def append(self, writer: str, item: Item) -> None:
        """Puts an item at the end of a writer's line."""
        self._line(writer).append(item)

    def put_back(self, writer: str, item: Item) -> None:
        """Puts an item at the front again."""
        self._line(writer).appendleft(item)

    def take(self) -> tuple[str, Item] | None:
        """The first item of the writer whose turn it is; None where nothing waits."""
        if not self._turns:
            return None
        writer = self._turns.popleft()
        line = self._lines[writer]
        item = line.popleft()
        if line:
            self._turns.append(writer)
        else:
            del self._lines[writer]
        return writer, item

    def clear(self) -> None:
        """Forgets everything."""
        self._lines.clear()
        self._turns.clear()

    def _line(self, writer: str) -> deque[Item]:
        if writer not in self._lines:
            self._lines[writer] = deque()
            self._turns.append(writer)
        return self._lines[writer]
