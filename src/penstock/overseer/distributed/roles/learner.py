"""The learner in a process of its own, with the server that its weights are fetched from.

It loads, compiles and publishes its first version by itself; warm start, parity probe and training are tasks that the
overseer asks for. Batches come from the replay service, and checkpoints are taken here: the replay service, the
curriculum and the evaluator give their states as of the update boundary.
"""

import threading
import time
from collections.abc import Mapping
from typing import Any

from penstock.curriculum import Curriculum
from penstock.inference import RemoteContext
from penstock.learner import Learner, load_checkpoint, save_checkpoint
from penstock.model.language import load_policy, named_arrays
from penstock.overseer.distributed.component import Surroundings
from penstock.overseer.distributed.records import Condition, View
from penstock.overseer.distributed.roles.base import ThreadedComponent
from penstock.overseer.distributed.roles.servers import make_pool, servers_of
from penstock.overseer.distributed.roles.settings import Settings
from penstock.overseer.full_disk import when_there_is_room
from penstock.overseer.parity import probe_parity
from penstock.overseer.training_loop import TrainingLoop
from penstock.overseer.warm_start import warm_start
from penstock.replay import RemoteBatches
from penstock.rollout import RolloutManager
from penstock.types import EnvironmentFailure, PenstockError, Stopped, UnreachableError, WeightVersion
from penstock.weights import Broadcaster, open_broadcaster, trained_arrays

STATES_S = 120.0
"""Longest wait for the other components' states at a checkpoint."""


class LearnerRole(ThreadedComponent):
    """Runs one `Learner` and its `TrainingLoop`."""

    def __init__(self, around: Surroundings, settings: Settings) -> None:
        super().__init__(around, settings)
        self._replay = around.caller("replay-0")
        self._batches = RemoteBatches(self._replay, settings.lineage)  # stopped first, so that nobody waits for a batch
        self._commits = RemoteBatches(self._replay, settings.lineage)
        self._pool = make_pool(settings)
        self._tokenizer = settings.tokenizer()
        self._learner: Learner | None = None
        self._loop: TrainingLoop | None = None
        self._broadcaster: Broadcaster | None = None
        self._publishing = threading.Lock()
        self._published: tuple[WeightVersion, Mapping[str, Any]] | None = None
        self._training = self._waiting_for_room = False
        self._results: dict[str, Any] = {}
        self._evaluator_state: dict[str, Any] = {}
        self._steps_done = 0
        self._seconds = {"busy": 0.0, "idle": 0.0}

    def start(self) -> None:
        """See `Component.start`."""
        self.crew.start(f"{self.name}.load", self._load)

    def look(self, view: View) -> None:
        """Follows the inference servers, for the probe."""
        self._pool.set_servers(servers_of(view))
        super().look(view)

    def _load(self) -> None:
        self.doing = "loading"
        config, checkpoint = self.config, self.settings.checkpoint
        if checkpoint is None:
            learner = Learner(load_policy(config.model, config.seed, self._tokenizer), config.learner, config.steps)
        else:
            loaded = load_checkpoint(checkpoint)
            learner = Learner(loaded.decoder, config.learner, config.steps)
            learner.restore_arrays(loaded.learner_arrays)
            self._evaluator_state = loaded.states["evaluator"]
            self._results = loaded.states["run"]["results"]
        self._learner = learner
        with self._publishing:
            self._open_broadcaster()  # servers fetch while it compiles
        self.doing = "compiling"
        learner.compile()
        self.doing, self.state = "waiting to be told what to do", "running"

    # --- weights -------------------------------------------------------------------------------------------------

    def _open_broadcaster(self) -> None:
        """A new server; it offers what was published last, or else the learner's present version."""
        learner, settings = self._loaded(), self.settings
        version, arrays = self._published or (_version(settings, learner), named_arrays(learner.decoder))
        default_url = str(settings.directory.path / "weights")
        broadcaster = open_broadcaster(self.config.weights, settings.job, settings.token, default_url)
        broadcaster.publish(version, trained_arrays(arrays, self.config.learner.optimizer.frozen))
        self._broadcaster, self._published = broadcaster, (version, arrays)

    def publish(self, version: WeightVersion, arrays: Mapping[str, Any]) -> None:
        """See `WeightSink.publish`; what is published already is not published again."""
        with self._publishing:
            assert self._broadcaster is not None  # opened before there is anything to publish
            if self._broadcaster.latest() != version:
                self._broadcaster.publish(version, trained_arrays(arrays, self.config.learner.optimizer.frozen))
                self._published = version, arrays

    def restart_broadcaster(self) -> None:
        """Another server for the same version; clients find it by its new incarnation. May be called at any time."""
        with self._publishing:
            if self._broadcaster is None:
                raise UnreachableError(f"{self.around.identity} has no broadcaster yet: wait until it runs")
            self._broadcaster.close()
            self._open_broadcaster()

    # --- tasks ---------------------------------------------------------------------------------------------------

    def warm_start(self) -> None:
        """Supervised steps on the environments' reference solutions; then version 0 is published anew."""
        config, learner = self.config, self._loaded()
        assert config.learner.warm_start is not None  # or nobody asks for it

        def on_step(done: int, total: int, metrics: Mapping[str, float]) -> None:
            if self.stopping.is_set():
                raise Stopped("warm start")
            self._steps_done += 1
            self.doing = f"warm start {done}/{total}"
            self.around.metrics(0, {"warm_start/step": float(done), **metrics})

        warm_start(learner, self._manager(), config.learner.warm_start, config.seed, on_step)
        self._published = None  # the same version, with other weights
        self.restart_broadcaster()

    def probe(self) -> float | None:
        """Largest difference between the servers' log-probabilities and the learner's; None where none was measured.

        Raises:
            MismatchError: it is too large.
        """
        self.doing = "checking that engines and learner agree"
        config = self.config
        lesson_id, limit = next(iter(config.curriculum.lessons)), config.learner.mismatch_limit
        try:
            worst = probe_parity(self._manager(), self._loaded(), lesson_id, config.learner.row_length, limit)
        except EnvironmentFailure as failure:  # counted where it trains; parity is checked at every step, too
            self.around.event("parity_not_probed", lesson=lesson_id, reason=str(failure))
            return None
        self.around.event("parity", largest_difference=worst, limit=limit)
        return worst

    def train(self, results: Mapping[str, Any]) -> int:
        """Updates until the last step, or until `finish`; returns the version reached.

        Args:
            results: Evaluations so far; they travel in the checkpoints.
        """
        self._results = dict(results)
        learner = self._loaded()
        loop = TrainingLoop(
            learner,
            lambda: named_arrays(learner.decoder),
            self._batches,
            self._commits,
            self,
            lineage=self.settings.lineage,
            steps=self.config.steps,
            batch_timeout_s=self.config.overseer.no_progress_s,
            progress=time.monotonic,  # who owes progress is seen by the overseer alone
            on_step=self._on_step,
            checkpoint=self._save,
            checkpoint_every=self.config.overseer.checkpoint_every,
        )
        if self.settings.checkpoint is None:
            self._save(learner.step)
        self._replay.call("admit", timeout_s=STATES_S)
        self._loop, self._training = loop, True
        if self.stopping.is_set():
            loop.stop()
        try:
            loop.run()
        finally:
            self._training = False
        self.doing = f"done at step {learner.step}"
        return learner.step

    def publish_last(self) -> None:
        """The version that training reached, for the last evaluation; a task after `train`."""
        learner = self._loaded()
        self.publish(_version(self.settings, learner), named_arrays(learner.decoder))

    def finish(self) -> None:
        """Training ends at the next update boundary, with a checkpoint."""
        if self._loop is not None:
            self._loop.stop()
        self._batches.stop()

    def drain(self) -> None:
        """The overseer hears of the notice, has the newest version saved, and begins anew elsewhere."""

    def stop(self, timeout_s: float) -> None:
        """See `Component.stop`."""
        self.stopping.set()
        self.finish()
        self._commits.stop()
        super().stop(timeout_s)
        if self._broadcaster is not None:
            self._broadcaster.close()
        self._pool.close()

    def _loaded(self) -> Learner:
        if self._learner is None:
            raise PenstockError("the learner is not loaded yet: wait until it runs")
        return self._learner

    def _manager(self) -> RolloutManager:
        curriculum = Curriculum(self.config.curriculum)  # names the lessons; nothing is recorded in it
        context = RemoteContext(self._pool, self._tokenizer)
        return RolloutManager(curriculum, context, self.config.seed, self.settings.lineage)

    # --- checkpoints and reports -----------------------------------------------------------------------------------

    def _save(self, step: int) -> None:
        try:  # before the others' states: an evaluation that counts as done is in the curriculum's state, too
            self._evaluator_state = self.around.caller("evaluator-0").call("evaluation_state", timeout_s=STATES_S)
        except UnreachableError:
            pass  # it is being replaced, and will go on from this older state: an evaluation is made again
        states = self._commits.checkpoint_states(step, STATES_S) | {
            "evaluator": self._evaluator_state,
            "run": {"lineage": self.settings.lineage, "results": self._results},
        }
        folder, keep = self.settings.directory.checkpoints, self.config.overseer.keep_checkpoints
        path = when_there_is_room(
            lambda: save_checkpoint(folder, step, self._loaded(), self._tokenizer, states, keep),
            self.config.replay.store.full_disk_s,
            self._wait_for_room,
        )
        self._commits.checkpoint_saved(step)
        self.around.event("checkpoint", step, path=str(path))

    def _wait_for_room(self, seconds: float, why: str) -> None:
        self.around.event("disk_full", reason=why)
        self._waiting_for_room = True
        if self.stopping.wait(seconds):
            raise Stopped(why)
        self._waiting_for_room = False

    def _on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._steps_done += 1
        self._seconds["idle"] += metrics["time/wait_for_batch"]
        self._seconds["busy"] += metrics["time/update"] + metrics["time/checkpoint"]
        assert self._broadcaster is not None  # it published this version's parent
        self.around.metrics(step, {**metrics, **self._broadcaster.metrics()})

    def _describe(self, busy_s: float, idle_s: float) -> Condition:
        training = self._training and self._loop is not None
        doing = self._loop.doing if training and self._loop is not None else self.doing
        waiting = self._waiting_for_room or doing.startswith(("waiting", "done"))
        address = {} if self._broadcaster is None else {"weights": self._broadcaster.endpoint(), "training": training}
        step = 0 if self._learner is None else self._learner.step
        return Condition(
            self.state,
            doing,
            None if waiting else float(self._steps_done),
            self._seconds["busy"],
            self._seconds["idle"],
            address,
            facts=self._facts(step=step, training=training),
        )


def _version(settings: Settings, learner: Learner) -> WeightVersion:
    """The version that the learner holds."""
    return WeightVersion(settings.lineage, learner.step)


def make_learner(around: Surroundings, settings: Mapping[str, Any]) -> LearnerRole:
    """Factory of the learner."""
    return LearnerRole(around, Settings.of(settings))
