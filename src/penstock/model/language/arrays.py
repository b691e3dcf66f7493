"""A decoder's parameters as named arrays; see `penstock.model.arrays`.

What a decoder does not have (an untied head, biases) has no name.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Array

from penstock.model.arrays import named_leaves, with_named_leaves
from penstock.model.language.decoder import Decoder


def named_arrays(decoder: Decoder) -> dict[str, Array]:
    """Every parameter of the decoder by name (``embedding``, ``layers.query``), in a fixed order."""
    return named_leaves(decoder)


def with_named_arrays(decoder: Decoder, arrays: Mapping[str, Array | np.ndarray]) -> Decoder:
    """A decoder of the same shape that holds these arrays instead.

    Raises:
        WeightsError: naming the arrays that are missing, extra, or of another shape or dtype.
    """
    return with_named_leaves(decoder, arrays, "the decoder")
