"""From a simulator's own `gymnasium.Space` to named arrays and back.

Runs inside simulator processes, once per step: a space is compiled at the start into one writer or reader per leaf, so
that a step does no walking and no copying beyond the one into shared memory. Arrays count from 0, whatever a space's
`start` is. Observations must lie in their space, and be finite: shape and bounds are checked; the dtype is cast where
no number changes by more than rounding. That costs about a microsecond per leaf and step, and nothing where a dtype
holds no other values than its space does (pictures of uint8).
Actions come from a policy and are checked for their range; those of a `Box` are clipped to it.

Not covered: spaces whose values have no fixed size (`Graph`, `Sequence`) or no fixed form (`OneOf`, a user's own
subclass of `Space`): they are refused by name.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces as gym

from penstock.types import ConfigError, LeafSpace, Spaces

ROUNDING = 1e-5
"""Floats may lie so far beyond a bound, relative to it and by so much near zero: simulators compute, and round."""

FEW = 8
"""Elements that are checked one by one: calls of NumPy would take longer."""

TEXT_END = -1
"""Stands after the last code point of a text."""

Writer = Callable[[int, Any], None]
"""Writes what a simulator observed into row i of the arrays."""
Reader = Callable[[int], Any]
"""Reads row i of the arrays as the simulator's own action."""


class SimulatorValueError(ValueError):
    """What a simulator returned cannot be used. The message names the leaf of the observation, or the value."""


class PolicyActionError(ValueError):
    """A policy's action lies outside the action space. The message names the leaf and the value."""


def spaces_of(observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> Spaces:
    """The leaves of a simulator's two spaces.

    Raises:
        ConfigError: one of them holds no leaf, a kind that has no fixed size, or two leaves of one name.
    """
    return Spaces(leaves_of(observation_space, "observation"), leaves_of(action_space, "action"))


def leaves_of(space: gym.Space[Any], side: str) -> tuple[LeafSpace, ...]:
    """The leaves of one space, in the order of its tree.

    Args:
        space: Any nesting of Box, Discrete, MultiDiscrete, MultiBinary, Text, Dict and Tuple.
        side: ``observation`` or ``action``, for the message.

    Raises:
        ConfigError: see `spaces_of`.
    """
    leaves = tuple(_leaf(leaf, name, side) for name, leaf in _walk(space, ""))
    names = [leaf.name for leaf in leaves]
    if not leaves:
        raise ConfigError(f"{side} space {space} has no leaf: a policy needs at least one array")
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"{side} space has two leaves named {min(repeated)!r}: rename a key of its Dict spaces")
    return leaves


def make_writer(space: gym.Space[Any], arrays: Mapping[str, np.ndarray], prefix: str = "") -> Writer:
    """Compiles what writes observations of `space` into arrays [n, …] by leaf name.

    The writer raises `SimulatorValueError` where a value does not fit.
    """
    parts = [(key, make_writer(part, arrays, name)) for key, name, part in _children(space, prefix)]
    if isinstance(space, (gym.Dict, gym.Tuple)):
        return _branch_writer(parts)
    return _leaf_writer(space, arrays[prefix], prefix)


def make_reader(space: gym.Space[Any], arrays: Mapping[str, np.ndarray], prefix: str = "") -> Reader:
    """Compiles what reads actions of `space` from arrays [n, …] by leaf name; values are copies.

    The reader raises `PolicyActionError` where a value lies outside the space.
    """
    parts = [(key, make_reader(part, arrays, name)) for key, name, part in _children(space, prefix)]
    if isinstance(space, gym.Dict):
        return lambda row: {key: read(row) for key, read in parts}
    if isinstance(space, gym.Tuple):
        return lambda row: tuple(read(row) for _, read in parts)
    return _leaf_reader(space, arrays[prefix], prefix)


# --- the tree ---------------------------------------------------------------------------------------------------------


def _children(space: gym.Space[Any], prefix: str) -> Iterator[tuple[Any, str, gym.Space[Any]]]:
    """Key, leaf name and space of each child; nothing for a leaf."""
    if isinstance(space, gym.Dict):
        yield from ((key, _joined(prefix, str(key)), part) for key, part in space.spaces.items())
    elif isinstance(space, gym.Tuple):
        yield from ((index, _joined(prefix, str(index)), part) for index, part in enumerate(space.spaces))


def _walk(space: gym.Space[Any], prefix: str) -> Iterator[tuple[str, gym.Space[Any]]]:
    if isinstance(space, (gym.Dict, gym.Tuple)):
        for _, name, part in _children(space, prefix):
            yield from _walk(part, name)
    else:
        yield prefix, space


def _joined(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _leaf(space: gym.Space[Any], name: str, side: str) -> LeafSpace:
    if isinstance(space, gym.Box):
        low, high = _extreme(space.low, np.min), _extreme(space.high, np.max)
        return LeafSpace(name, "box", space.shape, np.dtype(space.dtype).name, low=low, high=high)
    if isinstance(space, gym.Discrete):
        return LeafSpace(name, "discrete", (), "int64", n=(int(space.n),), start=int(space.start))
    if isinstance(space, gym.MultiDiscrete):
        start = int(space.start.flat[0]) if space.start.size and (space.start == space.start.flat[0]).all() else 0
        choices = tuple(int(n) for n in space.nvec.ravel())
        return LeafSpace(name, "multi_discrete", space.nvec.shape, "int64", n=choices, start=start)
    if isinstance(space, gym.MultiBinary):
        return LeafSpace(name, "multi_binary", space.shape, "int8")
    if isinstance(space, gym.Text):
        return LeafSpace(name, "text", (space.max_length,), "int32")
    raise ConfigError(
        f"{side} space{f' at {name!r}' if name else ''} is a {type(space).__name__}, whose values have no fixed size "
        "or form: wrap the simulator so that it uses Box, Discrete, MultiDiscrete, MultiBinary, Text, Dict and Tuple"
    )


def _extreme(bound: np.ndarray, least_or_largest: Callable[[np.ndarray], Any]) -> float | None:
    """Of all elements; None where one has no bound."""
    return float(least_or_largest(bound)) if bound.size and np.isfinite(bound).all() else None


# --- observations -----------------------------------------------------------------------------------------------------


def _branch_writer(parts: list[tuple[Any, Writer]]) -> Writer:
    def write(row: int, value: Any) -> None:
        for key, write_part in parts:
            try:
                part = value[key]
            except (KeyError, IndexError, TypeError) as error:
                raise SimulatorValueError(
                    f"an observation has no part {key!r}, which its space has: {_brief(value)}"
                ) from error
            write_part(row, part)

    return write


def _brief(value: Any) -> str:
    """What came instead, for a message."""
    return f"it has {', '.join(map(repr, value))}" if isinstance(value, dict) else f"it is a {type(value).__name__}"


def _leaf_writer(space: gym.Space[Any], array: np.ndarray, name: str) -> Writer:
    if isinstance(space, gym.Text):
        return _text_writer(array, name)
    bounds = _bounds(space)
    if isinstance(space, gym.Discrete):
        return _discrete_writer(array, name, bounds, int(space.start))
    start = space.start if isinstance(space, gym.MultiDiscrete) and space.start.any() else None
    return _array_writer(array, name, bounds, start)


Bounds = tuple[np.ndarray, np.ndarray]
"""Least and largest values of a leaf's elements, as the simulator counts: of the leaf's shape, or none."""


def _bounds(space: gym.Space[Any]) -> Bounds:
    if isinstance(space, gym.Discrete):
        return np.asarray(space.start), np.asarray(space.start + space.n - 1)
    if isinstance(space, gym.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    if isinstance(space, gym.MultiBinary):
        return np.asarray(0), np.asarray(1)
    assert isinstance(space, gym.Box)
    low, high = _finite(space.low, space.low.dtype), _finite(space.high, space.high.dtype)
    if low.size and (low == low.flat[0]).all() and (high == high.flat[0]).all():
        return low.flat[0].reshape(()), high.flat[0].reshape(())
    return low, high


def _finite(bound: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A bound within what a policy's device holds."""
    if dtype.kind != "f":
        return bound
    most = np.finfo(np.float32 if dtype.itemsize > 4 else dtype).max
    return np.clip(bound, -most, most).astype(dtype)


def _widened(bounds: Bounds) -> Bounds:
    """With room for rounding; of floats only."""
    dtype = bounds[0].dtype
    if dtype.kind != "f":
        return bounds
    low, high = (bound.astype(np.float64) for bound in bounds)
    low -= ROUNDING * np.maximum(1.0, np.abs(low))
    high += ROUNDING * np.maximum(1.0, np.abs(high))
    return _finite(low, dtype), _finite(high, dtype)


def _discrete_writer(array: np.ndarray, name: str, bounds: Bounds, start: int) -> Writer:
    low, high = (int(bound) for bound in bounds)

    def write(row: int, value: Any) -> None:
        if type(value) is not int and not isinstance(value, np.integer):
            value = _castable(_shaped(value, name, ()), name, array.dtype)
        if not low <= value <= high:
            raise _outside(name, np.asarray(value), bounds)
        array[row] = value - start

    return write


def _array_writer(array: np.ndarray, name: str, bounds: Bounds, start: np.ndarray | None) -> Writer:
    shape, dtype = array.shape[1:], array.dtype
    holds_all = not array[:1].size or (start is None and _are_all(bounds, dtype))
    within = _check(_widened(bounds), shape)

    def write(row: int, value: Any) -> None:
        if type(value) is not np.ndarray or value.shape != shape:
            value = _shaped(value, name, shape)
        if value.dtype != dtype:
            value = _castable(value, name, dtype)
        elif holds_all:
            array[row] = value
            return
        if not within(value):
            raise _outside(name, value, bounds)
        array[row] = value if start is None else value - start

    return write


def _are_all(bounds: Bounds, dtype: np.dtype) -> bool:
    """Whether every value of an integer dtype lies between them."""
    if dtype.kind not in "biu":
        return False
    limits = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return bool((bounds[0] == limits[0]).all() and (bounds[1] == limits[1]).all())


def _check(bounds: Bounds, shape: tuple[int, ...]) -> Callable[[np.ndarray], bool]:
    """What says whether all elements lie within their bounds; each of the three is the fastest somewhere."""
    if int(np.prod(shape)) <= FEW:
        return _check_of_few(bounds, shape)
    return _uniform_check(bounds) if bounds[0].ndim == 0 else _elementwise_check(bounds)


def _check_of_few(bounds: Bounds, shape: tuple[int, ...]) -> Callable[[np.ndarray], bool]:
    lows, highs = (np.broadcast_to(bound, shape).ravel().tolist() for bound in bounds)
    pairs = tuple(zip(lows, highs, strict=True))

    def within(value: np.ndarray) -> bool:
        for (low, high), number in zip(pairs, value.ravel().tolist(), strict=True):
            if not low <= number <= high:
                return False
        return True

    return within


def _uniform_check(bounds: Bounds) -> Callable[[np.ndarray], bool]:
    """Half the time of the next one with large arrays. The least of numbers and NaN is NaN, which is within nothing."""
    (low, high), least, largest = (bound.item() for bound in bounds), np.minimum.reduce, np.maximum.reduce
    return lambda value: bool(low <= least(value, None) and largest(value, None) <= high)


def _elementwise_check(bounds: Bounds) -> Callable[[np.ndarray], bool]:
    (low, high), all_of = bounds, np.logical_and.reduce
    return lambda value: bool(all_of((low <= value) & (value <= high), None))


def _shaped(value: Any, name: str, shape: tuple[int, ...]) -> np.ndarray:
    try:
        value = np.asarray(value)
    except ValueError as error:  # lists of several lengths
        raise SimulatorValueError(f"{_called(name)} is no array: {error}") from error
    if value.shape != shape:
        raise SimulatorValueError(f"{_called(name)} has shape {value.shape}: its space says {shape}")
    return value


def _castable(value: np.ndarray, name: str, dtype: np.dtype) -> np.ndarray:
    """Numbers of another dtype; for integers, floats only where none of them has a fraction."""
    fits = value.dtype.kind in "biuf" or value.dtype.kind == dtype.kind
    if fits and value.dtype.kind == "f" and dtype.kind != "f":
        fits = not (np.isfinite(value) & (np.trunc(value) != value)).any()
    if not fits:
        brief = f" = {value}" if value.size == 1 else ""
        raise SimulatorValueError(f"{_called(name)}{brief} has dtype {value.dtype}: its space says {dtype}")
    return value


def _outside(name: str, value: np.ndarray, bounds: Bounds) -> SimulatorValueError:
    """Says which element is outside its bounds, or not finite: the first."""
    least, most = _widened(bounds)
    at = tuple(int(i) for i in np.argwhere(~((least <= value) & (value <= most)))[0])
    where = f" at {list(at)}" if at else ""
    if not np.isfinite(value[at]):
        return SimulatorValueError(f"{_called(name)} is {value[at]}{where}: it must be finite")
    low, high = (np.broadcast_to(bound, value.shape)[at] for bound in bounds)
    low, high = (f"{bound:.5g}" if bounds[0].dtype.kind == "f" else str(bound) for bound in (low, high))
    return SimulatorValueError(
        f"{_called(name)} is {value[at]}{where}, outside its space's bounds {low} and {high}: declare those that its "
        "values have"
    )


def _called(name: str) -> str:
    return f"observation {name!r}" if name else "the observation"


def _text_writer(array: np.ndarray, name: str) -> Writer:
    most = array.shape[1]

    def write(row: int, value: Any) -> None:
        if not isinstance(value, str):
            raise SimulatorValueError(f"{_called(name)} is a {type(value).__name__}: its space says text")
        if len(value) > most:
            raise SimulatorValueError(f"{_called(name)} has {len(value)} characters: its space says {most}")
        array[row, : len(value)] = [ord(character) for character in value]
        array[row, len(value) :] = TEXT_END

    return write


# --- actions ----------------------------------------------------------------------------------------------------------


def _leaf_reader(space: gym.Space[Any], array: np.ndarray, name: str) -> Reader:
    if isinstance(space, gym.Discrete):
        return _discrete_reader(array, name, int(space.n), int(space.start))
    if isinstance(space, gym.MultiDiscrete):
        return _multi_discrete_reader(array, name, space.nvec, space.start)
    if isinstance(space, gym.MultiBinary):
        return _multi_discrete_reader(array, name, np.full(space.shape, 2), np.zeros(space.shape, np.int8))
    if isinstance(space, gym.Text):
        return _text_reader(array, name, space)
    assert isinstance(space, gym.Box)
    return _box_reader(array, name, space.low, space.high)


def _discrete_reader(array: np.ndarray, name: str, n: int, start: int) -> Reader:
    def read(row: int) -> np.integer[Any]:
        choice = array[row]
        if not 0 <= choice < n:
            raise PolicyActionError(f"action {name!r} is {choice}: it must be in [0, {n})")
        return choice + start

    return read


def _multi_discrete_reader(array: np.ndarray, name: str, n: np.ndarray, start: np.ndarray) -> Reader:
    def read(row: int) -> np.ndarray:
        choices = array[row]
        if (choices < 0).any() or (choices >= n).any():
            raise PolicyActionError(f"action {name!r} is {choices.tolist()}: each must be in [0, n), n = {n.tolist()}")
        return (choices + start).astype(start.dtype)

    return read


def _box_reader(array: np.ndarray, name: str, low: np.ndarray, high: np.ndarray) -> Reader:
    def read(row: int) -> np.ndarray:
        numbers = array[row]
        if not np.isfinite(numbers).all():
            raise PolicyActionError(f"action {name!r} is not finite: {numbers.tolist()}")
        return np.asarray(np.minimum(np.maximum(numbers, low), high))

    return read


def _text_reader(array: np.ndarray, name: str, space: gym.Text) -> Reader:
    def read(row: int) -> str:
        points = array[row].tolist()
        text = "".join(map(chr, points[: points.index(TEXT_END)] if TEXT_END in points else points))
        if not space.contains(text):
            raise PolicyActionError(f"action {name!r} is {text!r}, which {space} does not contain")
        return text

    return read
