"""A whole run on a virtual clock: workers and a learner that finish in any order, fail, hang and crash.

Everything random is drawn from seeds, so a schedule that breaks a rule can be replayed. What a ticket leads to
(success, failure, no signal) depends on the ticket alone, how long it takes on the schedule alone.
"""

import heapq
import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from tests.replay.memory_store import MemoryStore

from penstock.batch import make_batch_maker
from penstock.replay import Ledger, PacedReplayBuffer, ProblemRules, ReplayBufferConfig, TicketIssuer, TicketRules
from penstock.types import (
    Rollout,
    RolloutBatch,
    RolloutGroup,
    RolloutMetadata,
    RolloutSink,
    Ticket,
    TrainingBatch,
    fold,
)

GROUP_SIZES = {"easy": 2, "hard": 3}
ENGINE = "inference-0#0"


class Curriculum:
    """Draws lessons by everything that it was told, in that order: any reordering changes its choices."""

    def __init__(self) -> None:
        self.told = 0
        self.groups: list[str] = []

    def sample_lesson(self, seed: int) -> str:
        return sorted(GROUP_SIZES)[fold(seed, self.told) % len(GROUP_SIZES)]

    def update(self, group: RolloutGroup) -> None:
        lesson_id, index = lesson_and_index(group.group_id)
        rewards = "/".join(f"{reward:.4f}" for reward in group.rewards)
        self.told = fold(self.told, lesson_id, index, rewards)
        self.groups.append(group.group_id)

    def state(self) -> dict[str, int]:
        return {"told": self.told}

    def restore(self, state: dict[str, int]) -> None:
        self.told = state["told"]


@dataclass(frozen=True)
class World:
    """What goes wrong, and how often."""

    outcome_seed: int = 0
    schedule_seed: int = 0
    slots: int = 6
    failing: float = 0.0
    flat: float = 0.0
    malformed: float = 0.0
    cut: float = 0.0
    hanging: float = 0.0
    slow: float = 0.2
    serving_lag_s: float = 0.0
    digest_lag_s: float | None = None
    ahead: int = 0


@dataclass
class Trained:
    """One update, as the learner saw it."""

    step: int
    batch: TrainingBatch
    keys: list[tuple[str, int]]
    rewards: list[float] = field(default_factory=list)


def lesson_and_index(ticket_id: str) -> tuple[str, int]:
    lesson_id, _, index = ticket_id.rsplit("-", 2)
    return lesson_id, int(index)


def make_rollout(
    rollout_id: str,
    *,
    reward: float = 0.0,
    weight_step: int = 0,
    newest_step: int | None = None,
    lineage: int = 0,
    timestamp: float = 0.0,
    lesson_id: str | None = None,
    worker_id: str = "worker-0",
) -> Rollout:
    """A small rollout with metadata."""
    steps = np.array([weight_step, weight_step if newest_step is None else newest_step], np.int32)
    return Rollout(
        env_name="words",
        env_example_id=rollout_id.rpartition("/")[0],
        prompt_tokens=np.array([1, 2], np.int32),
        response_tokens=np.array([3, 4], np.int32),
        response_logprobs=np.array([-0.5, -1.0], np.float32),
        token_rewards=np.array([0.0, reward], np.float32),
        episode_reward=float(np.float32(reward)),
        metadata=RolloutMetadata(worker_id, timestamp, weight_step, lineage, engines=(ENGINE,)),
        rollout_id=rollout_id,
        lesson_id=lesson_and_index(rollout_id.rpartition("/")[0])[0] if lesson_id is None else lesson_id,
        response_weight_steps=steps,
        oldest_weight_step=weight_step,
    )


def make_group(ticket: Ticket, rewards: Sequence[float], **fields) -> RolloutGroup:
    """The group of a ticket."""
    fields.setdefault("weight_step", ticket.admitted_step)
    rollouts = [make_rollout(f"{ticket.ticket_id}/{i}", reward=reward, **fields) for i, reward in enumerate(rewards)]
    asked = ticket.seed if ticket.problem is None else ticket.problem
    return RolloutGroup(f"words:{asked}", tuple(rollouts), ticket.ticket_id)


def deliver(buffer: RolloutSink, *groups: RolloutGroup) -> None:
    buffer.add_batches([RolloutBatch.of((group,)) for group in groups])


class Simulation:
    """Drives the real issuer, buffer and batch maker; checks the rules at every batch."""

    def __init__(
        self,
        config: ReplayBufferConfig,
        world: World,
        store=None,
        ledger: Ledger | None = None,
        lineage: int = 0,
        states: dict | None = None,
        checkpoint_every: int = 0,
        problems: Mapping[str, ProblemRules] | None = None,
    ) -> None:
        self.config, self.world = config, world
        self.now = 1000.0
        self.store = MemoryStore() if store is None else store
        self.ledger = Ledger(lineage) if ledger is None else ledger
        self.curriculum = Curriculum()
        rules = TicketRules(7, self.curriculum, GROUP_SIZES.__getitem__, problems=problems or {})
        self.issuer = TicketIssuer(config, rules, lineage, self.ledger, self.clock)
        maker = make_batch_maker(
            config.batch_maker,
            advantage="rloo",
            max_tokens=16,
            max_samples=config.max_samples,
            ordered=config.synchronous,
            allow_truncated_sampling=False,
            seed=7,
        )
        self.buffer = PacedReplayBuffer(config, self.store, maker, self.issuer, self.clock)
        self.buffer.pool.on_group = self.curriculum.update
        self.step = 0
        if states is not None:
            self.curriculum.restore(states["curriculum"])
            self.issuer.restore(states["issuer"])
            self.buffer.restore(states["replay"])
            self.step = self.issuer.update
        self.checkpoint_every = checkpoint_every
        self.checkpoints: dict[int, dict] = {}
        self.trained: list[Trained] = []
        self.admitted: dict[str, Ticket] = {}
        self.uses: Counter[str] = Counter()
        self.aborted_then_delivered = 0
        self._schedule = random.Random(world.schedule_seed)
        self._events: list = []
        self._count = 0
        self._busy = 0
        self._learning = False
        self._ready: deque[TrainingBatch] = deque()
        self._publish()

    def clock(self) -> float:
        return self.now

    def run(self, until_step: int, most_events: int = 100_000) -> list[Trained]:
        """Runs until that many updates are done.

        Raises:
            AssertionError: a rule was broken, or nothing can happen any more.
        """
        for _ in range(most_events):
            if self.step >= until_step and not self._learning:
                return self.trained
            self._start_work()
            self._start_update(until_step)
            self._start_work()  # a file that the learner had written may have let the next cohort in
            if self._events:
                self.now, _, action, arguments = heapq.heappop(self._events)
                action(*arguments)
            else:
                self._wait_for_stragglers()
        raise AssertionError(f"no end after {most_events} events: {self.buffer.waiting_for()}")

    def _wait_for_stragglers(self) -> None:
        before = len(list(self.issuer.outstanding)), self.issuer.outstanding.trainable
        self.now += self.config.straggler_timeout_s + 1
        self._start_update(self.step + 1)
        after = len(list(self.issuer.outstanding)), self.issuer.outstanding.trainable
        assert self._events or before != after or self._busy, f"deadlock: {self.buffer.waiting_for()}"
        self._busy = 0  # generators that hang are replaced

    def _after(self, delay: float, action, *arguments) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + delay, self._count, action, arguments))

    # --- workers ---

    def _start_work(self) -> None:
        while self._busy < self.world.slots:
            tickets = self.issuer.acquire(self._schedule.randint(1, self.world.slots - self._busy), 0)
            if not tickets:
                return
            self._check_admission()
            for ticket in tickets:
                self._busy += 1
                self.admitted[ticket.ticket_id] = ticket
                serving = self.issuer.serving_step
                slow = 20.0 if self._schedule.random() < self.world.slow else 1.0
                hangs = self._schedule.random() < self.world.hanging
                if not hangs:
                    self._after(slow * self._schedule.random(), self._finish_work, ticket, serving)
                elif self._schedule.random() < 0.5:  # or it never comes back
                    delay = self.config.straggler_timeout_s * 4
                    self._after(delay, self._finish_work, ticket, serving, False)

    def _check_admission(self) -> None:
        serving = self.issuer.serving_step
        assert serving is not None
        bound = (self.config.staleness_budget + 1 - (self.issuer.update - serving)) * self.config.groups_per_batch
        assert len(self.issuer.outstanding) <= bound

    def _finish_work(self, ticket: Ticket, serving: int, in_slot: bool = True) -> None:
        self._busy = max(0, self._busy - in_slot)
        outcome = random.Random(fold(self.world.outcome_seed, ticket.lesson_id, ticket.index))
        size = GROUP_SIZES[ticket.lesson_id]
        rewards = [outcome.random() for _ in range(size)]
        kind = outcome.random()
        world = self.world
        if kind < world.failing:
            self.issuer.fail(ticket, "invalid", "the environment raised")
            return
        if kind < world.failing + world.flat:
            rewards = [0.5] * size
        newest = self.issuer.serving_step
        group = make_group(
            ticket,
            rewards,
            weight_step=serving,
            newest_step=newest,
            timestamp=self.now,
            lineage=self.issuer.lineage,
        )
        if world.failing + world.flat < kind < world.failing + world.flat + world.malformed:
            group = self._break(group, outcome)
        if world.cut:
            ends = ["length" if outcome.random() < world.cut else "stop" for _ in group.rollouts]
            cut = [replace(rollout, finish_reason=end) for rollout, end in zip(group.rollouts, ends, strict=True)]
            group = replace(group, rollouts=tuple(cut))
        deliver(self.buffer, group)
        self.buffer.check_ledger()

    def _break(self, group: RolloutGroup, rng: random.Random) -> RolloutGroup:
        members = list(group.rollouts)
        spoiled = rng.randrange(len(members))
        match rng.randrange(5):
            case 0:
                members[spoiled] = replace(members[spoiled], metadata=None)
            case 1:
                members = members[:spoiled] + members[spoiled + 1 :]
            case 2:
                members[spoiled] = members[0]
            case 3:
                members[spoiled] = replace(members[spoiled], response_mask=np.zeros(2, np.bool_))
            case _:
                members = [replace(member, metadata=None) for member in members]
        return replace(group, rollouts=tuple(members))

    # --- learner ---

    def _start_update(self, until_step: int) -> None:
        if not self._learning and self.step < until_step:
            batch = self._ready.popleft() if self._ready else self.buffer.try_next_batch(self.step)
            if batch is not None:
                assert batch.step == self.step
                self._check_batch(batch)
                self._learning = True
                self._after(1.0 + self._schedule.random(), self._finish_update, batch)
        while self._learning and len(self._ready) < self.world.ahead and self.issuer.update < until_step:
            batch = self.buffer.await_batch(self.issuer.update, 0.0, lambda: False)  # as the data loader does
            if batch is None:
                return
            self._ready.append(batch)

    def _check_batch(self, batch: TrainingBatch) -> None:
        maker = self.config.batch_maker
        if maker.name == "grpo" or maker.unit == "rollout":
            assert batch.examples
        else:
            assert len(batch.group_ids) == self.config.groups_per_batch
        assert len(set(batch.group_ids)) == len(batch.group_ids)
        ids = [rollout_id for example in batch.examples for rollout_id in example.rollout_ids]
        assert len(ids) == len(set(ids))
        for example in batch.examples:
            oldest = int(example.weight_steps[example.loss_mask].min())
            lesson_id, _ = lesson_and_index(example.rollout_ids[0].rpartition("/")[0])
            assert batch.step - self.config.step_delay(lesson_id) <= oldest <= batch.step
        for group_id in batch.group_ids:
            ticket = self.admitted.get(group_id)
            fresh = not any(i.startswith(f"{group_id}/") for i in self.uses)
            assert maker.name == "grpo" or ticket is None or not fresh or batch.step <= ticket.deadline_step
        for rollout_id in ids:
            self.uses[rollout_id] += 1
            assert self.uses[rollout_id] <= self.config.uses
        keys = [lesson_and_index(group_id) for group_id in batch.group_ids]
        rewards = [float(example.advantage.max()) for example in batch.examples]
        self.trained.append(Trained(batch.step, batch, keys, rewards))

    def _finish_update(self, batch: TrainingBatch) -> None:
        self._learning = False
        self.buffer.finish_update(batch.step)
        self.step = batch.step + 1
        self.buffer.set_current_step(self.step)
        self.buffer.check_ledger()
        if self.checkpoint_every and self.step % self.checkpoint_every == 0:
            with self.buffer.boundary():
                self.checkpoints[self.step] = {
                    "curriculum": self.curriculum.state(),
                    "issuer": self.issuer.state(),
                    "replay": self.buffer.state(),
                }
        self._publish()

    def _publish(self) -> None:
        """The learner's version; what engines tell of it comes so much later than they serve it."""
        serving_s, telling_s = self.world.serving_lag_s, self.world.digest_lag_s
        if telling_s is not None:
            told = self.issuer.lineage, self.step, {"weights": str(self.step)}
            self.buffer.digests.expect_digests(*told)
            self._after(serving_s + telling_s, self.buffer.digests.tell_digests, ENGINE, *told)
        if self.trained:
            self._after(serving_s, self.issuer.set_serving_step, self.step)
        else:
            self.issuer.set_serving_step(self.step)
