"""From per-token losses to one number: how much each sequence's tokens weigh in an optimiser step.

The loss of a step is Σ_i a_i Σ_t m_it L_it, with one weight a_i per sequence that is known before any forward pass.
It is computed once, on the host, over *all* sequences of the step; micro-batches then only add, so that their
number and their contents cannot change the gradient.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32

from penstock.learner.config import Aggregation


def sequence_weights(
    sampled_tokens: Sequence[int], aggregation: Aggregation, max_tokens: int
) -> Float32[np.ndarray, " sequences"]:
    """The weight a_i of every loss token of sequence i, of B sequences with n_i loss tokens.

    ``token`` 1 / Σ n_j (long answers count more); ``sequence`` 1 / (B · n_i) (Shao et al. 2024, GRPO: a token of
    a long answer counts less); ``constant`` 1 / (B · max_tokens) (Liu et al. 2025, https://arxiv.org/abs/2503.20783).

    Args:
        sampled_tokens: n_i ≥ 1.
        aggregation: Which of the three.
        max_tokens: Denominator of ``constant``.

    Example:
        Lengths 1 and 3: token [1/4, 1/4], sequence [1/2, 1/6], constant with max_tokens 4 [1/8, 1/8].
    """
    lengths = np.asarray(sampled_tokens, np.float64)
    if aggregation == "token":
        weights = np.full(len(lengths), 1.0 / max(lengths.sum(), 1.0))
    elif aggregation == "sequence":
        weights = 1.0 / (len(lengths) * lengths)
    else:
        weights = np.full(len(lengths), 1.0 / (len(lengths) * max_tokens))
    return weights.astype(np.float32)
