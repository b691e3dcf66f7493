"""An inference context without a model, to try and test environments with known answers."""

import threading
from collections.abc import Callable, Sequence

import numpy as np

from penstock.types import (
    Completion,
    Decoding,
    EnvironmentFailure,
    FinishReason,
    GenerationCall,
    ManyInferenceContext,
    PromptTooLong,
    TextCodec,
    fold,
)

Answer = Callable[[str, int], str]
"""From the prompt's text and the sample's seed to the answer's text."""


class ScriptedContext(ManyInferenceContext):
    """Answers by script, in the form of an engine.

    Each answer is encoded with the tokenizer and ended with its first stop token, or cut at the decoding's limit.
    Log-probabilities are a constant, versions are those of `weight_step`.

    Args:
        tokenizer: Renders prompts and encodes answers.
        answers: A function of the prompt's text and the sample's seed, or texts given in turn for ever.
        weight_step: Recorded as the version of every token.
        max_seq_len: A prompt of so many tokens or more is refused, as an engine would.
        ordered: Whether an environment must ask in rounds, so that answers given in turn go to the same conversations.
    """

    LOGPROB = -0.5

    def __init__(
        self,
        tokenizer: TextCodec,
        answers: Sequence[str] | Answer,
        weight_step: int = 0,
        max_seq_len: int = 4096,
        ordered: bool = True,
    ) -> None:
        if not callable(answers) and not answers:
            raise ValueError("answers is empty: give at least one text, or a function")
        self._tokenizer, self._answers = tokenizer, answers
        self._weight_step, self._max_seq_len = weight_step, max_seq_len
        self._ordered = ordered
        self._lock = threading.Lock()
        self._calls: list[GenerationCall] = []
        self._given = 0

    @property
    def tokenizer(self) -> TextCodec:
        """The tokenizer it was made with."""
        return self._tokenizer

    @property
    def ordered(self) -> bool:
        """As it was made."""
        return self._ordered

    @property
    def calls(self) -> tuple[GenerationCall, ...]:
        """Every call so far, for assertions."""
        with self._lock:
            return tuple(self._calls)

    def generate_many(self, calls: Sequence[GenerationCall]) -> list[list[list[Completion]] | EnvironmentFailure]:
        """See `penstock.types.ManyInferenceContext`; each prompt is answered n times."""
        return [self._answers_to(call) for call in calls]

    def _answers_to(self, call: GenerationCall) -> list[list[Completion]] | EnvironmentFailure:
        with self._lock:
            self._calls.append(call)
        try:
            return [
                [self._complete(prompt, call.decoding, fold(seed, j)) for j in range(call.n)]
                for prompt, seed in zip(call.prompts, call.seeds, strict=True)
            ]
        except EnvironmentFailure as failure:
            return failure

    def _complete(self, prompt: np.ndarray, decoding: Decoding, seed: int) -> Completion:
        if len(prompt) >= self._max_seq_len:
            raise PromptTooLong(
                f"prompt is too long: it has {len(prompt)} tokens, which leaves no room for a response within "
                f"max_seq_len = {self._max_seq_len}"
            )
        tokens, reason = self._tokens(self._answer(prompt, seed), decoding, self._max_seq_len - len(prompt))
        return Completion(
            prompt_tokens=prompt,
            response_tokens=tokens,
            response_logprobs=np.full(len(tokens), self.LOGPROB, np.float32),
            weight_steps=np.full(len(tokens), self._weight_step, np.int32),
            oldest_weight_step=self._weight_step,
            lineage=0,
            text=self._tokenizer.decode(tokens),
            finish_reason=reason,
        )

    def _answer(self, prompt: np.ndarray, seed: int) -> str:
        if callable(self._answers):
            return self._answers(self._tokenizer.decode(prompt), seed)
        with self._lock:
            self._given += 1
            return self._answers[(self._given - 1) % len(self._answers)]

    def _tokens(self, answer: str, decoding: Decoding, room: int) -> tuple[np.ndarray, FinishReason]:
        stops = decoding.stop_token_ids or self._tokenizer.stop_token_ids
        tokens = np.append(self._tokenizer.encode(answer), list(stops[:1])).astype(np.int32)
        limit = min(decoding.max_output_tokens, room)
        return tokens[:limit], "stop" if len(tokens) <= limit else "length"
