"""A learner as it was at one update boundary, for a checkpoint that is written while it goes on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class LearnerSnapshot:
    """A learner at one update boundary: it stays so, whatever is trained meanwhile.

    Implements `penstock.learner.checkpoints.SavedLearner`.
    Optimiser state is donated at every step, so what is kept of it is a copy on the host. Parameters are replaced and
    never donated: they are the device's own arrays, which live until this is gone.

    Attributes:
        arrays: Optimiser state and counters by name; nobody else has them.
        writer: As `SavedLearner.write_model`, of the parameters of that boundary.
    """

    arrays: Mapping[str, np.ndarray]
    writer: Callable[[Path, Any], dict[str, str]]

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], writer: Callable[[Path, Any], dict[str, str]]) -> "LearnerSnapshot":
        """With copies of the arrays that may still be another's memory, such as a device array's on a CPU."""
        own = {name: array if array.flags.owndata else array.copy() for name, array in arrays.items()}
        return cls(own, writer)

    def state_arrays(self) -> dict[str, np.ndarray]:
        """As they were."""
        return dict(self.arrays)

    def write_model(self, folder: Path, codec: Any) -> dict[str, str]:
        """The policy's folder, as it was."""
        return self.writer(folder, codec)
