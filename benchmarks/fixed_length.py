"""An environment for timing: random prompts, responses of so many tokens or of random lengths, a cheap reward."""

import threading
import time
from dataclasses import replace

import numpy as np

from penstock.environments import Environment
from penstock.types import Rollout, RolloutGroup, as_seed, fold, generator

GENERATED: list[tuple[float, float]] = []
SCORED: list[float] = []
_LOCK = threading.Lock()


class FixedLengthEnvironment(Environment):
    """Draws prompts of random tokens; the reward is the share of even tokens.

    Args:
        vocab_size: Tokens are drawn below it.
        prompt_tokens: Length of the prompts.
        stop_token: Ends an answer; by default one that is never sampled, so that all have the length allowed.
    """

    def __init__(self, vocab_size: int, prompt_tokens: int, stop_token: int | None = None) -> None:
        super().__init__("fixed-length")
        self._vocab_size = vocab_size
        self._stop_token = vocab_size if stop_token is None else stop_token
        self._prompt_tokens = prompt_tokens

    def sample(self, inference_ctx, n_examples, n_generations, decoding, prng_key, mode):
        """See `Environment.sample`; remembers when generation began and ended, and how long scoring took."""
        seed = as_seed(prng_key)
        rng = generator(fold(seed, mode))
        prompts = [rng.integers(0, self._vocab_size, self._prompt_tokens, np.int32) for _ in range(n_examples)]
        decoding = replace(decoding, stop_token_ids=(self._stop_token,))
        began = time.perf_counter()
        answers = inference_ctx.generate(prompts, n_generations, decoding, [fold(seed, i) for i in range(n_examples)])
        ended = time.perf_counter()
        groups = [
            RolloutGroup(f"{self.name}:{seed}-{i}", tuple(self._rollout(str(seed), completion) for completion in group))
            for i, group in enumerate(answers)
        ]
        if mode == "train":
            with _LOCK:
                GENERATED.append((began, ended))
                SCORED.append(time.perf_counter() - ended)
        return groups, {}

    def _rollout(self, example_id, completion):
        tokens = completion.response_tokens
        reward = float(np.mean(tokens % 2 == 0))
        return Rollout(
            self.name,
            example_id,
            completion.prompt_tokens,
            tokens,
            completion.response_logprobs,
            np.full(len(tokens), reward / len(tokens), np.float32),
            reward,
            response_weight_steps=completion.weight_steps,
            oldest_weight_step=completion.oldest_weight_step,
            finish_reason=completion.finish_reason,
        )
