"""The one compiled call of a decision: state out of the slots' arrays, step, sample, state back in place.

Compiled calls are shared by all runners of a process that have the same network, slots and batch size: workers that
are threads compile once. Arrays of slots are [slots + 1, …]; the last row belongs to padding. They are donated.
"""

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from penstock.fleet.policy_layout import InputLayout, OutputLayout
from penstock.model.control import ControlPolicy, Distribution
from penstock.model.control.memory import reset
from penstock.types import fold

_COMPILING = threading.Lock()
_DONATED = (2, 3)  # decision counts and recurrent states


def compute_inline() -> None:
    """Lets CPUs compute in the thread that asks; for processes that have not used JAX yet, without effect in others.

    By default JAX hands every call to a thread of its own. To wake that thread takes longer than a small policy's
    decision, and it takes processor time from the simulators. Accelerators are not affected.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)


@dataclass(frozen=True, slots=True)
class Bucket:
    """One padded batch size.

    Attributes:
        inputs: How a batch is packed.
        outputs: How answers come back.
        call: Compiled. Takes weights, keys, counts, states, the block of words and the whole leaves; gives the answers'
            block, the states before, and counts and states after.
    """

    inputs: InputLayout
    outputs: OutputLayout
    call: Callable[..., Any]


def bucket_of(policy: ControlPolicy, num_slots: int, rows: int, deterministic: bool) -> Bucket:
    """Compiles, or finds what was compiled in this process for a policy of the same form."""
    leaves, structure = jax.tree.flatten(policy)
    shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
    with _COMPILING:  # whoever comes second finds it
        return _compiled(structure, shapes, num_slots, rows, deterministic)


@functools.lru_cache(maxsize=64)
def _compiled(structure: Any, weights: tuple[Any, ...], num_slots: int, rows: int, deterministic: bool) -> Bucket:
    policy: ControlPolicy = jax.tree.unflatten(structure, weights)
    inputs = InputLayout(policy.spaces.observations, rows, padding_slot=num_slots)
    outputs = OutputLayout(policy.spaces.actions, rows)
    run = jax.jit(_decision(structure, inputs, outputs, deterministic), donate_argnums=_DONATED)
    keys = jax.ShapeDtypeStruct((num_slots + 1, 2), jnp.uint32)
    counts = jax.ShapeDtypeStruct((num_slots + 1,), jnp.int32)
    states = jax.eval_shape(lambda: policy.initial_state(num_slots + 1))
    return Bucket(inputs, outputs, run.lower(weights, keys, counts, states, *inputs.empty()).compile())


def _decision(structure: Any, inputs: InputLayout, outputs: OutputLayout, deterministic: bool) -> Callable[..., Any]:
    def run(weights: Any, keys: Array, counts: Array, states: Any, block: Array, whole: Any) -> Any:
        policy: ControlPolicy = jax.tree.unflatten(structure, weights)
        slots, first, observations = inputs.unpack(block, whole)
        before = reset({name: array[slots] for name, array in states.items()}, first)
        distribution, values, after = policy.step(observations, before, first)
        count = counts[slots]
        actions = distribution.mode() if deterministic else _sampled(distribution, keys[slots], count)
        answers = outputs.join(actions, distribution.log_prob(actions), values)
        stored = {name: array.at[slots].set(after[name]) for name, array in states.items()}
        return answers, before, counts.at[slots].set(count + 1), stored

    return run


def slot_keys(seed: int, rows: int) -> np.ndarray:
    """The first raw random key of each slot, uint32 [rows, 2]."""
    words = [fold(seed, "actions", slot) for slot in range(rows)]
    return np.array([(word >> 32, word & 0xFFFFFFFF) for word in words], np.uint32)


def _sampled(distribution: Distribution, keys: UInt32[Array, "rows 2"], counts: Array) -> dict[str, Array]:
    """One action per row, each with its own key: the slot's first one, its second word counted up.

    Threefry is a block cipher: different keys are different streams, however close. A `fold_in` would add a second
    pass of it to every compiled size.
    """

    def sample(row: Distribution, words: Array) -> dict[str, Array]:
        return row.sample(jax.random.wrap_key_data(words, impl="threefry2x32"))

    return jax.vmap(sample)(distribution, keys.at[:, 1].add(counts.astype(jnp.uint32)))
