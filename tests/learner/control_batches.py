"""Small control policies, and fragments that they might have made."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from penstock.model.control import ControlModelConfig, ControlPolicy, make_control_policy
from penstock.types import FragmentExample, LeafSpace, SampleFragment, Spaces, TrainingBatch

SPACES = Spaces(
    (LeafSpace("", "box", (3,), "float32"),),
    (LeafSpace("", "discrete", (), "int64", (4,)),),
)
"""Three numbers seen, one of four actions done."""


def make_policy(memory: str = "none", seed: int = 0, **options: Any) -> ControlPolicy:
    """Two layers of 8; weights large enough that actions differ in probability."""
    settings = {
        "hidden_sizes": (8, 8),
        "memory": memory,
        "memory_size": 8,
        "memory_window": 4,
        "policy_gain": 1.0,
    } | options
    return make_control_policy(ControlModelConfig(**settings), SPACES, seed)


def make_fragment(policy: ControlPolicy, length: int, seed: int, version: int = 0, **changes: Any) -> SampleFragment:
    """What `policy` might have done: actions drawn, log-probabilities and values its own; no episode ends.

    Args:
        policy: Behaves.
        length: T.
        seed: Of observations, actions and rewards.
        version: Under which it was sampled.
        changes: Other fields; ``ends`` {step: "terminated" | "truncated"} ends episodes there, with a last
            observation; ``state`` is the recurrent state that the fragment starts from.
    """
    rng = np.random.default_rng(seed)
    ends = changes.pop("ends", {})
    first = np.zeros(length + 1, bool)
    first[[step + 1 for step in ends]] = True
    observations = rng.normal(size=(length + 1, 3)).astype(np.float32)
    state = changes.pop("state", {name: array[0] for name, array in policy.initial_state(1).items()})
    batched = {name: jnp.asarray(array)[None] for name, array in state.items()}
    key, columns = jax.random.key(seed), {"": jnp.asarray(observations)[:, None]}
    actions, logprobs, values = _behave(policy, columns, jnp.asarray(first)[:, None], batched, key)
    fields: dict[str, Any] = {
        "task": "toy", "env_name": "toy", "group_id": f"w-0-0-{seed}", "slot": 0,
        "observations": {"": observations},
        "actions": {"": np.asarray(actions)[:-1, 0].astype(np.int64)},
        "rewards": rng.normal(size=length).astype(np.float32),
        "terminated": _at(length, ends, "terminated"), "truncated": _at(length, ends, "truncated"),
        "faults": np.zeros(length, bool), "first": first,
        "logprobs": np.asarray(logprobs)[:-1, 0], "values": np.asarray(values)[:, 0],
        "weight_steps": np.full(length, version, np.int32), "episodes": np.zeros(length, np.int64),
        "final_steps": np.array(sorted(ends), np.int32),
        "final_observations": {"": rng.normal(size=(len(ends), 3)).astype(np.float32)},
        "initial_state": {name: np.asarray(array) for name, array in state.items()},
    }  # fmt: skip
    return SampleFragment(**(fields | changes))


@jax.jit
def _behave(policy: ControlPolicy, observations: Any, first: Any, state: Any, key: Any) -> tuple[Any, Any, Any]:
    distribution, values, _ = policy.unroll(observations, first, state)
    actions = distribution.sample(key)
    return actions[""], distribution.log_prob(actions), values


def make_fragments(
    policy: ControlPolicy, count: int, length: int, seed: int = 0, version: int = 0
) -> list[SampleFragment]:
    """Several, with an end of either kind in each."""
    return [
        make_fragment(
            policy, length, 100 * seed + index, version, ends={index % length: "truncated", length // 2: "terminated"}
        )
        for index in range(count)
    ]


def make_batch(fragments: Sequence[SampleFragment], step: int = 0) -> TrainingBatch[FragmentExample]:
    """A batch for update `step`."""
    examples = tuple(FragmentExample(fragment) for fragment in fragments)
    return TrainingBatch("batch", step, examples, tuple(f.group_id for f in fragments), {})


def with_fault(fragment: SampleFragment, step: int) -> SampleFragment:
    """Everything at that step is nonsense, and says so."""
    rewards, logprobs, faults = fragment.rewards.copy(), fragment.logprobs.copy(), fragment.faults.copy()
    rewards[step], logprobs[step], faults[step] = np.nan, np.nan, True
    return replace(fragment, rewards=rewards, logprobs=logprobs, faults=faults)


def _at(length: int, ends: dict[int, str], kind: str) -> np.ndarray:
    return np.array([ends.get(step) == kind for step in range(length)], bool)
