"""What `test_model_runner_sharding` runs in a process of its own, in which the host has two devices."""

import re
import threading
from collections import Counter

import jax
import numpy as np
import pytest
from tests.inference.test_engine_weights import forward_logprobs, swap_after_first_dispatch
from tests.inference.test_model_runner import CompilationCounter
from tests.inference.test_model_runner_decoding import FAMILIES, packed_logprobs

from penstock.inference import GenerationRequest
from penstock.inference.decoding import moves_of
from penstock.inference.dispatch import SlotRows
from penstock.inference.model_runner import ModelRunner, ModelSplit
from penstock.model.arrays import digests_of
from penstock.model.language import named_arrays
from penstock.types import ConfigError, Decoding, WeightVersion

WAIT_S = 280.0
COLUMNS, ROWS, NORM = ("gate", "key", "query", "up", "value"), ("down", "output"), ("input_norm", "post_norm")


@pytest.fixture(autouse=True)
def two_devices():
    assert jax.local_device_count() == 2


@pytest.fixture
def split(config):
    return config.model_copy(update={"model_parallel": 2})


def requests(n=2, tokens=30, **decoding):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, length).astype(np.int32) for length in (1, 2, 9, 10, 23, 5)]
    fields = {"max_output_tokens": tokens, "stop_token_ids": tuple(range(8))} | decoding
    return [GenerationRequest(prompt, Decoding(**fields), i, n) for i, prompt in enumerate(prompts)]


def generate(engine, asked):
    return [completion for future in engine.submit(asked) for completion in future.result(WAIT_S)]


MODELS = {
    "qwen2, grouped, tied, odd vocabulary": {"tie_word_embeddings": True},
    "qwen3, no groups, untied, even vocabulary": {
        "model_type": "qwen3", "num_key_value_heads": 4, "vocab_size": 258,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(fields, id=name, marks=pytest.mark.slow if "untied" in name else ())
        for name, fields in MODELS.items()
    ],
)
def test_two_devices_sample_what_one_samples_and_what_training_scores(
    make_decoder, start_engine, config, split, fields
):
    weights = make_decoder(3, **fields)
    asked = [*requests(), *requests(n=1, temperature=0.0), *requests(n=1, top_k=9, top_p=0.8)]
    one, two = (generate(start_engine(weights, shapes), asked) for shapes in (config, split))
    assert sum(len(c.response_tokens) for c in one) > 300
    for left, right in zip(one, two, strict=True):
        np.testing.assert_array_equal(left.response_tokens, right.response_tokens)
        np.testing.assert_allclose(left.response_logprobs, right.response_logprobs, atol=1e-4)
    sampled = two[: 2 * len(requests())]
    for completion, scored in zip(sampled, packed_logprobs(weights, sampled, 1.0), strict=True):
        np.testing.assert_allclose(completion.response_logprobs, scored, atol=1e-4)


def test_every_family_of_one_key_head_is_refused_with_the_numbers(make_decoder, split):
    (fields,) = (f for _, _, f in FAMILIES.values() if f.get("num_key_value_heads") == 1)
    with pytest.raises(ConfigError, match=r"over 2 devices, of which num_key_value_heads \(1\) is no .*use one of 1$"):
        ModelRunner(make_decoder(**fields), split)


def test_none_takes_both_devices(make_decoder, split):
    runner = ModelRunner(make_decoder(), split.model_copy(update={"model_parallel": None}))
    assert runner._split == ModelSplit.over(make_decoder().config, 2)


def shard_shapes(array):
    return {shard.device.id: shard.data.shape for shard in array.addressable_shards}


def test_each_device_holds_its_half(make_decoder, split):
    decoder = make_decoder(model_type="llama", vocab_size=258)
    runner = ModelRunner(decoder, split)
    layer, ends = runner._weights.layers[1], runner._weights.ends
    whole = {name: getattr(decoder.layers, name).shape[1:] for name in (*COLUMNS, *ROWS, *NORM)}
    for name in COLUMNS:
        rows, columns = whole[name]
        assert shard_shapes(getattr(layer, name)) == dict.fromkeys((0, 1), (rows, columns // 2)), name
    for name in ROWS:
        rows, columns = whole[name]
        assert shard_shapes(getattr(layer, name)) == dict.fromkeys((0, 1), (rows // 2, columns)), name
    for name in NORM:
        assert shard_shapes(getattr(layer, name)) == dict.fromkeys((0, 1), whole[name]), name
    assert shard_shapes(ends.embedding) == shard_shapes(ends.head) == dict.fromkeys((0, 1), (129, 32))
    assert shard_shapes(runner._cache.keys[0]) == dict.fromkeys((0, 1), (4, 1, 16, 8))
    runner.resize(64)
    assert shard_shapes(runner._cache.values[1]) == dict.fromkeys((0, 1), (4, 1, 64, 8))


def collectives(program, *arguments, **fixed):
    """What the devices send each other in one run of a program: kind and shape, in any order."""
    text = program.lower(*arguments, **fixed).compile().as_text()
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    return Counter(re.findall(rf"= (\S+?)(?:{{\S*)? ({kinds})(?:-start)?\(", text))


def test_sums_and_scores_cross_between_devices_but_never_weights_or_cache(make_decoder, split):
    runner = ModelRunner(make_decoder(vocab_size=258), split)
    programs, weights, cache = runner._programs, runner._weights, runner._cache
    rows = SlotRows.array(4, 8)
    # Two layers with two sums each, the embedding's rows from whoever holds them, and the scores.
    assert collectives(programs.decode, weights, cache, rows, steps=4) == {
        ("f32[4,32]", "all-reduce"): 5, ("f32[4,258]", "all-gather"): 1,
    }  # fmt: skip
    tokens = np.zeros((2, 8), np.int32)
    assert sum(collectives(programs.prefill, weights, tokens).values()) == 3  # of the last layer only keys and values
    prefilled = programs.prefill(weights, tokens)
    assert collectives(programs.insert, cache, prefilled, moves_of({0: (1, 8)}, 4, 8)) == {}
    assert collectives(programs.fork, cache, moves_of({0: (1, 8)}, 4, 16)) == {}
    assert collectives(programs.resize, cache.keys[0], window=64) == {}


@pytest.mark.slow
def test_a_swap_while_running_is_whole_on_both_devices(make_decoder, start_engine, split, monkeypatch):
    first, second = make_decoder(3), make_decoder(9)
    engine = start_engine(first, split)
    swap_after_first_dispatch(engine, monkeypatch, WeightVersion(0, 5), second)
    prompt = np.arange(60, 72, dtype=np.int32)
    asked = GenerationRequest(prompt, Decoding(max_output_tokens=16, stop_token_ids=(999,)), 0, 1)
    (running,) = generate(engine, [asked])
    assert running.weight_steps.tolist() == [0] * 4 + [5] * 12
    np.testing.assert_allclose(running.response_logprobs[:4], forward_logprobs(first, running)[:4], atol=1e-4)
    (after,) = generate(engine, [asked])
    assert after.weight_steps.tolist() == [5] * 16
    np.testing.assert_allclose(after.response_logprobs, forward_logprobs(second, after), atol=1e-4)


def test_host_arrays_are_weights_too(make_decoder, start_engine, split):
    """As a client of another process holds them: each device then takes its part from host memory."""
    second = make_decoder(9)
    engine = start_engine(make_decoder(3), split)
    engine.set_weights(WeightVersion(0, 1), jax.tree.map(np.asarray, second))
    completions = generate(engine, requests(n=1, stop_token_ids=(999,)))
    for completion, scored in zip(completions, packed_logprobs(second, completions, 1.0), strict=True):
        assert set(completion.weight_steps) == {1}
        np.testing.assert_allclose(completion.response_logprobs, scored, atol=1e-4)


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_parts_on_two_devices_have_the_digests_of_the_whole(make_decoder, split, fields):
    decoder = make_decoder(3, **fields)
    runner = ModelRunner(decoder, split)
    assert len(runner.weights.layers[0].query.sharding.device_set) == 2
    assert runner.weights.digests() == digests_of(named_arrays(decoder))


def test_one_thread_writes_and_counts_and_compiles_nothing_when_ready(make_decoder, start_engine, split, monkeypatch):
    engine, new = start_engine(make_decoder(3), split), make_decoder(7)
    writers, load, decode = set(), engine._batch.runner.load, engine._batch.runner.decode

    def noting(function):
        return lambda *arguments: (writers.add(threading.current_thread().name), function(*arguments))[1]

    monkeypatch.setattr(engine._batch.runner, "load", noting(load))
    monkeypatch.setattr(engine._batch.runner, "decode", noting(decode))
    counter = CompilationCounter()
    counter.on = True
    futures = engine.submit(requests())
    engine.set_weights(WeightVersion(0, 1), new)
    completions = [completion for future in futures for completion in future.result(WAIT_S)]
    short = engine.submit(requests(n=1, tokens=1)[:1])[0].result(WAIT_S)
    counter.on = False
    assert counter.names == []
    assert writers == {"inference-engine"}
    tokens = sum(len(c.response_tokens) for c in (*completions, *short))
    assert engine.stats()["inference/tokens_total"] == tokens  # once, not once for each device


def test_the_same_submission_is_reproduced_to_the_last_bit(make_decoder, start_engine, split):
    engine = start_engine(make_decoder(3), split, forgets=True)
    first, second = generate(engine, requests()), generate(engine, requests())
    for left, right in zip(first, second, strict=True):
        np.testing.assert_array_equal(left.response_tokens, right.response_tokens)
        np.testing.assert_array_equal(left.response_logprobs, right.response_logprobs)
