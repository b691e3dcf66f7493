import numpy as np
import pytest

from penstock.batch import example_from_pair, example_from_rollout, trainable_tokens
from penstock.types import Decoding, InvalidRolloutError


def test_every_array_is_aligned_with_its_token(make_rollout):
    mask = np.array([True, False, True])
    rollout = make_rollout(1.0, response_mask=mask, decoding=Decoding(temperature=0.5))
    example = example_from_rollout(rollout, 0.25, max_tokens=5)
    assert example.tokens.tolist() == [10, 11, 20, 21, 22]
    assert example.loss_mask.tolist() == [False, False, True, False, True]
    assert example.advantage.tolist() == [0, 0, 0.25, 0, 0.25]
    assert example.generator_log_probs.tolist() == [0, 0, -1, 0, -3]
    assert example.temperature.tolist() == [0.5] * 5
    assert example.segment_ids.tolist() == [1] * 5
    assert example.position_ids.tolist() == [0, 1, 2, 3, 4]
    assert example.weight_steps.tolist() == [-1, -1, 5, -1, 5]
    assert example.rollout_ids == ("lesson-0-0/0",)
    assert example.reference_log_probs is None
    assert trainable_tokens(example) == 2


@pytest.mark.parametrize(
    ("recorded", "oldest", "stamp", "expected"),
    [
        ([3, 3, 4], None, 3, [3, 3, 4]),  # swapped during the response: the version of each token
        ([4, 4, 4], 3, 3, [3, 3, 3]),  # the prompt's cache is older than the first token
        ([4, 5, 5], None, 3, [3, 3, 3]),  # likewise, known from the metadata only
        ([3, 3, 4], 3, 3, [3, 3, 4]),
        (None, None, 7, [7, 7, 7]),  # an environment that did not pass the versions on
    ],
)
def test_versions_per_token_and_the_age_of_the_cache(make_rollout, recorded, oldest, stamp, expected):
    steps = None if recorded is None else np.array(recorded, np.int32)
    rollout = make_rollout(response_weight_steps=steps, oldest_weight_step=oldest, weight_step=stamp)
    example = example_from_rollout(rollout, 1.0, 10)
    assert example.weight_steps.tolist() == [-1, -1, *expected]


def test_versions_of_tool_tokens_do_not_count(make_rollout):
    rollout = make_rollout(
        response_weight_steps=np.array([4, 0, 5], np.int32),
        response_mask=np.array([True, False, True]),
        weight_step=4,
    )
    assert example_from_rollout(rollout, 1.0, 10).weight_steps.tolist() == [-1, -1, 4, -1, 5]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response": 0}, "empty loss mask"),
        ({"response_mask": np.zeros(3, np.bool_)}, "empty loss mask"),
        ({"response": 8}, "has 10 tokens, a training row 9: raise learner.row_length"),
        ({"decoding": Decoding(temperature=0.0)}, "temperature 0"),
        ({"decoding": Decoding(top_k=5, top_p=0.5)}, "was sampled with top_k=5, top_p=0.5: train on untruncated"),
        ({"decoding": Decoding(top_p=0.9)}, "allow_truncated_sampling"),
        ({"finish_reason": "aborted"}, "aborted"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_by_name(make_rollout, fields, message):
    with pytest.raises(InvalidRolloutError, match="lesson-0-0/0.*" + message):
        example_from_rollout(make_rollout(**fields), 1.0, max_tokens=9)


def test_a_rollout_of_exactly_a_row_is_taken(make_rollout):
    assert len(example_from_rollout(make_rollout(response=7), 1.0, max_tokens=9).tokens) == 9


def test_truncated_sampling_can_be_asked_for_but_greedy_cannot(make_rollout):
    rollout = make_rollout(decoding=Decoding(top_k=5))
    assert trainable_tokens(example_from_rollout(rollout, 1.0, 9, allow_truncated_sampling=True)) == 3
    with pytest.raises(InvalidRolloutError, match="temperature 0"):
        example_from_rollout(make_rollout(decoding=Decoding(temperature=0.0)), 1.0, 9, True)


def test_a_rollout_without_metadata_is_refused(make_rollout):
    bare = make_rollout()
    object.__setattr__(bare, "metadata", None)
    with pytest.raises(InvalidRolloutError, match="no metadata"):
        example_from_rollout(bare, 1.0, 9)


def test_a_supervised_pair_has_every_response_token_as_target():
    example = example_from_pair(np.array([1, 2, 3], np.int32), np.array([4, 5], np.int32))
    assert example.tokens.tolist() == [1, 2, 3, 4, 5]
    assert example.loss_mask.tolist() == [False, False, False, True, True]
    assert example.temperature.tolist() == [1.0] * 5 and example.advantage.tolist() == [0, 0, 0, 1, 1]
    for prompt, response in ((2, 0), (0, 2)):
        with pytest.raises(InvalidRolloutError, match=f"{prompt} prompt and {response} response"):
            example_from_pair(np.zeros(prompt, np.int32), np.zeros(response, np.int32))
