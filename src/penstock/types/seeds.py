"""Seeds derived by name, so that every random choice is reproducible and no two streams meet."""

import hashlib
import sys
from typing import SupportsInt

import numpy as np


def fold(seed: int, *names: str | int) -> int:
    """Derives a seed from another one and a path of names.

    Args:
        seed: The parent seed, any integer.
        names: Strings and integers; ``fold(s, "a", 1)`` differs from ``fold(s, "a1")``.

    Returns:
        An integer in [0, 2**63), the same on every machine.
    """
    digest = hashlib.sha256(repr((int(seed), *names)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def as_seed(prng_key: SupportsInt | np.ndarray) -> int:
    """Reads a seed from an integer, from a JAX PRNG key, or from a key's raw data (any uint32 array).

    ``jax.random.key(s)`` and ``jax.random.PRNGKey(s)`` give the same seed.
    """
    if isinstance(prng_key, int):
        return prng_key
    if str(getattr(prng_key, "dtype", "")).startswith("key<"):  # NumPy cannot read it; who made it has loaded JAX
        prng_key = sys.modules["jax"].random.key_data(prng_key)
    words = np.asarray(prng_key)
    return int(words) if words.ndim == 0 else fold(0, *(int(word) for word in words.ravel()))


def generator(seed: int) -> np.random.Generator:
    """A NumPy random generator for a seed made by `fold`."""
    return np.random.default_rng(seed)
