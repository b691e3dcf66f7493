import numpy as np
import pytest

from penstock.inference import ScriptedContext
from penstock.types import Decoding, EnvironmentFailure, GenerationCall, ManyInferenceContext, fold

PROMPT = np.frombuffer(b"2+2=", np.uint8).astype(np.int32)


def test_answers_in_turn_end_with_the_stop_token(codec):
    context: ManyInferenceContext = ScriptedContext(codec, ["4", "5"], weight_step=3)
    (first, second), (third, _) = context.generate([PROMPT, PROMPT], 2, Decoding(), [1, 2])
    assert [first.text, second.text, third.text] == ["4", "5", "4"]
    assert first.response_tokens.tolist() == [ord("4"), 256]
    assert first.finish_reason == "stop"
    assert first.weight_steps.tolist() == [3, 3] and first.oldest_weight_step == 3
    assert first.response_logprobs.dtype == np.float32 and first.response_logprobs.tolist() == [-0.5, -0.5]


def test_a_function_sees_the_prompt_and_the_samples_seed(codec):
    context = ScriptedContext(codec, lambda prompt, seed: f"{prompt}{seed % 10}")
    (group,) = context.generate([PROMPT], 2, Decoding(), [7])
    assert [c.text for c in group] == [f"2+2={fold(7, 0) % 10}", f"2+2={fold(7, 1) % 10}"]


def test_limits_cut_answers_and_refuse_prompts(codec):
    context = ScriptedContext(codec, ["a long answer"], max_seq_len=8)
    ((cut,),) = context.generate([PROMPT], 1, Decoding(max_output_tokens=3), [0])
    assert (cut.text, cut.finish_reason) == ("a l", "length")
    ((clipped,),) = context.generate([PROMPT], 1, Decoding(), [0])
    assert len(clipped.response_tokens) == 4
    with pytest.raises(EnvironmentFailure, match="no room"):
        context.generate([np.zeros(8, np.int32)], 1, Decoding(), [0])


def test_calls_are_remembered_and_fail_one_by_one(codec):
    context = ScriptedContext(codec, ["x"], max_seq_len=8)
    calls = [
        GenerationCall([np.zeros(9, np.int32)], 1, Decoding(), [0]),
        GenerationCall([PROMPT], 1, Decoding(), [0]),
    ]
    bad, good = context.generate_many(calls)
    assert isinstance(bad, EnvironmentFailure)
    assert not isinstance(good, EnvironmentFailure) and good[0][0].text == "x"
    assert [call.n for call in context.calls] == [1, 1]


def test_no_answers_are_refused(codec):
    with pytest.raises(ValueError, match="answers is empty"):
        ScriptedContext(codec, [])
