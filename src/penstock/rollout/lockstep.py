"""A fixed engine schedule for staleness zero: several groups generate as one, in ticket order.

Floating-point results may depend on which rows share a batch, so bit-for-bit reproduction needs the engine
to see the same batches in every run. Under a `Lockstep` every participant waits at a gate; when all that are
still active have arrived, the last arrival submits everybody's prompts, in ticket order, in one call. Nothing
else of the engine changes. With a staleness above zero there is no gate: groups call the engine as they come.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.types import (
    Completion,
    Decoding,
    GenerationCall,
    InferenceContext,
    ManyInferenceContext,
    NoProgressError,
    TextCodec,
)


@dataclass(slots=True)
class _Arrival:
    call: GenerationCall
    result: list[list[Completion]] | Exception | None = None


class Lockstep:
    """Lets `size` participants share one inference context, round by round.

    Args:
        context: The context to submit to.
        size: Number of participants; participant i uses ``participant(i)`` and ends with ``leave(i)``.
        timeout_s: Longest wait at the gate.
    """

    def __init__(self, context: ManyInferenceContext, size: int, timeout_s: float) -> None:
        self._context = context
        self._timeout_s = timeout_s
        self._gate = threading.Condition()
        self._active = set(range(size))
        self._waiting: dict[int, _Arrival] = {}

    def participant(self, index: int) -> InferenceContext:
        """The context that participant `index` generates with."""
        return _Participant(self, index)

    @property
    def tokenizer(self) -> TextCodec:
        """The policy's tokenizer."""
        return self._context.tokenizer

    def leave(self, index: int) -> None:
        """Participant `index` will not generate again; the others no longer wait for it."""
        with self._gate:
            self._active.discard(index)
            arrivals = self._complete_round()
        self._submit(arrivals)

    def arrive(self, index: int, arrival: _Arrival) -> list[list[Completion]]:
        """Waits for the round and returns this participant's share of its results."""
        with self._gate:
            self._waiting[index] = arrival
            arrivals = self._complete_round()
        self._submit(arrivals)
        with self._gate:
            done = self._gate.wait_for(lambda: arrival.result is not None, self._timeout_s)
        if not done or arrival.result is None:
            raise NoProgressError(
                f"lockstep: group {index} waited {self._timeout_s:g} s for its round (rollout.lockstep_timeout_s)"
            )
        if isinstance(arrival.result, Exception):
            raise arrival.result
        return arrival.result

    def _complete_round(self) -> list[_Arrival]:
        if not self._waiting or self._active - self._waiting.keys():
            return []
        arrivals = [self._waiting[index] for index in sorted(self._waiting)]
        self._waiting = {}
        return arrivals

    def _submit(self, arrivals: list[_Arrival]) -> None:
        if not arrivals:
            return
        results: list[list[list[Completion]] | Exception]
        try:
            results = list(self._context.generate_many([arrival.call for arrival in arrivals]))
        except Exception as failure:  # the engine failed: every participant raises it
            results = [failure] * len(arrivals)
        with self._gate:
            for arrival, result in zip(arrivals, results, strict=True):
                arrival.result = result
            self._gate.notify_all()


class _Participant:
    def __init__(self, lockstep: Lockstep, index: int) -> None:
        self._lockstep = lockstep
        self._index = index

    @property
    def tokenizer(self) -> TextCodec:
        return self._lockstep.tokenizer

    def generate(
        self, prompts: Sequence[np.ndarray], n: int, decoding: Decoding, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        return self._lockstep.arrive(self._index, _Arrival(GenerationCall(prompts, n, decoding, seeds)))
