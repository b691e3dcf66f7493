"""What all components share: threads whose failure is told, a state, tasks that the overseer asks for."""

import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Generic

from penstock.overseer.distributed.component import Surroundings
from penstock.overseer.distributed.records import Condition, State, View
from penstock.overseer.distributed.roles.activity import Activity
from penstock.overseer.distributed.roles.settings import AnyConfig, Settings
from penstock.overseer.supervision import Crew
from penstock.types import PenstockError

POLL_S = 0.5
"""How often a waiting thread looks whether it should stop."""


class ThreadedComponent(Generic[AnyConfig]):
    """Implements `Component` for roles whose work is done in threads.

    A subclass starts its threads in `start` and says in `_describe` how it is.

    Args:
        around: What its host gives it.
        settings: The run.
    """

    def __init__(self, around: Surroundings, settings: Settings[AnyConfig]) -> None:
        self.around = around
        self.settings = settings
        self.config = settings.config
        self.crew = Crew()
        self.activity = Activity()
        self.stopping = threading.Event()
        self.view_changed = threading.Event()
        self.doing = "starting"
        self.state: State = "starting"
        self.draining = False
        self._finished_at: float | None = None
        self._outcomes: dict[str, dict[str, Any]] = {}

    @property
    def name(self) -> str:
        """Its own, such as ``rollout-2``."""
        return self.around.identity.name

    def start(self) -> None:
        """See `Component.start`."""
        raise NotImplementedError

    def look(self, view: View) -> None:
        """See `Component.look`."""
        self.view_changed.set()

    def drain(self) -> None:
        """See `Component.drain`."""
        self.draining = True

    def stop(self, timeout_s: float) -> None:
        """See `Component.stop`."""
        self.stopping.set()
        self.crew.join(timeout_s)

    def condition(self) -> Condition:
        """See `Component.condition`."""
        failure = self.crew.failure
        if failure is not None:
            return Condition("failed", self.doing, error=_told(failure), facts=self._facts())
        if self.draining:
            self._drain_if_finished()
        busy_s, idle_s = self.activity.read()
        return self._describe(busy_s, idle_s)

    def _describe(self, busy_s: float, idle_s: float) -> Condition:
        return Condition(self.state, self.doing, None, busy_s, idle_s, facts=self._facts())

    def _has_work(self) -> bool:
        """Whether something that it began goes on; asked while it drains."""
        return False

    def _drain_if_finished(self) -> None:
        """Drained a heartbeat after its last work: by then its outcome was told, and others know that it drains."""
        now = time.monotonic()
        if self._has_work():
            self._finished_at = None
        elif self._finished_at is None:
            self._finished_at = now
        elif now - self._finished_at >= self.config.overseer.heartbeat_s:
            self.state = "drained"

    # --- tasks ---------------------------------------------------------------------------------------------------

    def begin(self, task_id: str, method: str, *args: Any) -> None:
        """Runs a method in a thread; its outcome stands in `facts` under ``tasks``. A repeat changes nothing.

        One task follows another, so that outcomes of earlier ones were read.
        """
        target: Callable[..., Any] = getattr(self, method)
        for earlier in [
            name for name, told in self._outcomes.items() if name != task_id and told["state"] != "running"
        ]:
            del self._outcomes[earlier]
        running = {"state": "running"}
        if self._outcomes.setdefault(task_id, running) is not running:
            return
        self.crew.start(f"{self.name}.{method}", lambda: self._attempt(task_id, target, args))

    def _attempt(self, task_id: str, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            self._outcomes[task_id] = {"state": "done", "result": target(*args)}
        except PenstockError as error:  # whoever asked for the task is told
            self._outcomes[task_id] = {"state": "failed", "error": type(error).__name__, "message": str(error)}

    def _facts(self, **more: Any) -> Mapping[str, Any]:
        return {"tasks": dict(self._outcomes), **more}


def _told(failure: BaseException) -> str:
    if isinstance(failure, PenstockError):
        return str(failure)
    where = traceback.extract_tb(failure.__traceback__)[-1:]
    place = f" ({where[0].filename}:{where[0].lineno})" if where else ""
    return f"{type(failure).__name__}: {failure}{place}"
