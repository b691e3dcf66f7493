"""What a language policy's learner does before training: the warm start, and the parity probe."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast, final

from penstock.curriculum import Curriculum
from penstock.inference import RemoteContext
from penstock.learner import Learner
from penstock.overseer.distributed.component import Surroundings
from penstock.overseer.distributed.records import View
from penstock.overseer.distributed.roles.servers import make_pool, servers_of
from penstock.overseer.parity import probe_parity
from penstock.overseer.warm_start import warm_start
from penstock.rollout import RolloutManager
from penstock.types import EnvironmentFailure, Stopped

if TYPE_CHECKING:
    from penstock.overseer.trainer import LearnerComponent


@final
class Preparation:
    """Tasks of a learner's component that ask inference servers and environments.

    Args:
        ctx: The component's.
        component: Has the learner.
    """

    def __init__(self, ctx: Surroundings, component: "LearnerComponent") -> None:
        self._ctx = ctx
        self._component = component
        self._pool = make_pool(component.settings)

    def on_view(self, view: View) -> None:
        """Follows the inference servers."""
        self._pool.set_servers(servers_of(view))

    def close(self) -> None:
        """Ends its connections."""
        self._pool.close()

    def warm_start(self) -> None:
        """Supervised steps on the environments' reference solutions; then version 0 is published anew."""
        component, config = self._component, self._component.config
        assert config.learner.warm_start is not None  # or nobody asks for it

        def on_step(done: int, total: int, metrics: Mapping[str, float]) -> None:
            if component.stopping.is_set():
                raise Stopped("warm start")
            component.note_step()
            component.doing = f"warm start {done}/{total}"
            self._ctx.metrics(0, {"warm_start/step": float(done), **metrics})

        warm_start(self._learner, self._manager(), config.learner.warm_start, config.seed, on_step)
        component.publish_anew()

    def probe(self) -> float | None:
        """Largest difference between the servers' log-probabilities and the learner's; None where none was measured.

        Raises:
            MismatchError: it is too large.
        """
        self._component.doing = "checking that engines and learner agree"
        config = self._component.config
        lesson_id, limit = next(iter(config.curriculum.lessons)), config.learner.mismatch_limit
        try:
            worst = probe_parity(self._manager(), self._learner, lesson_id, config.learner.row_length, limit)
        except EnvironmentFailure as failure:  # counted where it trains; parity is checked at every step, too
            self._ctx.event("parity_not_probed", lesson=lesson_id, reason=str(failure))
            return None
        self._ctx.event("parity", largest_difference=worst, limit=limit)
        return worst

    @property
    def _learner(self) -> Learner:
        return cast(Learner, self._component.learner)

    def _manager(self) -> RolloutManager:
        settings = self._component.settings
        curriculum = Curriculum(settings.config.curriculum)  # names the lessons; nothing is recorded in it
        context = RemoteContext(self._pool, settings.tokenizer())
        return RolloutManager(curriculum, context, settings.config.seed, settings.lineage)
