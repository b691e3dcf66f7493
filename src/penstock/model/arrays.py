"""Parameters of any network as a flat mapping of named arrays: the form in which weights travel.

Names are tree paths: ``layers.query``, ``encoder.mlp.layers.0.weight``. Arrays go by reference; nothing is copied.

*Digests.* An array's digest says which bits a device holds, wherever its parts lie: nothing but eight bytes per array
leaves the device. Element i with bit pattern w, zero-extended to 32 bits, adds m(i)·f(w) to a sum modulo 2³², in two
lanes with multipliers m of their own (multilinear hashing: Carter & Wegman 1979,
https://doi.org/10.1016/0022-0000(79)90044-8; modulo a power of two: Lemire & Kaser 2014,
https://arxiv.org/abs/1202.4961). f and what makes m out of i are the finaliser of MurmurHash3 (Appleby, public domain,
https://github.com/aappleby/smhasher), so that high bits count as much as low ones and places are told apart. The order
of additions modulo 2³² does not matter: the digest is the same on every platform and for every placement, and that of a
stack is the sum of its layers' own, each taken at its place. Against accidents; it authenticates nobody.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from penstock.types.errors import WeightsError

Network = TypeVar("Network")
_MOST_NAMED = 5


def named_leaves(network: object) -> dict[str, Any]:
    """Every parameter by name, in a fixed order: arrays, or what `shapes_of` has in their place."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(network)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def shapes_of(network: Network) -> Network:
    """The same network with shape, dtype and placement of each JAX array in its place: keeps none of them alive."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), network)


def are_shapes(network: Any) -> bool:
    """Whether its arrays, or some of them, are shapes only."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(network))


def with_named_leaves(network: Network, arrays: Mapping[str, Array | np.ndarray], what: str) -> Network:
    """A network of the same shape that holds these arrays instead.

    Args:
        network: Gives the shape; `shapes_of` it will do.
        arrays: The arrays to put in, by their name in the network.
        what: The network in words, for the error.

    Raises:
        WeightsError: naming the arrays that are missing, extra, or of another shape or dtype.
    """
    current = named_leaves(network)
    check_fits(current, arrays, what)
    return jax.tree.unflatten(jax.tree.structure(network), [jnp.asarray(arrays[name]) for name in current])


def check_fits(
    shapes: Mapping[str, Any], arrays: Mapping[str, Array | np.ndarray], what: str, partly: bool = False
) -> None:
    """Refuses arrays that cannot stand in the place of a network's.

    Args:
        shapes: The network's arrays by name, or what `shapes_of` has in their place.
        arrays: The others.
        what: The network in words, for the error.
        partly: Some of them will do, those in host memory in any dtype.

    Raises:
        WeightsError: naming the arrays that are missing, extra, or of another shape or dtype.
    """
    problems = [] if partly else [f"{name} is missing" for name in shapes if name not in arrays]
    problems += [f"{name} is unknown" for name in arrays if name not in shapes]
    for name, array in arrays.items():
        cast = partly and not isinstance(array, jax.Array)
        own = shapes.get(name, array)
        if array.shape != own.shape or not (cast or array.dtype == own.dtype):
            problems.append(f"{name} is {_signature(array)}, not {_signature(own)}")
    if problems:
        more = f" and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        raise WeightsError(f"weights do not fit {what}: {'; '.join(problems[:_MOST_NAMED])}{more}")


def _signature(array: Array | np.ndarray | jax.ShapeDtypeStruct) -> str:
    return f"{array.dtype}{list(array.shape)}"


_SEEDS = (0x9E3779B9, 0x7F4A7C15)
"""One for each lane."""


def digests_of(arrays: Mapping[str, Array | np.ndarray]) -> dict[str, str]:
    """The digest of every array in 16 hexadecimal digits, by its name."""
    return joined_digests([(0, arrays)])


def joined_digests(parts: Iterable[tuple[int, Mapping[str, Array | np.ndarray]]]) -> dict[str, str]:
    """Digests of arrays that lie in parts along their first axis, as if each were in one piece.

    Args:
        parts: Each with its number: part k of an array begins k times its own size after the array's beginning.
    """
    sums: dict[str, np.ndarray] = {}
    begun = [(sorted(arrays), _digest_sums(dict(arrays), np.uint32(number))) for number, arrays in parts]
    for names, lanes in begun:
        for name, lane in zip(names, np.asarray(lanes), strict=True):
            sums[name] = sums.get(name, np.zeros(2, np.uint32)) + lane
    return {name: "".join(f"{lane:08x}" for lane in lanes.tolist()) for name, lanes in sums.items()}


def lower_digests(arrays: Mapping[str, Any]) -> Any:
    """The program that `digests_of` runs on arrays of these names and shapes, or on one of the parts, lowered."""
    return _digest_sums.lower(dict(arrays), np.uint32(0))


@jax.jit
def _digest_sums(arrays: dict[str, Array], number: UInt32[Array, ""]) -> UInt32[Array, "arrays 2"]:
    """Of every array, by the order of names, both lanes of a part."""
    return jnp.stack([_lanes(arrays[name], number * np.uint32(arrays[name].size % 2**32)) for name in sorted(arrays)])


def _lanes(array: Array, first: UInt32[Array, ""]) -> UInt32[Array, " 2"]:
    """Both lanes of elements whose places begin at `first`.

    Nothing is reshaped, which would gather what is split; both sums are one reduction, which is a fifth of the time.
    """
    bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))
    words = _finalised(bits.astype(jnp.uint32))
    axes = tuple(range(array.ndim))
    places, stride = jnp.zeros(array.shape, jnp.uint32) + first, 1
    for axis in reversed(axes):
        places += jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis) * np.uint32(stride % 2**32)
        stride *= array.shape[axis]
    terms = [_finalised(places + np.uint32(seed)) * words for seed in _SEEDS]
    zeros = [np.uint32(0)] * len(terms)
    sums = jax.lax.reduce(terms, zeros, lambda left, right: [a + b for a, b in zip(left, right, strict=True)], axes)
    return jnp.stack(sums)


def _finalised(word: Array) -> Array:
    """MurmurHash3's `fmix32` of uint32 words: every bit of one changes half of the bits of what comes out."""
    word = (word ^ (word >> 16)) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * np.uint32(0xC2B2AE35)
    return word ^ (word >> 16)
