"""What a simulator's observations and actions look like: named arrays, whatever the nesting of its own spaces.

A `gymnasium.Space` of any kind is a tree; each of its leaves is one array with a name (``image``, ``inventory.wood``,
``0`` in a tuple; the empty name where the space is a leaf itself). Policies, fragments, files and shared memory know
only these. `penstock.fleet` converts in both directions.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from penstock.types.errors import ConfigError

LeafKind = Literal["box", "discrete", "multi_discrete", "multi_binary", "text"]

_DTYPE = re.compile(r"[<>|=]?[A-Za-z][A-Za-z0-9_]{0,15}")


def dtype_named(name: object) -> np.dtype[Any]:
    """A dtype by a name that was read from somewhere, such as ``float32`` or ``<f4``.

    NumPy itself takes more: with commas a text is a record, parts of which it evaluates.

    Raises:
        ValueError: it is no such name.
        TypeError: NumPy knows none of that name.
    """
    if not isinstance(name, str) or not _DTYPE.fullmatch(name):
        raise ValueError(f"{name!r:.100} is no name of a dtype")
    return np.dtype(name)


@dataclass(frozen=True, slots=True)
class LeafSpace:
    """One array of an observation or an action, without batch axes.

    Attributes:
        name: Path in the tree, joined by dots.
        kind: ``box`` numbers; ``discrete`` one int64 scalar in [0, n); ``multi_discrete`` int64 with an n for each
            element; ``multi_binary`` int8 of zeros and ones; ``text`` int32 code points, −1 after the end.
        shape: Of the array.
        dtype: NumPy's name of it.
        n: Number of choices: one for ``discrete``, one per element in C order for ``multi_discrete``; else empty.
        low: Smallest value of a ``box``, the least of all elements; None: one of them is unbounded.
        high: Largest, likewise.
        start: First value of a ``discrete``, or of all of a ``multi_discrete``, as the simulator counts; arrays here
            begin at 0.
    """

    name: str
    kind: LeafKind
    shape: tuple[int, ...]
    dtype: str
    n: tuple[int, ...] = ()
    low: float | None = None
    high: float | None = None
    start: int = 0

    @property
    def nbytes(self) -> int:
        """Of one array."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    @property
    def is_wide(self) -> bool:
        """Whether it holds 64-bit integers."""
        return self.dtype in ("int64", "uint64")

    @property
    def device_dtype(self) -> np.dtype:
        """What the array becomes on a device, which has no 64-bit numbers.

        Floats of 64 bits are rounded to the nearest of 32. Integers of 64 bits become int32, or else uint32, where that
        holds every value between their bounds. Everything else stays.

        Raises:
            ConfigError: neither holds them, or it is no kind of number that a device has; names leaf and bounds.
        """
        dtype = np.dtype(self.dtype)
        if self.is_wide:
            return self._narrow()
        if dtype.kind not in "biuf" or dtype.itemsize > 8:
            raise ConfigError(
                f"{self.kind} {self.name!r} is {self.dtype}, which a policy's device does not have: wrap the simulator "
                "so that it is float32, or an integer"
            )
        return np.dtype(np.float32) if dtype == np.float64 else dtype

    def _narrow(self) -> np.dtype:
        low, high = (0, max(self.n) - 1) if self.n else (self.low, self.high)
        for narrow in (np.int32, np.uint32):
            limits = np.iinfo(narrow)
            if low is not None and high is not None and limits.min <= low and high <= limits.max:
                return np.dtype(narrow)
        bounds = "without bounds" if low is None or high is None else f"between {low:.17g} and {high:.17g}"
        raise ConfigError(
            f"{self.kind} {self.name!r} is {self.dtype} {bounds}: a policy's device holds integers of -2**31 to "
            "2**31 - 1, or of 0 to 2**32 - 1. Declare the bounds that the values really have, or wrap the simulator so "
            "that they fit, or are float32"
        )

    def zeros(self, *batch: int) -> np.ndarray:
        """An array of zeros with batch axes in front."""
        return np.zeros((*batch, *self.shape), self.dtype)


@dataclass(frozen=True, slots=True)
class Spaces:
    """What a policy sees and does.

    Attributes:
        observations: Leaves, sorted as the tree is walked; at least one.
        actions: Leaves, sorted in the same way.
    """

    observations: tuple[LeafSpace, ...]
    actions: tuple[LeafSpace, ...]

    def to_values(self) -> dict[str, Any]:
        """JSON values."""
        return {side: [_values(leaf) for leaf in getattr(self, side)] for side in ("observations", "actions")}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "Spaces":
        """Reads `to_values` back.

        Raises:
            ConfigError: they are not of that form.
        """
        try:
            return cls(*(tuple(_leaf(leaf) for leaf in values[side]) for side in ("observations", "actions")))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"these are no spaces: {type(error).__name__}: {error}") from error

    def forms(self, side: Literal["observations", "actions"]) -> list[tuple[Any, ...]]:
        """What the arrays of a side are, without bounds and starts."""
        leaves: tuple[LeafSpace, ...] = getattr(self, side)
        return [(leaf.name, leaf.kind, leaf.shape, leaf.dtype, leaf.n) for leaf in leaves]

    def same_form(self, other: "Spaces") -> bool:
        """Whether both are the same arrays: a policy for the one is one for the other. Bounds and starts may differ."""
        return all(self.forms(side) == other.forms(side) for side in ("observations", "actions"))

    def differences(self, other: "Spaces") -> str:
        """The leaves that are not `other`'s, by side and name with both forms, for an error; empty where none is.

        Args:
            other: Those that a policy was made for.
        """
        found: list[str] = []
        for side in ("observations", "actions"):
            ours, theirs = ({form[0]: form[1:] for form in spaces.forms(side)} for spaces in (self, other))
            found += [
                f"{side} {name!r}: {_form(ours.get(name))}, the policy's {_form(theirs.get(name))}"
                for name in dict.fromkeys((*ours, *theirs))
                if ours.get(name) != theirs.get(name)
            ]
        return "; ".join(found)

    def widened(self, other: "Spaces") -> "Spaces":
        """These, with bounds of 64-bit integers that hold for both: by them a device knows how to hold the numbers."""
        by_name = {leaf.name: leaf for leaf in other.observations}
        wider = tuple(_wider(leaf, by_name.get(leaf.name, leaf)) for leaf in self.observations)
        return self if wider == self.observations else replace(self, observations=wider)


def _form(form: tuple[Any, ...] | None) -> str:
    if form is None:
        return "none"
    kind, shape, dtype, n = form
    return f"{kind} {dtype} {list(shape)}" + (f" with n = {list(n)}" if n else "")


def _wider(leaf: LeafSpace, other: LeafSpace) -> LeafSpace:
    if not leaf.is_wide or leaf.low is None or leaf.high is None:
        return leaf
    if other.low is None or other.high is None:
        return replace(leaf, low=None, high=None)
    return replace(leaf, low=min(leaf.low, other.low), high=max(leaf.high, other.high))


def _values(leaf: LeafSpace) -> dict[str, Any]:
    return {
        "name": leaf.name, "kind": leaf.kind, "shape": list(leaf.shape), "dtype": leaf.dtype, "n": list(leaf.n),
        "low": leaf.low, "high": leaf.high, "start": leaf.start,
    }  # fmt: skip


def _leaf(values: Mapping[str, Any]) -> LeafSpace:
    return LeafSpace(
        str(values["name"]), values["kind"], tuple(map(int, values["shape"])), dtype_named(values["dtype"]).name,
        tuple(map(int, values["n"])), values["low"], values["high"], int(values["start"]),
    )  # fmt: skip
