"""Drawing ranks without replacement, newer ones more often; and how environments share the places of a batch.

Exact: the first rank is drawn with P(i) ∝ (i + 1)^alpha, each further one in proportion among those that are left.
Ranks are those at the batch's start. Few out of many are drawn by prefix sums, and what was drawn already is refused;
many, or from a distribution that leaves too little outside what was drawn, by an exponential race (Efraimidis and
Spirakis 2006, https://doi.org/10.1016/j.ipl.2005.11.003), which costs O(n).
"""

import math
from collections.abc import Mapping
from typing import Literal, final

import numpy as np
from jaxtyping import Float64

RACE_SHARE = 8
"""A race decides where more than one in this many is drawn."""

ROUNDS = 8
"""So often are refused ranks drawn anew before a race decides the rest."""

LARGEST_LOG_WEIGHT = 600.0
"""Sums of weights overflow a float64 near e^709; a race, which needs logarithms only, decides beyond this."""


@final
class RankSampler:
    """Draws ranks.

    Args:
        alpha: The exponent, ≥ 0; 0 is uniform.
    """

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha
        self._sums: Float64[np.ndarray, " capacity"] = np.zeros(0)

    def draw(self, n: int, count: int, rng: np.random.Generator) -> list[int]:
        """Distinct ranks in [0, n), in the order drawn; count ≤ n."""
        if count == 0:
            return []
        if count * RACE_SHARE > n or self._alpha * math.log(n) > LARGEST_LOG_WEIGHT:
            return self._race(n, count, [], rng)
        drawn: dict[int, None] = {}
        for _ in range(ROUNDS):
            for rank in self._independent(n, count - len(drawn), rng):
                drawn[rank] = None
            if len(drawn) == count:
                return list(drawn)
        return [*drawn, *self._race(n, count - len(drawn), list(drawn), rng)]

    def _independent(self, n: int, count: int, rng: np.random.Generator) -> list[int]:
        """Ranks with replacement."""
        if self._alpha == 0:
            return rng.integers(0, n, count).tolist()
        sums = self._prefix_sums(n)
        # The product may round up to the whole sum, which no rank lies beyond.
        points: np.ndarray = np.minimum(rng.random(count) * sums[-1], np.nextafter(sums[-1], 0))
        return np.searchsorted(sums, points, side="right").tolist()

    def _race(self, n: int, count: int, taken: list[int], rng: np.random.Generator) -> list[int]:
        """The first `count` of n runners with speeds (i + 1)^alpha, in the order of their arrival."""
        lead = self._alpha * np.log(np.linspace(1.0, n, n)) + rng.gumbel(size=n)
        lead[taken] = -np.inf
        first = np.argpartition(-lead, count - 1)[:count]
        return first[np.argsort(-lead[first])].tolist()

    def _prefix_sums(self, n: int) -> Float64[np.ndarray, " n"]:
        """Σ_{j ≤ i} (j + 1)^alpha for i < n; a quarter more is computed than asked for, so that growing is cheap."""
        if len(self._sums) < n:
            self._sums = np.cumsum(np.arange(1, n + n // 4 + 1, dtype=np.float64) ** self._alpha)
        return self._sums[:n]


Balance = Literal["size", "even"]


@final
class LargestRemainder:
    """Splits batches by largest remainder, with a memory.

    An environment's quota is its share of the batch; it gets the quota rounded down or up. What rounding took from it
    or gave to it is carried to the next batch, so that over many batches each gets exactly its share, a small one
    included. One that has fewer units than its quota gives all of them, and its places go to the others.

    Args:
        balance: Shares by the ``size`` of the environments, or ``even`` ones.
    """

    def __init__(self, balance: Balance) -> None:
        self._balance: Balance = balance
        self._carried: dict[str, float] = {}

    def split(self, places: int, sizes: Mapping[str, int]) -> dict[str, int]:
        """Environment to places.

        Args:
            places: At most as many as there are units.
            sizes: Environment to its units; those without any get nothing.
        """
        granted: dict[str, int] = {}
        open_ones = {name: size for name, size in sorted(sizes.items()) if size > 0}
        while True:
            quotas = self._quotas(places - sum(granted.values()), open_ones)
            short = {name: open_ones[name] for name, quota in quotas.items() if quota >= open_ones[name]}
            if not short:
                return granted | self._round(quotas, places - sum(granted.values()))
            granted |= short
            for name in short:
                del open_ones[name]

    def _quotas(self, places: int, sizes: Mapping[str, int]) -> dict[str, float]:
        if self._balance == "even":
            return {name: places / len(sizes) for name in sizes}
        total = sum(sizes.values())
        return {name: places * size / total for name, size in sizes.items()}

    def _round(self, quotas: Mapping[str, float], places: int) -> dict[str, int]:
        granted = {name: int(quota) for name, quota in quotas.items()}
        owed = {name: quotas[name] - granted[name] + self._carried.get(name, 0.0) for name in quotas}
        for name in sorted(owed, key=lambda name: -owed[name])[: places - sum(granted.values())]:
            granted[name] += 1
            owed[name] -= 1
        self._carried = owed
        return granted
