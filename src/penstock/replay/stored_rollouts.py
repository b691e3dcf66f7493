"""Training on rollouts that another run, or `penstock generate`, has stored: which of them, and in which batches.

Nothing is generated: no tickets, no engines, no freshness. How old a stored rollout is cannot be said in versions of
the policy that is trained on it, which never sampled it: its tokens have no version here, and what remains is its
behaviour log-probabilities, by which the loss corrects. All groups are held in memory, without texts.

Batches follow from the seed and the step alone: each epoch has all groups in an order of its own, and as many whole
batches as fit; a resumed run goes on as if it had never stopped. In the ledger a rollout waits until its first update
was applied and is trained from then on; files and fates of the run that made it stay as they are. The batch file is
the intent of an update, and the checkpoint's rename its only commit, as in every run.
"""

import hashlib
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, final

import numpy as np

from penstock.batch import BatchMakerConfig, GroupFilters, compute_advantages, example_from_rollout, has_signal
from penstock.batch.advantages import AdvantageName, GroupAdvantage
from penstock.batch.examples import assemble_examples, batch_metadata
from penstock.replay.store import RolloutStore
from penstock.rundir import RunDirectory, read_json_lines, read_records
from penstock.rundir.live_files import RunFiles
from penstock.types import (
    CheckpointError,
    ConfigError,
    InvalidRolloutError,
    RLExample,
    Rollout,
    RolloutGroup,
    RolloutRecord,
    Stopped,
    TrainingBatch,
    fold,
    generator,
)

KEY = "replay.from_rollouts"
_SOURCES = "give a run directory, a folder of its parts, or the Parquet file of penstock generate"


@dataclass(frozen=True, slots=True)
class StoredRollouts:
    """What a run trains on; made by `read`.

    Attributes:
        source: Where it was read.
        groups: In the order of their ids; rollouts without texts.
        rollouts: How many there are in them.
        left_out: By fate, so many rollouts are not in them: ``invalid`` or ``filtered``.
        digest: Of all their ids: a resumed run must find the same.
    """

    source: Path
    groups: tuple[RolloutGroup[Rollout], ...]
    rollouts: int
    left_out: Mapping[str, int]
    digest: str

    @classmethod
    def read(
        cls,
        source: Path,
        *,
        row_length: int,
        vocab_size: int,
        allow_truncated_sampling: bool = False,
        batch_maker: BatchMakerConfig | None = None,
    ) -> "StoredRollouts":
        """Reads all rollouts of a place. What its run found to be invalid is left out, and what no row can hold.

        Args:
            source: A run directory, a folder of Parquet files, or such a file.
            row_length: Longest sequence that can be trained.
            vocab_size: Of the policy.
            allow_truncated_sampling: Take rollouts of truncated sampling.
            batch_maker: Its filters leave out rollouts and groups, or change rewards, as in a run that generates;
                None: it has none.

        Raises:
            ConfigError: there is nothing to train on, or something that this policy cannot be trained on.
            RunDirectoryError: a file cannot be read.
            SchemaVersionError: a newer Penstock wrote a file.
        """
        try:
            records = list(_each_once(source))
        except InvalidRolloutError as error:
            raise ConfigError(
                f"{KEY} is {source}: {error}; every row needs its tokens with their log-probabilities"
            ) from error
        _check_policy(source, records, vocab_size)
        known = _invalid_of(source)
        left_out, groups = Counter[str](), dict[str, list[Rollout]]()
        refusals: list[str] = []
        for record in records:
            reason = _refusal(record, row_length, allow_truncated_sampling, source)
            if reason or record.rollout.rollout_id in known:
                left_out["invalid"] += 1
                refusals += [reason] if reason else []
            else:
                rollout = cast(Rollout, record.rollout)
                groups.setdefault(record.group_id, []).append(replace(rollout, turns=()))
        filters = GroupFilters(batch_maker or BatchMakerConfig())
        judged = [filters.judge(RolloutGroup(key, tuple(groups[key]), key)) for key in sorted(groups)]
        kept = [each.kept for each in judged if each.kept is not None]
        left_out["filtered"] += sum(len(ids) for each in judged for ids in each.left.values())
        if not kept:
            why = f"can be trained on; the first: {refusals[0]}" if refusals else "passes the filters: "
            causes, remedy = ("", "") if refusals else filters.describe()
            raise ConfigError(
                f"{KEY} is {source}: none of its {len(records)} rollouts {why}{causes}{'; ' if remedy else ''}{remedy}"
            )
        ids = "\n".join(rollout.rollout_id for group in kept for rollout in group.rollouts)
        digest = hashlib.blake2b(ids.encode(), digest_size=16).hexdigest()
        return cls(source, tuple(kept), sum(len(group.rollouts) for group in kept), dict(left_out), digest)

    @staticmethod
    def records(source: Path, groups: Collection[str]) -> list[RolloutRecord]:
        """The rollouts of some groups, with texts; none where the place, or what was in it, is not there any more.

        Args:
            source: As of `read`.
            groups: Ids of those wanted.
        """
        try:
            return [record for record in _records(source) if record.group_id in groups]
        except ConfigError:  # nothing is there
            return []


def _records(source: Path) -> Iterator[RolloutRecord]:
    if source.is_file():
        yield from read_records(source)
        return
    if not source.is_dir():
        raise ConfigError(f"{KEY} is {source}: there is nothing; {_SOURCES}")
    if (source / "rollouts").is_dir():
        yield from RunFiles.list_now(RunDirectory(source)).records()
        return
    files = sorted(source.glob("*.parquet"))
    if not files:
        raise ConfigError(f"{KEY} is {source}: there is no Parquet file in it; {_SOURCES}")
    for path in files:
        yield from read_records(path)


def _each_once(source: Path) -> Iterable[RolloutRecord]:
    """Each rollout once, also where a merged part and what it was merged of are both there.

    Raises:
        ConfigError: two rollouts have one id.
    """
    found: dict[str, RolloutRecord] = {}
    for record in _records(source):
        ours, rollout = found.setdefault(record.rollout.rollout_id, record).rollout, record.rollout
        if not (
            np.array_equal(ours.response_tokens, rollout.response_tokens)
            and np.array_equal(ours.response_logprobs, rollout.response_logprobs)
        ):
            raise ConfigError(
                f"{KEY} is {source}: two rollouts in it have the id {rollout.rollout_id}, as those of different runs "
                "do: give the rollouts of one run"
            )
    return found.values()


def _check_policy(source: Path, records: Sequence[RolloutRecord], vocab_size: int) -> None:
    """Refuses what no rollout of this policy can be."""
    if not records and (source / "fragments").is_dir():
        raise ConfigError(f"{KEY} is {source}: it is a run of simulators, whose fragments train no language policy")
    if not records:
        raise ConfigError(f"{KEY} is {source}: it holds no rollouts yet; {_SOURCES}")
    arrays = [array for each in records for array in (each.rollout.prompt_tokens, each.rollout.response_tokens)]
    largest = max(int(array.max(initial=0)) for array in arrays)
    if largest >= vocab_size:
        raise ConfigError(
            f"{KEY} is {source}: it has token {largest}, and the policy's vocabulary {vocab_size} tokens: these are "
            "rollouts of another tokenizer; name the model that they were sampled with, or one of its vocabulary"
        )
    if not any((each.rollout.response_logprobs[each.rollout.response_mask] != 0).any() for each in records):
        raise ConfigError(
            f"{KEY} is {source}: all log-probabilities are 0, which are those of no policy: the loss corrects by them; "
            "store those under which the tokens were sampled"
        )


def _refusal(record: RolloutRecord, row_length: int, allow_truncated_sampling: bool, source: Path) -> str:
    """Why a rollout cannot be trained on; empty where it can.

    Raises:
        ConfigError: it is of truncated sampling, which has to be named.
    """
    rollout = record.rollout
    if rollout.decoding.truncation and not allow_truncated_sampling:
        values = ", ".join(f"{name}={value}" for name, value in rollout.decoding.truncation.items())
        raise ConfigError(
            f"{KEY} is {source}: rollout {rollout.rollout_id} was sampled with {values}, and its log-probabilities are "
            "those before that: set learner.allow_truncated_sampling: true to train on it all the same"
        )
    try:
        example_from_rollout(rollout, 0.0, row_length, allow_truncated_sampling)
    except InvalidRolloutError as error:
        return str(error)
    return ""


def _invalid_of(source: Path) -> set[str]:
    """Rollouts that the run itself would not train on."""
    path = RunDirectory(source).fates_path
    fates = {str(row.get("rollout_id")): row.get("fate") for row in read_json_lines(path)} if source.is_dir() else {}
    return {rollout_id for rollout_id, fate in fates.items() if fate == "invalid"}


@final
class StoredBatches:
    """The learner's side of replay over stored rollouts. Implements `penstock.types.BatchSource`.

    Args:
        stored: What is trained on.
        groups_per_batch: Of an update.
        advantage: Name of the advantage, or one's own function of a group.
        store: The run's, where batch files go.
        seed: Of the run; the order of each epoch is drawn from it.
        lineage: Number of this life of the run, in the batch files.

    Attributes:
        complete: Given the examples and rollouts of a batch, the examples as they are trained and metrics; for scores
            of a reference.
        when_there_is_room: Calls what writes a file, again where the disk was full.
        known_ahead: Whether a batch can be formed before its update: not where a reference scores it.

    Raises:
        ConfigError: a batch has more groups than there are.
    """

    def __init__(
        self,
        stored: StoredRollouts,
        groups_per_batch: int,
        advantage: AdvantageName | GroupAdvantage,
        store: RolloutStore,
        seed: int,
        lineage: int,
    ) -> None:
        self.check(stored, groups_per_batch)
        self.complete: Callable[[Any, Any], tuple[Any, dict[str, float]]] = lambda examples, rollouts: (examples, {})
        self.when_there_is_room: Callable[[Callable[[], None]], object] = lambda write: write()
        self.known_ahead = True
        self._stored = stored
        self._groups_per_batch = groups_per_batch
        self._advantage: AdvantageName | GroupAdvantage = advantage
        self._store = store
        self._seed = seed
        self._lineage = lineage
        self._ready: TrainingBatch[Any] | None = None
        self._used = set[int]()
        self._stopped = False
        self.step = 0

    @staticmethod
    def check(stored: StoredRollouts, groups_per_batch: int) -> None:
        """Whether one batch can be made.

        Raises:
            ConfigError: it has more groups than there are.
        """
        if len(stored.groups) < groups_per_batch:
            raise ConfigError(
                f"replay.groups_per_batch is {groups_per_batch}, but {stored.source} ({KEY}) has "
                f"{len(stored.groups)} groups to train on: lower it"
            )

    @property
    def updates_per_epoch(self) -> int:
        """So many whole batches are in an epoch; which groups are left over is drawn anew in each."""
        return len(self._stored.groups) // self._groups_per_batch

    # --- for the learner -----------------------------------------------------------------------------------------

    def next_batch(self, step: int, timeout_s: float) -> TrainingBatch[Any]:
        """The batch of update `step`, its file written.

        Raises:
            Stopped: `stop` was called.
            RunFailed: the disk has been full for too long.
        """
        if self._stopped:
            raise Stopped("the run ends")
        if self._ready is None or self._ready.step != step:
            self._ready = self._formed(step)
        ready, self._ready = self._ready, None
        return ready

    def peek(self, step: int) -> TrainingBatch[Any] | None:
        """See `BatchSource.peek`: formed here, where it can be."""
        if not self.known_ahead or self._stopped:
            return None
        if self._ready is None or self._ready.step != step:
            self._ready = self._formed(step)
        return self._ready

    def finish_update(self, step: int) -> None:
        """Update `step` was applied."""
        self._used.update(self._chosen(step))

    def set_current_step(self, step: int) -> None:
        """The learner holds version `step`."""
        self.step = step

    def expect_digests(self, step: int, digests: Mapping[str, str]) -> None:
        """Nobody serves a version."""

    def checkpoint_states(self, step: int, timeout_s: float) -> dict[str, Any]:
        """Of the boundary before update `step`."""
        return {"replay": {"lineage": self._lineage, "update": step, "digest": self._stored.digest}}

    def checkpoint_saved(self, step: int) -> None:
        """Nothing expires: the files are another run's."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint's state.

        Raises:
            CheckpointError: it is the state of a run that generated.
            ConfigError: the rollouts are not those that it was trained on.
        """
        if "digest" not in state:
            raise CheckpointError(f"the run generated its rollouts until now: resume it without {KEY}")
        if state["digest"] != self._stored.digest:
            raise ConfigError(
                f"{self._stored.source} ({KEY}) does not hold the rollouts that the run has trained on so far: more "
                "were added, some are gone, or the learner's filters are others; train on a copy that stays as it is"
            )
        self.step = int(state["update"])
        self._store.lineages.begin(self._lineage, int(state["lineage"]), self.step)
        for step in range(self.step):
            self._used.update(self._chosen(step))

    def stop(self) -> None:
        """Gives no batch any more."""
        self._stopped = True

    # --- how it is -----------------------------------------------------------------------------------------------

    def ledger(self) -> dict[str, int]:
        """How many rollouts there were, wait for their first use, were trained, or were left out."""
        trained = sum(len(self._stored.groups[index].rollouts) for index in self._used)
        left_out = {name: count for name, count in self._stored.left_out.items() if count}
        counts = {"waiting": self._stored.rollouts - trained, "trained": trained, **left_out}
        return {"started": sum(counts.values()), **counts}

    def metrics(self) -> dict[str, float]:
        """``replay/…`` numbers of this moment."""
        counts = {f"replay/ledger/{name}": float(count) for name, count in self.ledger().items()}
        return {"replay/epoch": self.step / self.updates_per_epoch, **counts}

    def _chosen(self, step: int) -> list[int]:
        """Indices of the groups of an update."""
        epoch, place = divmod(step, self.updates_per_epoch)
        order = generator(fold(self._seed, "stored rollouts", epoch)).permutation(len(self._stored.groups))
        return order[place * self._groups_per_batch : (place + 1) * self._groups_per_batch].tolist()

    def _formed(self, step: int) -> TrainingBatch[Any]:
        started = time.monotonic()
        groups = [self._stored.groups[index] for index in self._chosen(step)]
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        examples = [
            _without_version(example)
            for example in assemble_examples(groups, compute_advantages(self._advantage, groups))
        ]
        known = batch_metadata(groups, [not has_signal(group) for group in groups], examples)
        completed, numbers = self.complete(examples, rollouts)
        batch_id = f"batch_{uuid.uuid4().hex}_{int(time.time() * 1000)}"
        self.when_there_is_room(lambda: self._store.write_batch(batch_id, completed, step, self._lineage))
        metrics = {**known["metrics"], **numbers, **self.metrics(), "replay/wait_s": time.monotonic() - started}
        return TrainingBatch(batch_id, step, tuple(completed), known["group_ids"], metrics)


def _without_version(example: RLExample) -> RLExample:
    """No version of the policy that is trained sampled any of it."""
    return replace(example, weight_steps=np.full(len(example.tokens), -1, np.int32))
