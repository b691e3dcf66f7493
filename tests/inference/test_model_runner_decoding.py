"""The engine's cached, batched decode against the packed forward pass of training, same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.inference import GenerationRequest
from penstock.inference.decoding import ServedWeights, create_cache, decode
from penstock.inference.dispatch import DeviceSamples, HostSamples, SlotRows
from penstock.model.language import Segments
from penstock.model.language.config import YarnScaling
from penstock.types import Decoding

YARN = YarnScaling(factor=4.0, original_max_position_embeddings=16, attention_factor=1.2)
FAMILIES = {
    "qwen2, grouped, tied, growing windows": (1.0, (16,), {"tie_word_embeddings": True}),
    "llama, one key head, untied": (0.7, (64,), {"model_type": "llama", "num_key_value_heads": 1}),
    "qwen3, no groups": (1.3, (64,), {"model_type": "qwen3", "num_key_value_heads": 4}),
    "gemma, windows in some layers": (
        1.0,
        (64,),
        {
            "model_type": "gemma3_text",
            "sliding_window": 7,
            "rope_local_theta": 100.0,
            "query_pre_attn_scalar": 24.0,
            "layer_types": ("sliding_attention", "full_attention"),
        },
    ),
    "phi3, yarn": (1.0, (64,), {"model_type": "phi3", "rope_scaling": YARN}),
}
DEFAULT = tuple(FAMILIES)[0], "gemma, windows in some layers"


def packed_logprobs(decoder, completions, temperature):
    """log softmax(logits / temperature) of every response token, all sequences in one packed row."""
    sequences = [np.concatenate([c.prompt_tokens, c.response_tokens]) for c in completions]
    tokens = np.concatenate(sequences)[None]
    segments = np.concatenate([np.full(len(s), i + 1) for i, s in enumerate(sequences)])[None]
    positions = np.concatenate([np.arange(len(s)) for s in sequences])[None]
    hidden = decoder.hidden_states(jnp.asarray(tokens), jnp.asarray(positions, jnp.int32), Segments.of(segments))
    logprobs = np.asarray(jax.nn.log_softmax(decoder.logits(hidden[0]) / temperature, axis=-1))
    start = 0
    for completion, sequence in zip(completions, sequences, strict=True):
        first = start + len(completion.prompt_tokens) - 1
        rows = np.arange(first, first + len(completion.response_tokens))
        yield logprobs[rows, completion.response_tokens]
        start += len(sequence)


@pytest.mark.parametrize(
    ("temperature", "windows", "fields"),
    [pytest.param(*FAMILIES[name], id=name, marks=() if name in DEFAULT else pytest.mark.slow) for name in FAMILIES],
)
def test_engine_and_packed_forward_agree_on_ragged_sequences(
    make_decoder, start_engine, config, temperature, windows, fields
):
    weights = make_decoder(3, **fields)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, length).astype(np.int32) for length in (1, 2, 9, 10, 23, 5)]
    requests = [
        GenerationRequest(prompt, Decoding(temperature, max_output_tokens=30, stop_token_ids=tuple(range(8))), i, n=2)
        for i, prompt in enumerate(prompts)
    ]
    futures = start_engine(weights, config.model_copy(update={"windows": windows})).submit(requests)
    completions = [completion for future in futures for completion in future.result(60)]
    assert len({len(c.response_tokens) for c in completions}) > 1
    for completion, expected in zip(completions, packed_logprobs(weights, completions, temperature), strict=True):
        np.testing.assert_allclose(completion.response_logprobs, expected, atol=1e-4)
        assert expected.mean() < -0.5  # not a degenerate model that agrees by certainty


def test_few_rows_of_bfloat16_are_rounded_as_a_packed_row_is(make_decoder, start_engine, config):
    """One token may fall on the other side of a rounding; where the programs round differently, most do."""
    weights = make_decoder(3, dtype="bfloat16")
    request = GenerationRequest(np.arange(9, dtype=np.int32), Decoding(max_output_tokens=20), 0)
    (future,) = start_engine(weights, config).submit([request])
    (completion,) = future.result(60)
    (expected,) = packed_logprobs(weights, [completion], 1.0)
    assert np.mean(np.abs(completion.response_logprobs - expected) > 1e-4) < 0.2


def rows_of(budget, stops):
    whole, slots = SlotRows.array(len(budget), 1), len(budget)
    rows = SlotRows.of(whole)
    rows.tokens[:], rows.budget[:], rows.seeds[:] = np.arange(slots), budget, np.arange(2 * slots).reshape(slots, 2)
    rows.stop_token_ids[:, 0] = stops
    return whole


compiled_decode = jax.jit(decode, static_argnames="steps")


def run(decoder, rows, steps=6):
    slots = rows.shape[1]
    cache = create_cache(decoder.config, slots, 16)
    cache, emitted = compiled_decode(ServedWeights.of(decoder), cache, rows, steps=steps)
    return cache, HostSamples.of(emitted, steps, np.arange(slots), slots)


@pytest.mark.parametrize("alternatives", [0, 3])
def test_what_was_sampled_comes_in_one_array_and_each_row_to_its_slot(alternatives):
    rng, steps, chosen = np.random.default_rng(0), 4, np.array([1, 3])
    top = (steps, alternatives, 2)
    sampled = DeviceSamples(
        jnp.asarray(rng.integers(9, size=(steps, 2)), jnp.int32), jnp.asarray(rng.normal(size=(steps, 2)), jnp.float32),
        jnp.array([4, 2], jnp.int32),
        jnp.asarray(rng.integers(9, size=top), jnp.int32) if alternatives else None,
        jnp.asarray(rng.normal(size=top), jnp.float32) if alternatives else None,
    )  # fmt: skip
    found = HostSamples.of(sampled.array(), steps, chosen, 5)
    for here, there in zip(found, sampled, strict=True):
        assert (here is None) == (there is None)
        if here is not None and there is not None:
            np.testing.assert_array_equal(here[..., chosen], there)
            assert here.dtype == there.dtype and not here[..., [0, 2, 4]].any()


def test_a_row_stops_inside_a_dispatch_and_wastes_no_record(decoder):
    _, free = run(decoder, rows_of([6, 6, 6], [-1, -1, -1]))
    assert free.count.tolist() == [6, 6, 6]
    stop = int(free.tokens[2, 0])
    first = free.tokens[:, 0].tolist().index(stop) + 1
    _, ended = run(decoder, rows_of([6, 4, 0], [stop, -1, -1]))
    assert ended.count.tolist() == [first, 4, 0]
    np.testing.assert_array_equal(ended.tokens[:first, 0], free.tokens[:first, 0])
    np.testing.assert_array_equal(ended.tokens[:4, 1], free.tokens[:4, 1])


def test_a_dispatch_ends_when_no_row_is_left(decoder):
    _, emitted = run(decoder, rows_of([2, 1, 0], [-1, -1, -1]))
    assert emitted.tokens[2:].any() == np.False_  # never written
    assert emitted.tokens[1, 0] != 0


def test_a_device_that_runs_ahead_takes_every_step_and_records_the_same(decoder, monkeypatch):
    rows = rows_of([2, 4, 0], [-1, -1, -1])
    _, here = run(decoder, rows)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *given, default, **others: default(*given))
    program = jax.jit(decode, static_argnames="steps")
    _, emitted = program(ServedWeights.of(decoder), create_cache(decoder.config, 3, 16), rows, steps=6)
    there = HostSamples.of(emitted, 6, np.arange(3), 3)
    assert there.count.tolist() == here.count.tolist() == [2, 4, 0]
    for row, count in enumerate(here.count):
        np.testing.assert_array_equal(there.tokens[:count, row], here.tokens[:count, row])


def test_slots_without_a_response_write_nothing_into_the_cache(decoder):
    cache, _ = run(decoder, rows_of([3, 0, 1], [-1, -1, -1]))
    written = np.asarray(jnp.abs(cache.keys[1]).sum((1, 3)) > 0).sum(1)
    assert written.tolist() == [3, 0, 1]


def test_served_weights_share_embedding_and_head_with_the_published_decoder(decoder):
    served = ServedWeights.of(decoder)
    assert served.ends.embedding is decoder.embedding
    assert len(served.layers) == 2
    np.testing.assert_array_equal(served.layers[1].gate, decoder.layers.gate[1])
