"""A jitted control policy behind a rollout worker: decisions for any of its slots, recurrent state on the device.

One compiled call per decision: it takes the slots' state out of arrays of [slots + 1, …], resets it where an episode
begins, steps the policy, samples, and puts the state back in place; the last row belongs to padding. Batches are
padded to few sizes, all compiled before the first decision (`compile`), so that nothing compiles in flight.

Randomness: the k-th decision of a slot is sampled with a key made of seed, slot and k. How slots are batched does not
change it, but for the last bits of the products.

Memory: observations must not change until `Pending.result` returned; those with rows for the padding are read where
they lie if XLA can. What `result` returns is the caller's own, but for states, which are read-only and come when asked
for.

Not covered: more than one device; one slot twice in one batch (the order would be undefined).
"""

import bisect
from collections.abc import Iterator, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from penstock.fleet.arrivals import Decision, Leaves
from penstock.fleet.policy_call import Bucket, bucket_of, slot_keys
from penstock.fleet.policy_layout import OutputLayout, Packed
from penstock.model.control import ControlPolicy, named_arrays, with_named_arrays
from penstock.types import ConfigError, WeightVersion

_SMALLEST_PADDED = 8  # batches of fewer rows are padded to this, or are one row


class DeviceStates(Mapping[str, np.ndarray]):
    """States of n slots, on the device until one is asked for: most are never kept."""

    def __init__(self, arrays: Mapping[str, Array], n: int) -> None:
        self._arrays = arrays
        self._n = n

    def __getitem__(self, name: str) -> np.ndarray:
        """[n, …], read-only; on a CPU the device's own memory."""
        return np.asarray(self._arrays[name])[: self._n]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


class JaxPending:
    """A decision under way.

    Attributes:
        version: Whose weights decide.
    """

    def __init__(
        self,
        n: int,
        block: Array,
        states: Mapping[str, Array],
        layout: OutputLayout,
        version: WeightVersion,
        inputs: Packed,
    ) -> None:
        self._n = n
        self._block = block
        self._states = states
        self._layout = layout
        self._inputs = inputs  # kept alive: XLA may read them in place
        self.version = version

    def done(self) -> bool:
        """Whether `result` returns at once."""
        return bool(cast(Any, self._block).is_ready())

    def result(self) -> Decision:
        """Waits for the decision: as long as the device computes."""
        actions, logprobs, values = self._layout.split(np.asarray(self._block), self._n)
        return Decision(actions, logprobs, values, self.version, DeviceStates(self._states, self._n))


class JaxPolicyRunner:
    """Decides for one rollout worker's slots; see the module.

    One thread decides; `set_weights` may be called from any.
    """

    def __init__(
        self,
        policy: ControlPolicy,
        num_slots: int,
        most_in_batch: int,
        seed: int,
        *,
        deterministic: bool = False,
        version: WeightVersion | None = None,
    ) -> None:
        """Puts weights and state on the device; compiles nothing.

        Args:
            policy: Network and first weights.
            num_slots: Slots are 0 … num_slots − 1.
            most_in_batch: Most slots in one decision.
            seed: Of the sampled actions; the worker's own.
            deterministic: Take each distribution's mode, as for an evaluation; nothing is sampled.
            version: Of the first weights; None: step 0 of the first lineage.

        Raises:
            ConfigError: a size is not positive.
        """
        if num_slots < 1 or most_in_batch < 1:
            raise ConfigError(f"num_slots is {num_slots}, most_in_batch {most_in_batch}: both must be at least 1")
        self._policy = policy
        self._num_slots = num_slots
        self._deterministic = deterministic
        self._sizes = padded_sizes(min(most_in_batch, num_slots))
        self._buckets: dict[int, Bucket] = {}
        self._weights = (version or WeightVersion(0, 0), _on_device(named_arrays(policy)))
        self._keys = jnp.asarray(slot_keys(seed, num_slots + 1))
        self._counts = jnp.zeros(num_slots + 1, jnp.int32)
        self._states = policy.initial_state(num_slots + 1)

    @property
    def version(self) -> WeightVersion:
        """Of the weights that the next decision is made with."""
        return self._weights[0]

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """What batches are padded to, ascending."""
        return self._sizes

    def compile(self) -> None:
        """Compiles every batch size and runs it once, on padding: until then, a decision may wait for the compiler."""
        for rows in self._sizes:
            bucket = self._bucket(rows)
            block, _ = self._dispatch(bucket, self._weights[1], bucket.inputs.empty())
            block.block_until_ready()

    def set_weights(self, version: WeightVersion, arrays: Mapping[str, Array | np.ndarray]) -> None:
        """Replaces all weights before the next decision; of several calls in between, the last counts.

        Args:
            version: Theirs; every later decision says it.
            arrays: By the names of `named_arrays`. NumPy arrays are copied, JAX arrays are used as they are.

        Raises:
            WeightsError: they do not fit the policy; the weights stay as they were.
        """
        owned = {name: np.array(array) if isinstance(array, np.ndarray) else array for name, array in arrays.items()}
        self._weights = (version, _on_device(named_arrays(with_named_arrays(self._policy, owned))))

    def decide(self, slots: np.ndarray, observations: Leaves, first: np.ndarray) -> JaxPending:
        """Begins a decision for n slots, each at most once.

        Args:
            slots: Integers [n], 1 ≤ n ≤ `most_in_batch`.
            observations: By leaf name, [n or more, …], of which the first n count; unchanged until the result is there.
                Those with as many rows as the batch is padded to, or more, are read where they lie.
            first: bool [n], the observation begins an episode.

        Raises:
            ConfigError: too many slots, or an observation is missing or has another shape.
        """
        if not 1 <= len(slots) <= self._sizes[-1]:
            raise ConfigError(f"a decision for {len(slots)} slots: this runner takes 1 to {self._sizes[-1]}")
        bucket = self._bucket(self._sizes[bisect.bisect_left(self._sizes, len(slots))])
        packed = bucket.inputs.pack(slots, observations, first)
        version, weights = self._weights  # read once: another thread may replace both
        block, states = self._dispatch(bucket, weights, packed)
        return JaxPending(len(slots), block, states, bucket.outputs, version, packed)

    def _dispatch(self, bucket: Bucket, weights: tuple[Array, ...], packed: Packed) -> tuple[Array, dict[str, Array]]:
        answers, before, self._counts, self._states = bucket.call(
            weights, self._keys, self._counts, self._states, *packed
        )
        return answers, before

    def _bucket(self, rows: int) -> Bucket:
        if rows not in self._buckets:
            self._buckets[rows] = bucket_of(self._policy, self._num_slots, rows, self._deterministic)
        return self._buckets[rows]


def padded_sizes(most: int) -> tuple[int, ...]:
    """What batches of up to `most` are padded to: halves of it down to 8, and 1; ascending."""
    sizes = {1, most}
    while most > _SMALLEST_PADDED:
        most = -(-most // 2)
        sizes.add(most)
    return tuple(sorted(sizes))


def _on_device(arrays: Mapping[str, Array]) -> tuple[Array, ...]:
    return tuple(jax.device_put(array) for array in arrays.values())
