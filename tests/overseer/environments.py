"""Environments that misbehave."""

import threading
from dataclasses import replace

import numpy as np

from penstock.environments import Example, MultiTurnEnvironment
from penstock.environments.cats import CatsEnvironment


class RaisingEnvironment(CatsEnvironment):
    """Raises at every training group."""

    def sample(self, inference_ctx, n_examples, n_generations, decoding, prng_key, mode):
        if mode == "train":
            return [1 // 0], {}
        return super().sample(inference_ctx, n_examples, n_generations, decoding, prng_key, mode)


class UnmovedEnvironment(CatsEnvironment):
    """Whatever is said, it is worth nothing."""

    def score(self, example, text, completion):
        return 0.0


class TalkingEnvironment(MultiTurnEnvironment):
    """Three turns, whatever is said; worth the share of small letters in the last of them."""

    examples = tuple(Example(str(number), f"Say {number}.") for number in range(64))

    def __init__(self) -> None:
        super().__init__("talk", template="chat", max_turns=3, turn_tokens=40)

    def respond(self, conversation):
        return "And?"

    def score(self, conversation):
        return sum(letter.islower() for letter in conversation.text) / max(len(conversation.text), 1)


class FlakyEnvironment(CatsEnvironment):
    """Raises at every third training group, whichever it is."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0
        self._lock = threading.Lock()

    def sample(self, inference_ctx, n_examples, n_generations, decoding, prng_key, mode):
        with self._lock:
            self._calls += 1
            failing = mode == "train" and self._calls % 3 == 0
        if failing:
            raise ValueError("flaky")
        return super().sample(inference_ctx, n_examples, n_generations, decoding, prng_key, mode)


class HangingEnvironment(CatsEnvironment):
    """Never returns from a training group."""

    def sample(self, inference_ctx, n_examples, n_generations, decoding, prng_key, mode):
        if mode == "train":
            threading.Event().wait()
        return super().sample(inference_ctx, n_examples, n_generations, decoding, prng_key, mode)


class FailingLaterEnvironment(CatsEnvironment):
    """Raises at every training group after the first twelve."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0
        self._lock = threading.Lock()

    def sample(self, inference_ctx, n_examples, n_generations, decoding, prng_key, mode):
        with self._lock:
            self._calls += mode == "train"
            failing = self._calls > 12
        if failing and mode == "train":
            raise ValueError("the verifier went away")
        return super().sample(inference_ctx, n_examples, n_generations, decoding, prng_key, mode)


class UnverifiableEnvironment(CatsEnvironment):
    """Its verifier is away whenever held-out answers are to be judged."""

    def sample(self, inference_ctx, n_examples, n_generations, decoding, prng_key, mode):
        if mode != "train":
            raise ValueError("the verifier is away")
        return super().sample(inference_ctx, n_examples, n_generations, decoding, prng_key, mode)


class GenerousEnvironment(CatsEnvironment):
    """Every fifth training group has a reward that no learner survives."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def sample(self, inference_ctx, n_examples, n_generations, decoding, prng_key, mode):
        groups, metrics = super().sample(inference_ctx, n_examples, n_generations, decoding, prng_key, mode)
        self._calls += mode == "train"
        if mode == "train" and self._calls % 5 == 1:
            groups = [replace(groups[0], rollouts=tuple(map(self._spoiled, groups[0].rollouts)))]
        return groups, metrics

    @staticmethod
    def _spoiled(rollout):
        rewards = np.zeros_like(rollout.token_rewards)
        rewards[-1] = 1e30
        return replace(rollout, token_rewards=rewards, episode_reward=1e30)
