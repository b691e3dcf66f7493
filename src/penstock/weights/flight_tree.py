"""Who fetches a version from whom: a tree that keeps the load on the root bounded, whatever the number of clients.

Of each version the root gives at most `fanout` copies, and so does every client that has it whole; a client for which
there is no place yet waits until there is one. A client that fails with its parent goes to the root, and the parent
gets no more children. Pure book-keeping: no sockets, no threads, no clock of its own; its user holds a lock.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

ROOT = ""
"""Stands for the root among locations."""


@dataclass(slots=True)
class _Assignment:
    """A place that was given: by whom, and until when it is kept for the client."""

    parent: str
    until_s: float


@dataclass(slots=True)
class _Tree:
    """One version's: children given so far by every location that has it whole, and places not yet used."""

    copies: dict[str, int] = field(default_factory=lambda: {ROOT: 0})
    given: dict[str, _Assignment] = field(default_factory=dict[str, _Assignment])
    failed: set[str] = field(default_factory=set[str])


class DistributionTree:
    """Gives clients their parents, version by version; only the newest version has a tree.

    Args:
        fanout: Most copies of one version that the root, and each client, gives.
        lease_s: A client that is not seen to fetch for so long loses its place to another.
        forget_s: A client not heard of for so long is counted no more.
        clock: Seconds.
    """

    def __init__(self, fanout: int, lease_s: float, forget_s: float, clock: Callable[[], float]) -> None:
        self._fanout, self._lease_s, self._forget_s, self._clock = fanout, lease_s, forget_s, clock
        self._seen: dict[str, float] = {}
        self._version: object = None
        self._tree = _Tree()

    @property
    def has_relays(self) -> bool:
        """Whether there are more clients than the root serves, so that clients should keep what they have."""
        self._forget()
        return len(self._seen) > self._fanout

    @property
    def clients(self) -> int:
        """Clients heard of lately."""
        self._forget()
        return len(self._seen)

    def knows(self, client: str) -> bool:
        """Whether a client was heard of lately."""
        return client in self._seen

    def hear(self, client: str) -> None:
        """A client gave a sign of life."""
        self._seen[client] = self._clock()

    def moves(self, client: str) -> None:
        """The client is fetching and gets something: its place is kept for it, however long that takes."""
        self.hear(client)
        if (given := self._tree.given.get(client)) is not None:
            given.until_s = self._clock() + self._lease_s

    def start(self, version: object) -> None:
        """A new version is there, and only the root has it."""
        self._version, self._tree = version, _Tree()

    def parent(self, version: object, client: str) -> str | None:
        """Where the client shall fetch: a location, `ROOT`, or None (ask again when something changed).

        With no place free and nobody under way who could offer one, it is the root, beyond its number.
        """
        if version != self._version:
            return ROOT  # it will be told there that the version is superseded
        self._expire()
        if (given := self._tree.given.get(client)) is not None:
            return given.parent
        free = [(count, place) for place, count in self._tree.copies.items() if count < self._fanout]
        free = [(count, place) for count, place in free if place not in self._tree.failed]
        if not free and self._tree.given:
            return None
        return self._give(client, min(free)[1] if free else ROOT)

    def finished(self, version: object, client: str, location: str | None) -> bool:
        """The client has the whole version, and gives it to others where it named a location.

        Returns:
            Whether that may help another client that waits for a place.
        """
        if version != self._version:
            return False
        was_given = self._tree.given.pop(client, None) is not None
        if location is not None:
            self._tree.copies.setdefault(location, 0)
            self._tree.failed.discard(location)
        return was_given or location is not None

    def failed(self, version: object, client: str) -> None:
        """The client got nothing from its parent; it is sent to the root next, even beyond the root's number."""
        if version != self._version:
            return
        given = self._tree.given.pop(client, None)
        if given is None or given.parent == ROOT:
            self._give_back(given)
            return
        self._tree.failed.add(given.parent)
        self._give(client, ROOT)

    def _give(self, client: str, parent: str) -> str:
        self._tree.copies[parent] += 1
        self._tree.given[client] = _Assignment(parent, self._clock() + self._lease_s)
        return parent

    def _give_back(self, given: _Assignment | None) -> None:
        if given is not None:
            self._tree.copies[given.parent] -= 1

    def _expire(self) -> None:
        now = self._clock()
        for client in [client for client, given in self._tree.given.items() if given.until_s <= now]:
            self._give_back(self._tree.given.pop(client))

    def _forget(self) -> None:
        oldest = self._clock() - self._forget_s
        for client in [client for client, seen in self._seen.items() if seen < oldest]:
            del self._seen[client]
