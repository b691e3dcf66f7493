"""The probe's arithmetic; that a perturbed weight stops a run is tested in test_training."""

from types import SimpleNamespace

import numpy as np
import pytest

from penstock.overseer.language.preparation import probe_parity
from penstock.types import Decoding, MismatchError, Rollout, RolloutBatch, RolloutGroup, RolloutMetadata

PROMPT, RESPONSE = np.array([1, 2], np.int32), np.array([3, 4], np.int32)


def probe(*scores: float) -> float:
    """Two rollouts whose engine says −1 for every token; the learner says `scores`."""
    logprobs, rewards = np.full(2, -1, np.float32), np.zeros(2, np.float32)
    metadata, decoding = RolloutMetadata("probe", 0.0, 0), Decoding(top_p=0.9)
    rollouts = tuple(
        Rollout("cats", "0", PROMPT, RESPONSE, logprobs, rewards, 0.0, metadata, decoding=decoding) for _ in scores
    )
    manager = SimpleNamespace(sample_batch=lambda *a, **k: (RolloutBatch((RolloutGroup("cats:0", rollouts),)), {}))
    learner = SimpleNamespace(step=0, score=lambda examples: [np.array([0, -2, -1, s], np.float32) for s in scores])
    return probe_parity(manager, learner, "cats", 8, limit=0.5)


def test_the_largest_difference_over_sampled_tokens_counts():
    assert probe(-1.0, -1.25) == 0.25
    with pytest.raises(MismatchError, match=r"up to 0.75 .*mismatch_limit is 0.5"):
        probe(-1.75, -1.0)


@pytest.mark.parametrize("scores", [(np.nan, -1.0), (-1.0, np.nan)])
def test_a_score_that_is_not_a_number_is_a_mismatch(scores: tuple[float, float]):
    with pytest.raises(MismatchError, match="up to nan"):
        probe(*scores)
