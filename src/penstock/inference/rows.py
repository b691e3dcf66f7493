"""What passes between the host and the device at every dispatch: the state of all slots, and what they sampled."""

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, UInt32

from penstock.types import SAMPLING_FIELDS

HostRows = Mapping[str, np.ndarray]
"""The fields of `Rows`, and those of `Rows.sampling`, by name in host memory."""


class Rows(NamedTuple):
    """State of every slot between two dispatches, and what its request asks for.

    Attributes:
        tokens: The newest token: sampled or the prompt's last, not yet in the cache.
        positions: Its position, which is how many tokens the cache holds.
        budget: How many tokens may still be sampled; 0 for a slot that is not live.
        seeds: The sample's seed in two words.
        sampling: [slots] each, by the names of `SAMPLING_FIELDS`: what `sampling.sample` takes.
        stop_token_ids: Padded with −1.
    """

    tokens: Int32[Array, " slots"]
    positions: Int32[Array, " slots"]
    budget: Int32[Array, " slots"]
    seeds: UInt32[Array, "slots 2"]
    sampling: dict[str, Array]
    stop_token_ids: Int32[Array, "slots stops"]


class Emitted(NamedTuple):
    """What one dispatch sampled: of slot s, the first ``count[s]`` entries of column s.

    Attributes:
        tokens: By step, then slot.
        logprobs: Of those tokens, before truncation.
        count: How many tokens the slot sampled before it stopped or the dispatch ended.
    """

    tokens: Int32[Array, "steps slots"]
    logprobs: Float32[Array, "steps slots"]
    count: Int32[Array, " slots"]


class Sampled(NamedTuple):
    """`Emitted` in host memory."""

    tokens: np.ndarray
    logprobs: np.ndarray
    count: np.ndarray


def to_device(rows: HostRows) -> Rows:
    """Copies rows to the device."""
    arrays = {name: jnp.asarray(array) for name, array in rows.items()}
    sampling = {name: arrays.pop(name) for name in SAMPLING_FIELDS}
    return Rows(**arrays, sampling=sampling)


def to_host(emitted: Emitted) -> Sampled:
    """Waits for a dispatch and fetches its result."""
    return Sampled(*(np.asarray(array) for array in emitted))
