import dataclasses

import numpy as np
import pytest

from penstock.types import Decoding, InvalidRolloutError, RLExample, TrainingBatch, WeightVersion


def example(**changes) -> RLExample:
    fields = {
        "tokens": np.zeros(4, np.int32),
        "loss_mask": np.ones(4, np.bool_),
        "segment_ids": np.ones(4, np.int32),
        "position_ids": np.arange(4, dtype=np.int32),
        "advantage": np.zeros(4, np.float32),
        "generator_log_probs": np.zeros(4, np.float32),
        "reference_log_probs": None,
        "temperature": np.ones(4, np.float32),
        "weight_steps": np.zeros(4, np.int32),
        "rollout_ids": ("t/0",),
    }
    return RLExample(**{**fields, **changes})


@pytest.mark.parametrize(
    ("field", "value"),
    [("advantage", np.zeros(3, np.float32)), ("loss_mask", np.ones(4, np.int32)), ("tokens", np.zeros(4, np.int64))],
)
def test_a_misaligned_example_is_refused_by_field(field: str, value: np.ndarray):
    with pytest.raises(InvalidRolloutError, match=f"RLExample.{field} is"):
        example(**{field: value})


def test_records_show_themselves_in_one_line():
    half = np.array([False, False, True, True])
    one = example(loss_mask=half, advantage=np.array([0, 0, 0.5, 0.5], np.float32))
    assert repr(one) == "RLExample(t/0, 4 tokens, 2 trained, advantage 0.5)"
    packed = example(rollout_ids=("t/0", "t/1"), advantage=np.array([-1, 0, 0, 0.25], np.float32))
    assert repr(packed) == "RLExample(2 rollouts, 4 tokens, 4 trained, advantage -1 to 0.25)"
    assert repr(example(loss_mask=np.zeros(4, np.bool_))) == "RLExample(t/0, 4 tokens, 0 trained)"
    batch = TrainingBatch("batch_7", 3, (one, packed), ("t",), {"replay/x": 1.0})
    assert repr(batch) == "TrainingBatch(batch_7, update 3, 2 examples of 1 groups)"


def test_records_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        example().tokens = np.zeros(1, np.int32)


def test_versions_order_by_lineage_then_step():
    assert WeightVersion(0, 9) < WeightVersion(1, 2) < WeightVersion(1, 3)


@pytest.mark.parametrize(
    ("decoding", "truncated"),
    [
        (Decoding(), False),
        (Decoding(temperature=0), True),
        (Decoding(temperature=0.7), False),
        (Decoding(top_k=5), True),
        (Decoding(top_p=0.9), True),
        (Decoding(top_p=1.0), False),
        (Decoding(min_p=0.1), True),
        (Decoding(min_p=0.0), False),
    ],
)
def test_decoding_knows_whether_recorded_logprobs_are_those_sampled_from(decoding: Decoding, truncated: bool):
    assert decoding.truncated is truncated


def test_decoding_names_what_truncates_it():
    assert Decoding(0.7, top_k=5, top_p=0.9, max_output_tokens=3).truncation == {"top_k": 5, "top_p": 0.9}
    assert Decoding(temperature=0, top_p=1.0).truncation == {}
