"""Stored files that cannot be read any more: put aside and told, so that they stop nothing."""

# pyarrow comes without types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false

from penstock.replay.formats import ExperienceFormat
from penstock.replay.history import NO_DAMAGE, Damage
from penstock.replay.inventory import Inventory
from penstock.replay.salvage import OnDamage
from penstock.rundir.live_files import UNREADABLE, opened_part
from penstock.rundir.parquet import read_columns
from penstock.rundir.storage import Storage


class DamagedFiles:
    """Moves damaged files out of everybody's way.

    Args:
        storage: Where they are.
        experience: Which they are.
        inventory: Of the writer.
        on_damage: Told where each lies now, and what is wrong with it.

    Attributes:
        damage: What was lost with them.
    """

    def __init__(
        self, storage: Storage, experience: ExperienceFormat, inventory: Inventory, on_damage: OnDamage
    ) -> None:
        self.damage = NO_DAMAGE
        self._storage = storage
        self._folder = experience.folder
        self._inventory = inventory
        self._on_damage = on_damage

    def set_aside(self, name: str, error: Exception) -> None:
        """Takes one file away, of rollouts or of a batch."""
        if name.startswith(f"{self._folder}/"):
            ids = self._legible_ids(name)
            self.damage = Damage(self.damage.ids.union(ids or ()), self.damage.more or ids is None)
        place = self._storage.set_aside(name)
        self._inventory.remove(name)
        self._on_damage(place, f"{name} cannot be read: {error}")

    def _legible_ids(self, name: str) -> list[str] | None:
        """The rollouts of a damaged part, where it can still say which they are."""
        try:
            with opened_part(self._storage, name) as file:
                return [str(i) for i in read_columns(file, ["rollout_id"]).column("rollout_id").to_pylist()]
        except UNREADABLE:
            return None
