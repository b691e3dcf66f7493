"""Which version serves, where there are several inference servers: the oldest that any of them holds.

One that an evaluation holds back does not count while others do: it is given no new groups once those have left its
version. At staleness zero all count, since nothing is trained there while a version is evaluated.
"""

import threading
from dataclasses import dataclass

from penstock.replay.issuer import TicketIssuer
from penstock.types import SupersededError


@dataclass(frozen=True, slots=True)
class _Held:
    incarnation: int
    step: int
    held_back: bool


class ServingVersions:
    """Tells the issuer of the version that all servers have reached; it never goes back. Thread-safe.

    A server that joins late with an older version holds nothing up that was admitted already, and does not answer for
    it: requests say which version their ticket was admitted at.

    Args:
        issuer: Stamps tickets with the version.
        needs_clearance: A version serves only when the evaluator has cleared it (staleness zero).
    """

    def __init__(self, issuer: TicketIssuer, needs_clearance: bool) -> None:
        self._issuer = issuer
        self._needs_clearance = needs_clearance
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._dead: dict[str, int] = {}
        self._cleared: int | None = None

    def hold(self, server: str, incarnation: int, lineage: int, step: int, held_back: bool = False) -> bool:
        """A server holds a version now; held back, it is kept there by an evaluation.

        Returns:
            Whether it counts; one of another lineage does not.

        Raises:
            SupersededError: a newer incarnation of the server has spoken.
        """
        with self._lock:
            known = self._held.get(server)
            if incarnation <= self._dead.get(server, -1):  # it would hold the serving version up for ever
                raise SupersededError(f"{server}#{incarnation} is dead")
            if known is not None and incarnation < known.incarnation:
                raise SupersededError(f"{server}#{incarnation} was replaced by #{known.incarnation}")
            if lineage != self._issuer.lineage:
                return False
            self._held[server] = _Held(incarnation, step, held_back)
            self._tell()
            return True

    def forget(self, server: str, incarnation: int) -> None:
        """An incarnation of a server is dead, and those before it."""
        with self._lock:
            self._dead[server] = max(incarnation, self._dead.get(server, -1))
            known = self._held.get(server)
            if known is not None and known.incarnation <= incarnation:
                del self._held[server]
                self._tell()

    def clear(self, lineage: int, step: int) -> bool:
        """Nothing is to be evaluated any more at this version; returns whether it counts."""
        with self._lock:
            if lineage != self._issuer.lineage:
                return False
            self._cleared = step if self._cleared is None else max(step, self._cleared)
            self._tell()
            return True

    def describe(self) -> dict[str, int]:
        """The version that each server holds."""
        with self._lock:
            return {server: held.step for server, held in self._held.items()}

    def _tell(self) -> None:
        if not self._held or (self._needs_clearance and self._cleared is None):
            return
        free = [held for held in self._held.values() if self._needs_clearance or not held.held_back]
        step = min(held.step for held in free or self._held.values())
        if self._needs_clearance and self._cleared is not None:
            step = min(step, self._cleared)
        serving = self._issuer.serving_step
        if serving is None or step > serving:
            self._issuer.set_serving_step(step)
