"""Fragments side by side: the arrays of one update, [T, B, …], of few different shapes.

Shorter fragments are padded at their end. Final observations are packed, [K, …] with the step and fragment that each
belongs to, and only where a value is bootstrapped from them. What is not counted (padding, faults) has action, reward
and log-probability 0, and no observation of it that is a number in the first place stays infinite or NaN, so that it
can meet no gradient. NumPy only; the learner moves the arrays to its device in one piece.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock.types import InvalidRolloutError, LeafSpace, SampleFragment, Spaces

FEWEST_FINALS = 16
"""K is this times a power of 4, so that an update is compiled for few sizes."""

Arrays = dict[str, Any]
"""By leaf name; NumPy arrays, or the device's."""


class BatchShape(NamedTuple):
    """Sizes of the arrays of an update.

    Attributes:
        steps: T.
        fragments: B, blank ones at the end included.
        finals: K.
    """

    steps: int
    fragments: int
    finals: int

    @classmethod
    def holding(cls, fragments: Sequence[SampleFragment], minibatches: int, least_steps: int = 0) -> "BatchShape":
        """The shape for a batch; with one blank fragment where minibatches cannot all be of one size.

        Args:
            fragments: At least one.
            minibatches: Into which an epoch is cut.
            least_steps: T of earlier batches: shorter fragments need no arrays of their own.
        """
        blank = len(fragments) % min(minibatches, len(fragments)) > 0
        needed = sum(len(_bootstrapping(fragment)) for fragment in fragments)
        finals = FEWEST_FINALS
        while finals < needed:
            finals *= 4
        return cls(max(least_steps, *(f.length for f in fragments)), len(fragments) + blank, finals)


class FragmentArrays(NamedTuple):
    """A batch; time comes first.

    Attributes:
        observations: By leaf name, [T + 1, B, …].
        actions: By leaf name, [T, B, …].
        rewards: float32 [T, B].
        terminated: bool [T, B].
        truncated: bool [T, B].
        counted: bool [T, B]: real, without a fault, and with all that its value needs.
        first: bool [T + 1, B].
        logprobs: float32 [T, B], of the behaviour policy.
        own_version: bool [T, B]: counted, and sampled by the learner's version, as was all since the last state that
            is known: there the learner must find the same log-probability.
        old: bool [B]: beyond the staleness from where on V-trace is used.
        final_steps: int32 [K]; T where there is none.
        final_fragments: int32 [K].
        final_observations: By leaf name, [K, …].
        initial_state: By name, [B, …].
    """

    observations: Arrays
    actions: Arrays
    rewards: Any
    terminated: Any
    truncated: Any
    counted: Any
    first: Any
    logprobs: Any
    own_version: Any
    old: Any
    final_steps: Any
    final_fragments: Any
    final_observations: Arrays
    initial_state: Arrays


class Reading(NamedTuple):
    """What fragments are read as.

    Attributes:
        spaces: The policy's.
        initial_state: The policy's state before an episode, [1, …].
        version_step: The learner's version.
        old_beyond: Fragments whose oldest counted step lies more versions back are `old`; None: none is.
    """

    spaces: Spaces
    initial_state: Mapping[str, np.ndarray]
    version_step: int
    old_beyond: int | None


def stack_fragments(fragments: Sequence[SampleFragment], shape: BatchShape, reading: Reading) -> FragmentArrays:
    """The arrays of a batch.

    Args:
        fragments: As many as `shape` has room for, none longer.
        shape: From `BatchShape.holding`.
        reading: For which policy and version.

    Raises:
        InvalidRolloutError: a fragment's leaves or recurrent state are not those of the policy.
    """
    arrays = blank_arrays(shape, reading)
    versions = np.full(arrays.rewards.shape, reading.version_step, np.int32)
    finals = 0
    for column, fragment in enumerate(fragments):
        _check_names(fragment, reading)
        length = fragment.length
        counted = _counted(fragment)
        arrays.counted[:length, column] = counted
        versions[:length, column] = fragment.weight_steps
        for name in ("rewards", "logprobs"):
            getattr(arrays, name)[:length, column] = np.where(counted, getattr(fragment, name), 0)
        for name in ("terminated", "truncated"):
            getattr(arrays, name)[:length, column] = getattr(fragment, name)
        arrays.first[: length + 1, column] = fragment.first
        _place(fragment, "observations", arrays.observations, np.s_[: length + 1, column])
        _place(fragment, "actions", arrays.actions, np.s_[:length, column])
        _place(fragment, "initial_state", arrays.initial_state, column)
        for leaf in arrays.actions.values():
            leaf[:length, column][~counted] = 0
        finals = _place_finals(fragment, column, arrays, finals)
    _without_infinities(arrays)
    recurrent = bool(reading.initial_state)
    own = _own_version(versions, arrays.first[:-1], reading.version_step, recurrent) & arrays.counted
    return arrays._replace(own_version=own, old=_old(versions, arrays.counted, reading))


def blank_arrays(shape: BatchShape, reading: Reading) -> FragmentArrays:
    """Arrays of that shape in which nothing is counted."""
    steps, fragments, finals = shape

    def flags(rows: int) -> np.ndarray:
        return np.zeros((rows, fragments), bool)

    def leaves(spaces: Sequence[LeafSpace], *batch: int) -> Arrays:
        return {leaf.name: np.zeros((*batch, *leaf.shape), leaf.device_dtype) for leaf in spaces}

    states = reading.initial_state.items()
    return FragmentArrays(
        observations=leaves(reading.spaces.observations, steps + 1, fragments),
        actions=leaves(reading.spaces.actions, steps, fragments),
        rewards=np.zeros((steps, fragments), np.float32),
        terminated=flags(steps),
        truncated=flags(steps),
        counted=flags(steps),
        first=flags(steps + 1),
        logprobs=np.zeros((steps, fragments), np.float32),
        own_version=flags(steps),
        old=np.zeros(fragments, bool),
        final_steps=np.full(finals, steps, np.int32),
        final_fragments=np.zeros(finals, np.int32),
        final_observations=leaves(reading.spaces.observations, finals),
        initial_state={name: np.repeat(np.asarray(array), fragments, axis=0) for name, array in states},
    )


def minibatch_columns(count: int, minibatches: int, blank: int, rng: np.random.Generator) -> np.ndarray:
    """Which fragments each minibatch of one epoch takes: a random partition, as even as it can be.

    Args:
        count: Fragments of the batch.
        minibatches: How many; no more than there are fragments are made, so that none is empty.
        blank: Column of a blank fragment, which fills those that are one short.
        rng: Decides.

    Returns:
        int32 [minibatches, size].
    """
    parts = np.array_split(rng.permutation(count), min(minibatches, count))
    size = len(parts[0])  # none is longer
    return np.stack([np.append(part, [blank] * (size - len(part))) for part in parts]).astype(np.int32)


def _counted(fragment: SampleFragment) -> np.ndarray:
    """Which steps count, bool [T]; a truncated step needs the observation that its episode ended with."""
    known = np.zeros(fragment.length, bool)
    known[fragment.final_steps] = True
    return ~fragment.faults & ~(fragment.truncated & ~fragment.terminated & ~known)


def _bootstrapping(fragment: SampleFragment) -> np.ndarray:
    """Which final observations have values that count, as indices into them."""
    at = fragment.final_steps
    return np.flatnonzero((fragment.truncated & ~fragment.terminated & ~fragment.faults)[at])


def _place_finals(fragment: SampleFragment, column: int, arrays: FragmentArrays, start: int) -> int:
    """Adds a fragment's final observations; returns where the next one's begin."""
    chosen = _bootstrapping(fragment)
    end = start + len(chosen)
    arrays.final_steps[start:end] = fragment.final_steps[chosen]
    arrays.final_fragments[start:end] = column
    for name, array in arrays.final_observations.items():
        if len(chosen):
            array[start:end] = fragment.final_observations[name][chosen]
    return end


def _place(fragment: SampleFragment, field: str, into: Arrays, index: Any) -> None:
    for name, array in into.items():
        shape, found = np.shape(array[index]), getattr(fragment, field)[name]
        if shape != np.shape(found):
            raise InvalidRolloutError(
                f"fragment {fragment.rollout_id}: {field}[{name!r}] is {list(np.shape(found))}, the policy needs "
                f"{list(shape)}: fleet and learner were made for different spaces or networks"
            )
        array[index] = found


def _check_names(fragment: SampleFragment, reading: Reading) -> None:
    expected = {
        "observations": {leaf.name for leaf in reading.spaces.observations},
        "actions": {leaf.name for leaf in reading.spaces.actions},
        "initial_state": set(reading.initial_state),
    }
    for field, names in expected.items():
        if set(getattr(fragment, field)) != names:
            raise InvalidRolloutError(
                f"fragment {fragment.rollout_id}: {field} has {sorted(getattr(fragment, field))}, the policy needs "
                f"{sorted(names)}: fleet and learner were made for different spaces or networks"
            )


def _without_infinities(arrays: FragmentArrays) -> None:
    """0 for what is no finite number in an observation that nothing is learned from."""
    for array in arrays.observations.values():
        if np.issubdtype(array.dtype, np.floating):
            steps = array[:-1]
            steps[~arrays.counted] = np.nan_to_num(steps[~arrays.counted], posinf=0.0, neginf=0.0)


def _own_version(versions: np.ndarray, first: np.ndarray, version_step: int, recurrent: bool) -> np.ndarray:
    """Steps of that very version; recurrent state must also come from it, a fragment's start or an episode's."""
    own = versions == version_step
    if recurrent:
        for step in range(1, len(own)):
            own[step] &= own[step - 1] | first[step]
    return own


def _old(versions: np.ndarray, counted: np.ndarray, reading: Reading) -> np.ndarray:
    if reading.old_beyond is None:
        return np.zeros(versions.shape[1], bool)
    oldest = np.where(counted, versions, reading.version_step).min(axis=0)
    return reading.version_step - oldest > reading.old_beyond
