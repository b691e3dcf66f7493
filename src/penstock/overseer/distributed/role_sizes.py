"""Which roles may grow and shrink while a run goes on, and which components come and go then."""

from collections.abc import Callable, Collection
from itertools import count, islice

from penstock.overseer.distributed.members import ComponentSpec
from penstock.types import ConfigError

SpecMaker = Callable[[int], ComponentSpec]
"""Gives a role's component of an index."""

MOST_OF_A_ROLE = 10_000
"""No role can be scaled beyond this."""


class RoleSizes:
    """The roles that can be scaled."""

    def __init__(self) -> None:
        self._makers: dict[str, tuple[SpecMaker, int]] = {}

    def allow(self, role: str, make: SpecMaker, least: int) -> None:
        """Lets a role be scaled, to no fewer than `least`."""
        self._makers[role] = make, least

    def changes(
        self, role: str, wanted: int, staying: Collection[int], taken: Collection[int]
    ) -> tuple[list[ComponentSpec], list[int]]:
        """What has to be done.

        Args:
            role: Which.
            wanted: How many there shall be.
            staying: Indexes of those that are there to stay.
            taken: These, and the indexes of those that are leaving: nobody new can have them yet.

        Returns:
            New components, of the lowest free indexes, and the indexes of those that have to leave, the highest first.

        Raises:
            ConfigError: the role cannot be scaled, or not to that number.
        """
        if role not in self._makers:
            known = ", ".join(sorted(self._makers)) or "none"
            raise ConfigError(f"the role {role!r} cannot be scaled in this run; those that can: {known}")
        make, least = self._makers[role]
        if not least <= wanted <= MOST_OF_A_ROLE:
            raise ConfigError(f"{role}={wanted} is outside of {least} to {MOST_OF_A_ROLE}: choose a number within")
        free = (index for index in count() if index not in taken)
        more = [make(index) for index in islice(free, max(0, wanted - len(staying)))]
        return more, sorted(staying, reverse=True)[: max(0, len(staying) - wanted)]
