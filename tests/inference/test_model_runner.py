"""No program is compiled after `wait_until_ready`, whatever is asked; and none untold before."""

import dataclasses
import threading
from collections import Counter

import equinox as eqx
import jax.monitoring
import numpy as np
import pytest

from penstock.inference import GenerationRequest, InferenceEngine
from penstock.inference.model_runner import ModelRunner
from penstock.inference.scheduler import SlotTable
from penstock.model.arrays import digests_of
from penstock.model.language import named_arrays
from penstock.types import Decoding, RunFailed, WeightVersion

WAIT_S = 60.0


class CompilationCounter:
    """Counts compilations in the process while it is on; JAX offers no way to take a listener away."""

    def __init__(self):
        self.on, self.names = False, []
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event, duration, **_):
        if self.on and event == "/jax/core/compile/backend_compile_duration":
            self.names.append(threading.current_thread().name)


@pytest.fixture(scope="module")
def counter():
    return CompilationCounter()


def request(length, tokens, n=1, seed=0, **decoding):
    prompt = np.arange(60, 60 + length, dtype=np.int32)
    fields = {"max_output_tokens": tokens, "stop_token_ids": (999,)} | decoding
    return GenerationRequest(prompt, Decoding(**fields), seed, n)


def test_the_steady_state_compiles_nothing(start_engine, make_decoder, counter):
    engine, new = start_engine(), make_decoder(7)
    requests = [
        request(1, 3), request(5, 60, n=6), request(9, 2, temperature=0.0), request(50, 9, n=2, top_k=3),
        request(63, 4), request(12, 20, top_p=0.5, stop_strings=("zz",)),
    ]  # fmt: skip
    counter.on, counter.names = True, []
    futures = engine.submit(requests)
    engine.set_weights(WeightVersion(0, 1), new)
    futures += engine.submit([request(5, 6), request(1, 60)])
    results = [future.result(WAIT_S) for future in futures]
    short = engine.submit([request(3, 1)])[0].result(WAIT_S)  # the cache shrinks again
    served, digests = engine.digests(WAIT_S)
    counter.on = False
    assert counter.names == []
    assert served == WeightVersion(0, 1) and digests == digests_of(named_arrays(new))
    assert len(short) == 1 and sum(map(len, results)) == 14
    assert engine.stats()["inference/weight_swaps_total"] == 1


def test_an_engine_that_serves_at_once_compiles_what_is_asked_for_and_tells_each(
    decoder, codec, config, make_decoder, start_engine, counter
):
    shapes = config.model_copy(
        update={"max_slots": 3, "max_seq_len": 63, "prefill_lengths": (9,)}
    )  # compiled by no other test
    engine, new = InferenceEngine(decoder, WeightVersion(0, 0), codec, shapes), make_decoder(7)
    counter.on, counter.names = True, []
    engine.start(lazily=True)
    told = engine.compiling(WAIT_S)
    first = engine.submit([request(5, 3)])[0].result(WAIT_S)
    early = {next(told).name for _ in range(5)}
    assert early == {
        "decode, window 16", "prefill, 2 × 9 prompt tokens", "insert, 2 × 9 prompt tokens, window 16",
        "resize, window 16 to 63", "decode, window 63",
    }  # fmt: skip
    assert len(counter.names) == 5  # each once, and nothing that is not told
    engine.set_weights(WeightVersion(0, 1), new)
    engine.wait_until_served(WeightVersion(0, 1), WAIT_S)
    assert engine.digests(WAIT_S)[1] == digests_of(named_arrays(new))
    assert sorted(next(told).name.partition(",")[0] for _ in range(2)) == ["digests", "digests"]
    counter.names = []
    engine.compile_rest()
    engine.compile_rest()
    rest = list(told)  # ends: all are there
    assert len(rest) == 13 - 5 - 2 == len(counter.names) and rest[-1].number == rest[-1].of == 13
    counter.names = []
    futures = engine.submit([request(5, 3), request(50, 9, n=2, top_k=3), request(5, 6, seed=3), request(1, 60)])
    results = [future.result(WAIT_S) for future in futures]
    counter.on = False
    assert counter.names == [] and len(results) == 4
    engine.stop(WAIT_S)
    eager = start_engine(decoder, shapes)  # the same tokens, whenever its programs were compiled
    assert (
        eager.submit([request(5, 3)])[0].result(WAIT_S)[0].response_tokens.tolist() == first[0].response_tokens.tolist()
    )
    assert (
        eager.submit([request(5, 3)])[0].result(WAIT_S)[0].response_logprobs.tolist()
        == first[0].response_logprobs.tolist()
    )


def test_a_program_that_cannot_be_compiled_fails_an_engine_that_serves_already(decoder, codec, config, monkeypatch):
    engine = InferenceEngine(decoder, WeightVersion(0, 0), codec, config)
    lowered = engine._batch._runner._lowered

    def broken(rows):
        return {**lowered(rows), "fork, window 64": lambda: 1 / 0}

    monkeypatch.setattr(engine._batch._runner, "_lowered", broken)
    engine.start(lazily=True)
    assert engine.submit([request(5, 3)])[0].result(WAIT_S)
    engine.compile_rest()
    with pytest.raises(RunFailed, match="division by zero"):
        list(engine.compiling(WAIT_S))
    engine.stop(WAIT_S)


def test_the_counter_sees_a_compilation(counter):
    counter.on, counter.names = True, []
    jax.jit(lambda x: x * 3 + 1)(np.arange(7))
    counter.on = False
    assert counter.names != []


def test_the_window_follows_the_longest_live_sequence(engine, config, monkeypatch):
    windows, decode = [], engine._batch._runner.decode
    monkeypatch.setattr(
        engine._batch._runner, "decode", lambda rows: (windows.append(engine._batch._runner.window), decode(rows))[1]
    )
    engine.submit([request(4, 20)])[0].result(WAIT_S)
    assert windows == [16, 16, 16, 64, 64]  # positions 3…22, four a dispatch
    windows.clear()
    engine.submit([request(4, 4)])[0].result(WAIT_S)
    assert windows == [16]


def test_resizing_passes_only_compiled_steps(decoder, config):
    shapes = config.model_copy(update={"windows": (8, 16, 32)})
    runner = ModelRunner(decoder, shapes)
    seen = []
    for window in (32, 8, 8, 64, 16):
        runner.resize(window)
        seen.append(runner.window)
    assert seen == [32, 8, 8, 64, 16]


@pytest.mark.parametrize("tied", [True, False])
def test_the_digests_of_what_is_served_are_those_of_the_decoder(make_decoder, config, tied):
    decoder = make_decoder(3, tie_word_embeddings=tied)
    expected = digests_of(named_arrays(decoder))
    runner = ModelRunner(decoder, config)
    assert runner.weights.digests() == expected and ("head" in expected) is not tied
    stale = ModelRunner(make_decoder(4, tie_word_embeddings=tied), config).weights.layers[1].query
    runner.load(eqx.tree_at(lambda weights: weights.layers[1].query, runner.weights, stale))
    found = runner.weights.digests()
    assert {name for name in expected if found[name] != expected[name]} == {"layers.query"}
    first, second = runner.weights.layers
    runner.load(dataclasses.replace(runner.prepare(decoder), layers=(second, first)))
    found = runner.weights.digests()
    assert {name for name in expected if found[name] != expected[name]} == {
        name for name in expected if name.startswith("layers.")
    }


def test_warm_up_leaves_the_smallest_window_and_touches_no_slot(decoder, config):
    runner = ModelRunner(decoder, config)
    programs = list(runner.warm_up(SlotTable(config.max_slots, config.max_stop_token_ids).rows))
    assert runner.window == 16
    names = [program.name.partition(",")[0] for program in programs]
    # Prefills are of no window, and small enough for one number of rows; what they made is inserted into either.
    assert Counter(names) == {"decode": 2, "fork": 2, "resize": 2, "prefill": 2, "insert": 3, "digests": 2}
    assert [(program.number, program.of) for program in programs] == [(number, 13) for number in range(1, 14)]
    assert all(float(np.abs(np.asarray(a)).max()) == 0 for a in (*runner._cache.keys, *runner._cache.values))
