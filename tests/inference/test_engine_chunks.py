"""Long prompts are prefilled by chunks between dispatches, and say what whole prefill says."""

import threading

import numpy as np
import pytest

from penstock.inference import GenerationRequest
from penstock.inference.dispatch import SlotRows
from penstock.types import Decoding, WeightVersion

WAIT_S = 280.0


@pytest.fixture
def chunked(config):
    return config.model_copy(update={"prefill_chunk": 16})


def request(length, tokens, n=1, seed=0):
    prompt = np.random.default_rng(length).integers(0, 256, length).astype(np.int32)
    return GenerationRequest(prompt, Decoding(max_output_tokens=tokens, stop_token_ids=(999,)), seed, n)


def answers(futures):
    return [completion for future in futures for completion in future.result(WAIT_S)]


@pytest.fixture
def watched_engine(start_engine, decoder, monkeypatch):
    """Starts an engine, and tells what its device does, in order: ("extend", slot, start), ("decode", live slots)."""

    def start(config):
        engine, done = start_engine(decoder, config), []
        runner = engine._batch.runner
        extend, decode = runner.extend, runner.decode

        def extending(tokens, slot, start):
            done.append(("extend", slot, start))
            extend(tokens, slot, start)

        def decoding(rows, alternatives):
            done.append(("decode", np.flatnonzero(SlotRows.of(rows).budget).tolist()))
            return decode(rows, alternatives)

        monkeypatch.setattr(runner, "extend", extending)
        monkeypatch.setattr(runner, "decode", decoding)
        return engine, done

    return start


@pytest.fixture
def watched(watched_engine, chunked):
    return watched_engine(chunked)


def test_chunks_give_what_whole_prefill_gives(start_engine, decoder, chunked, config):
    asked = [
        request(5, 20),
        request(40, 12, n=2, seed=3),
        request(9, 6),
        request(61, 3),
        request(17, 9),
        request(33, 9),
    ]
    whole, by_chunks = (answers(start_engine(decoder, c).submit(asked)) for c in (config, chunked))
    for expected, found in zip(whole, by_chunks, strict=True):
        assert found.response_tokens.tolist() == expected.response_tokens.tolist()
        np.testing.assert_allclose(found.response_logprobs, expected.response_logprobs, atol=1e-5)


def test_others_go_on_between_the_chunks_and_siblings_begin_together(watched, monkeypatch):
    engine, done = watched
    runner, later = engine._batch.runner, []
    decode = runner.decode

    def decoding(rows, alternatives):
        if not later:
            later.extend(engine.submit([request(50, 4, n=2, seed=3)]))
        return decode(rows, alternatives)

    monkeypatch.setattr(runner, "decode", decoding)
    assert len(answers(engine.submit([request(5, 30, n=2)]))) == 2
    assert len(answers(later)) == 2
    assert done[:9] == [
        ("decode", [0, 1]), ("extend", 2, 0), ("decode", [0, 1]), ("extend", 2, 16), ("decode", [0, 1]),
        ("extend", 2, 32), ("decode", [0, 1]), ("extend", 2, 48), ("decode", [0, 1, 2, 3]),
    ]  # fmt: skip


@pytest.mark.parametrize(("at_once", "chunks"), [(64, 4), (32, 2), (8, 1)])
def test_whoever_has_no_token_yet_begins_beside_those_that_wait(chunked, at_once, chunks, watched_engine):
    engine, done = watched_engine(chunked.model_copy(update={"prefill_tokens": at_once}))
    assert len(answers(engine.submit([request(5, 20, n=3), request(50, 4, seed=3)]))) == 4
    assert done[: chunks + 1] == [
        *(("extend", 3, 16 * number) for number in range(chunks)),
        ("decode", [0, 1, 2, 3] if chunks == 4 else [0, 1, 2]),
    ]


@pytest.mark.parametrize(("at_once", "chunks"), [(64, [4, 0, 0]), (32, [2, 2, 0]), (8, [1, 1, 1])])
def test_several_chunks_go_at_once_where_fewer_go_on_than_wait(chunked, at_once, chunks, watched_engine):
    engine, done = watched_engine(chunked.model_copy(update={"prefill_tokens": at_once}))
    assert len(answers(engine.submit([request(5, 20), request(50, 4, n=2, seed=3)]))) == 3
    kinds = [kind for kind, *_ in done]
    dispatches = [number for number, kind in enumerate(kinds) if kind == "decode"]
    assert np.diff([-1, *dispatches[:3]]).tolist() == [1 + count for count in chunks]


def test_a_prompt_that_is_there_by_chunks_is_shared(watched):
    engine, done = watched
    futures = engine.submit([request(40, 12, n=6)])
    assert len({tuple(c.response_tokens.tolist()) for c in answers(futures)}) == 6
    assert [each for each in done if each[0] == "extend"] == [("extend", 0, at) for at in (0, 16, 32)]
    assert engine.stats()["inference/prefix_hits_total"] == 2  # the four slots at once were one prefill


def test_a_cancelled_first_sibling_leaves_the_prompt_to_the_next(
    watched_engine, start_engine, decoder, chunked, monkeypatch
):
    engine, done = watched_engine(chunked.model_copy(update={"prefill_tokens": 16}))
    one, other = request(50, 4, seed=1), request(50, 4, seed=2)
    batch, cancelled = engine._batch, []
    extend = batch.runner.extend

    def cancelling(tokens, slot, start):
        extend(tokens, slot, start)
        if start == 16 and not cancelled:
            cancelled.append(futures[0].cancel())

    monkeypatch.setattr(batch.runner, "extend", cancelling)
    with engine._changed:
        futures = engine.submit([one, other, request(5, 30, n=2)])
    found = futures[1].result(WAIT_S)[0]
    assert cancelled == [True]
    assert [each[1:] for each in done if each[0] == "extend"] == [(0, 0), (0, 16), (1, 0), (1, 16), (1, 32), (1, 48)]
    alone = start_engine(decoder, chunked).submit([other])[0].result(WAIT_S)[0]
    assert found.response_tokens.tolist() == alone.response_tokens.tolist()
    again = engine.submit([one])[0].result(WAIT_S)  # slot 0 does not hold the prompt, though it was going to
    expected = start_engine(decoder, chunked).submit([one])[0].result(WAIT_S)
    assert again[0].response_tokens.tolist() == expected[0].response_tokens.tolist()


def test_a_prompt_of_two_versions_says_the_older(watched, make_decoder, monkeypatch):
    engine, _ = watched
    extend, new = engine._batch.runner.extend, make_decoder(7)

    def swapping(tokens, slot, start):
        extend(tokens, slot, start)
        if start == 16:
            engine.set_weights(WeightVersion(0, 1), new)

    monkeypatch.setattr(engine._batch.runner, "extend", swapping)
    (found,) = answers(engine.submit([request(50, 4)]))
    assert set(found.weight_steps.tolist()) == {1} and found.oldest_weight_step == 0


@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_a_pause_waits_for_long_prompts_or_begins_them_again(
    watched, start_engine, decoder, chunked, mode, monkeypatch
):
    engine, done = watched
    extend, reached = engine._batch.runner.extend, threading.Event()

    def waiting(tokens, slot, start):
        extend(tokens, slot, start)
        if start == 16 and not reached.is_set():
            reached.set()
            with engine._changed:
                assert engine._changed.wait_for(lambda: engine._pause is not None, WAIT_S)

    monkeypatch.setattr(engine._batch.runner, "extend", waiting)
    future = engine.submit([request(50, 12)])[0]
    assert reached.wait(WAIT_S)
    engine.pause(mode, mode == "keep", WAIT_S)
    assert future.done() is (mode == "wait")
    engine.resume()
    found = future.result(WAIT_S)[0]
    starts = [each[2] for each in done if each[0] == "extend"]
    assert starts == ([0, 16, 32, 48] if mode == "wait" else [0, 16, 0, 16, 32, 48])
    expected = start_engine(decoder, chunked).submit([request(50, 12)])[0].result(WAIT_S)[0]
    assert found.response_tokens.tolist() == expected.response_tokens.tolist()
