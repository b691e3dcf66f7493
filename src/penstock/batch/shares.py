"""How environments share the places of a batch."""

from collections.abc import Mapping
from typing import Literal, final

Balance = Literal["size", "even"]


@final
class Shares:
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
