import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from penstock.inference import EngineContext
from penstock.types import (
    Decoding,
    EnvironmentFailure,
    GenerationCall,
    InferenceContext,
    ManyInferenceContext,
    NoProgressError,
)

FREE = Decoding(max_output_tokens=6, stop_token_ids=(999,))


@pytest.fixture
def context(engine, codec):
    return EngineContext(engine, codec)


def prompts(*texts):
    return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]


def test_it_is_the_context_that_environments_expect(context, codec):
    checked: tuple[InferenceContext, ManyInferenceContext] = (context, context)
    assert checked[0].tokenizer is codec


def test_groups_come_back_by_prompt_then_sample(context):
    groups = context.generate(prompts("ab", "c"), 3, FREE, [1, 2])
    assert [[c.prompt_tokens.tolist() for c in group] for group in groups] == [[[97, 98]] * 3, [[99]] * 3]
    assert all(len(c.response_tokens) == 6 for group in groups for c in group)


def test_the_same_seed_gives_the_same_group_whatever_else_is_asked(context):
    (alone,) = context.generate(prompts("ab"), 2, FREE, [7])
    _, among = context.generate(prompts("x", "ab"), 2, FREE, [1, 7])
    assert [c.response_tokens.tolist() for c in alone] == [c.response_tokens.tolist() for c in among]


def test_each_response_says_when_it_was_finished(context):
    begun = time.monotonic()
    calls = [GenerationCall(prompts("ab"), 1, replace(FREE, max_output_tokens=n), [n]) for n in (2, 24)]
    ((short,),), ((long,),) = context.generate_many(calls)
    assert begun < short.finished_s < long.finished_s <= time.monotonic()


def test_each_response_says_how_long_it_waited_for_a_slot_was_prefilled_and_decoded(start_engine, config, codec):
    """More answers than slots: the last ones wait as long as the first ones take. The stages leave nothing out."""
    engine = start_engine(shapes=config.model_copy(update={"max_slots": 2}))
    begun = time.monotonic()
    (group,) = EngineContext(engine, codec).generate(prompts("abc"), 4, replace(FREE, max_output_tokens=24), [1])
    took_s = time.monotonic() - begun
    for completion in group:
        assert list(completion.timings) == ["wait_s", "prefill_s", "decode_s"]
        assert min(completion.timings.values()) > 0
        assert sum(completion.timings.values()) <= completion.finished_s - begun <= took_s
    first, *_, last = group
    assert last.timings["wait_s"] >= first.timings["prefill_s"] + first.timings["decode_s"] - 0.001


def test_duplicate_prompts_stay_distinct(context):
    first, second = context.generate(prompts("ab", "ab"), 1, FREE, [1, 2])
    assert first[0].response_tokens.tolist() != second[0].response_tokens.tolist()


def test_no_prompts_give_no_groups(context):
    assert context.generate([], 4, FREE, []) == []


def test_a_seed_per_prompt_is_required(context):
    with pytest.raises(ValueError, match="seeds has 1 for 2 prompts: give one for each"):
        context.generate(prompts("ab", "c"), 1, FREE, [1])


def test_a_prompt_that_does_not_fit_fails_its_call_only(context):
    calls = [
        GenerationCall(prompts("ab"), 2, FREE, [1]),
        GenerationCall(prompts("c", "x" * 64), 2, FREE, [1, 2]),
        GenerationCall(prompts("d", "e"), 1, FREE, [3, 4]),
    ]
    first, second, third = context.generate_many(calls)
    assert isinstance(second, EnvironmentFailure) and "no room" in str(second)
    assert [len(first), len(third)] == [1, 2] and len(first[0]) == 2
    assert third[1][0].prompt_tokens.tolist() == [101]
    with pytest.raises(EnvironmentFailure, match="no room"):
        context.generate(prompts("x" * 64), 1, FREE, [1])


def test_the_tokenizers_stop_tokens_are_the_default(context, codec, monkeypatch):
    ((free,),) = context.generate(prompts("ab"), 1, FREE, [1])
    monkeypatch.setattr(type(codec), "stop_token_ids", (int(free.response_tokens[0]),))
    ((ended,),) = context.generate(prompts("ab"), 1, Decoding(max_output_tokens=6), [1])
    assert (len(ended.response_tokens), ended.finish_reason) == (1, "stop")


def test_a_wait_is_limited_and_frees_the_slots(start_engine, config, codec, monkeypatch):
    engine = start_engine(shapes=config.model_copy(update={"request_timeout_s": 0.05}))
    decode, opened = engine._batch.runner.decode, threading.Event()
    monkeypatch.setattr(engine._batch.runner, "decode", lambda *rows: (opened.wait(60), decode(*rows))[1])
    with pytest.raises(NoProgressError, match="request_timeout_s = 0.05"):
        EngineContext(engine, codec).generate(prompts("ab"), 4, FREE, [1])
    opened.set()
    (group,) = EngineContext(engine, codec).generate([], 1, FREE, []) or [[]]
    assert group == []
    future = engine.submit([])
    assert future == []
