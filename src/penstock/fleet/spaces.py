"""From a simulator's own `gymnasium.Space` to named arrays and back.

Runs inside simulator processes, once per step: a space is compiled at the start into one writer or reader per leaf, so
that a step does no walking and no copying beyond the one into shared memory. Arrays count from 0, whatever a space's
`start` is. Observations are checked for their shape; their dtype is cast, as Gymnasium's own vector environments do.
Those of 64-bit integers must also fit the 32 bits in which their bounds say that a device can hold them.
Actions come from a policy and are checked for their range; those of a `Box` are clipped to it.

Not covered: spaces whose values have no fixed size (`Graph`, `Sequence`) or no fixed form (`OneOf`, a user's own
subclass of `Space`): they are refused by name.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium import spaces as gym

from penstock.types import ConfigError, LeafSpace, Spaces

TEXT_END = -1
"""Stands after the last code point of a text."""

Writer = Callable[[int, Any], None]
"""Writes what a simulator observed into row i of the arrays."""
Reader = Callable[[int], Any]
"""Reads row i of the arrays as the simulator's own action."""


class SimulatorValueError(ValueError):
    """A simulator's observation does not fit the space that it declared. The message names the leaf and what it is."""


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
        low, high = (_common(bound) for bound in (space.low, space.high))
        leaf = LeafSpace(name, "box", space.shape, np.dtype(space.dtype).name, low=low, high=high)
        if leaf.is_wide and space.low.size:
            return replace(leaf, low=float(space.low.min()), high=float(space.high.max()))
        return leaf
    if isinstance(space, gym.Discrete):
        return LeafSpace(name, "discrete", (), "int64", n=(int(space.n),), start=int(space.start))
    if isinstance(space, gym.MultiDiscrete):
        start = int(_common(space.start) or 0)
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


def _common(bound: np.ndarray) -> float | None:
    """The one finite value of all elements, if there is one."""
    if bound.size == 0 or not np.isfinite(bound.flat[0]) or (bound != bound.flat[0]).any():
        return None
    return float(bound.flat[0])


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
    write = _unchecked_writer(space, array, name)
    leaf = _leaf(space, name, "observation")
    try:
        held = leaf.device_dtype
    except ConfigError:  # a policy that runs on a device refuses these spaces; others may well take them
        return write
    return _checked_writer(write, name, held, _within(space, held)) if leaf.is_wide else write


def _within(space: gym.Space[Any], held: np.dtype) -> Callable[[Any], bool]:
    """What says whether a device can hold a value of the space, counted from 0."""
    least, most = int(np.iinfo(held).min), int(np.iinfo(held).max)
    if isinstance(space, gym.Discrete):
        low, high = least + int(space.start), most + int(space.start)
        return lambda value: low <= value <= high
    starts = np.asarray(space.start if isinstance(space, gym.MultiDiscrete) else 0, np.int64)
    lows, highs = least + starts, most + starts
    return lambda value: bool(((lows <= value) & (value <= highs)).all())


def _checked_writer(write: Writer, name: str, held: np.dtype, within: Callable[[Any], bool]) -> Writer:
    def write_checked(row: int, value: Any) -> None:
        write(row, value)
        if not within(value):
            raise SimulatorValueError(
                f"observation {name!r} is {value}: by its space's bounds a policy's device takes it as {held}, which "
                "does not hold that; declare its true bounds"
            )

    return write_checked


def _unchecked_writer(space: gym.Space[Any], array: np.ndarray, name: str) -> Writer:
    if isinstance(space, gym.Discrete):
        return _discrete_writer(array, int(space.start))
    if isinstance(space, gym.Text):
        return _text_writer(array, name)
    if isinstance(space, gym.MultiDiscrete) and space.start.any():
        return _array_writer(array, name, space.start)
    return _array_writer(array, name, None)


def _discrete_writer(array: np.ndarray, start: int) -> Writer:
    def write(row: int, value: Any) -> None:
        array[row] = value - start

    return write


def _array_writer(array: np.ndarray, name: str, start: np.ndarray | None) -> Writer:
    shape = array.shape[1:]

    def write(row: int, value: Any) -> None:
        if type(value) is not np.ndarray or value.shape != shape:
            value = np.asarray(value)
            if value.shape != shape:
                raise SimulatorValueError(f"observation {name!r} has shape {value.shape}: its space says {shape}")
        array[row] = value if start is None else value - start

    return write


def _text_writer(array: np.ndarray, name: str) -> Writer:
    most = array.shape[1]

    def write(row: int, value: Any) -> None:
        if len(value) > most:
            raise SimulatorValueError(f"observation {name!r} has {len(value)} characters: its space says {most}")
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
