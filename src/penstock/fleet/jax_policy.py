"""A jitted control policy behind a rollout worker: decisions for any of its slots, recurrent state on the device.

One compiled call per decision: it takes the slots' state out of arrays of [slots + 1, …], resets it where an episode
begins, steps the policy, samples, and puts the state back in place; the last row belongs to padding. The arrays are
donated. Batches are padded to few sizes, all compiled before the first decision (`compile`), so that nothing compiles
in flight. Runners of a process that have the same network, slots and batch size share compiled calls: workers that are
threads compile once. `GymPolicy` is a runner for one environment, in a program of one's own.

Randomness: the k-th decision of a slot is sampled with a key made of seed, slot and k. How slots are batched does not
change it, but for the last bits of the products.

A batch travels as one block of 32-bit words each way, since a transfer costs much more than the bytes of a small
observation: slots, `first` and all small observations go as one int32 vector, floats and uint32 as their bits; leaves
of `WHOLE_BYTES` and more go as they are. What stands in padding rows means nothing. No number changes on its way but
for float64, which becomes float32 (`LeafSpace.device_dtype`). Whoever packs allocates anew: JAX may read the memory
until the decision is there, and on a CPU does not copy it.

Memory: observations must not change until `Pending.result` returned; those with rows for the padding are read where
they lie if XLA can. What `result` returns is the caller's own, but for states, which are read-only and come when asked
for.

Not covered: more than one device; one slot twice in one batch (the order would be undefined).
"""

import bisect
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, UInt32

from penstock.fleet.spaces import make_reader, make_writer, spaces_of
from penstock.fleet.steps import ActionBatch, Leaves, aligned_zeros
from penstock.model.control import ActionDistribution, ControlPolicy, named_arrays, with_named_arrays
from penstock.model.control.memory import reset
from penstock.model.programs import choose_cache
from penstock.types import ConfigError, LeafSpace, WeightVersion, fold

Packed = tuple[np.ndarray, tuple[np.ndarray, ...]]
"""A block of words, and the leaves that are not in it."""

WHOLE_BYTES = 2048
"""A leaf of so many bytes per row is not packed."""

_FLOAT, _INT = np.dtype(np.float32), np.dtype(np.int32)


@dataclass(frozen=True, slots=True)
class PackedField:
    """Where one array of [rows, …] lies in a block of words.

    Attributes:
        where: Its words.
        shape: [rows, …].
        dtype: Whose bits the words are: float32, int32 or uint32.
    """

    where: slice
    shape: tuple[int, ...]
    dtype: np.dtype

    def view(self, block: np.ndarray) -> np.ndarray:
        """The array in a block on the host."""
        return block[self.where].view(self.dtype).reshape(self.shape)

    def read(self, block: Int32[Array, " words"]) -> Array:
        """The same on the device."""
        part = block[self.where].reshape(self.shape)
        return part if self.dtype == _INT else jax.lax.bitcast_convert_type(part, self.dtype)


def lay_out(rows: int, arrays: Sequence[tuple[tuple[int, ...], np.dtype]]) -> tuple[tuple[PackedField, ...], int]:
    """For arrays given as (shape of a row, dtype of `PackedField`), one after the other; the number of words."""
    places: list[PackedField] = []
    start = 0
    for shape, dtype in arrays:
        end = start + rows * math.prod(shape)
        places.append(PackedField(slice(start, end), (rows, *shape), dtype))
        start = end
    return tuple(places), start


class InputLayout:
    """Slots, `first` and observations of one batch size."""

    def __init__(self, leaves: Sequence[LeafSpace], rows: int, padding_slot: int) -> None:
        self._rows = rows
        self._padding_slot = padding_slot
        self._small = [leaf for leaf in leaves if leaf.nbytes < WHOLE_BYTES]
        self._whole = [leaf for leaf in leaves if leaf.nbytes >= WHOLE_BYTES]
        columns = [((), _INT), ((), _INT), *((leaf.shape, word_dtype(leaf)) for leaf in self._small)]
        (self._slots, self._first, *self._places), self._size = lay_out(rows, columns)

    def pack(self, slots: np.ndarray, observations: Leaves, first: np.ndarray) -> Packed:
        """Words int32 [size], and the whole leaves [rows, …]: the caller's own where they have so many rows.

        Args:
            slots: [n].
            observations: By leaf name, [n or more, …].
            first: [n].

        Raises:
            ConfigError: an observation is missing or has another shape.
        """
        block = aligned_zeros((self._size,), np.int32)
        n = len(slots)
        indices = self._slots.view(block)
        indices[:n] = slots
        indices[n:] = self._padding_slot
        self._first.view(block)[:n] = first
        for leaf, place in zip(self._small, self._places, strict=True):
            place.view(block)[:n] = _checked(leaf, observations, n)[:n]
        return block, tuple(self._padded(_checked(leaf, observations, n), leaf, n) for leaf in self._whole)

    def unpack(self, block: Int32[Array, " words"], whole: Sequence[Array]) -> tuple[Array, Array, dict[str, Array]]:
        """Slots int32 [rows], first bool [rows] and observations by leaf name; traced."""
        observations = {leaf.name: place.read(block) for leaf, place in zip(self._small, self._places, strict=True)}
        observations |= {leaf.name: array for leaf, array in zip(self._whole, whole, strict=True)}
        return self._slots.read(block), self._first.read(block) > 0, observations

    def empty(self) -> Packed:
        """A batch of padding only."""
        no_rows = np.zeros(0, np.int64)
        return self.pack(no_rows, {leaf.name: leaf.zeros(0) for leaf in (*self._small, *self._whole)}, no_rows)

    def _padded(self, array: np.ndarray, leaf: LeafSpace, n: int) -> np.ndarray:
        dtype = leaf.device_dtype
        if len(array) >= self._rows and array.dtype == dtype and array.flags.c_contiguous:
            return array[: self._rows]
        padded = aligned_zeros((self._rows, *leaf.shape), dtype)
        padded[:n] = array[:n]
        return padded


class OutputLayout:
    """Actions, log-probabilities and values of one batch size."""

    def __init__(self, leaves: Sequence[LeafSpace], rows: int) -> None:
        self._leaves = tuple(leaves)
        self._rows = rows
        columns = [((), _FLOAT), ((), _FLOAT), *((leaf.shape, word_dtype(leaf)) for leaf in leaves)]
        (self._logprobs, self._values, *self._places), _ = lay_out(rows, columns)

    def join(self, actions: Mapping[str, Array], logprobs: Array, values: Array) -> Int32[Array, " words"]:
        """One block; traced."""
        arrays = [logprobs, values, *(actions[leaf.name] for leaf in self._leaves)]
        return jnp.concatenate([_bits(array) for array in arrays])

    def split(self, block: np.ndarray, n: int) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
        """Actions of the spaces' dtypes, log-probabilities and values float32, of the first n rows; all copies."""
        actions = {
            leaf.name: place.view(block)[:n].astype(leaf.dtype)
            for leaf, place in zip(self._leaves, self._places, strict=True)
        }
        logprobs, values = (place.view(block)[:n].copy() for place in (self._logprobs, self._values))
        return actions, logprobs, values


def word_dtype(leaf: LeafSpace) -> np.dtype:
    """What a leaf's words are the bits of.

    Raises:
        ConfigError: no device holds the leaf exactly.
    """
    dtype = leaf.device_dtype
    if dtype.kind == "f":
        return _FLOAT
    return dtype if dtype == np.uint32 else _INT


def _bits(array: Array) -> Array:
    if jnp.issubdtype(array.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(array.astype(jnp.float32), jnp.int32).ravel()
    return array.astype(jnp.int32).ravel()


def _checked(leaf: LeafSpace, observations: Leaves, n: int) -> np.ndarray:
    array = observations.get(leaf.name)
    if array is None or len(array) < n or array.shape[1:] != leaf.shape:
        found = "missing" if array is None else f"{array.dtype}{list(array.shape)}"
        raise ConfigError(f"observation {leaf.name!r} is {found}: the policy needs {leaf.dtype}{[n, *leaf.shape]}")
    return array


_COMPILING = threading.Lock()
_DONATED = (2, 3)  # decision counts and recurrent states


def compute_inline() -> None:
    """Lets CPUs compute in the thread that asks; for processes that have not used JAX yet, without effect in others.

    By default JAX hands every call to a thread of its own. To wake that thread takes longer than a small policy's
    decision, and it takes processor time from the simulators. Accelerators are not affected.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)


@dataclass(frozen=True, slots=True)
class BatchBucket:
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


def bucket_of(policy: ControlPolicy, num_slots: int, rows: int, deterministic: bool) -> BatchBucket:
    """Compiles, or finds what was compiled in this process for a policy of the same form."""
    leaves, structure = jax.tree.flatten(policy)
    shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
    choose_cache()
    with _COMPILING:  # whoever comes second finds it
        return _compiled(structure, shapes, num_slots, rows, deterministic)


@functools.lru_cache(maxsize=64)
def _compiled(structure: Any, weights: tuple[Any, ...], num_slots: int, rows: int, deterministic: bool) -> BatchBucket:
    policy: ControlPolicy = jax.tree.unflatten(structure, weights)
    inputs = InputLayout(policy.spaces.observations, rows, padding_slot=num_slots)
    outputs = OutputLayout(policy.spaces.actions, rows)
    run = jax.jit(_decision(structure, inputs, outputs, deterministic), donate_argnums=_DONATED)
    keys = jax.ShapeDtypeStruct((num_slots + 1, 2), jnp.uint32)
    counts = jax.ShapeDtypeStruct((num_slots + 1,), jnp.int32)
    states = jax.eval_shape(lambda: policy.initial_state(num_slots + 1))
    return BatchBucket(inputs, outputs, run.lower(weights, keys, counts, states, *inputs.empty()).compile())


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


def _sampled(distribution: ActionDistribution, keys: UInt32[Array, "rows 2"], counts: Array) -> dict[str, Array]:
    """One action per row, each with its own key: the slot's first one, its second word counted up.

    Threefry is a block cipher: different keys are different streams, however close. A `fold_in` would add a second
    pass of it to every compiled size.
    """

    def sample(row: ActionDistribution, words: Array) -> dict[str, Array]:
        return row.sample(jax.random.wrap_key_data(words, impl="threefry2x32"))

    return jax.vmap(sample)(distribution, keys.at[:, 1].add(counts.astype(jnp.uint32)))


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

    def result(self) -> ActionBatch:
        """Waits for the decision: as long as the device computes."""
        actions, logprobs, values = self._layout.split(np.asarray(self._block), self._n)
        return ActionBatch(actions, logprobs, values, self.version, DeviceStates(self._states, self._n))


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
        self._buckets: dict[int, BatchBucket] = {}
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

    def _dispatch(
        self, bucket: BatchBucket, weights: tuple[Array, ...], packed: Packed
    ) -> tuple[Array, dict[str, Array]]:
        answers, before, self._counts, self._states = bucket.call(
            weights, self._keys, self._counts, self._states, *packed
        )
        return answers, before

    def _bucket(self, rows: int) -> BatchBucket:
        if rows not in self._buckets:
            self._buckets[rows] = bucket_of(self._policy, self._num_slots, rows, self._deterministic)
        return self._buckets[rows]


class GymPolicy:
    """A trained policy in one's own program: a Gymnasium environment's observations in, its actions out.

    Observations and actions are the environment's own (dicts, starts of discrete spaces; actions clipped to a box), and
    memory is carried from call to call. One thread at a time.
    """

    def __init__(
        self,
        policy: ControlPolicy,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        *,
        deterministic: bool = True,
        seed: int = 0,
    ) -> None:
        """Compiles nothing: the first action does.

        Args:
            policy: For example of `load_control_policy`.
            observation_space: What the environment shows, a `gymnasium.Space`.
            action_space: What it takes.
            deterministic: Take the most probable action; false: sample.
            seed: Of the sampled actions.

        Raises:
            ConfigError: the policy was made for other observations or actions.
        """
        spaces = spaces_of(observation_space, action_space)
        if not spaces.same_form(policy.spaces):
            raise ConfigError(
                f"the policy was made for other observations or actions ({spaces.differences(policy.spaces)}): give "
                "the spaces of an environment as it was trained in, wrappers included"
            )
        self._runner = JaxPolicyRunner(policy, 1, 1, seed, deterministic=deterministic)
        self._observations = {leaf.name: leaf.zeros(1) for leaf in spaces.observations}
        self._actions = {leaf.name: leaf.zeros(1) for leaf in spaces.actions}
        self._write = make_writer(observation_space, self._observations)
        self._read = make_reader(action_space, self._actions)
        self._first = np.ones(1, bool)

    def reset(self) -> None:
        """The next observation begins an episode."""
        self._first[:] = True

    def act(self, observation: Any) -> Any:
        """The action that answers an observation.

        Raises:
            ValueError: the observation lies outside its space; the message names the part.
        """
        self._write(0, observation)
        decision = self._runner.decide(np.zeros(1, np.int64), self._observations, self._first).result()
        self._first[:] = False
        for name, array in decision.actions.items():
            self._actions[name][:] = array
        return self._read(0)


def padded_sizes(most: int) -> tuple[int, ...]:
    """What batches of up to `most` are padded to: halves of it down to 8, and 1; ascending."""
    sizes = {1, most}
    while most > _SMALLEST_PADDED:
        most = -(-most // 2)
        sizes.add(most)
    return tuple(sorted(sizes))


def _on_device(arrays: Mapping[str, Array]) -> tuple[Array, ...]:
    return tuple(jax.device_put(array) for array in arrays.values())
