"""Which arrays travel, and how they meet those that a client has already: only what trains is sent."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from penstock.types import WeightsError


def trained_arrays(arrays: Mapping[str, Any], frozen: Sequence[str]) -> dict[str, Any]:
    """The arrays that are published, in their order.

    Args:
        arrays: All of the model's, by name.
        frozen: Patterns of names that do not train, such as ``embedding`` or ``layers.*``.

    Raises:
        WeightsError: a pattern matches no array, or together they match all.
    """
    idle = [pattern for pattern in frozen if not any(fnmatchcase(name, pattern) for name in arrays)]
    if idle:
        raise WeightsError(f"frozen arrays {idle} match no name: the model has {sorted(arrays)}")
    kept = {name: array for name, array in arrays.items() if not any(fnmatchcase(name, each) for each in frozen)}
    if arrays and not kept:
        raise WeightsError(f"frozen arrays {list(frozen)} match every name: nothing would train")
    return kept


def merged_arrays(base: Mapping[str, Any], fetched: Mapping[str, Any]) -> dict[str, Any]:
    """All arrays of a model: the fetched ones, and the client's own where none came.

    Args:
        base: The client's JAX arrays, whose dtypes the result has. They stay where they are.
        fetched: Arrays of the same names and shapes, for some or all of them; of another dtype where they were cast to
            travel. They are copied to where the client's own lie, and cast there; their memory may be used again.

    Raises:
        WeightsError: naming fetched arrays that the client does not know, or that have another shape.
    """
    unknown = sorted(fetched.keys() - base.keys())
    misshaped = [
        f"{name} is {tuple(array.shape)}, not {tuple(base[name].shape)}"
        for name, array in fetched.items()
        if name in base and tuple(array.shape) != tuple(base[name].shape)
    ]
    if unknown or misshaped:
        raise WeightsError(f"fetched arrays do not fit the model: unknown {unknown}, misshaped {misshaped}")
    return {name: _placed(fetched[name], own) if name in fetched else own for name, own in base.items()}


def _placed(array: Any, like: Any) -> Any:
    import jax
    import numpy as np

    if any(device.platform == "cpu" for device in like.devices()):
        array = np.array(array)  # there, JAX would only refer to memory that is aligned well
    return jax.device_put(array, like.sharding).astype(like.dtype)
