"""Published arrays on their way to the host: cast on the device where asked, then copied, or referred to, once."""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np


def host_arrays(arrays: Mapping[str, Any], bfloat16: bool) -> dict[str, np.ndarray]:
    """C-contiguous NumPy arrays of JAX or NumPy arrays; by reference where they are that already.

    Args:
        arrays: Of any device. Those split over several are put together.
        bfloat16: Cast float32 arrays to bfloat16, on the device that they lie on.
    """
    sent = {name: _cast(array) if bfloat16 else array for name, array in arrays.items()}
    for array in sent.values():
        start = getattr(array, "copy_to_host_async", None)
        if start is not None:
            start()  # every copy is on its way before the first is waited for
    return {name: np.asarray(array, order="C") for name, array in sent.items()}


def _cast(array: Any) -> Any:
    return array.astype(ml_dtypes.bfloat16) if str(array.dtype) == "float32" else array
