"""Small publications for the tests of this folder."""

import numpy as np

from penstock.types import WeightVersion
from penstock.weights.broadcaster import Publication
from penstock.weights.delta import DeltaHistory
from penstock.weights.manifest import Manifest, describe

JOB = "job"
INCARNATION = "a" * 32


def arrays_of(step: int) -> dict[str, np.ndarray]:
    kernel = np.zeros(5000, np.float32)
    kernel[:step] = 1.0
    return {"kernel": kernel, "step": np.array([step], np.int32)}


def manifest_of(step: int, incarnation: str = INCARNATION) -> Manifest:
    return describe(JOB, incarnation, WeightVersion(0, step), arrays_of(step))


def publications(count: int, deltas: bool = False) -> list[Publication]:
    history, made = DeltaHistory(), []
    for step in range(count):
        manifest, arrays = manifest_of(step), arrays_of(step)
        history.add(manifest, arrays)
        made.append(Publication(manifest, arrays, history.chains() if deltas else {}))
    return made
