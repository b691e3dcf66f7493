"""Responses in the making: what one sample has so far, and the request whose future waits for all of them.

Host-side only. A `Response` is owned by the engine's thread from submission to completion.
"""

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from penstock.inference.requests import GenerationRequest
from penstock.inference.stopping import StopStrings, text_of
from penstock.types import Completion, FinishReason, TextCodec, WeightVersion, fold


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A submitted request; its future is resolved when all its responses have ended.

    Attributes:
        request: What was asked.
        stop_token_ids: The request's, or the tokenizer's.
        room: Most tokens per response: what was asked for, or what the sequence length leaves.
        future: Resolved with n completions in order.
        completions: Those that have ended, by sample.
    """

    request: GenerationRequest
    stop_token_ids: tuple[int, ...]
    room: int
    future: Future[list[Completion]] = field(default_factory=Future)
    completions: dict[int, Completion] = field(default_factory=dict[int, Completion])

    def complete(self, index: int, completion: Completion) -> None:
        """Takes one sample's completion; the last one resolves the future."""
        self.completions[index] = completion
        if len(self.completions) == self.request.n and self.future.set_running_or_notify_cancel():
            self.future.set_result([self.completions[i] for i in range(self.request.n)])

    def fail(self, error: BaseException) -> None:
        """Gives the error to whoever waits."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


@dataclass(slots=True, eq=False)
class Response:
    """One sample on its way.

    Attributes:
        pending: The request it belongs to.
        index: Which of the request's n samples.
        seed: ``fold(request.seed, index)``.
        tokens: Sampled so far.
        logprobs: Of those tokens.
        versions: The weights that sampled each of them.
        prefilled_by: The weights behind the prompt's cache; None for a prompt that needed none.
        finish_reason: None while it runs.
    """

    pending: PendingRequest
    index: int
    seed: int = 0
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[WeightVersion] = field(default_factory=list[WeightVersion])
    prefilled_by: WeightVersion | None = None
    finish_reason: FinishReason | None = None
    _stop_strings: StopStrings | None = None

    @classmethod
    def of(cls, pending: PendingRequest, index: int, tokenizer: TextCodec) -> "Response":
        """A sample that has not begun."""
        response = cls(pending, index, fold(pending.request.seed, index))
        if pending.request.decoding.stop_strings:
            response._stop_strings = StopStrings(tokenizer, pending.request.decoding.stop_strings)
        return response

    @property
    def prompt(self) -> np.ndarray:
        """int32 [p]."""
        return self.pending.request.prompt

    @property
    def room(self) -> int:
        """How many tokens it may still sample."""
        return self.pending.room - len(self.tokens)

    def extend(self, tokens: list[int], logprobs: list[float], version: WeightVersion) -> None:
        """Takes one dispatch's tokens, drops those past the end, and notes why it ended if it did."""
        kept = self._stop_strings.completed_by(tokens) if self._stop_strings is not None else None
        count = len(tokens) if kept is None else kept
        self.tokens += tokens[:count]
        self.logprobs += logprobs[:count]
        self.versions += [version] * count
        if kept is not None or (self.tokens and self.tokens[-1] in self.pending.stop_token_ids):
            self.finish_reason = "stop"
        elif self.room == 0:
            self.finish_reason = "length"

    def finish(self, tokenizer: TextCodec, current: WeightVersion) -> None:
        """Hands the completion to its request.

        Args:
            tokenizer: Decodes the text.
            current: Stands for the weights where no token was sampled.
        """
        touched = [*self.versions, *([self.prefilled_by] if self.prefilled_by else [])]
        oldest = min(touched, default=current)
        completion = Completion(
            prompt_tokens=self.prompt,
            response_tokens=np.array(self.tokens, np.int32),
            response_logprobs=np.array(self.logprobs, np.float32),
            weight_steps=np.array([version.step for version in self.versions], np.int32),
            oldest_weight_step=oldest.step,
            lineage=oldest.lineage,
            text=text_of(tokenizer, self.tokens, self.pending.request.decoding.stop_strings),
            finish_reason=self.finish_reason or "aborted",
        )
        self.pending.complete(self.index, completion)
