"""Who fetches a version from whom: a tree that bounds the load on the root, whatever the number of clients.

Of each version the root gives at most `fanout` copies, and so does every client that has it whole; a client for which
there is no place yet waits until there is one. A client that fails with its parent goes to the root, and the parent
gets no more children. No sockets, no threads, no clock of its own; its user holds a lock.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

ROOT = ""
"""Stands for the root among locations."""


@dataclass(slots=True)
class _Assignment:
    """A client's place: whom it fetches from, and until when the place is kept for it."""

    parent: str
    until_s: float


@dataclass(slots=True)
class _Tree:
    """Of one version: copies given so far by every location that has it whole, and places that are not used yet."""

    copies: dict[str, int] = field(default_factory=lambda: {ROOT: 0})
    assigned: dict[str, _Assignment] = field(default_factory=dict[str, _Assignment])
    failed: set[str] = field(default_factory=set[str])


class DistributionTree:
    """Gives clients their parents, version by version; only the newest version has a tree.

    Args:
        fanout: Most copies of one version that the root, and each client, gives.
        lease_s: A client to which nothing moves for so many seconds loses its place to another.
        forget_s: A client that asked nothing for so many seconds is counted no more.
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
        """Clients that asked something lately."""
        self._forget()
        return len(self._seen)

    def knows(self, client: str) -> bool:
        """Whether a client asked something lately."""
        return client in self._seen

    def note(self, client: str) -> None:
        """A client asked something, so it lives."""
        self._seen[client] = self._clock()

    def moves(self, client: str) -> None:
        """The client is fetching and gets something: its place is kept for it, however long that takes."""
        self.note(client)
        if (assigned := self._tree.assigned.get(client)) is not None:
            assigned.until_s = self._clock() + self._lease_s

    def start(self, version: object) -> None:
        """A new version is there, and only the root has it."""
        self._version, self._tree = version, _Tree()

    def parent(self, version: object, client: str) -> str | None:
        """Where the client shall fetch: a location, `ROOT`, or None (ask again when something changed).

        With no place free and nobody under way who could offer one, it is the root, beyond its number.
        """
        if version != self._version:
            return ROOT  # which answers that the version is superseded
        self._expire()
        if (assigned := self._tree.assigned.get(client)) is not None:
            return assigned.parent
        free = [(count, place) for place, count in self._tree.copies.items() if count < self._fanout]
        free = [(count, place) for count, place in free if place not in self._tree.failed]
        if not free and self._tree.assigned:
            return None
        return self._assign(client, min(free)[1] if free else ROOT)

    def finished(self, version: object, client: str, location: str | None) -> bool:
        """The client has the whole version, and gives it to others where it named a location.

        Returns:
            Whether that may help another client that waits for a place.
        """
        if version != self._version:
            return False
        was_assigned = self._tree.assigned.pop(client, None) is not None
        if location is not None:
            self._tree.copies.setdefault(location, 0)
            self._tree.failed.discard(location)
        return was_assigned or location is not None

    def failed(self, version: object, client: str) -> None:
        """The client got nothing from its parent; it is sent to the root next, even beyond the root's number."""
        if version != self._version:
            return
        assigned = self._tree.assigned.pop(client, None)
        if assigned is None or assigned.parent == ROOT:
            self._release(assigned)
            return
        self._tree.failed.add(assigned.parent)
        self._assign(client, ROOT)

    def _assign(self, client: str, parent: str) -> str:
        self._tree.copies[parent] += 1
        self._tree.assigned[client] = _Assignment(parent, self._clock() + self._lease_s)
        return parent

    def _release(self, assigned: _Assignment | None) -> None:
        if assigned is not None:
            self._tree.copies[assigned.parent] -= 1

    def _expire(self) -> None:
        now = self._clock()
        for client in [client for client, assigned in self._tree.assigned.items() if assigned.until_s <= now]:
            self._release(self._tree.assigned.pop(client))

    def _forget(self) -> None:
        oldest = self._clock() - self._forget_s
        for client in [client for client, seen in self._seen.items() if seen < oldest]:
            del self._seen[client]
