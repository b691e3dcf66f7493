"""The last few deltas of a broadcaster, from which a client that is some versions behind gets its way to the newest."""

from collections import deque
from collections.abc import Mapping

import numpy as np

from penstock.types import WeightVersion
from penstock.weights.delta import Delta, encode_delta
from penstock.weights.manifest import Manifest


class DeltaHistory:
    """Encodes each publication against the one before it. Not thread-safe; keeps the newest arrays by reference.

    Args:
        most: Deltas that are kept.
    """

    def __init__(self, most: int = 4) -> None:
        self._deltas: deque[Delta] = deque(maxlen=most)
        self._newest: tuple[Manifest, Mapping[str, np.ndarray]] | None = None

    def add(self, manifest: Manifest, arrays: Mapping[str, np.ndarray]) -> Delta | None:
        """Takes the next publication.

        Returns:
            Its delta to the one before; None for the first, and where the delta is not smaller than the arrays. From
            then on nobody who has an older version gets a delta.
        """
        previous, self._newest = self._newest, (manifest, arrays)
        if previous is None:
            return None
        delta = encode_delta(*previous, manifest, arrays)
        if delta.nbytes >= manifest.nbytes:
            self._deltas.clear()
            return None
        self._deltas.append(delta)
        return delta

    def chains(self) -> dict[tuple[WeightVersion, str], tuple[Delta, ...]]:
        """For each content (`Manifest.content`) from which the newest can be reached: the deltas, the oldest first.

        Ways that are not smaller than the arrays are left out. The newest content has an empty one.
        """
        if self._newest is None:
            return {}
        manifest = self._newest[0]
        deltas = tuple(self._deltas)
        chains = {delta.base: deltas[start:] for start, delta in enumerate(deltas)}
        chains[manifest.content] = ()
        return {base: chain for base, chain in chains.items() if sum(each.nbytes for each in chain) < manifest.nbytes}
