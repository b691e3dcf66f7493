"""Tiny models of every family, and the golden files that `scripts/make_golden_logits.py` made."""

from pathlib import Path

import jax
import numpy as np
import pytest

from penstock.model.language import Decoder, ModelConfig, named_arrays

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma3_text", "window", "yarn")


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def golden_root():
    return GOLDEN


@pytest.fixture
def golden(golden_root, family):
    return golden_root / family


@pytest.fixture(scope="session")
def states():
    """`Decoder.hidden_states`, compiled: outside jit every call would compile its scan anew."""
    return jax.jit(lambda decoder, *rows: decoder.hidden_states(*rows))


@pytest.fixture
def tiny_config():
    """A config maker: a small untied Llama, with any field changed."""

    def make(**changes):
        fields = {
            "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 64,
        }  # fmt: skip
        return ModelConfig(**(fields | changes))

    return make


@pytest.fixture
def tiny_decoder(tiny_config):
    """A decoder maker; every parameter is drawn, biases and norm weights included."""

    def make(seed=0, **changes):
        config = tiny_config(**changes)
        rng = np.random.default_rng(seed)
        start = named_arrays(Decoder.initialise(config, jax.random.key(seed)))
        drawn = {n: (a + 0.2 * rng.standard_normal(a.shape)).astype(a.dtype) for n, a in start.items()}
        return Decoder.from_arrays(config, drawn)

    return make
