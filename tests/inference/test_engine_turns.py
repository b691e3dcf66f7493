"""A conversation's next turn prefills what is new in it, under the same weights only, and says what it says anyway."""

import numpy as np
import pytest

from penstock.inference import GenerationRequest
from penstock.types import Decoding, WeightVersion

WAIT_S = 280.0
ANSWER, SAID = 6, 5


@pytest.fixture
def shapes(config):
    return config.model_copy(update={"prefill_chunk": 16})


def ask(engine, prompt, seed=0, n=1, **decoding):
    fields = {"max_output_tokens": ANSWER, "stop_token_ids": (999,)} | decoding
    request = GenerationRequest(np.array(prompt, np.int32), Decoding(**fields), seed, n)
    return engine.submit([request])[0].result(WAIT_S)


def said(turn, tokens=SAID):
    return np.random.default_rng(turn).integers(0, 256, tokens).tolist()


def converse(engine, turns=4, between=lambda turn: None, **decoding):
    """The completions of a conversation, and how many tokens each turn took from the cache."""
    text, found, saved = said(0, 9), [], []
    for turn in range(1, turns + 1):
        before = engine.stats()["inference/prefix_tokens_total"]
        found += ask(engine, text, seed=turn, **decoding)
        saved.append(engine.stats()["inference/prefix_tokens_total"] - before)
        text = [*text, *found[-1].response_tokens.tolist(), *said(turn)]
        between(turn)
    return found, saved


def assert_same(left, right):
    for one, other in zip(left, right, strict=True):
        assert one.response_tokens.tolist() == other.response_tokens.tolist()
        np.testing.assert_allclose(one.response_logprobs, other.response_logprobs, rtol=1e-6, atol=1e-6)
        assert one.oldest_weight_step == other.oldest_weight_step


@pytest.fixture
def forgetting(start_engine, decoder, shapes):
    return start_engine(decoder, shapes, forgets=True)


def test_a_turn_prefills_what_is_new_and_samples_the_same(start_engine, decoder, shapes, forgetting):
    engine = start_engine(decoder, shapes)
    found, saved = converse(engine)
    expected, nothing = converse(forgetting)
    assert_same(found, expected)
    # All but the newest token of a turn stays in its slot; the next one's last token is decoded.
    assert saved == [0, 9 + ANSWER - 1, 9 + 2 * ANSWER + SAID - 1, 9 + 3 * ANSWER + 2 * SAID - 1]
    assert nothing == [0] * 4
    stats, whole = engine.stats(), forgetting.stats()
    assert stats["inference/prefix_hits_total"] == 3 and whole["inference/prefix_hits_total"] == 0
    assert stats["inference/prefill_tokens_total"] == 16 + 3 * 8  # two pieces of 4 for each turn after the first
    assert whole["inference/prefill_tokens_total"] == 16 + 20 + 32 + 48  # a rest of three pieces is a whole chunk


def test_new_weights_take_nothing_from_what_others_computed(start_engine, decoder, make_decoder, shapes):
    new, engines = make_decoder(7), [start_engine(decoder, shapes, forgets) for forgets in (False, True)]

    def swap(engine):
        return lambda turn: turn == 2 and engine.set_weights(WeightVersion(0, 1), new)

    (found, saved), (expected, _) = (converse(engine, between=swap(engine)) for engine in engines)
    assert_same(found, expected)
    assert [completion.oldest_weight_step for completion in found] == [0, 0, 1, 1]
    assert saved[2] == 0 and saved[3] > 0  # the first turn of the new version prefills everything


def test_what_two_versions_computed_is_not_kept(start_engine, decoder, make_decoder, shapes, monkeypatch):
    engine, new = start_engine(decoder, shapes), make_decoder(7)
    decode, dispatches = engine._batch.runner.decode, []

    def swapping(*rows):
        dispatches.append(rows)
        sampled = decode(*rows)
        if len(dispatches) == 1:
            engine.set_weights(engine.version, new)  # by the same name: who drives a server names them later
        return sampled

    monkeypatch.setattr(engine._batch.runner, "decode", swapping)
    (first,) = ask(engine, said(0, 9))
    text = [*said(0, 9), *first.response_tokens.tolist(), *said(1)]
    (second,) = ask(engine, text)
    assert engine.stats()["inference/prefix_hits_total"] == 0
    assert_same([second], ask(start_engine(new, shapes), text))


def test_another_name_for_the_same_weights_is_another_version(start_engine, decoder, shapes):
    engine = start_engine(decoder, shapes)
    converse(engine, between=lambda turn: engine.rename_version(WeightVersion(0, turn)))
    assert engine.stats()["inference/prefix_hits_total"] == 0


def test_turns_that_come_together_with_a_stranger_go_on_where_they_were(
    start_engine, decoder, shapes, forgetting, monkeypatch
):
    engine, texts = start_engine(decoder, shapes), list[list[int]]()
    fork, copied = engine._batch.runner.fork, list[int]()

    def noted(sources):
        copied.extend(count for _, count in sources.values())
        fork(sources)

    monkeypatch.setattr(engine._batch.runner, "fork", noted)
    for seed in (1, 2):
        text = said(seed, 9)
        (answer,) = ask(engine, text, seed)
        texts.append([*text, *answer.response_tokens.tolist(), *said(seed + 2)])
    asked = [(said(9, 20), 2), (texts[1], 1), (texts[0], 1)]
    saved = engine.stats()["inference/prefix_tokens_total"]
    decoding = Decoding(max_output_tokens=ANSWER, stop_token_ids=(999,))
    requests = [GenerationRequest(np.array(text, np.int32), decoding, 5, n) for text, n in asked]
    found, expected = (
        [done for future in each.submit(requests) for done in future.result(WAIT_S)] for each in (engine, forgetting)
    )
    assert_same(found, expected)
    assert engine.stats()["inference/prefix_tokens_total"] - saved == 2 * (9 + ANSWER - 1)
    assert copied == [19], "what the stranger's second answer needs, and no conversation: each is where its text is"


def test_a_rewritten_history_shares_its_beginning(start_engine, decoder, shapes, forgetting):
    engine, text = start_engine(decoder, shapes), said(0, 24)
    (first,) = ask(engine, text)
    rewritten = [*text, *first.response_tokens.tolist()[3:], *said(1)]  # the template drops what was thought
    assert_same(ask(engine, rewritten, seed=1), ask(forgetting, rewritten, seed=1))
    assert engine.stats()["inference/prefix_tokens_total"] == 24


def test_a_stop_string_inside_a_dispatch_leaves_only_what_was_kept(start_engine, decoder, shapes, forgetting):
    engine = start_engine(decoder, shapes)
    stops = tuple(chr(byte) for byte in range(97, 123))
    found, _ = converse(engine, max_output_tokens=9, stop_strings=stops)
    assert any(len(completion.response_tokens) % 4 for completion in found)
    assert_same(found, converse(forgetting, max_output_tokens=9, stop_strings=stops)[0])


def test_what_is_kept_keeps_nobody_waiting(start_engine, decoder, shapes, forgetting):
    engine = start_engine(decoder, shapes)
    texts = [said(number, 20) for number in range(6)]
    for number, text in enumerate(texts):  # six conversations in four slots
        ask(engine, text, seed=number)
    crowd = [ask(engine, said(10 + number, 20), seed=number, n=4) for number in range(2)]
    expected = [ask(forgetting, said(10 + number, 20), seed=number, n=4) for number in range(2)]
    for group, other in zip(crowd, expected, strict=True):
        assert_same(group, other)
    assert engine.stats()["inference/prefix_hits_total"] == 0  # the siblings are one prefill


def test_turns_of_a_group_go_on_side_by_side(start_engine, decoder, shapes, forgetting):
    def play(engine):
        group = ask(engine, said(0, 20), n=4)
        texts = [[*said(0, 20), *each.response_tokens.tolist(), *said(1)] for each in group]
        requests = [
            GenerationRequest(np.array(text, np.int32), Decoding(max_output_tokens=4, stop_token_ids=(999,)), seed)
            for seed, text in enumerate(texts)
        ]
        return [future.result(WAIT_S)[0] for future in engine.submit(requests)]

    engine = start_engine(decoder, shapes)
    assert_same(play(engine), play(forgetting))
    assert engine.stats()["inference/prefix_tokens_total"] == 4 * (20 + ANSWER - 1)
