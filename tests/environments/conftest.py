"""A tokenizer of characters and a scripted policy, so that environments are tested without a model."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from penstock.types import Completion, ConfigError, Decoding, fold

EOS = 3
CLOSE_CALL = 4
_SPECIAL = {EOS: "<eos>", CLOSE_CALL: "</calc>"}


class CharacterTokenizer:
    """One token per character, but for the end of text and the end of a call."""

    vocab_size = 1 << 16
    stop_token_ids = (EOS,)

    def __init__(self, chat_template: bool = True) -> None:
        self._chat_template = chat_template

    def encode(self, text):
        tokens = []
        while text:
            special = next((i for i, word in _SPECIAL.items() if text.startswith(word)), None)
            tokens.append(special if special is not None else ord(text[0]))
            text = text[len(_SPECIAL[special]) if special is not None else 1 :]
        return np.array(tokens, np.int32)

    def decode(self, tokens, skip_special_tokens=True):
        shown = {CLOSE_CALL: "</calc>", EOS: "" if skip_special_tokens else "<eos>"}
        return "".join(shown.get(int(token), chr(int(token))) for token in tokens)

    def token_bytes(self, token):
        return bytes([token])

    def render(self, prompt, max_tokens=None, chat_template_kwargs=None, continue_final=False):
        return self.encode(self.render_text(prompt, chat_template_kwargs))

    def render_text(self, prompt, chat_template_kwargs=None, continue_final=False):
        if isinstance(prompt, str):
            return prompt
        if not self._chat_template:
            raise ConfigError("the tokenizer has no chat template: set template: plain")
        return "".join(f"[{m['role']}]{m['content']}\n" for m in prompt) + "[assistant]"


class ScriptedPolicy:
    """An inference context whose answers come from a function of (prompt text, sample number, seed).

    An answer that ends in ``<eos>`` or ``</calc>`` finished by itself; others are cut at the token limit or end as
    `length` where they stop.
    """

    ordered = True

    def __init__(self, answer: Callable[[str, int, int], str], weight_step: int = 5) -> None:
        self.tokenizer = CharacterTokenizer()
        self.calls: list[tuple[list[np.ndarray], int, Decoding, list[int]]] = []
        self._answer = answer
        self._weight_step = weight_step

    def generate(self, prompts: Sequence[np.ndarray], n: int, decoding: Decoding, seeds: Sequence[int]):
        self.calls.append((list(prompts), n, decoding, list(seeds)))
        return [
            [self._complete(prompt, j, decoding, seed) for j in range(n)]
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]

    def _complete(self, prompt, j, decoding, seed):
        said = self._answer(self.tokenizer.decode(prompt), j, fold(seed, j))
        tokens = self.tokenizer.encode(said)[: decoding.max_output_tokens]
        stopped = len(tokens) > 0 and int(tokens[-1]) in (EOS, CLOSE_CALL)
        return Completion(
            prompt_tokens=prompt,
            response_tokens=tokens,
            response_logprobs=np.full(len(tokens), -0.5, np.float32),
            weight_steps=np.full(len(tokens), self._weight_step, np.int32),
            oldest_weight_step=self._weight_step - 1,
            lineage=0,
            text=self.tokenizer.decode(tokens),
            finish_reason="stop" if stopped else "length",
        )


@pytest.fixture
def policy():
    """Makes a scripted policy: ``policy("text<eos>")``, or from a function of (prompt, sample, seed)."""

    def make(answer, **arguments):
        return ScriptedPolicy(answer if callable(answer) else lambda *_: answer, **arguments)

    return make


@pytest.fixture
def decoding():
    return Decoding(max_output_tokens=64)
