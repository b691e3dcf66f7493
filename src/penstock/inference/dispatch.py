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
    """State of slots between two dispatches, and what their requests ask for.

    Attributes:
        slots: Which slot of the cache each row is.
        tokens: The newest token: sampled or the prompt's last, not yet in the cache.
        positions: Its position, which is how many tokens the cache holds.
        budget: How many tokens may still be sampled; 0 for a row that is not live.
        seeds: The sample's seed in two words.
        sampling: [rows] each, by the names of `SAMPLING_FIELDS`: what `sampling.sample` takes.
        stop_token_ids: Padded with −1.
    """

    slots: Int32[Array, " rows"]
    tokens: Int32[Array, " rows"]
    positions: Int32[Array, " rows"]
    budget: Int32[Array, " rows"]
    seeds: UInt32[Array, "rows 2"]
    sampling: dict[str, Array]
    stop_token_ids: Int32[Array, "rows stops"]


class DeviceSamples(NamedTuple):
    """What one dispatch sampled: of row r, the first ``count[r]`` entries of column r.

    Attributes:
        tokens: By step, then row.
        logprobs: Of those tokens, before truncation.
        count: How many tokens the row sampled before it stopped or the dispatch ended.
    """

    tokens: Int32[Array, "steps rows"]
    logprobs: Float32[Array, "steps rows"]
    count: Int32[Array, " rows"]


class HostSamples(NamedTuple):
    """`DeviceSamples` in host memory, a column per slot."""

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


def to_host(emitted: DeviceSamples, chosen: np.ndarray, slots: int) -> HostSamples:
    """Waits for a dispatch and fetches its result.

    Args:
        emitted: Of the rows that ran.
        chosen: The slot of each.
        slots: How many there are; those that did not run sampled nothing.
    """
    fetched = [np.asarray(array) for array in emitted]
    if len(chosen) == slots:  # all, in order
        return HostSamples(*fetched)
    found = [np.zeros((*array.shape[:-1], slots), array.dtype) for array in fetched]
    for whole, part in zip(found, fetched, strict=True):
        whole[..., chosen] = part
    return HostSamples(*found)
