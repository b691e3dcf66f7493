"""Given texts are scored as the learner scores them, by one version, beside what is generated; and alternatives."""

import functools
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from scipy.special import log_softmax
from tests.waiting import wait_until

from penstock.inference import EngineConfig, GenerationRequest, InferenceEngine
from penstock.inference.model_runner import ONE_DEVICE
from penstock.learner.head import HeadInputs, tiled_logprobs
from penstock.model.language import Segments, load_decoder
from penstock.types import ConfigError, Decoding, EnvironmentFailure, Stopped, WeightVersion

WAIT_S = 280.0
GOLDEN = Path(__file__).parents[1] / "model/language/golden/qwen2"


@pytest.fixture(scope="module")
def chunked(config):
    return config.model_copy(update={"prefill_chunk": 16})


@pytest.fixture(scope="module")
def engine(decoder, codec, chunked):
    """One for all tests that leave it as it is; texts go in chunks of 8."""
    engine = InferenceEngine(decoder, WeightVersion(0, 3), codec, chunked)
    engine.start()
    engine.wait_until_ready(WAIT_S)
    yield engine
    engine.stop(WAIT_S)


def text_of_length(length):
    return np.random.default_rng(length).integers(0, 256, length).astype(np.int32)


def learners(decoder, text, temperature):
    """Of all tokens but the first, by the learner's own tiled head over its own forward pass."""
    positions, rows = jnp.arange(len(text), dtype=jnp.int32)[None], Segments.of(np.ones((1, len(text))))
    hidden = decoder.hidden_states(jnp.asarray(text[None]), positions, rows)[0, :-1]
    count = len(text) - 1
    inputs = HeadInputs(jnp.asarray(text[1:]), jnp.full(count, temperature, jnp.float32), jnp.int32(count))
    return np.asarray(tiled_logprobs(hidden, decoder.output_matrix, inputs, tile=8).logprobs)


def result(futures):
    return [future.result(WAIT_S) for future in futures]


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.slow), 0.6])
def test_scores_are_the_learners(engine, decoder, temperature):
    longest = text_of_length(64)
    expected, texts = learners(decoder, longest, temperature), [longest[:n] for n in (2, 16, 17, 18, 33, 64)]
    for text, scores in zip(texts, result(engine.score(texts, temperature)), strict=True):
        assert scores.tokens is text and scores.version == WeightVersion(0, 3) and scores.alternatives is None
        np.testing.assert_allclose(scores.logprobs, expected[: len(text) - 1], atol=1e-5, rtol=0)


def test_scores_ranks_and_alternatives_are_those_of_transformers(codec):
    decoder, golden = load_decoder(GOLDEN), load_file(GOLDEN / "golden.safetensors")
    shapes = EngineConfig(max_slots=1, max_seq_len=64, prefill_chunk=8, windows=(64,), prefill_lengths=(64,))
    engine = InferenceEngine(decoder, WeightVersion(0, 0), codec, shapes)
    engine.start(lazily=True)
    try:
        for i in range(len(golden) // 2):
            tokens, expected = golden[f"tokens_{i}"].astype(np.int32), log_softmax(golden[f"logits_{i}"][:-1], axis=1)
            (scores,) = result(engine.score([tokens], alternatives=4))
            chosen = expected[np.arange(len(tokens) - 1), tokens[1:]]
            np.testing.assert_allclose(scores.logprobs, chosen, atol=1e-5, rtol=0)
            np.testing.assert_array_equal(scores.ranks, 1 + (expected > chosen[:, None]).sum(1))
            best = np.argsort(-expected, axis=1)[:, :4]
            np.testing.assert_array_equal(scores.alternatives.tokens, best)
            found = np.take_along_axis(expected, best, axis=1)
            np.testing.assert_allclose(scores.alternatives.logprobs, found, atol=1e-5, rtol=0)
    finally:
        engine.stop(WAIT_S)


def test_temperature_zero_leaves_the_logits_and_one_token_has_no_score(engine):
    text = text_of_length(9)
    one, greedy, alone = result([*engine.score([text]), *engine.score([text, text[:1]], 0.0, 3)])
    np.testing.assert_array_equal(one.logprobs, greedy.logprobs)
    assert len(alone.logprobs) == len(alone.ranks) == 0 and alone.alternatives.tokens.shape == (0, 3)


def test_what_is_generated_has_the_same_scores_and_alternatives(engine):
    decoding = Decoding(0.8, top_k=9, max_output_tokens=20, stop_token_ids=(999,))
    request = GenerationRequest(text_of_length(7), decoding, 5, 2, alternatives=3)
    for completion in engine.submit([request])[0].result(WAIT_S):
        text = np.concatenate([completion.prompt_tokens, completion.response_tokens])
        (scores,) = result(engine.score([text], 0.8, alternatives=3))
        np.testing.assert_allclose(scores.logprobs[6:], completion.response_logprobs, atol=1e-5, rtol=0)
        np.testing.assert_array_equal(scores.alternatives.tokens[6:], completion.alternatives.tokens)
        np.testing.assert_allclose(scores.alternatives.logprobs[6:], completion.alternatives.logprobs, atol=1e-5)
        # the same number, not nearly: clients ask whether a token is the most probable one by comparing
        places = completion.alternatives.tokens == completion.response_tokens[:, None]
        same = np.broadcast_to(completion.response_logprobs[:, None], places.shape)
        np.testing.assert_array_equal(completion.alternatives.logprobs[places], same[places])
        assert places.any() and not places.all(1).any()


def test_alternatives_change_nothing_and_others_have_none(engine):
    plain = GenerationRequest(text_of_length(7), Decoding(max_output_tokens=12, stop_token_ids=(999,)), 5)
    (alone,) = engine.submit([plain])[0].result(WAIT_S)
    told = GenerationRequest(text_of_length(7), plain.decoding, 5, alternatives=2)
    (beside,), (asked,) = (future.result(WAIT_S) for future in engine.submit([plain, told]))
    assert alone.alternatives is None and beside.alternatives is None and asked.alternatives.tokens.shape == (12, 2)
    assert alone.response_tokens.tolist() == beside.response_tokens.tolist() == asked.response_tokens.tolist()


def test_a_run_compiles_what_it_compiled_before(engine, decoder, config):
    """Nothing that tells alternatives or scores, before somebody asks; then once per shape."""
    fresh = InferenceEngine(decoder, WeightVersion(0, 0), engine._tokenizer, config)
    assert not any(task.future.done() for task in fresh._batch.runner._rare._tasks.values())
    before = ONE_DEVICE.score._cache_size(), ONE_DEVICE.decode._cache_size()
    result(engine.score([text_of_length(20), text_of_length(40)], alternatives=5))
    first = ONE_DEVICE.score._cache_size()
    result(engine.score([text_of_length(21), text_of_length(60)], 0.5))
    assert ONE_DEVICE.score._cache_size() == first >= before[0]
    assert ONE_DEVICE.decode._cache_size() == before[1]


def watched(engine, monkeypatch):
    """What its device does, in order: ("score", start) and "decode"."""
    runner, done = engine._batch.runner, []
    score, decode = runner.score, runner.decode

    def scoring(weights, cache, tokens, start, temperature):
        done.append(("score", start))
        return score(weights, cache, tokens, start, temperature)

    def decoding(rows, alternatives):
        done.append("decode")
        return decode(rows, alternatives)

    monkeypatch.setattr(runner, "score", scoring)
    monkeypatch.setattr(runner, "decode", decoding)
    return done


def test_one_chunk_goes_between_two_dispatches(engine, monkeypatch):
    result(engine.score([text_of_length(64)]))  # compiled
    done = watched(engine, monkeypatch)
    begun = threading.Event()
    request = GenerationRequest(
        text_of_length(3), Decoding(max_output_tokens=50, stop_token_ids=(999,)), 1, on_tokens=lambda *_: begun.set()
    )
    generated = engine.submit([request])
    assert begun.wait(WAIT_S)
    scored = engine.score([text_of_length(64)])
    result([*generated, *scored])
    chunks = [at for at, what in enumerate(done) if what != "decode"]
    assert [done[at] for at in chunks] == [("score", start) for start in range(0, 64, 8)]
    during = [at for at in chunks if "decode" in done[at:]]
    assert all(done[at + 1] == "decode" for at in during)


def test_what_goes_on_from_a_kept_text_does_not_prefill_it(engine, decoder):
    def prefilled_by(number, kept, between=lambda: None):
        text = (text_of_length(40) + number) % 257
        result(engine.score([text], kept=kept))
        between()
        before = engine.stats()["inference/prefill_tokens_total"]
        request = GenerationRequest(text, Decoding(max_output_tokens=8, stop_token_ids=(999,)), 3, 2)
        for answer in engine.submit([request])[0].result(WAIT_S):
            whole = np.concatenate([text, answer.response_tokens])
            np.testing.assert_allclose(answer.response_logprobs, learners(decoder, whole, 1.0)[39:], atol=1e-4)
        return engine.stats()["inference/prefill_tokens_total"] - before

    assert prefilled_by(1, kept=True) == 0 < prefilled_by(2, kept=False)
    again = functools.partial(engine.set_weights, WeightVersion(0, 3), decoder)
    assert prefilled_by(3, kept=True, between=lambda: (again(), engine.digests(WAIT_S))) > 0


def test_a_text_is_scored_by_one_version_whatever_comes_meanwhile(start_engine, decoder, make_decoder, chunked):
    engine, other, text = start_engine(decoder, chunked), make_decoder(5), text_of_length(64)
    runner, calls = engine._batch.runner, []
    score = runner.score

    def scoring(*given):
        calls.append(engine.version)
        if len(calls) == 2:
            engine.set_weights(WeightVersion(0, 1), other)  # swapped in before the next chunk
        return score(*given)

    runner.score = scoring
    old, new = result(engine.score([text, text]))
    assert calls[1] == WeightVersion(0, 0) and calls[2] == WeightVersion(0, 1)
    assert (old.version, new.version) == (WeightVersion(0, 0), WeightVersion(0, 1))
    np.testing.assert_allclose(old.logprobs, learners(decoder, text, 1.0), atol=1e-5, rtol=0)
    np.testing.assert_allclose(new.logprobs, learners(other, text, 1.0), atol=1e-5, rtol=0)
    assert np.abs(old.logprobs - new.logprobs).max() > 0.1


def test_a_paused_engine_scores_nothing(start_engine, decoder, chunked):
    engine = start_engine(decoder, chunked)
    engine.pause("keep", False, WAIT_S)
    (waits,) = engine.score([text_of_length(5)])
    assert engine.stats()["inference/waiting"] == 1 and not waits.done()
    engine.resume()
    assert len(waits.result(WAIT_S).logprobs) == 4
    engine.pause("wait", False, WAIT_S)
    (aborted,) = engine.score([text_of_length(5)])
    engine.pause("abort", False, WAIT_S)
    with pytest.raises(Stopped, match="before the text was scored"):
        aborted.result(WAIT_S)
    (stopped,) = engine.score([text_of_length(5)])
    engine.stop(WAIT_S)
    with pytest.raises(Stopped):
        stopped.result(WAIT_S)
    with pytest.raises(Stopped):
        engine.score([text_of_length(5)])


def test_nobody_waits_for_what_is_cancelled(start_engine, decoder, chunked):
    engine = start_engine(decoder, chunked)
    engine.pause("keep", False, WAIT_S)
    futures = engine.score([text_of_length(n) for n in (50, 60)])
    futures[0].cancel()
    engine.resume()
    assert len(futures[1].result(WAIT_S).logprobs) == 59
    wait_until(lambda: engine.stats()["inference/scored_tokens_total"] == 59, "only one was scored")


def test_a_failure_of_the_device_reaches_who_waits(start_engine, decoder, chunked, monkeypatch):
    engine = start_engine(decoder, chunked)
    monkeypatch.setattr(engine._batch.runner, "score", lambda *_: 1 / 0)
    (future,) = engine.score([text_of_length(5)])
    with pytest.raises(ZeroDivisionError):
        future.result(WAIT_S)


@pytest.mark.parametrize(
    ("text", "given", "error", "said"),
    [
        ([], {}, EnvironmentFailure, "empty"),
        ([300], {}, EnvironmentFailure, "token id 300"),
        ([1] * 65, {}, EnvironmentFailure, "has 65 tokens, and max_seq_len is 64"),
        ([1], {"temperature": -1.0}, ConfigError, "temperature is -1"),
        ([1], {"alternatives": 21}, ConfigError, "from 0 to 20"),
    ],
)
def test_what_cannot_be_scored_is_refused(engine, text, given, error, said):
    with pytest.raises(error, match=said):
        engine.score([np.array(text, np.int32)], **given)
    with pytest.raises(ConfigError, match="from 0 to 20"):
        engine.submit([GenerationRequest(np.array([1], np.int32), Decoding(), 0, alternatives=21)])


@pytest.mark.slow
def test_scores_of_a_vocabulary_smaller_than_what_is_told(start_engine, make_decoder, chunked):
    engine = start_engine(make_decoder(0, vocab_size=7), chunked)
    text = np.arange(6, dtype=np.int32)
    (scores,) = result(engine.score([text], alternatives=20))
    assert scores.alternatives.tokens.shape == (5, 7)
    assert (np.sort(scores.alternatives.tokens, axis=1) == np.arange(7)).all()
