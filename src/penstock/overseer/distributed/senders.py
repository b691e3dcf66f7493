"""Whose messages are still taken: "late messages of the dead are refused"."""

from penstock.overseer.distributed.records import Identity, View
from penstock.types import SupersededError


class Senders:
    """Refuses incarnations that are known to have died, by the newest view and by who has called since.

    A sender that no view has named yet is taken: a new incarnation is started only after the death of the old one,
    and may speak before the next heartbeat brings the view that names it. Thread-safe when its owner is.
    """

    def __init__(self) -> None:
        self._oldest_taken: dict[str, int] = {}
        self._view = View()

    def look(self, view: View) -> None:
        """Takes a newer view: whoever has left it is dead."""
        present = {peer.identity for peer in view.peers}
        for peer in self._view.peers:
            if peer.identity not in present:
                self._raise_to(peer.identity.name, peer.identity.incarnation + 1)
        for identity in present:
            self._raise_to(identity.name, identity.incarnation)
        self._view = view

    def check(self, sender: Identity) -> None:
        """Takes note of a sender.

        Raises:
            SupersededError: it is dead, or replaced.
        """
        oldest = self._oldest_taken.get(sender.name, 0)
        if sender.incarnation < oldest:
            raise SupersededError(f"{sender} was given up and its messages are refused: {sender.name} is at #{oldest}")
        self._raise_to(sender.name, sender.incarnation)

    def _raise_to(self, name: str, incarnation: int) -> None:
        self._oldest_taken[name] = max(incarnation, self._oldest_taken.get(name, 0))
