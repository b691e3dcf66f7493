"""Which files may go when the disk budget is spent: the oldest, and only those that no checkpoint needs again.

The choice is made when a checkpoint's state is taken, and carried out when the checkpoint is there. A file whose groups
are all settled in that state is needed by no resume from it. A file goes whole or not at all, so one live group keeps
what was merged with it. What was chosen is not merged until it is gone or chosen anew, so that nothing that may go is
carried on in a larger file.

Where batches only name what they trained on (`ExperienceFormat.batches_refer`), a file of experience goes together with
every batch that names any of it, and not before they may go.
"""

# pyarrow comes without types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from penstock.replay.config import StoreConfig
from penstock.replay.formats import ExperienceFormat
from penstock.replay.inventory import Entry, Inventory, State
from penstock.replay.stored_rows import groups_of_batch, groups_of_part
from penstock.rundir.live_files import opened_part
from penstock.rundir.storage import Storage
from penstock.types import Clock, RunDirectoryError

_NO_BATCHES: Mapping[str, Sequence[Entry]] = MappingProxyType({})


class Retention:
    """Keeps a run's files within `StoreConfig.max_bytes`.

    Args:
        storage: Where they are.
        experience: Which they are.
        inventory: Of the writer.
        config: The limits.
        clock: Unix seconds.
    """

    def __init__(
        self, storage: Storage, experience: ExperienceFormat, inventory: Inventory, config: StoreConfig, clock: Clock
    ) -> None:
        self._storage = storage
        self._experience = experience
        self._inventory = inventory
        self._config = config
        self._clock = clock

    @property
    def is_exceeded(self) -> bool:
        """Whether the files take more than they may."""
        return self._config.max_bytes is not None and self._inventory.bytes > self._config.max_bytes

    def offer(self, live_groups: Collection[str], made_before_s: float) -> tuple[str, ...]:
        """Names of files that may go, the oldest first; what was offered before is not any more."""
        self._inventory.change([entry.name for entry in self._inventory.in_state(State.OFFERED)], State.KEPT)
        if self._config.max_bytes is None or not self.is_exceeded:
            return ()
        kept = self._inventory.kept((self._experience.folder, self._experience.batch_folder))
        leaving = sum(entry.size_bytes for entry in self._inventory.in_state(State.REPLACED))
        chosen = choose_expendable(
            kept,
            self._inventory.bytes - leaving - self._config.max_bytes,
            live_groups,
            min(made_before_s, self._clock() - self._config.retention_s),
            self._groups_of,
            self._batches_by_group(kept),
        )
        # A round of compaction may have begun meanwhile; it keeps what it is copying.
        return tuple(self._inventory.change([entry.name for entry in chosen], State.OFFERED, only=State.KEPT))

    def delete(self, names: Collection[str]) -> None:
        """Deletes those of the named files that are still offered."""
        for name in self._inventory.change(names, State.OFFERED, only=State.OFFERED):
            self._storage.delete(name)
            self._inventory.remove(name)

    def _batches_by_group(self, kept: Iterable[Entry]) -> dict[str, list[Entry]]:
        """Which batches name a group; none where batches are worth something by themselves."""
        batches: dict[str, list[Entry]] = {}
        if self._experience.batches_refer:
            for entry in kept:
                if entry.name.startswith(f"{self._experience.batch_folder}/"):
                    for group_id in self._groups_of(entry) or ():
                        batches.setdefault(group_id, []).append(entry)
        return batches

    def _groups_of(self, entry: Entry) -> frozenset[str] | None:
        if entry.groups is None and entry.readable:
            of = groups_of_part if entry.name.startswith(f"{self._experience.folder}/") else groups_of_batch
            try:
                with opened_part(self._storage, entry.name) as file:
                    entry.groups = frozenset(of(file))
            except FileNotFoundError:  # merged since it was listed: `change` passes it over
                entry.groups = frozenset()
            except RunDirectoryError:  # it may hold groups that are needed, and somebody may be able to repair it
                entry.readable = False
        return entry.groups


def choose_expendable(
    oldest_first: Iterable[Entry],
    excess_bytes: int,
    live_groups: Collection[str],
    made_before_s: float,
    groups_of: Callable[[Entry], Collection[str] | None],
    batches_by_group: Mapping[str, Sequence[Entry]] = _NO_BATCHES,
) -> list[Entry]:
    """The oldest files that together take the excess, or all that may go.

    Args:
        oldest_first: Files.
        excess_bytes: What should go.
        live_groups: Groups that are still needed.
        made_before_s: No younger file goes; Unix seconds.
        groups_of: Looks a file's groups up; None where it cannot be read, which keeps it.
        batches_by_group: Batches that are worth nothing without a group: they go with it, before it, or it stays.
    """
    live = frozenset(live_groups)
    chosen: dict[str, Entry] = {}

    def may_go(entry: Entry) -> bool:
        groups = groups_of(entry)
        return entry.made_at_s <= made_before_s and groups is not None and live.isdisjoint(groups)

    for entry in oldest_first:
        if excess_bytes <= 0 or entry.made_at_s > made_before_s:
            break
        if entry.name in chosen or not may_go(entry):
            continue
        named = {batch.name: batch for group in groups_of(entry) or () for batch in batches_by_group.get(group, ())}
        if entry.name in named:  # a batch itself, which takes nothing with it
            named = {}
        if all(map(may_go, named.values())):
            going = {**named, entry.name: entry}
            excess_bytes -= sum(each.size_bytes for name, each in going.items() if name not in chosen)
            chosen |= going
    return list(chosen.values())
