"""What simulated workers deliver: groups whose arrays are shared, and whose ids are their tickets'."""

import numpy as np

from penstock.types import Rollout, RolloutBatch, RolloutGroup, RolloutMetadata, Ticket

GROUP_SIZE = 8
PROMPT_TOKENS, RESPONSE_TOKENS = 32, 160
"""As in `benchmarks.scale.latencies`: limits between 64 and 256 tokens are 160 on average."""


class GroupMaker:
    """Makes the group of a ticket; what it holds follows from the ticket's seed.

    Args:
        worker: Who delivers it.
    """

    def __init__(self, worker: str) -> None:
        self._worker = worker
        rng = np.random.default_rng(0)
        self._prompt = rng.integers(0, 250, PROMPT_TOKENS, np.int32)
        self._tokens = rng.integers(0, 250, RESPONSE_TOKENS, np.int32)
        self._logprobs = -rng.exponential(1.0, RESPONSE_TOKENS).astype(np.float32)

    def __call__(self, ticket: Ticket, lineage: int, now: float) -> RolloutBatch:
        """One group, finished at `now` (Unix seconds)."""
        members = tuple(self._rollout(ticket, lineage, now, member) for member in range(GROUP_SIZE))
        return RolloutBatch.of((RolloutGroup(f"cats:{ticket.index}", members, ticket.ticket_id),))

    def _rollout(self, ticket: Ticket, lineage: int, now: float, member: int) -> Rollout:
        rewards = np.zeros(RESPONSE_TOKENS, np.float32)
        rewards[-1] = reward = float(member % 2)
        return Rollout(
            env_name="cats",
            env_example_id=str(ticket.index),
            prompt_tokens=self._prompt,
            response_tokens=self._tokens,
            response_logprobs=self._logprobs,
            token_rewards=rewards,
            episode_reward=reward,
            metadata=RolloutMetadata(self._worker, now, ticket.admitted_step, lineage),
            rollout_id=f"{ticket.ticket_id}/{member}",
            lesson_id=ticket.lesson_id,
            response_weight_steps=np.full(RESPONSE_TOKENS, ticket.admitted_step, np.int32),
        )
