"""What the files of a run say of its fragments: which worker made them and when, and whether all is in order.

Labels step by step (`labels`), versions that never go back, no fragment twice in store, log or batches, and two books
that close over what is stored. Not covered: runs with faults of simulators in them, or in more than one lineage.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from benchmarks.fleet.labels import Labels, problems
from penstock.rundir import fragments_from_table, read_json_lines, read_parquet
from penstock.rundir.fragment_rows import uses_from_table

UNTOLD_S = 3.0
"""What was finished so long before the end stands in the books: workers and buffer tell twice a second and oftener."""


@dataclass(frozen=True, slots=True)
class Lives:
    """The fragments of a run, and what became of them.

    Attributes:
        fragment_length: Steps of each.
        ends_s: By life (``rollout-1.0-1``: worker, lineage, incarnation) and slot, Unix seconds at which its fragments
            were finished, ascending.
        faults: Steps that are faults.
        trained: Fragments that were trained on.
        wrong: What is wrong with labels and uses, in words.
    """

    fragment_length: int
    ends_s: dict[str, dict[int, np.ndarray]]
    faults: int
    trained: int
    wrong: tuple[str, ...]

    @classmethod
    def of(cls, run_dir: Path) -> Self:
        """Reads them from its files."""
        stored = [
            record.rollout
            for path in sorted((run_dir / "fragments").glob("*.parquet"))
            for record in fragments_from_table(read_parquet(path), path.stem)
        ]
        ends: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        labels: dict[str, list[Labels]] = defaultdict(list)
        for fragment in stored:
            assert fragment.metadata is not None, "every fragment that was sent has its stamp"
            life = fragment.group_id.rsplit("-", 2)[0]
            ends[life][fragment.slot].append(fragment.metadata.timestamp)
            labels[life].append(Labels.of(fragment))
        trained = [row["rollout_id"] for row in read_json_lines(run_dir / "fates.jsonl") if row["fate"] == "trained"]
        ids = [fragment.rollout_id for fragment in stored]
        return cls(
            stored[0].length,
            {life: {slot: np.sort(times) for slot, times in slots.items()} for life, slots in ends.items()},
            sum(fragment.length - fragment.trainable_steps for fragment in stored), len(trained),
            (*_wrong_labels(labels), *_wrong_uses(ids, trained, _used(run_dir))),
        )  # fmt: skip

    @property
    def steps(self) -> int:
        """In all fragments."""
        return len(self.every_end_s()) * self.fragment_length

    def steps_per_s(self, life: str, begin_s: float, end_s: float) -> float:
        """Of all slots within that time; between the ends of two fragments a slot steps evenly."""
        steps = 0.0
        for ends_s in self.ends_s[life].values():
            begin, end = np.interp((begin_s, end_s), ends_s, np.arange(len(ends_s)))
            steps += (end - begin) * self.fragment_length
        return steps / (end_s - begin_s)

    def every_end_s(self, life: str | None = None) -> np.ndarray:
        """Unix seconds at which fragments were finished, ascending; of all lives where none is named."""
        lives = self.ends_s.values() if life is None else [self.ends_s.get(life, {})]
        return np.sort(np.concatenate([np.zeros(0), *(ends for slots in lives for ends in slots.values())]))


def _used(run_dir: Path) -> list[str]:
    paths = sorted((run_dir / "batches").glob("*.parquet"))
    return [name for path in paths for name in uses_from_table(read_parquet(path), path.stem)]


def _wrong_labels(by_life: dict[str, list[Labels]]) -> Iterator[str]:
    for life, labels in by_life.items():
        yield from (f"{life}: {problem}" for problem in problems(labels))
        for slot in {each.slot for each in labels}:
            ordered = sorted((one for one in labels if one.slot == slot), key=_number)
            steps = np.concatenate([one.weight_steps for one in ordered])
            if (np.diff(steps) < 0).any():
                yield f"{life}, slot {slot}: a step names an older version than the one before it"


def _number(labels: Labels) -> int:
    return int(labels.group_id.rpartition("-")[2])


def _wrong_uses(stored: list[str], trained: list[str], used: list[str]) -> Iterator[str]:
    yield from (f"{name} is stored {n} times" for name, n in Counter(stored).items() if n > 1)
    yield from (f"{name} was trained {n} times" for name, n in Counter(trained).items() if n > 1)
    yield from (f"{name} is in {n} batches" for name, n in Counter(used).items() if n > 1)
    if unknown := set(trained) - set(stored):
        yield f"{len(unknown)} fragments were trained on and are not stored, such as {min(unknown)}"
    if different := set(trained) - set(used):
        yield f"{len(different)} fragments are said to be trained and are in no batch, such as {min(different)}"


def wrong_books(status: dict[str, Any], lives: Lives) -> Iterator[str]:
    """The last status.json was written while workers still acted: it knows all but the last fragments."""
    for name in ("account", "ledger"):
        book = status[name]
        if book["started"] != sum(count for place, count in book.items() if place != "started"):
            yield f"the {name} does not close: {book}"
    account, ledger, ends_s = status["account"], status["ledger"], lives.every_end_s()
    settled, stored = int(np.searchsorted(ends_s, ends_s[-1] - UNTOLD_S)), len(ends_s)
    if ledger["trained"] != lives.trained or not settled <= ledger["started"] <= stored:
        yield f"the ledger is {ledger}; of {stored} stored fragments {settled} are old, {lives.trained} trained"
    sent = account["sent"] + account["sent_faults"]
    if not (settled * lives.fragment_length <= sent <= lives.steps and account["abandoned"] > 0):
        yield f"{stored} fragments are stored, {settled} of them old, and the account of steps is {account}"
