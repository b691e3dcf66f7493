"""Continuous batching through the public interface: order, isolation, reproduction, limits, failure, shutdown."""

import threading
import time

import numpy as np
import pytest

from penstock.inference import EngineConfig, GenerationRequest, InferenceEngine
from penstock.inference import engine as engine_module
from penstock.inference.engine import IDLE_WAKE_S
from penstock.types import (
    CompiledProgram,
    ConfigError,
    Decoding,
    EnvironmentFailure,
    NoProgressError,
    RunFailed,
    Stopped,
    WeightVersion,
)

WAIT_S = 280.0


def request(prompt=(65, 66, 67), seed=0, n=1, stop=(), **decoding):
    """Runs to its limit unless `stop` says otherwise: no byte model samples token 999."""
    fields = {"max_output_tokens": 12, "stop_token_ids": tuple(stop) or (999,)} | decoding
    return GenerationRequest(np.array(prompt, np.int32), Decoding(**fields), seed, n)


def answers(engine, *requests):
    return [future.result(WAIT_S) for future in engine.submit(requests)]


class Gate:
    """Lets a test hold the engine between dispatches."""

    def __init__(self, engine, monkeypatch):
        self.dispatches, self.reached, self.opened = 0, threading.Event(), threading.Event()
        self._decode = engine._batch.runner.decode
        monkeypatch.setattr(engine._batch.runner, "decode", self.decode)

    def decode(self, *rows):
        sampled = self._decode(*rows)
        self.dispatches += 1
        self.reached.set()
        assert self.opened.wait(WAIT_S)
        return sampled


def test_a_late_short_request_finishes_before_an_early_long_one(engine, monkeypatch):
    gate, order = Gate(engine, monkeypatch), []
    (long,) = engine.submit([request(max_output_tokens=40)])
    long.add_done_callback(lambda _: order.append("long"))
    assert gate.reached.wait(WAIT_S)  # the long one runs
    (short,) = engine.submit([request(seed=1, max_output_tokens=2)])
    short.add_done_callback(lambda _: order.append("short"))
    gate.opened.set()
    assert len(long.result(WAIT_S)[0].response_tokens) == 40
    assert order == ["short", "long"]
    assert gate.dispatches == 10  # the short one ran inside the long one's dispatches of 4 steps


def test_more_responses_than_slots_are_all_answered_in_order(engine):
    results = answers(engine, *(request(prompt=(65 + i, 66), seed=i, n=3) for i in range(5)))
    assert [len(group) for group in results] == [3] * 5
    assert [group[0].prompt_tokens[0] for group in results] == [65, 66, 67, 68, 69]
    assert all(len(c.response_tokens) == 12 and c.finish_reason == "length" for g in results for c in g)
    stats = engine.stats()
    assert stats["inference/tokens_total"] == 15 * 12 and stats["inference/responses_total"] == 15


def test_samples_of_one_prompt_differ_and_are_reproducible_one_by_one(engine):
    (group,) = answers(engine, request(n=3, seed=5))
    assert len({tuple(c.response_tokens) for c in group}) == 3
    (again,) = answers(engine, request(n=1, seed=5))
    np.testing.assert_array_equal(again[0].response_tokens, group[0].response_tokens)


def test_neighbours_and_slots_do_not_change_a_sample(engine):
    wanted = request(prompt=[70] * 9, seed=3, max_output_tokens=20)
    ((alone,),) = answers(engine, wanted)
    crowd = [request(prompt=[80 + i] * (i + 1), seed=i, temperature=0.5 + i, top_k=i + 1) for i in range(3)]
    ((crowded,),) = answers(engine, *crowd, wanted)[-1:]
    np.testing.assert_array_equal(alone.response_tokens, crowded.response_tokens)
    np.testing.assert_allclose(alone.response_logprobs, crowded.response_logprobs, atol=1e-5)


def varied_request(index):
    """Every kind: shared and own prompts, greedy and truncated, stop strings, more samples than slots."""
    rng = np.random.default_rng(index)
    prompt = range(60, 70) if index % 3 == 0 else rng.integers(0, 256, rng.choice([1, 2, 9, 25, 50]))
    decoding = {
        "temperature": [0.0, 0.7, 1.5][index % 3],
        "top_k": [None, 3][index % 2],
        "top_p": [None, 0.8, None][index % 3],
        "min_p": [None, None, None, 0.1][index % 4],
        "max_output_tokens": int(rng.choice([1, 3, 10, 30])),
        "stop_strings": [(), ("e", "ab")][index % 2],
    }
    return request(prompt, seed=index, n=[1, 3, 6][index % 3], **decoding)


def test_a_crowd_with_cancellations_and_swaps_gives_what_each_gives_alone(engine, decoder):
    requests = [varied_request(i) for i in range(24)]
    futures = []
    for i, wanted in enumerate(requests):
        engine.submit([varied_request(100 + i)])[0].cancel()
        futures += engine.submit([wanted])
        if i % 7 == 3:
            engine.set_weights(WeightVersion(0, i), decoder)
    crowd = [future.result(WAIT_S) for future in futures]
    for wanted, group in zip(requests, crowd, strict=True):
        (alone,) = answers(engine, wanted)
        for left, right in zip(group, alone, strict=True):
            np.testing.assert_array_equal(left.response_tokens, right.response_tokens)
            np.testing.assert_allclose(left.response_logprobs, right.response_logprobs, atol=1e-5)


def test_min_p_keeps_improbable_tokens_out_and_their_logprobs_as_they_are(engine):
    (plain,), (narrow,), (narrowest,), (greedy,) = answers(
        engine,
        *(request(seed=4, temperature=1.5, max_output_tokens=30, min_p=min_p) for min_p in (None, 0.3, 1.0)),
        request(seed=4, temperature=0.0, max_output_tokens=30),
    )
    assert narrowest.response_tokens.tolist() == greedy.response_tokens.tolist()
    assert (narrowest.response_logprobs != greedy.response_logprobs).all()  # of softmax(logits / 1.5), not truncated
    assert plain.response_tokens.tolist() != narrow.response_tokens.tolist() != narrowest.response_tokens.tolist()
    assert plain.response_logprobs.mean() < narrow.response_logprobs.mean()


def test_two_engines_agree_to_the_bit_on_one_submission(start_engine):
    requests = [request(prompt=range(60, 63 + 5 * i), seed=i, n=3, max_output_tokens=9 + i) for i in range(4)]
    busy_before = start_engine(forgets=True)
    answers(busy_before, request(prompt=[90] * 30, n=4), request(prompt=range(60, 63)))
    first, second = answers(busy_before, *requests), answers(start_engine(), *requests)
    for left, right in zip([c for g in first for c in g], [c for g in second for c in g], strict=True):
        np.testing.assert_array_equal(left.response_tokens, right.response_tokens)
        np.testing.assert_array_equal(left.response_logprobs, right.response_logprobs)


def test_samples_share_one_prefill_even_when_they_do_not_fit_at_once(engine, monkeypatch):
    prefilled, prefill = [], engine._batch.runner.prefill
    monkeypatch.setattr(engine._batch.runner, "prefill", lambda t, s: (prefilled.append(t), prefill(t, s))[1])
    (group,) = answers(engine, request(prompt=range(60, 66), n=7, seed=2))
    assert len(group) == 7 and len(prefilled) == 1  # 4 slots: three samples copied a neighbour's prompt
    (alone,) = answers(engine, GenerationRequest(group[0].prompt_tokens, request().decoding, 2, 7))
    for left, right in zip(group, alone, strict=True):
        np.testing.assert_array_equal(left.response_tokens, right.response_tokens)


def test_greedy_requests_do_not_depend_on_the_seed(engine):
    (left,), (right,) = answers(engine, request(seed=1, temperature=0.0), request(seed=2, temperature=0.0))
    np.testing.assert_array_equal(left.response_tokens, right.response_tokens)


def test_a_stop_token_ends_the_response_and_is_kept(engine):
    ((free,),) = answers(engine, request(max_output_tokens=20))
    stop = int(free.response_tokens[5])
    ((ended,),) = answers(engine, request(max_output_tokens=20, stop=(stop,)))
    length = free.response_tokens.tolist().index(stop) + 1
    np.testing.assert_array_equal(ended.response_tokens, free.response_tokens[:length])
    np.testing.assert_allclose(ended.response_logprobs, free.response_logprobs[:length], atol=1e-5)
    assert ended.finish_reason == "stop"


def test_without_stop_tokens_the_tokenizers_are_used(engine, codec, monkeypatch):
    ((free,),) = answers(engine, request())
    monkeypatch.setattr(type(codec), "stop_token_ids", (int(free.response_tokens[2]),))
    plain = Decoding(max_output_tokens=12)
    ((ended,),) = answers(engine, GenerationRequest(free.prompt_tokens, plain, 0))
    assert len(ended.response_tokens) <= 3 and ended.finish_reason == "stop"


def test_a_stop_string_ends_the_response_at_its_last_token(engine, codec):
    ((free,),) = answers(engine, request(max_output_tokens=30, seed=4))
    tokens = free.response_tokens.tolist()
    pairs = [(i, bytes(tokens[i : i + 2])) for i in range(29) if max(tokens[i : i + 2]) < 128]
    at, stop = next((i, pair.decode()) for i, pair in pairs if i % 4 != 2)  # not at the end of a dispatch
    ((ended,),) = answers(engine, request(max_output_tokens=30, seed=4, stop_strings=("\0never", stop)))
    assert len(ended.response_tokens) == len(ended.response_logprobs) == len(ended.weight_steps) == at + 2
    assert ended.response_tokens.tolist() == tokens[: at + 2]
    assert ended.text.endswith(stop) and ended.finish_reason == "stop"


def test_the_response_is_clipped_to_the_room_that_the_prompt_leaves(engine):
    ((cut,),) = answers(engine, request(prompt=[65] * 60, max_output_tokens=50))
    assert len(cut.response_tokens) == 4 and cut.finish_reason == "length"
    ((last,),) = answers(engine, request(prompt=[65] * 63, max_output_tokens=50))
    assert len(last.response_tokens) == 1


def test_an_invalid_request_refuses_the_whole_submission(engine):
    with pytest.raises(EnvironmentFailure, match="it has 64 tokens, which leaves no room"):
        engine.submit([request(), request(prompt=[65] * 64)])
    with pytest.raises(ConfigError, match="top_p is 2"):
        engine.submit([request(), request(top_p=2.0)])
    assert engine.stats()["inference/prompts_total"] == 0


def test_a_model_that_is_too_short_is_bad_input(make_decoder, codec):
    short = make_decoder(max_position_embeddings=32)
    with pytest.raises(ConfigError, match="max_seq_len is 64, but the model is meant for 32 tokens"):
        InferenceEngine(short, WeightVersion(0, 0), codec, EngineConfig(max_seq_len=64))


def test_a_cancelled_request_frees_its_slots(engine, monkeypatch):
    gate = Gate(engine, monkeypatch)
    (unwanted,) = engine.submit([request(n=4, max_output_tokens=60)])
    (queued,) = engine.submit([request(n=4, max_output_tokens=60)])
    assert gate.reached.wait(WAIT_S)
    assert unwanted.cancel() and queued.cancel()
    gate.opened.set()
    answers(engine, request(max_output_tokens=4))
    assert gate.dispatches == 2


def test_a_failure_in_the_thread_reaches_everybody(engine, monkeypatch):
    cause = ValueError("device lost")

    def fail(*_):
        raise cause

    monkeypatch.setattr(engine._batch.runner, "decode", fail)
    futures = engine.submit([request(n=4), request(n=4)])
    assert [future.exception(WAIT_S) for future in futures] == [cause, cause]
    for call in (engine.raise_if_failed, lambda: engine.submit([request()]), lambda: engine.wait_until_ready(1.0)):
        with pytest.raises(RunFailed, match="inference engine failed.*device lost") as raised:
            call()
        assert raised.value.__cause__ is cause


def test_stopping_completes_pending_requests_as_aborted_with_what_they_have(engine, monkeypatch):
    gate = Gate(engine, monkeypatch)
    (running,) = engine.submit([request(n=4, max_output_tokens=60)])
    (queued,) = engine.submit([request()])
    assert gate.reached.wait(WAIT_S)
    threading.Timer(0.05, gate.opened.set).start()
    engine.stop(WAIT_S)
    assert {(c.finish_reason, len(c.response_tokens)) for c in running.result(0)} == {("aborted", 4)}
    assert [(c.finish_reason, len(c.response_tokens)) for c in queued.result(0)] == [("aborted", 0)]
    with pytest.raises(Stopped):
        engine.submit([request()])
    engine.stop(WAIT_S)  # twice is once


def test_a_stop_that_hangs_says_so(engine, monkeypatch):
    gate = Gate(engine, monkeypatch)
    engine.submit([request()])
    assert gate.reached.wait(WAIT_S)
    with pytest.raises(NoProgressError, match="inference engine did not stop within 0.01 s"):
        engine.stop(0.01)
    gate.opened.set()


def test_an_engine_that_was_never_started_stops_and_aborts(decoder, codec, config):
    engine = InferenceEngine(decoder, WeightVersion(0, 0), codec, config)
    with pytest.raises(NoProgressError, match="not ready after 0.01 s"):
        engine.wait_until_ready(0.01)
    (future,) = engine.submit([request()])
    engine.stop(1.0)
    assert future.result(0)[0].finish_reason == "aborted"
    with pytest.raises(Stopped):
        engine.wait_until_ready(1.0)


def test_the_limit_of_a_start_is_for_each_program_and_each_is_told(decoder, codec, config, monkeypatch):
    engine = InferenceEngine(decoder, WeightVersion(0, 0), codec, config)
    programs = [CompiledProgram(f"program {number}", number, 3, 0.5) for number in (1, 2, 3)]
    gates = [threading.Event() for _ in programs]

    def warm_up():
        for program, gate in zip(programs, gates, strict=True):
            assert gate.wait(WAIT_S)
            yield program

    monkeypatch.setattr(engine._batch, "warm_up", warm_up)
    engine.start()
    told = engine.compiling(WAIT_S)
    gates[0].set()
    assert next(told) == programs[0]
    with pytest.raises(NoProgressError, match=r"not ready after 0.01 s without another compiled program \(1 before\)"):
        engine.wait_until_ready(0.01)
    for gate in gates[1:]:
        gate.set()
    assert list(told) == programs[1:]
    engine.wait_until_ready(0.0)
    engine.stop(WAIT_S)


def test_an_idle_engine_waits_to_be_notified(engine, monkeypatch):
    waits, idle, wait = [], threading.Event(), engine._changed.wait

    def record(timeout=None):
        waits.append(timeout)
        idle.set()
        return wait(timeout)

    monkeypatch.setattr(engine._changed, "wait", record)
    answers(engine, request(max_output_tokens=40))  # ten dispatches, none of which waited
    assert idle.wait(WAIT_S)
    assert waits == [IDLE_WAKE_S]


def test_gauges_show_what_runs_and_waits(engine, monkeypatch):
    gate = Gate(engine, monkeypatch)
    futures = engine.submit([request(n=6, max_output_tokens=8)])
    assert gate.reached.wait(WAIT_S)
    assert engine.stats()["inference/waiting"] == 2
    gate.opened.set()
    futures[0].result(WAIT_S)
    stats = engine.stats()
    assert stats["inference/tokens_total"] == 48 and stats["inference/tokens_per_s"] > 0


def is_idle(engine):
    """Once it has seen that nothing is left to do, which it tells nobody."""
    deadline = time.monotonic() + WAIT_S
    while engine._calls:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def asked_by_several(engine):
    with engine._changed:  # both are there when it looks
        futures = [engine.submit([request(seed=i)])[0] for i in range(2)]
    assert [len(future.result(WAIT_S)) for future in futures] == [1, 1]
    is_idle(engine)


def test_an_idle_engine_that_several_ask_at_a_time_serves_them_together(engine, monkeypatch):
    monkeypatch.setattr(engine_module, "GATHER_S", WAIT_S)
    asked_by_several(engine)
    begun, wait_for = threading.Event(), engine._changed.wait_for

    def gathering(*args):
        begun.set()
        return wait_for(*args)

    monkeypatch.setattr(engine._changed, "wait_for", gathering)
    before = engine.stats()["inference/dispatches_total"]
    futures = engine.submit([request()])
    futures[0].add_done_callback(lambda _: begun.set())  # where it waited for nobody
    assert begun.wait(WAIT_S)
    futures += [engine.submit([request(seed=i)])[0] for i in range(1, 4)]  # as many as there are slots
    assert [len(future.result(WAIT_S)[0].response_tokens) for future in futures] == [12] * 4
    assert engine.stats()["inference/dispatches_total"] == before + 3  # of 4 steps


def test_an_engine_that_one_asks_at_a_time_waits_for_nobody(engine, monkeypatch):
    monkeypatch.setattr(engine_module, "GATHER_S", 100 * WAIT_S)
    for seed in range(3):
        (answer,) = answers(engine, request(seed=seed))
        assert len(answer[0].response_tokens) == 12
    asked_by_several(engine)
    monkeypatch.setattr(engine_module, "GATHER_S", 0.0)
    answers(engine, request())  # nobody comes along any more
    is_idle(engine)
    monkeypatch.setattr(engine_module, "GATHER_S", 100 * WAIT_S)
    assert len(answers(engine, request())[0][0].response_tokens) == 12


def test_who_asks_while_another_is_served_counts_as_several_and_is_kept_waiting_for_nobody(engine, monkeypatch):
    monkeypatch.setattr(engine_module, "GATHER_S", 0.0)
    for _ in range(2):  # the second time the engine knows that several ask
        gate = Gate(engine, monkeypatch)
        (first,) = engine.submit([request()])
        assert gate.reached.wait(WAIT_S)
        monkeypatch.setattr(engine_module, "GATHER_S", 100 * WAIT_S)
        (second,) = engine.submit([request(seed=1)])
        gate.opened.set()
        assert [len(each.result(WAIT_S)[0].response_tokens) for each in (first, second)] == [12, 12]
        monkeypatch.setattr(engine_module, "GATHER_S", 0.0)
        is_idle(engine)
        assert engine._asked_by_several


def test_however_many_come_the_wait_for_others_has_an_end(engine, monkeypatch):
    monkeypatch.setattr(engine_module, "GATHER_S", 100 * WAIT_S)
    monkeypatch.setattr(engine_module, "_MOST_GATHERS", 0)
    asked_by_several(engine)
    assert len(answers(engine, request())[0][0].response_tokens) == 12


def test_stopping_ends_the_wait_for_others(engine, monkeypatch):
    monkeypatch.setattr(engine_module, "GATHER_S", 100 * WAIT_S)
    asked_by_several(engine)
    (future,) = engine.submit([request()])
    engine.stop(WAIT_S)
    assert future.result(WAIT_S)[0].finish_reason == "aborted"
