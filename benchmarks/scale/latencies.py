"""How long a simulated worker waits for its tokens: times of real calls of the inference engine.

    python -m benchmarks.scale.latencies

measures them anew: 16 callers at once, each asking for a group of 8 answers whose length limit is drawn between 64 and
256 tokens, from an engine with 128 slots and the model of `benchmarks.generation` (8 million parameters, on CPU). What
is printed is `QUANTILES_S`: the shortest, the deciles, and the longest.
"""

import statistics
import threading
import time
from collections.abc import Sequence

import numpy as np

QUANTILES_S: tuple[float, ...] = (1.67, 3.45, 4.78, 6.62, 7.38, 8.49, 9.00, 10.44, 12.40, 14.96, 24.15)
"""Seconds from request to last answer, at the shares 0, 10%, …, 100%; measured on 2 cores that others used, too."""

CALLERS, CALLS, GROUP_SIZE, SLOTS = 16, 6, 8, 128
SHORTEST, LONGEST = 64, 256


class Latencies:
    """Draws from a distribution that is given by its quantiles, linear between them.

    Args:
        quantiles_s: At evenly spaced shares, ascending.
        speed: Everything takes this much less time.
    """

    def __init__(self, quantiles_s: Sequence[float] = QUANTILES_S, speed: float = 1.0) -> None:
        self._quantiles_s = np.asarray(quantiles_s) / speed
        self._shares = np.linspace(0.0, 1.0, len(quantiles_s))

    def at(self, share: float) -> float:
        """Seconds that this share of the calls does not exceed."""
        return float(np.interp(share, self._shares, self._quantiles_s))

    @property
    def mean_s(self) -> float:
        """Of the distribution."""
        return float((self._quantiles_s[1:] + self._quantiles_s[:-1]).mean() / 2)


def quantiles(seconds: Sequence[float]) -> tuple[float, ...]:
    """The shortest, the deciles, and the longest."""
    return (min(seconds), *statistics.quantiles(seconds, n=10), max(seconds))


def measure() -> list[float]:
    """Seconds of each call."""
    import jax

    from benchmarks.generation import MODEL, PROMPT_TOKENS, started_engine
    from penstock.inference import GenerationRequest
    from penstock.model.language import Decoder
    from penstock.types import Decoding

    decoder = Decoder.initialise(MODEL, jax.random.key(0))
    engine, _ = started_engine(decoder, SLOTS, 8, PROMPT_TOKENS + LONGEST)
    seconds: list[float] = []

    def call_again_and_again(caller: int) -> None:
        rng = np.random.default_rng(caller)
        for call in range(CALLS):
            prompt = rng.integers(0, MODEL.vocab_size, PROMPT_TOKENS).astype(np.int32)
            decoding = Decoding(max_output_tokens=int(rng.integers(SHORTEST, LONGEST + 1)))
            began = time.perf_counter()
            engine.submit([GenerationRequest(prompt, decoding, caller * CALLS + call, GROUP_SIZE)])[0].result(600.0)
            seconds.append(time.perf_counter() - began)

    callers = [threading.Thread(target=call_again_and_again, args=(number,)) for number in range(CALLERS)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    engine.stop(30.0)
    return seconds


if __name__ == "__main__":
    print(", ".join(f"{found:.2f}" for found in quantiles(measure())))
