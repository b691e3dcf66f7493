"""A decoder's parameters as a flat mapping of named arrays: the form in which weights travel.

Names are tree paths: ``embedding``, ``layers.query``, ``final_norm``. Array for array by reference; nothing is
copied. What a decoder does not have (an untied head, biases) has no name.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array

from penstock.model.language.decoder import Decoder
from penstock.types.errors import WeightsError


def named_arrays(decoder: Decoder) -> dict[str, Array]:
    """Every parameter of the decoder by name, in a fixed order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(decoder)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def with_named_arrays(decoder: Decoder, arrays: Mapping[str, Array]) -> Decoder:
    """A decoder of the same shape that holds these arrays instead.

    Raises:
        WeightsError: naming the arrays that are missing, extra, or of another shape or dtype.
    """
    current = named_arrays(decoder)
    problems = [f"{name} is missing" for name in current if name not in arrays]
    problems += [f"{name} is unknown" for name in arrays if name not in current]
    problems += [
        f"{name} is {_signature(arrays[name])}, not {_signature(array)}"
        for name, array in current.items()
        if name in arrays and _signature(arrays[name]) != _signature(array)
    ]
    if problems:
        raise WeightsError(f"weights do not fit the decoder: {'; '.join(problems[:5])}" + _rest(problems))
    structure = jax.tree.structure(decoder)
    return jax.tree.unflatten(structure, [jnp.asarray(arrays[name]) for name in current])


def _signature(array: Array) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _rest(problems: list[str]) -> str:
    return f" and {len(problems) - 5} more" if len(problems) > 5 else ""
