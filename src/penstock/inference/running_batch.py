"""The responses that run at present, and how they move on: admission, one dispatch, departure.

Joins the slots (host) with the runner (device). Used by the engine's thread only, but for `prepare`; knows no queue,
lock or future.
"""

import time
from collections.abc import Iterator, Sequence

from penstock.inference.admission import Admission, PrefixIndex, plan_admission
from penstock.inference.config import EngineConfig
from penstock.inference.decoding import ServedWeights
from penstock.inference.meter import Meter
from penstock.inference.responses import Response
from penstock.inference.runner import ModelRunner
from penstock.inference.slots import SlotTable
from penstock.model.language import Decoder
from penstock.types import WeightVersion


class RunningBatch:
    """Fixed slots that are refilled as responses end.

    Args:
        decoder: The first weights.
        config: Shapes and limits.
        meter: Told what runs.
    """

    def __init__(self, decoder: Decoder, config: EngineConfig, meter: Meter) -> None:
        self._config, self._meter = config, meter
        self._runner = ModelRunner(decoder, config)
        self._slots = SlotTable(config.max_slots, config.max_stop_token_ids)
        self._prefixes = PrefixIndex()

    @property
    def free(self) -> int:
        """How many responses can be admitted."""
        return self._slots.free

    @property
    def running(self) -> int:
        """How many responses run."""
        return self._slots.running

    @property
    def cached_tokens(self) -> int:
        """Cache positions in use."""
        return self._slots.cached_tokens

    @property
    def responses(self) -> list[Response]:
        """Those that run."""
        return [response for _, response in self._slots.occupied()]

    def warm_up(self) -> Iterator[None]:
        """Compiles every program; yields after each."""
        return self._runner.warm_up(self._slots.rows)

    def prepare(self, decoder: Decoder) -> ServedWeights:
        """Weights as the programs take them; what runs goes on meanwhile. For any thread."""
        return self._runner.prepare(decoder)

    def load(self, weights: ServedWeights) -> None:
        """Serves these from the next program on; prompts cached before are not lent any more."""
        self._runner.load(weights)
        self._prefixes.clear()
        self._meter.add(weight_swaps=1)

    def admit(self, arrivals: Sequence[Response], version: WeightVersion, fresh_start: bool) -> None:
        """Gives each arrival a slot and its prompt's cache.

        Args:
            arrivals: At most as many as slots are free.
            version: Of the weights that prefill.
            fresh_start: Nothing that was before may show in what follows.
        """
        if fresh_start:
            self._prefixes.clear()
        assigned = [(self._slots.assign(response), response) for response in arrivals]
        admission = plan_admission(assigned, self._prefixes, self._config)
        self._fit_window(admission, fresh_start)
        self._fill(admission)
        for response in arrivals:
            response.prefilled_by = version if len(response.prompt) > 1 else None

    def decode(self, version: WeightVersion) -> list[Response]:
        """Runs one dispatch; returns the responses that ended with it, whose slots are free again."""
        if not self._slots.running:
            return []
        started = time.monotonic()
        sampled = self._runner.decode(self._slots.rows)
        ended = self._slots.advance(sampled, version)
        for slot, _ in ended:
            self._slots.release(slot)
        self._meter.add(responses=len(ended))
        self._meter.add_dispatch(started, int(sampled.count.sum()))
        return [response for _, response in ended]

    def drop_cancelled(self) -> int:
        """Frees the slots of responses that nobody waits for; returns how many."""
        cancelled = [slot for slot, response in self._slots.occupied() if response.pending.future.cancelled()]
        for slot in cancelled:
            self._slots.release(slot)
        return len(cancelled)

    def _fit_window(self, admission: Admission, fresh_start: bool) -> None:
        """Grows the cache when needed; shrinks it at a fresh start, or when half of it would do."""
        lengths = [prefill.tokens.shape[1] for prefill in admission.prefills]
        needed = max([self._slots.reach(self._config.steps_per_dispatch), *lengths])
        if needed > self._runner.window or fresh_start:
            self._runner.resize(self._bucket(needed))
        elif self._bucket(2 * needed) < self._runner.window:
            self._runner.resize(self._bucket(2 * needed))
            self._prefixes.clear()  # the end of a prompt in a free slot may be cut off

    def _bucket(self, needed: int) -> int:
        windows = self._config.window_buckets
        return next((window for window in windows if window >= needed), windows[-1])

    def _fill(self, admission: Admission) -> None:
        if admission.fork is not None:
            self._runner.fork(admission.fork)
        for prefill in admission.prefills:
            self._runner.prefill(prefill.tokens, prefill.source)
            self._meter.add(prefill_tokens=prefill.tokens.size)
