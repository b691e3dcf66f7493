"""`penstock export`: what an adapter and its base compute, as one model's directory, and what it refuses."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.adapted import adapted

from penstock.model.language import Decoder, ModelConfig, Segments, load_decoder, named_arrays, save_decoder
from penstock.model.language.adapter import base_digest
from penstock.model.language.hugging_face import save_adapter
from penstock.text import Tokenizer

SHAPE = ModelConfig(
    vocab_size=320, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8,
)  # fmt: skip


@pytest.fixture
def adapter(tmp_path):
    """Directory of a learned adapter, whose base lies beside it."""
    tokenizer = Tokenizer.load("penstock")
    shape = SHAPE.model_copy(update={"vocab_size": max(SHAPE.vocab_size, tokenizer.vocab_size)})
    base = Decoder.initialise(shape, jax.random.key(0))
    save_decoder(base, tmp_path / "base", tokenizer)
    learned = adapted(base, base=str(tmp_path / "base"))
    still = {name: array for name, array in named_arrays(learned).items() if not name.startswith("adapter.")}
    save_adapter(learned, tmp_path / "adapter", tokenizer, base_digest(still))
    return tmp_path / "adapter"


def states(decoder):
    tokens = jnp.asarray(np.arange(12, dtype=np.int32)[None])
    return np.asarray(decoder.hidden_states(tokens, jnp.arange(12)[None], Segments.of(np.ones((1, 12), np.int32))))


def test_the_merged_model_computes_what_adapter_and_base_do(penstock, adapter, tmp_path):
    result = penstock("export", str(adapter), "--out", "merged")
    assert result.returncode == 0 and result.stdout.strip() == "merged"
    merged, apart = load_decoder(tmp_path / "merged"), load_decoder(adapter)
    assert merged.adapter is None and merged.config.lora is None
    np.testing.assert_allclose(states(merged), states(apart), atol=1e-4)
    base = load_decoder(tmp_path / "base")
    assert np.abs(states(merged) - states(base)).max() > 0.01
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".tmp-")]


def test_a_base_that_moved_is_named_and_the_dtype_may_be_another(penstock, adapter, tmp_path):
    (tmp_path / "base").rename(tmp_path / "moved")
    lost = penstock("export", str(adapter), "--out", "merged")
    assert lost.returncode == 2 and "model.base" in lost.stderr and not (tmp_path / "merged").exists()
    found = penstock("export", str(adapter), "--out", "merged", "model.base=moved", "model.dtype=bfloat16")
    assert found.returncode == 0
    assert load_decoder(tmp_path / "merged", "bfloat16").embedding.dtype == jnp.bfloat16


def test_what_cannot_be_exported_is_one_line(penstock, adapter, tmp_path):
    whole = penstock("export", str(tmp_path / "base"), "--out", "merged")
    assert whole.returncode == 2 and "is no adapter but a whole model" in whole.stderr
    there = penstock("export", str(adapter), "--out", "base")
    assert there.returncode == 2 and "--out base exists" in there.stderr
    (tmp_path / "file").touch()
    nowhere = penstock("export", str(adapter), "--out", "file/merged")
    assert nowhere.returncode == 2 and "--out file/merged cannot be written" in nowhere.stderr
