"""What environments see of an engine: blocking calls with prompts in and completions out."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from penstock.inference.engine import InferenceEngine
from penstock.inference.sequence import GenerationRequest
from penstock.types import (
    Completion,
    EnvironmentFailure,
    GenerationCall,
    ManyInferenceContext,
    NoProgressError,
    TextCodec,
)


class EngineContext(ManyInferenceContext):
    """A `ManyInferenceContext` over one engine; any number of threads may call it.

    Args:
        engine: Already started; its `request_timeout_s` bounds every call.
        tokenizer: The policy's; its stop tokens stand in where a call names none.
        ordered: As callers see it.
    """

    def __init__(self, engine: InferenceEngine, tokenizer: TextCodec, ordered: bool = False) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._ordered = ordered

    @property
    def tokenizer(self) -> TextCodec:
        """The policy's tokenizer."""
        return self._tokenizer

    @property
    def ordered(self) -> bool:
        """As `penstock.types.InferenceContext`."""
        return self._ordered

    def generate_many(self, calls: Sequence[GenerationCall]) -> list[list[list[Completion]] | EnvironmentFailure]:
        """See `penstock.types.ManyInferenceContext`; all calls are one atomic submission.

        A call with a prompt that does not fit the engine's sequence length has its failure in its place; the others are
        served.

        Raises:
            ConfigError: decoding parameters are out of range.
            ValueError: there are not as many seeds as prompts.
            NoProgressError: the responses took longer than the engine's ``request_timeout_s``.
            RunFailed: the engine failed.
            Stopped: the engine was stopped before the request came in.
        """
        requests = [self._requests(call) for call in calls]
        served = [request for answer in requests if isinstance(answer, list) for request in answer]
        completions = iter(self._wait(self._engine.submit(served)))
        return [
            answer if isinstance(answer, EnvironmentFailure) else [next(completions) for _ in answer]
            for answer in requests
        ]

    def _requests(self, call: GenerationCall) -> list[GenerationRequest] | EnvironmentFailure:
        if len(call.prompts) != len(call.seeds):
            raise ValueError(f"seeds has {len(call.seeds)} for {len(call.prompts)} prompts: give one for each")
        stops = call.decoding.stop_token_ids or self._tokenizer.stop_token_ids
        decoding = replace(call.decoding, stop_token_ids=stops)
        requests = [
            GenerationRequest(prompt, decoding, seed, call.n)
            for prompt, seed in zip(call.prompts, call.seeds, strict=True)
        ]
        try:
            for request in requests:
                self._engine.check(request)
        except EnvironmentFailure as failure:
            return failure
        return requests

    def _wait(self, futures: list[Future[list[Completion]]]) -> list[list[Completion]]:
        timeout_s = self._engine.config.request_timeout_s
        deadline = time.monotonic() + timeout_s
        try:
            return [future.result(max(0.0, deadline - time.monotonic())) for future in futures]
        except TimeoutError as error:
            raise NoProgressError(
                f"the inference engine did not answer within inference.request_timeout_s = {timeout_s}"
            ) from error
        finally:
            for future in futures:
                future.cancel()  # frees the slots of what is not awaited any more; a no-op once done
