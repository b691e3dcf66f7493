"""No program is compiled after `wait_until_ready`, whatever is asked; and none untold before."""

import dataclasses
import threading
from collections import Counter
from concurrent.futures import wait

import equinox as eqx
import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from tests.waiting import wait_until

from penstock.inference import EngineConfig, GenerationRequest, InferenceEngine
from penstock.inference.config import InferenceConfig
from penstock.inference.model_runner import ModelRunner
from penstock.inference.scheduler import SlotTable
from penstock.model import programs
from penstock.model.arrays import digests_of
from penstock.model.language import named_arrays
from penstock.model.programs import processors_of_process
from penstock.types import Decoding, RunFailed, WeightVersion

WAIT_S = 280.0


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


def wait_for_others():
    """Until nothing is compiled that an engine of an earlier test began."""
    idle = threading.Barrier(processors_of_process())
    wait([programs._threads().submit(idle.wait, WAIT_S) for _ in range(idle.parties)], WAIT_S)


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
    wait_for_others()
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
        update={"max_slots": 3, "max_seq_len": 63, "prefill_lengths": (9,), "forgets": True}
    )  # compiled by no other test
    engine, new = InferenceEngine(decoder, WeightVersion(0, 0), codec, shapes), make_decoder(7)
    start_engine().digests(WAIT_S)  # their two programs are those of any engine with such arrays
    expected = digests_of(named_arrays(new))
    counter.on, counter.names = True, []
    engine.start(lazily=True)
    told = engine.compiling(WAIT_S)
    first = engine.submit([request(5, 3)])[0].result(WAIT_S)
    early = {next(told).name for _ in range(8)}
    assert early == {
        "decode, window 16", "prefill, 2 × 9 prompt tokens", "insert, 2 × 9 prompt tokens, window 16",
        "decode, 1 ragged rows, window 16", "resize, window 16 to 63", "decode, window 63",
        "digests, embedding and norm", "digests, one layer",
    }  # fmt: skip
    assert len(counter.names) == len(early) - 2  # each once, and nothing that is not told
    counter.names = []
    engine.set_weights(WeightVersion(0, 1), new)
    engine.wait_until_served(WeightVersion(0, 1), WAIT_S)
    assert engine.digests(WAIT_S)[1] == expected
    assert counter.names == []
    engine.compile_rest()
    engine.compile_rest()
    rest = list(told)  # ends: all are there
    assert len(rest) == 17 - 8 == len(counter.names) and rest[-1].number == rest[-1].of == 17
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
    lowered = engine._batch.runner._lowered

    def broken():
        return {**lowered(), "fork, window 64": lambda: 1 / 0}

    monkeypatch.setattr(engine._batch.runner, "_lowered", broken)
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


@pytest.mark.parametrize("forgets", [True, False])
def test_the_window_follows_the_longest_sequence_that_is_live_or_kept(start_engine, monkeypatch, forgets):
    engine = start_engine(forgets=forgets)
    windows, decode = [], engine._batch.runner.decode
    monkeypatch.setattr(
        engine._batch.runner, "decode", lambda *rows: (windows.append(engine._batch.runner.window), decode(*rows))[1]
    )
    engine.submit([request(4, 20)])[0].result(WAIT_S)
    assert windows == [16, 16, 16, 64, 64]  # positions 3…22, four a dispatch
    windows.clear()
    engine.submit([request(4, 4)])[0].result(WAIT_S)
    assert windows == [16 if forgets else 64]


def rows_of(lengths, slots=6, budget=9):
    table = SlotTable(slots, 2)
    for slot, length in lengths.items():
        table.rows.positions[slot], table.rows.budget[slot] = length, budget
    return table.whole


def test_the_program_of_a_dispatch_is_chosen_by_what_is_live_alone(decoder, config):
    shapes = config.model_copy(update={"max_slots": 6, "max_seq_len": 300, "decode_rows": (1, 2), "windows": (128,)})
    runner = ModelRunner(decoder, shapes)
    for count, lengths in {1: {5: 100}, 2: {0: 3, 4: 100}}.items():
        assert runner._decode_shape(rows_of(lengths)) == (f"decode, {count} ragged rows, window 128", count, "ragged")
    assert runner._decode_shape(rows_of(dict.fromkeys(range(3), 9))) == ("decode, window 128", 6, "dense")
    runner.resize(300)
    ragged = {0: 290, 1: 290, 2: 290, **dict.fromkeys(range(4, 6), 9)}  # these read 3 · 300 + 2 · 64 of 6 · 300
    for length in (60, 61, 124):  # with four steps more 64 or 128, which are two thirds of all at most
        expected = ("decode, 6 ragged rows, window 300", 6, "ragged")
        assert runner._decode_shape(rows_of(ragged | {3: length})) == expected
    assert runner._decode_shape(rows_of(ragged | {3: 125})) == ("decode, window 300", 6, "dense")


@pytest.mark.parametrize("run", [True, False])
def test_a_runs_first_weights_decode_all_rows(decoder, run):
    shapes = (InferenceConfig if run else EngineConfig)(max_slots=6, max_seq_len=300, decode_rows=(1, 2))
    runner, one = ModelRunner(decoder, shapes), rows_of({5: 100})
    assert runner._decode_shape(one)[1] == 1
    runner.first = True
    assert runner._decode_shape(one)[1] == (6 if run else 1)


@pytest.mark.parametrize("forgets", [False, True])
def test_rows_that_a_better_program_is_for_do_not_wait_for_it(decoder, forgets):
    """But where what is computed must not hang on when it was compiled: there it is waited for."""
    shapes = EngineConfig(max_slots=6, max_seq_len=40, decode_rows=(1, 2), forgets=forgets)
    runner, told, one = ModelRunner(decoder, shapes), list[str](), rows_of({5: 20})
    lazy = runner.begin(lambda done: told.append(done.name))
    dense, best = "decode, window 40", "decode, 1 ragged rows, window 40"
    lazy.need(dense)
    assert runner._decode_shape(one)[0] == best
    first = runner.decode(one)
    assert (best in told) == forgets
    if not forgets:
        lazy.note_replaced(best, dense, lazy.compiled_s(dense))
        wait_until(lambda: best in told, "the better program", WAIT_S)
    again = runner.decode(one)
    assert first.count.tolist() == again.count.tolist() and first.tokens[:, 5].tolist() == again.tokens[:, 5].tolist()
    np.testing.assert_allclose(first.logprobs[:, 5], again.logprobs[:, 5], atol=1e-5)


def test_a_run_compiles_what_truncates_when_a_request_asks(decoder, codec, config):
    """In the thread of whoever asks, and what is sampled is what an engine samples that always can."""
    runs = InferenceConfig.model_validate(config.model_dump())
    found = {}
    for given in (config, runs):
        engine = InferenceEngine(decoder, WeightVersion(0, 1), codec, given)
        engine.start(lazily=True)
        rare = engine._batch.runner._rare._tasks
        plain, asking = request(5, 9, n=2, seed=3), request(5, 9, n=2, seed=3, top_k=2)
        futures = engine.submit([plain])
        kept = [completion.response_tokens.tolist() for completion in futures[0].result(WAIT_S)]
        assert not any(task.future.done() for task in rare.values())
        futures = engine.submit([asking])
        asked = [name for name, task in rare.items() if task.future.done()]
        assert bool(asked) == (given is runs) and all(name.endswith(", truncating") for name in asked)
        few = [completion.response_tokens.tolist() for completion in futures[0].result(WAIT_S)]
        both = [future.result(WAIT_S) for future in engine.submit([plain, asking])]
        beside = [[completion.response_tokens.tolist() for completion in each] for each in both]
        assert beside == [kept, few] and kept != few
        found[type(given)] = beside
        engine.stop(WAIT_S)
    assert found[EngineConfig] == found[InferenceConfig]


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param({3: 7}, marks=pytest.mark.slow),
        pytest.param({1: 140, 4: 3}, marks=pytest.mark.slow),
        {0: 290, 1: 3, 2: 130, 5: 20},
    ],
)
def test_few_rows_and_pages_sample_what_all_slots_sample(decoder, config, lengths):
    shapes = config.model_copy(update={"max_slots": 6, "max_seq_len": 300, "decode_rows": (1, 2), "windows": (300,)})
    found, rng = {}, np.random.default_rng(0)
    noise = rng.normal(size=(6, 2, 300, 8)).astype(np.float32)
    for kernel in ("dense", "ragged"):
        runner = ModelRunner(decoder, shapes)
        runner._cache = jax.tree.map(lambda _: jnp.array(noise), runner._cache)
        rows = rows_of(lengths)
        shape = runner._decode_shape(rows)
        found[kernel] = runner._decode(rows, *(shape if kernel == "ragged" else ("decode, window 300", 6, "dense")))
        found[kernel, "cache"] = np.asarray(runner._cache.values[1])
    assert shape[2] == "ragged"
    assert (
        found["ragged"].count.tolist() == [4 * (slot in lengths) for slot in range(6)] == found["dense"].count.tolist()
    )
    for slot in lengths:
        np.testing.assert_array_equal(found["ragged"].tokens[:, slot], found["dense"].tokens[:, slot])
        np.testing.assert_allclose(found["ragged"].logprobs[:, slot], found["dense"].logprobs[:, slot], atol=1e-5)
    np.testing.assert_allclose(found["ragged", "cache"], found["dense", "cache"], atol=1e-5)
    written = np.abs(found["ragged", "cache"] - noise).sum((1, 3)) > 0
    assert written.sum(1).tolist() == found["dense"].count.tolist()  # and idle slots are as they were


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
    runner.load(dataclasses.replace(runner.prepare(named_arrays(decoder)), layers=(second, first)))
    found = runner.weights.digests()
    assert {name for name in expected if found[name] != expected[name]} == {
        name for name in expected if name.startswith("layers.")
    }


def test_warm_up_leaves_the_smallest_window_and_touches_no_slot(decoder, config):
    runner = ModelRunner(decoder, config)
    programs = list(runner.warm_up(SlotTable(config.max_slots, config.max_stop_token_ids).whole))
    assert runner.window == 16
    names = [program.name.partition(",")[0] for program in programs]
    # Prefills are of no window, and small enough for one number of rows; what they made is inserted into either. One
    # more for each window adds to what is cached.
    assert Counter(names) == {"decode": 4, "fork": 2, "resize": 2, "prefill": 4, "insert": 3, "digests": 2}
    assert [(program.number, program.of) for program in programs] == [(number, 17) for number in range(1, 18)]
    assert all(float(np.abs(np.asarray(a)).max()) == 0 for a in (*runner._cache.keys, *runner._cache.values))
