"""One random stream per batch: it depends on the seed, the step and the batch's number there, and on no history."""

from typing import final

import numpy as np

from penstock.types import fold, generator


@final
class BatchRandomness:
    """Streams of one batch maker.

    Args:
        seed: None takes one from the operating system.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed = int(np.random.SeedSequence().generate_state(1, np.uint64)[0]) if seed is None else seed
        self._step = 0
        self._batches = 0

    def next(self, step: int) -> np.random.Generator:
        """The stream of the next batch for an update."""
        if step != self._step:
            self._step, self._batches = step, 0
        self._batches += 1
        return generator(fold(self._seed, "batch", step, self._batches))
