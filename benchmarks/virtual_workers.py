"""Workers and learners of a run on a virtual clock, with the production issuer and buffer: the model of `pacing`.

A ticket leads to the same group whoever runs it and when: its lengths and rewards follow from its seed. A rollout takes
time in proportion to its tokens, whose number is log-normal; a group takes as long as its longest.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from benchmarks.no_files import FateLog, NoFiles
from penstock.batch import BatchMaker, DeadlineBatchMaker, RecencyBatchMaker
from penstock.replay import (
    OpenAdmission,
    PacedReplayBuffer,
    ReplayBuffer,
    ReplayBufferConfig,
    TicketIssuer,
    TicketRules,
)
from penstock.types import (
    Rollout,
    RolloutGroup,
    RolloutMetadata,
    Ticket,
    TrainingBatch,
    fold,
    generator,
)

GROUPS, GROUP_SIZE, SLOTS, TOKENS_PER_S = 8, 4, 32, 10.0
MEAN_TOKENS = {"fast": 10, "slow": 100}
REWARD = {"fast": 0.8, "slow": 0.3}
JITTER = 0.5


class EvenLessons:
    """Draws each lesson as often."""

    def sample_lesson(self, seed: int) -> str:
        return sorted(MEAN_TOKENS)[fold(seed, "lesson") % len(MEAN_TOKENS)]


@dataclass(frozen=True)
class Generated:
    """What a ticket leads to, whoever runs it and when."""

    lesson_id: str
    tokens: tuple[int, ...]
    rewards: tuple[float, ...]

    @classmethod
    def of(cls, lesson_id: str, seed: int) -> "Generated":
        rng = generator(fold(seed, "generation"))
        noise = rng.normal(size=GROUP_SIZE)
        tokens = MEAN_TOKENS[lesson_id] * np.exp(JITTER * noise - JITTER**2 / 2)
        wins = rng.random(GROUP_SIZE) < REWARD[lesson_id] - 0.1 * noise  # long answers fail more often
        return cls(lesson_id, tuple(max(1, round(n)) for n in tokens), tuple(float(win) for win in wins))

    @property
    def seconds(self) -> float:
        return max(self.tokens) / TOKENS_PER_S

    def group(self, ticket: Ticket, version: int, now: float) -> RolloutGroup:
        """Delivered now, sampled under `version` from the first token on."""
        members = zip(self.tokens, self.rewards, strict=True)
        rollouts = (_rollout(ticket, i, n, reward, version, now) for i, (n, reward) in enumerate(members))
        return RolloutGroup(f"simulated:{ticket.seed}", tuple(rollouts), ticket.ticket_id)


def _rollout(ticket: Ticket, index: int, tokens: int, reward: float, version: int, now: float) -> Rollout:
    rewards = np.zeros(tokens, np.float32)
    rewards[-1] = reward
    return Rollout(
        env_name="simulated",
        env_example_id=str(ticket.seed),
        prompt_tokens=np.ones(1, np.int32),
        response_tokens=np.ones(tokens, np.int32),
        response_logprobs=np.zeros(tokens, np.float32),
        token_rewards=rewards,
        episode_reward=reward,
        metadata=RolloutMetadata("worker", now, version),
        rollout_id=f"{ticket.ticket_id}/{index}",
        lesson_id=ticket.lesson_id,
    )


def mean_group_s() -> float:
    """Mean seconds per group, both lessons alike."""
    lessons = sorted(MEAN_TOKENS)
    return float(np.mean([Generated.of(lessons[i % 2], fold(0, "mean", i)).seconds for i in range(2000)]))


class Policy(Protocol):
    """How groups are begun, and how batches are asked for."""

    fates: dict[str, str]
    buffer: ReplayBuffer | PacedReplayBuffer

    def begin(self, most: int) -> list[Ticket]: ...

    def batch(self, step: int) -> TrainingBatch | None: ...

    def finish(self, step: int) -> None:
        """Update `step` was applied; the version after it serves at once."""
        ...


class Paced:
    """Tickets, deadlines, bounded overtaking."""

    def __init__(self, budget: int, seed: int, clock: Callable[[], float]) -> None:
        config = _config(budget)
        log = FateLog()
        self.fates, store = log.fates, NoFiles(log)
        self._issuer = TicketIssuer(
            config, TicketRules(seed, EvenLessons(), lambda _: GROUP_SIZE), 0, store.open_ledger(), clock
        )
        maker = DeadlineBatchMaker(ordered=config.synchronous)
        self.buffer = PacedReplayBuffer(config, store, maker, self._issuer, clock)
        self._issuer.set_serving_step(0)

    def begin(self, most: int) -> list[Ticket]:
        return self._issuer.acquire(most, 0)

    def batch(self, step: int) -> TrainingBatch | None:
        return self.buffer.try_next_batch(step)

    def finish(self, step: int) -> None:
        self.buffer.finish_update(step)
        self.buffer.set_current_step(step + 1)
        self._issuer.set_serving_step(step + 1)


class DropOnly:
    """Whoever is free generates; freshness alone decides what becomes of it."""

    def __init__(self, maker: BatchMaker, budget: int, seed: int, clock: Callable[[], float]) -> None:
        log = FateLog()
        self.fates, store = log.fates, NoFiles(log)
        self._admission = OpenAdmission(store.open_ledger())
        self.buffer = ReplayBuffer(_config(budget), store, maker, self._admission, clock)
        self._tickets = self._endless(seed)

    def begin(self, most: int) -> list[Ticket]:
        tickets = list(itertools.islice(self._tickets, most))
        for ticket in tickets:
            self._admission.start(ticket.ticket_id, ticket.lesson_id, GROUP_SIZE)
        return tickets

    def batch(self, step: int) -> TrainingBatch | None:
        return self.buffer.sample(GROUPS)

    def finish(self, step: int) -> None:
        self.buffer.set_current_step(step + 1)

    def _endless(self, seed: int) -> Iterator[Ticket]:
        lessons = EvenLessons()
        counts = {lesson_id: itertools.count() for lesson_id in MEAN_TOKENS}
        for draw in itertools.count():
            lesson_id = lessons.sample_lesson(fold(seed, "lesson", draw))
            index = next(counts[lesson_id])
            yield Ticket(f"{lesson_id}-0-{index}", lesson_id, index, fold(seed, lesson_id, index), 0, 0)


def _config(budget: int) -> ReplayBufferConfig:
    return ReplayBufferConfig(groups_per_batch=GROUPS, staleness_budget=budget, straggler_timeout_s=1e9)


POLICIES: dict[str, Callable[[int, int, Callable[[], float]], Policy]] = {
    "paced": Paced,
    "drop-only, oldest first": lambda *rest: DropOnly(DeadlineBatchMaker(), *rest),
    "drop-only, by recency": lambda *rest: DropOnly(RecencyBatchMaker(unit="group"), *rest),
}
