"""Logits against transformers' own, for every family, alone and packed; see scripts/make_golden_logits.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from penstock.model.language import Segments, load_decoder

TOLERANCE = 1e-4


@pytest.fixture
def case(golden):
    arrays = load_file(golden / "golden.safetensors")
    count = len(arrays) // 2
    assert count == 4
    return load_decoder(golden), [(arrays[f"tokens_{i}"], arrays[f"logits_{i}"]) for i in range(count)]


@pytest.fixture
def logits_of(states):
    def compute(decoder, tokens, positions, ids):
        return np.asarray(
            decoder.logits(states(decoder, jnp.asarray(tokens), jnp.asarray(positions), Segments.of(ids)))
        )

    return compute


def test_a_sequence_alone_matches_transformers(case, logits_of):
    decoder, sequences = case
    tokens, logits = sequences[-1]
    positions = np.arange(len(tokens), dtype=np.int32)
    found = logits_of(decoder, tokens[None], positions[None], np.ones_like(tokens)[None])[0]
    np.testing.assert_allclose(found, logits, atol=TOLERANCE, rtol=0)
    assert np.abs(logits).max() > 1.0  # the comparison is not one of zeros


def test_ragged_batch_with_padding_matches_transformers(case, logits_of):
    decoder, sequences = case
    width = max(len(tokens) for tokens, _ in sequences)
    rows = np.zeros((len(sequences), width), np.int32)
    segments = np.zeros_like(rows)
    for row, (tokens, _) in enumerate(sequences):
        rows[row, : len(tokens)] = tokens
        segments[row, : len(tokens)] = 1
    positions = np.broadcast_to(np.arange(width, dtype=np.int32), rows.shape)
    found = logits_of(decoder, rows, positions, segments)
    for row, (tokens, logits) in enumerate(sequences):
        np.testing.assert_allclose(found[row, : len(tokens)], logits, atol=TOLERANCE, rtol=0)


def test_all_sequences_packed_into_one_row_match_transformers(case, logits_of):
    decoder, sequences = case
    tokens = np.concatenate([tokens for tokens, _ in sequences] + [np.zeros(5, np.int32)])
    lengths = [len(tokens) for tokens, _ in sequences]
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in (*lengths, 5)])
    segments = np.repeat(np.array([1, 2, 3, 4, 0], np.int32), (*lengths, 5))
    found = logits_of(decoder, tokens[None], positions[None], segments[None])[0]
    start = 0
    for length, (_, logits) in zip(lengths, sequences, strict=True):
        np.testing.assert_allclose(found[start : start + length], logits, atol=TOLERANCE, rtol=0)
        start += length
    assert np.isfinite(found).all()


def test_every_parameter_matters_to_the_logits(case):
    """A parameter that the decoder ignored would make the comparisons above blind to it."""
    decoder, sequences = case
    tokens = jnp.asarray(sequences[-1][0])[None]
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]

    def score(model):
        logits = model.logits(model.hidden_states(tokens, positions, Segments.of(np.ones(tokens.shape))))
        return jax.nn.log_softmax(logits)[..., 0].sum()

    for path, gradient in jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(score))(decoder)):
        per_layer = gradient.reshape(gradient.shape[0], -1) if gradient.ndim > 1 else gradient[None]
        name = jax.tree_util.keystr(path)
        touched = np.abs(per_layer).max(axis=1)
        # The softmax ignores a shift of all keys, so a key bias acts through the rotation only: small, not zero.
        assert touched.max() > 1e-7 if "embedding" in name else touched.min() > 1e-7, name
