"""Rollouts in, groups sealed, a batch made and stored, and all of it read back with SQL; run it with a directory.

python examples/replay_usage.py NEW_DIRECTORY
"""

import sys
import time

import duckdb
import numpy as np

from penstock.batch import GrpoBatchMaker
from penstock.replay import ReplayBuffer, ReplayBufferConfig, RolloutStore
from penstock.types import Rollout, RolloutBatch, RolloutGroup, RolloutMetadata


def answer_to(question: int, attempt: int) -> Rollout:
    """One answer of a policy at weight step 0; here random tokens, and every other one is right."""
    rng = np.random.default_rng([question, attempt])
    reward = float(attempt % 2)
    return Rollout(
        env_name="sums",
        env_example_id=f"question-{question}",
        prompt_tokens=np.array([1, 10 + question], np.int32),
        response_tokens=rng.integers(0, 100, 5, dtype=np.int32),
        response_logprobs=np.log(rng.uniform(0.1, 1.0, 5)).astype(np.float32),
        token_rewards=np.array([0, 0, 0, 0, reward], np.float32),
        episode_reward=reward,
        metadata=RolloutMetadata(worker_id="me", timestamp=time.time(), weight_step=0),
        rollout_id=f"sums-0-{question}/{attempt}",
        lesson_id="sums",
    )


def main(directory: str) -> None:
    store = RolloutStore(directory)
    buffer = ReplayBuffer(ReplayBufferConfig(), store, GrpoBatchMaker())
    for question in range(4):  # a group is all the answers to one question; it is stored as a whole
        answers = tuple(answer_to(question, attempt) for attempt in range(4))
        group = RolloutGroup(f"sums:question-{question}", answers, group_id=f"sums-0-{question}")
        buffer.add_batches([RolloutBatch.of((group,))])

    batch = buffer.sample(8)  # 8 rollouts with advantages; their file is written before you have them
    assert batch is not None  # it would be, had we too few
    print(f"{batch.batch_id}: {len(batch.examples)} examples")
    buffer.set_current_step(1)  # you trained on it, and hold weight step 1 now
    print({name: count for name, count in buffer.metrics().items() if "ledger" in name and count})
    buffer.close()
    store.close()

    rollouts, batches = f"'{directory}/rollouts/*.parquet'", f"'{directory}/batches/*.parquet'"
    query = f"""
        SELECT env_example_id, count(*) AS answers, mean(episode_reward) AS reward, count(advantage) AS trained
        FROM {rollouts} LEFT JOIN {batches} USING (rollout_id) GROUP BY env_example_id ORDER BY env_example_id"""
    print(duckdb.sql(query))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "my-experience")
