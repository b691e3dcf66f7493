"""Small fragments of simulators to store, batch and count, told apart by their rewards."""

import numpy as np

from penstock.types import RolloutBatch, RolloutGroup, RolloutMetadata, SampleFragment


def make_fragment(
    group_id: str = "cart-w0-0-0",
    steps: int = 4,
    weight_steps: int | list[int] = 0,
    timestamp: float = 1000.0,
    faults: tuple[int, ...] = (),
    task: str = "cart",
    env_name: str = "CartPole-v1",
    reward: float = 1.0,
    lineage: int = 0,
) -> SampleFragment:
    """A fragment with one observation of four numbers, one action, and one episode that ends at step 1 if there is one.

    Args:
        group_id: Its id.
        steps: T.
        weight_steps: Of all steps, or of each.
        timestamp: When it was finished.
        faults: Steps not to be trained on.
        task: Its task.
        env_name: Its environment.
        reward: Of each step.
        lineage: Of its weights.
    """
    versions = np.broadcast_to(np.asarray(weight_steps, np.int32), (steps,)).copy()
    ends = np.arange(steps) == 1
    flags = np.zeros(steps, np.bool_)
    flags[list(faults)] = True
    finals = np.flatnonzero(ends).astype(np.int32)
    return SampleFragment(
        task=task,
        env_name=env_name,
        group_id=group_id,
        slot=3,
        observations={"": np.arange(4 * (steps + 1), dtype=np.float32).reshape(steps + 1, 4)},
        actions={"": np.arange(steps, dtype=np.int64) % 2},
        rewards=np.full(steps, reward, np.float32),
        terminated=ends,
        truncated=flags.copy(),
        faults=flags,
        first=np.append(False, ends),
        logprobs=np.full(steps, -0.5, np.float32),
        values=np.linspace(0, 1, steps + 1, dtype=np.float32),
        weight_steps=versions,
        episodes=np.cumsum(ends).astype(np.int64),
        final_steps=finals,
        final_observations={"": np.full((len(finals), 4), 7, np.float32)},
        initial_state={"hidden": np.full(2, 0.25, np.float32)},
        timings={"generate_s": 2.0, "policy_s": 0.5, "simulate_s": 1.25},
        metadata=RolloutMetadata("w0", timestamp, int(versions.min()), lineage),
    )


def a_batch(*fragments: SampleFragment) -> RolloutBatch[SampleFragment]:
    """Each as a group of one."""
    groups = (RolloutGroup(f"{each.env_name}:{each.slot}", (each,), each.group_id) for each in fragments)
    return RolloutBatch.of(tuple(groups))
