"""What one dispatch of decode steps is given and what it returns, on the device and in host memory."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float32, Int32, UInt32

from penstock.types import SAMPLING_FIELDS

HostRows = Mapping[str, np.ndarray]
"""The fields of `SlotRows`, and those of `SlotRows.sampling`, by name in host memory."""


class SlotRows(NamedTuple):
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


class DeviceSamples(NamedTuple):
    """What one dispatch sampled: of slot s, the first ``count[s]`` entries of column s.

    Attributes:
        tokens: By step, then slot.
        logprobs: Of those tokens, before truncation.
        count: How many tokens the slot sampled before it stopped or the dispatch ended.
    """

    tokens: Int32[Array, "steps slots"]
    logprobs: Float32[Array, "steps slots"]
    count: Int32[Array, " slots"]


class HostSamples(NamedTuple):
    """`DeviceSamples` in host memory."""

    tokens: np.ndarray
    logprobs: np.ndarray
    count: np.ndarray


def to_device(rows: HostRows) -> SlotRows:
    """Puts rows on the device, which may read them where they are: they stay as they are until the dispatch has ended.

    Not by `jnp.asarray`, which compiles a program for each shape.
    """
    arrays = {name: jax.device_put(array) for name, array in rows.items()}
    sampling = {name: arrays.pop(name) for name in SAMPLING_FIELDS}
    return SlotRows(**arrays, sampling=sampling)


def to_host(emitted: DeviceSamples) -> HostSamples:
    """Waits for a dispatch and fetches its result."""
    return HostSamples(*(np.asarray(array) for array in emitted))
