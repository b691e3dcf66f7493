"""Messages of a component for the run's logs, kept until the overseer has written them."""

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

from penstock.overseer.distributed.records import Message

MOST_PER_REPORT = 1000
"""So many messages travel with one heartbeat; more wait for the next, so that no report grows without bound."""


class Outbox:
    """Numbers messages from 1 and repeats them until they are acknowledged. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: deque[Message] = deque()
        self._last = 0

    def put(
        self, kind: Literal["metrics", "event", "samples"], step: int, name: str, fields: Mapping[str, Any]
    ) -> None:
        """Adds a message."""
        with self._lock:
            self._last += 1
            self._messages.append(Message(self._last, kind, step, name, dict(fields)))

    def unacknowledged(self, acknowledged: int) -> tuple[Message, ...]:
        """Forgets messages up to a number and gives those after it, oldest first, at most `MOST_PER_REPORT`."""
        with self._lock:
            while self._messages and self._messages[0].number <= acknowledged:
                self._messages.popleft()
            return tuple(self._messages)[:MOST_PER_REPORT]
