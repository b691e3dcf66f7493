"""Weight swaps: between dispatches only, whole, and recorded token by token."""

import gc
import queue
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.waiting import wait_until

from penstock.inference import GenerationRequest, InferenceEngine, decoding
from penstock.model.arrays import digests_of
from penstock.model.language import Segments, named_arrays
from penstock.types import Decoding, NoProgressError, WeightsError, WeightVersion

WAIT_S = 280.0
PROMPT = np.arange(60, 72, dtype=np.int32)


def request(tokens=16, n=1, seed=0):
    return GenerationRequest(PROMPT, Decoding(max_output_tokens=tokens, stop_token_ids=(999,)), seed, n)


def forward_logprobs(decoder, completion):
    tokens = np.concatenate([completion.prompt_tokens, completion.response_tokens])[None]
    positions = np.arange(tokens.shape[1])[None]
    arrays = jnp.asarray(tokens), jnp.asarray(positions, jnp.int32), Segments.of(np.ones_like(tokens))
    logprobs = jax.nn.log_softmax(decoder.logits(decoder.hidden_states(*arrays)[0]))
    rows = np.arange(len(completion.prompt_tokens) - 1, tokens.shape[1] - 1)
    return np.asarray(logprobs)[rows, completion.response_tokens]


def swap_after_first_dispatch(engine, monkeypatch, version, decoder):
    """Publishes while the first dispatch runs, as a learner would."""
    decode, swapped = engine._batch.runner.decode, []

    def decode_and_swap(*rows):
        if not swapped:
            swapped.append(engine.set_weights(version, decoder))
        return decode(*rows)

    monkeypatch.setattr(engine._batch.runner, "decode", decode_and_swap)


def test_tokens_carry_the_version_that_sampled_them(engine, make_decoder, monkeypatch):
    new = make_decoder(9)
    swap_after_first_dispatch(engine, monkeypatch, WeightVersion(0, 5), new)
    ((completion,),) = [future.result(WAIT_S) for future in engine.submit([request()])]
    assert completion.weight_steps.tolist() == [0] * 4 + [5] * 12
    assert (completion.lineage, completion.oldest_weight_step) == (0, 0)
    assert engine.version == WeightVersion(0, 5)
    # After the swap the new weights read a cache whose beginning the old ones wrote.
    old_part = forward_logprobs(engine_decoder(engine), completion)
    assert np.abs(completion.response_logprobs[4:] - old_part[4:]).max() > 1e-2
    assert np.abs(completion.response_logprobs[4:] - forward_logprobs(new, completion)[4:]).max() > 1e-2


def engine_decoder(engine):
    """The first published decoder, whose embedding the engine shares."""
    return engine._first


@pytest.fixture
def engine(start_engine, decoder):
    engine = start_engine(decoder)
    engine._first = decoder
    return engine


def test_requests_after_a_swap_see_the_new_weights_whole(engine, make_decoder):
    engine.submit([request(n=4)])[0].result(WAIT_S)
    new = make_decoder(9)
    engine.set_weights(WeightVersion(0, 1), new)
    assert engine.version == WeightVersion(0, 1)  # at once, for what is submitted from now on
    (completion,) = engine.submit([request(seed=3)])[0].result(WAIT_S)
    assert completion.weight_steps.tolist() == [1] * 16 and completion.oldest_weight_step == 1
    np.testing.assert_allclose(completion.response_logprobs, forward_logprobs(new, completion), atol=1e-4)


def test_a_prompt_cached_under_old_weights_is_not_lent_to_new_requests(engine, make_decoder, monkeypatch):
    new = make_decoder(9)
    swap_after_first_dispatch(engine, monkeypatch, WeightVersion(0, 1), new)
    group = engine.submit([request(n=6, tokens=8)])[0].result(WAIT_S)  # 4 slots: two samples begin after the swap
    assert [c.weight_steps.tolist() for c in group] == [[0] * 4 + [1] * 4] * 4 + [[1] * 8] * 2
    assert [c.oldest_weight_step for c in group] == [0] * 4 + [1] * 2
    for completion in group[4:]:
        np.testing.assert_allclose(completion.response_logprobs, forward_logprobs(new, completion), atol=1e-4)


def test_only_the_newest_of_several_published_versions_is_served(engine, make_decoder, monkeypatch):
    runner, loaded = engine._batch.runner, []
    load = runner.load
    monkeypatch.setattr(runner, "load", lambda weights: (loaded.append(weights), load(weights))[1])
    first, second = make_decoder(1), make_decoder(2)
    with engine._changed:  # the engine cannot look in between
        engine.set_weights(WeightVersion(0, 1), first)
        engine.set_weights(WeightVersion(0, 2), second)
    (completion,) = engine.submit([request()])[0].result(WAIT_S)
    assert [weights.ends.embedding is second.embedding for weights in loaded] == [True]
    assert set(completion.weight_steps) == {2}


def test_generation_goes_on_while_weights_are_brought_into_their_form(engine, make_decoder, monkeypatch):
    runner, begun, go_on = engine._batch.runner, threading.Event(), threading.Event()
    prepare, unstacked_by = runner.prepare, []

    def prepare_when_told(arrays, held):
        begun.set()
        assert go_on.wait(WAIT_S)
        unstacked_by.append(threading.current_thread())
        return prepare(arrays, held)

    monkeypatch.setattr(runner, "prepare", prepare_when_told)
    publisher = threading.Thread(target=engine.set_weights, args=(WeightVersion(0, 1), make_decoder(9)))
    publisher.start()
    assert begun.wait(WAIT_S)
    (before,) = engine.submit([request()])[0].result(WAIT_S)
    assert set(before.weight_steps) == {0} and engine.version == WeightVersion(0, 0)
    go_on.set()
    publisher.join(WAIT_S)
    (after,) = engine.submit([request()])[0].result(WAIT_S)
    assert set(after.weight_steps) == {1} and unstacked_by == [publisher]


def test_an_engine_tells_the_digests_of_what_the_next_dispatch_reads(engine, make_decoder, monkeypatch):
    new, other = make_decoder(9), make_decoder(8)
    assert engine.digests(WAIT_S) == (WeightVersion(0, 0), digests_of(named_arrays(engine_decoder(engine))))
    prepare = engine._batch.runner.prepare
    monkeypatch.setattr(
        engine._batch.runner, "prepare",
        lambda *given: eqx.tree_at(lambda w: w.ends.final_norm, prepare(*given), other.final_norm),
    )  # fmt: skip
    engine.set_weights(WeightVersion(0, 5), new)
    version, found = engine.digests(WAIT_S)
    expected = digests_of(named_arrays(new))
    assert version == WeightVersion(0, 5)
    assert {name for name in expected if found[name] != expected[name]} == {"final_norm"}


def test_digests_wait_for_weights_that_are_not_swapped_in_yet(engine, make_decoder, monkeypatch):
    """Also where those have the number of what is served, as after a warm start."""
    busy, free = threading.Event(), threading.Event()
    load = engine._batch.load

    def slow_load(weights):
        busy.set()
        load(weights)

    take = engine._take_weights
    monkeypatch.setattr(engine, "_take_weights", lambda: (free.wait(WAIT_S), take()))
    monkeypatch.setattr(engine._batch, "load", slow_load)
    engine.set_weights(WeightVersion(0, 0), make_decoder(9))
    with pytest.raises(NoProgressError, match="had not swapped its weights after 0.05 s"):
        engine.digests(0.05)
    assert not busy.is_set()
    free.set()
    assert engine.digests(WAIT_S) == (WeightVersion(0, 0), digests_of(named_arrays(make_decoder(9))))


def test_a_new_lineage_is_recorded(engine, decoder):
    engine.set_weights(WeightVersion(3, 1), decoder)
    (completion,) = engine.submit([request()])[0].result(WAIT_S)
    assert (completion.lineage, completion.oldest_weight_step) == (3, 1)


def test_weights_of_another_shape_are_refused_and_change_nothing(engine, make_decoder):
    for other in (make_decoder(hidden_size=40), make_decoder(model_type="llama")):
        with pytest.raises(WeightsError, match="weights do not fit the engine: "):
            engine.set_weights(WeightVersion(0, 1), other)
    assert engine.version == WeightVersion(0, 0)


def test_a_perturbed_weight_shows_in_the_logprobs(engine, decoder):
    (completion,) = engine.submit([request()])[0].result(WAIT_S)
    agreeing = forward_logprobs(decoder, completion)
    np.testing.assert_allclose(completion.response_logprobs, agreeing, atol=1e-4)
    leaves, structure = jax.tree.flatten(decoder)
    perturbed = jax.tree.unflatten(structure, [leaves[0] * 1.01, *leaves[1:]])
    assert np.abs(completion.response_logprobs - forward_logprobs(perturbed, completion)).max() > 1e-3


# --- pauses ---------------------------------------------------------------------------------------------------------


def pause_during_first_dispatch(engine, monkeypatch, mode, clear_cache=True):
    """As another thread would, while the first dispatch runs; returns what joins that thread."""
    decode, pausing = engine._batch.runner.decode, []

    def decode_and_pause(*rows):
        if not pausing:
            pause = threading.Thread(target=engine.pause, args=(mode, clear_cache, WAIT_S), daemon=True)
            pause.start()
            pausing.append(pause)
            wait_until(lambda: engine._pause is not None, "the pause is asked for")
        return decode(*rows)

    monkeypatch.setattr(engine._batch.runner, "decode", decode_and_pause)

    def paused():
        wait_until(lambda: pausing, "a dispatch began")
        pausing[0].join(WAIT_S)
        assert engine.paused

    return paused


def test_what_is_kept_over_a_pause_goes_on_under_the_new_weights_alone(engine, make_decoder, monkeypatch):
    new = make_decoder(9)
    paused = pause_during_first_dispatch(engine, monkeypatch, "keep")
    (future,) = engine.submit([request(n=2)])
    paused()
    engine.set_weights(WeightVersion(0, 5), new)
    engine.wait_until_served(WeightVersion(0, 5), WAIT_S)
    assert not future.done() and engine.paused
    engine.resume()
    for completion in future.result(WAIT_S):
        assert completion.weight_steps.tolist() == [0] * 4 + [5] * 12 and completion.oldest_weight_step == 0
        np.testing.assert_allclose(  # of a cache that the new weights wrote
            completion.response_logprobs[4:], forward_logprobs(new, completion)[4:], atol=1e-4
        )
        first = forward_logprobs(engine_decoder(engine), completion)
        np.testing.assert_allclose(completion.response_logprobs[:4], first[:4], atol=1e-4)


def test_a_cache_that_is_not_cleared_is_read_on(engine, make_decoder, monkeypatch):
    new = make_decoder(9)
    paused = pause_during_first_dispatch(engine, monkeypatch, "keep", clear_cache=False)
    (future,) = engine.submit([request()])
    paused()
    engine.set_weights(WeightVersion(0, 5), new)
    engine.resume()
    (completion,) = future.result(WAIT_S)
    assert np.abs(completion.response_logprobs[4:] - forward_logprobs(new, completion)[4:]).max() > 1e-2


def test_a_pause_that_aborts_ends_what_came_before_it_and_frees_the_slots(engine, make_decoder, monkeypatch):
    slots = engine.config.max_slots
    paused = pause_during_first_dispatch(engine, monkeypatch, "abort")
    running, waiting = engine.submit([request(n=slots), request(n=2)])
    paused()
    assert [(c.finish_reason, len(c.response_tokens)) for c in running.result(WAIT_S)] == [("aborted", 4)] * slots
    assert [(c.finish_reason, len(c.response_tokens)) for c in waiting.result(WAIT_S)] == [("aborted", 0)] * 2
    assert engine.stats()["inference/running"] == 0
    (later,) = engine.submit([request(n=slots)])
    engine.set_weights(WeightVersion(0, 5), make_decoder(9))  # which is taken beside a request that waits
    engine.wait_until_served(WeightVersion(0, 5), WAIT_S)
    assert engine.paused and not later.done()
    engine.pause("abort", True, WAIT_S)
    assert [c.finish_reason for c in later.result(WAIT_S)] == ["aborted"] * slots
    (later,) = engine.submit([request(n=slots)])
    engine.resume()
    assert [len(c.response_tokens) for c in later.result(WAIT_S)] == [16] * slots
    assert engine.stats()["inference/running"] == engine.stats()["inference/waiting"] == 0


def test_a_pause_that_waits_lets_what_runs_end_and_admits_nothing(engine, monkeypatch):
    slots = engine.config.max_slots
    paused = pause_during_first_dispatch(engine, monkeypatch, "wait")
    running, waiting = engine.submit([request(n=slots), request(seed=1)])
    paused()
    assert [c.finish_reason for c in running.result(WAIT_S)] == ["length"] * slots and not waiting.done()
    engine.resume()
    assert len(waiting.result(WAIT_S)[0].response_tokens) == 16


def test_a_pause_that_is_ended_before_it_has_begun_says_so_at_once(engine, monkeypatch):
    decode, found = engine._batch.runner.decode, queue.SimpleQueue()

    def pause():
        try:
            engine.pause("wait", False, 30.0)
        except NoProgressError as error:
            found.put(str(error))
        else:
            found.put("paused")

    def decode_and_pause(*rows):
        if found.empty() and engine._pause is None:
            threading.Thread(target=pause, daemon=True).start()
            wait_until(lambda: engine._pause is not None, "the pause is asked for")
            engine.resume()
            assert found.get(timeout=WAIT_S) == "the inference engine was resumed before it had paused"
            found.put("said")
        return decode(*rows)

    monkeypatch.setattr(engine._batch.runner, "decode", decode_and_pause)
    (running,) = engine.submit([request()])
    assert len(running.result(WAIT_S)[0].response_tokens) == 16 and found.get_nowait() == "said"


def test_what_a_pause_waits_for_may_outgrow_the_window(engine, decoder, monkeypatch):
    paused = pause_during_first_dispatch(engine, monkeypatch, "wait")
    decoding = Decoding(max_output_tokens=50, stop_token_ids=(999,))
    (running,) = engine.submit([GenerationRequest(PROMPT[:5], decoding, 0)])  # begins in a window of 16
    paused()
    (found,) = running.result(WAIT_S)
    np.testing.assert_allclose(found.response_logprobs, forward_logprobs(decoder, found), atol=1e-4)


def test_an_idle_engine_pauses_and_a_version_gets_another_name(engine):
    engine.pause("keep", True, WAIT_S)
    engine.rename_version(WeightVersion(0, 17))
    (future,) = engine.submit([request()])
    engine.resume()
    assert future.result(WAIT_S)[0].weight_steps.tolist() == [17] * 16


# --- memory ---------------------------------------------------------------------------------------------------------


DEEP = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8}


def live_bytes():
    return sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())


def from_host(decoder, dtype):
    return {name: np.array(array, dtype) for name, array in named_arrays(decoder).items()}


@pytest.fixture
def deep_engine(make_decoder, codec, config):
    """One of eight layers, which compiles nothing, as nobody asks it."""
    engine = InferenceEngine(make_decoder(**DEEP), WeightVersion(0, 0), codec, config)
    engine.start(lazily=True)
    yield engine
    engine.stop(WAIT_S)


@pytest.mark.parametrize("dtype", [None, np.float32, jnp.bfloat16])
def test_a_swap_has_the_weights_twice_and_nothing_more(deep_engine, make_decoder, monkeypatch, dtype):
    """Given by reference, as in one process; and from host memory, in the engine's dtype and in that of the way."""
    engine, new = deep_engine, make_decoder(9, **DEEP)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(engine._batch.runner.weights))
    given = named_arrays(new) if dtype is None else from_host(new, dtype)
    expected = digests_of({name: jnp.asarray(array, jnp.float32) for name, array in given.items()})
    if dtype is not None:
        del new
    gc.collect()
    others = live_bytes() - size  # the cache, and what the caller has: all but what is served
    seen, taken, load = [], decoding._taken, engine._batch.load
    monkeypatch.setattr(decoding, "_taken", lambda *args: (taken(*args), seen.append(live_bytes()))[0])
    monkeypatch.setattr(engine._batch, "load", lambda weights: (load(weights), seen.append(live_bytes()))[0])
    engine.set_weights(WeightVersion(0, 1), given)
    assert engine.digests(WAIT_S) == (WeightVersion(0, 1), expected)
    assert len(seen) > 8 and 1.5 * size < max(seen) - others <= 2.1 * size
    gc.collect()
    assert live_bytes() - others <= 1.1 * size


def test_what_is_not_named_stays_as_it_is_served(engine, decoder, make_decoder):
    before, new = engine._batch.runner.weights, named_arrays(make_decoder(9))
    frozen = ("embedding", "layers.gate", "layers.up")
    engine.set_weights(WeightVersion(0, 1), {name: array for name, array in new.items() if name not in frozen})
    expected = new | {name: named_arrays(decoder)[name] for name in frozen}
    assert engine.digests(WAIT_S) == (WeightVersion(0, 1), digests_of(expected))
    after = engine._batch.runner.weights
    assert after.ends.embedding is before.ends.embedding and after.ends.final_norm is new["final_norm"]
    for layer, held in zip(after.layers, before.layers, strict=True):
        assert layer.gate is held.gate and layer.up is held.up and layer.down is not held.down


def test_versions_that_name_different_arrays_add_up_before_they_are_served(engine, decoder, make_decoder):
    new = named_arrays(make_decoder(9))
    with engine._changed:  # the engine cannot look in between
        engine.set_weights(WeightVersion(0, 1), {"layers.up": new["layers.up"]})
        engine.set_weights(WeightVersion(0, 2), {"final_norm": new["final_norm"]})
    expected = named_arrays(decoder) | {name: new[name] for name in ("layers.up", "final_norm")}
    assert engine.digests(WAIT_S) == (WeightVersion(0, 2), digests_of(expected))


def test_host_memory_may_be_used_again(engine, make_decoder):
    given, expected = from_host(make_decoder(9), np.float32), digests_of(named_arrays(make_decoder(9)))
    engine.set_weights(WeightVersion(0, 1), given)
    for array in given.values():
        array[...] = 0
    assert engine.digests(WAIT_S) == (WeightVersion(0, 1), expected)
