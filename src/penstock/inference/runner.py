"""Owns what is on the device: the served weights and the cache; runs the compiled programs on them.

`warm_up` compiles every shape that can occur, so that serving never compiles again. Used by one thread only, which is
the only writer of weights and cache, on however many devices they lie; any other may `prepare` weights meanwhile. What
runs when is decided elsewhere (`penstock.inference.engine`).
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from penstock.inference.config import EngineConfig
from penstock.inference.decoding import ServedWeights
from penstock.inference.programs import ONE_DEVICE, split_programs
from penstock.inference.rows import HostRows, Sampled, to_device, to_host
from penstock.inference.sharding import ModelSplit
from penstock.model.language import Decoder


class ModelRunner:
    """Runs prefill and decode for a fixed number of slots.

    Args:
        decoder: The first weights.
        config: Shapes, and over how many devices.

    Raises:
        ConfigError: the model cannot be split over that many devices, or there are fewer.
    """

    def __init__(self, decoder: Decoder, config: EngineConfig) -> None:
        self._config = config
        self._windows = config.window_buckets
        devices = jax.local_device_count() if config.model_parallel is None else config.model_parallel
        self._split = ModelSplit.over(decoder.config, devices) if devices > 1 else None
        self._programs = ONE_DEVICE if self._split is None else split_programs(self._split)
        self.load(self.prepare(decoder))
        self._cache = self._programs.create(decoder.config, config.max_slots, self._windows[0])

    @property
    def window(self) -> int:
        """Positions that fit into the cache at present."""
        return self._cache.window

    def prepare(self, decoder: Decoder) -> ServedWeights:
        """Weights as the programs take them, on their devices; what is served stays as it is. For any thread."""
        weights = ServedWeights.of(decoder) if self._split is None else self._split.serve(decoder)
        return jax.block_until_ready(weights)

    def load(self, weights: ServedWeights) -> None:
        """Serves these from the next program on: a reference changes. Cached keys and values stay as they are."""
        self._weights = weights

    def resize(self, window: int) -> None:
        """Takes the cache to another of the configured windows, through those between (each a compiled step)."""
        current, target = self._windows.index(self.window), self._windows.index(window)
        direction = 1 if target > current else -1
        for index in range(current + direction, target + direction, direction) if target != current else ():
            self._cache = self._programs.resize(self._cache, window=self._windows[index])

    def prefill(self, tokens: Int32[np.ndarray, "rows length"], source: Int32[np.ndarray, " slots"]) -> None:
        """Runs padded prompts and copies row ``source[s]`` into slot s (−1: none)."""
        prefilled = self._programs.prefill(self._weights, jnp.asarray(tokens))
        self._cache = self._programs.insert(self._cache, prefilled, jnp.asarray(source))

    def fork(self, source: Int32[np.ndarray, " slots"]) -> None:
        """Copies the cache of slot ``source[s]`` into slot s."""
        self._cache = self._programs.fork(self._cache, jnp.asarray(source))

    def decode(self, rows: HostRows) -> Sampled:
        """Runs one dispatch and waits for it."""
        steps = self._config.steps_per_dispatch
        self._cache, emitted = self._programs.decode(self._weights, self._cache, to_device(rows), steps=steps)
        return to_host(emitted)

    def warm_up(self, idle_rows: HostRows) -> Iterator[None]:
        """Compiles and runs every program in every shape, with slots that are not live.

        Args:
            idle_rows: Rows with no budget.

        Yields:
            After each program, so that whoever waits for an end need not wait for all of them.
        """
        slots = self._config.max_slots
        nowhere = np.full(slots, -1, np.int32)
        for window in self._windows:
            self.resize(window)
            self.decode(idle_rows)
            yield
            self.fork(np.arange(slots, dtype=np.int32))
            for rows, length in self._prefill_shapes(window):
                self.prefill(np.zeros((rows, length), np.int32), nowhere)
                yield
        self.resize(self._windows[0])
        jax.block_until_ready(self._cache)

    def _prefill_shapes(self, window: int) -> Iterator[tuple[int, int]]:
        for length in self._config.prefill_buckets:
            if length <= window:
                yield from ((rows, length) for rows in self._config.prefill_row_counts(length))
