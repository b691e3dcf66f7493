"""A byte-level codec, tiny random models of every family, and engines that are always stopped."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.inference import EngineConfig, InferenceEngine
from penstock.model.language import Decoder, ModelConfig
from penstock.types import Message, PromptTooLong, WeightVersion

STOP_TIMEOUT_S = 280.0
READY_TIMEOUT_S = 280.0


class ByteCodec:
    """UTF-8 bytes and one end token: tokens can be halves of characters. 257 ids: no divisor near the root."""

    vocab_size = 257
    stop_token_ids = (256,)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, tokens: Sequence[int] | np.ndarray, skip_special_tokens: bool = True) -> str:
        text = bytes(int(t) for t in tokens if t < 256).decode(errors="replace")
        return text if skip_special_tokens else text + "<end>" * sum(int(t) == 256 for t in tokens)

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b"<end>"

    def render(
        self,
        prompt: str | Sequence[Message],
        max_tokens: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final: bool = False,
    ) -> np.ndarray:
        text = self.render_text(prompt, chat_template_kwargs, continue_final)
        if max_tokens is not None and len(text.encode()) > max_tokens:
            raise PromptTooLong(f"prompt has {len(text.encode())} bytes, more than {max_tokens} tokens can hold")
        return self.encode(text)

    def render_text(
        self,
        prompt: str | Sequence[Message],
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final: bool = False,
    ) -> str:
        if isinstance(prompt, str):
            return prompt
        text = "".join(f"{message['role']}: {message['content']}\n" for message in prompt)
        if (chat_template_kwargs or {}).get("enable_thinking") is False:
            text += "hush\n"
        return text[:-1] if continue_final else text


@pytest.fixture(scope="session")
def codec() -> ByteCodec:
    return ByteCodec()


@pytest.fixture(scope="session")
def make_decoder() -> Callable[..., Decoder]:
    """A tiny model in which every parameter is random, so that its distributions are far from uniform."""

    def make(seed: int = 0, **fields: object) -> Decoder:
        shape = {
            "model_type": "qwen2", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        }  # fmt: skip
        decoder = Decoder.initialise(ModelConfig.model_validate(shape | fields), jax.random.key(seed))
        leaves, structure = jax.tree.flatten(decoder)
        rng = np.random.default_rng(seed)
        noise = [jnp.asarray(rng.normal(size=leaf.shape) * 0.2, leaf.dtype) for leaf in leaves]
        return jax.tree.unflatten(structure, [leaf + extra for leaf, extra in zip(leaves, noise, strict=True)])

    return make


@pytest.fixture(scope="session")
def decoder(make_decoder: Callable[..., Decoder]) -> Decoder:
    return make_decoder()


@pytest.fixture(scope="session")
def config() -> EngineConfig:
    """Small enough that windows grow and slots run out within a few tokens."""
    return EngineConfig(
        max_slots=4, max_seq_len=64, steps_per_dispatch=4, prefill_rows=2, prefill_lengths=(8,), windows=(16,)
    )


@pytest.fixture(scope="session")
def served_engine(decoder: Decoder, codec: ByteCodec, config: EngineConfig) -> Iterator[InferenceEngine]:
    """One that runs for all tests that only ask it through HTTP; of few programs, each of which is compiled first."""
    few = config.model_copy(update={"decode_rows": (config.max_slots,)})
    engine = InferenceEngine(decoder, WeightVersion(2, 7), codec, few, "inference-0#3")
    engine.start()
    engine.wait_until_ready(READY_TIMEOUT_S)
    yield engine
    engine.stop(STOP_TIMEOUT_S)


@pytest.fixture
def start_engine(decoder: Decoder, codec: ByteCodec, config: EngineConfig) -> Iterator[Callable[..., InferenceEngine]]:
    """Starts engines, ready to serve; all of them are stopped at the end of the test."""
    engines: list[InferenceEngine] = []

    def start(weights: Decoder = decoder, shapes: EngineConfig = config, forgets: bool = False) -> InferenceEngine:
        engine = InferenceEngine(weights, WeightVersion(0, 0), codec, shapes.model_copy(update={"forgets": forgets}))
        engines.append(engine)
        engine.start()
        engine.wait_until_ready(READY_TIMEOUT_S)
        return engine

    yield start
    for engine in engines:
        engine.stop(STOP_TIMEOUT_S)


@pytest.fixture
def engine(start_engine: Callable[..., InferenceEngine]) -> InferenceEngine:
    return start_engine()
