"""What a run directory keeps of updates that were made: enough to make them again, without inference.

An update is named as everywhere by the version that it led to: update n makes version n, from version n − 1. It is
made again by a learner of a checkpoint before it, from the batch file of each update in between: the one on the path
of lives that led to the newest version, since a run that went back to a checkpoint left others. The configuration is
that of the moment: what later resumes changed is taken back. Nothing is written into the run, neither here nor by
who uses it.
"""

import json
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.batch import GroupFilters, compute_advantages, with_kl_in_reward
from penstock.batch.examples import assemble_examples
from penstock.learner import Checkpoint, KlConfig, LearnerConfig, load_checkpoint
from penstock.learner.checkpoints import find_checkpoints
from penstock.model.programs import arithmetic, compile_programs
from penstock.overseer.config import RunConfig
from penstock.overseer.config_loading import all_keys, load_config, load_recorded_config, with_what_follows
from penstock.overseer.kind import PolicyKind, RunStart
from penstock.replay import FRAGMENTS, LANGUAGE, Lineages, RolloutStore, StoredRollouts
from penstock.replay.history import StoredBatch
from penstock.rundir import RunDirectory, read_events, read_metrics
from penstock.types import (
    AnyRollout,
    CheckpointError,
    ConfigError,
    FragmentExample,
    RLExample,
    RolloutGroup,
    RolloutRecord,
    TrainingBatch,
)

if TYPE_CHECKING:
    from penstock.overseer.control_config import FleetRunConfig

_READ = re.compile(
    r"learner\..+|seed|steps|curriculum\.lessons\.[^.]+\.sampling_params\.max_output_tokens|"
    r"replay\.fragments_per_batch|fleet\.fragment_length|replay\.batch_maker\.(?:filter|overlong)_.+"
)
"""Keys that an update depends on."""

_OF_UPDATE = "train/optimizer_steps"
"""A number that the line of every update has."""

CHANGEABLE = "learner."
"""What another update of the same data may have otherwise."""
_NOT_OF_UPDATES = re.compile(r"learner\.(parity|warm_start|allow_truncated_sampling)\b")
"""What of it says nothing of an update: how a run begins, samples and is checked."""


@dataclass(frozen=True, slots=True)
class StoredUpdate:
    """One update that was made.

    Attributes:
        step: The version that it led to.
        stored: Its batch file.
        metrics: Its line of metrics.jsonl; empty where the run ended before that was written.
    """

    step: int
    stored: StoredBatch
    metrics: Mapping[str, float | None]

    @property
    def time_s(self) -> float:
        """When the batch was made, in Unix seconds."""
        return int(self.stored.batch_id.rpartition("_")[2]) / 1000


class StoredRun:
    """A run directory, read as a source of updates; the run may go on.

    Args:
        path: The run directory.
        trust: Believe what others than the user may have written there.

    Raises:
        ConfigError: there is no run, others may have written it, or its config is not valid.
    """

    def __init__(self, path: Path | str, trust: bool = False) -> None:
        self.directory = RunDirectory(path)
        check_run_directory(self.directory.path)
        self.config, _ = load_recorded_config(self.directory, [], trust, ("learner", "model"))
        self.is_language = isinstance(self.config, RunConfig)
        self._format = LANGUAGE if self.is_language else FRAGMENTS
        self._store = RolloutStore(self.directory, self.config.replay.store, experience=self._format)
        self._configs: dict[tuple[str, ...], RunConfig | FleetRunConfig] = {}

    # --- what is there -------------------------------------------------------------------------------------------

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Those that are there, by version."""
        return {int(path.name.removeprefix("step-")): path for path in find_checkpoints(self.directory.checkpoints)}

    def checkpoint_before(self, step: int) -> int:
        """The newest version before update `step` that has a checkpoint.

        Raises:
            ConfigError: no update has such a number.
            CheckpointError: there is none; the message names the nearest.
        """
        if step < 1:
            raise ConfigError(f"--step is {step}: updates count from 1; an update is called by the version it led to")
        root, by_step = self.directory.checkpoints, self.checkpoints
        before = [found for found in by_step if found < step]
        if before:
            return max(before)
        remedy = "overseer.keep_every=N keeps every Nth, and that of the beginning, for good"
        if not by_step:
            raise CheckpointError(f"{root} holds no checkpoint, so that update {step} cannot be made again: {remedy}")
        nearest = min(by_step)
        raise CheckpointError(
            f"no checkpoint before update {step} is left in {root}: the nearest is step-{nearest}, from which updates "
            f"from {nearest + 1} on can be made again; {remedy}"
        )

    def updates(self, above: int, first: int, last: int) -> list[StoredUpdate]:
        """Updates in their order.

        Args:
            above: The checkpoint's version; the updates after it are needed.
            first: The first that is asked for, a step.
            last: The last one.

        Raises:
            ConfigError: one was not made, or its batch is not there any more.
        """
        lines = {int(row["step"]): row for row in read_metrics(self.directory.metrics_path) if _OF_UPDATE in row}
        newest = max([*lines, *self.checkpoints], default=0)
        for option, step in {"--step": first, "--until": last}.items():
            if not 1 <= step <= newest:
                reached = f"it made updates 1 to {newest}" if newest else "it made none yet"
                raise ConfigError(f"{option} is {step}, and {self.directory.path} has no such update: {reached}")
        found: list[StoredUpdate] = []
        for step in range(above + 1, last + 1):
            stored = self._made.get(step)
            if stored is None:
                raise ConfigError(
                    f"the batch of update {step} is not in {self.directory.path}: it has expired "
                    "(replay.store.max_bytes), or was deleted"
                )
            found.append(StoredUpdate(step, stored, lines.get(step, {})))
        return found

    @cached_property
    def _made(self) -> dict[int, StoredBatch]:
        """By the version that it led to, the batch file that counts."""
        lineages = Lineages(self.directory.lineages_path)
        batches = sorted(self._store.history().batches, key=lambda stored: (stored.version, stored.batch_id))
        return {stored.outcome.step: stored for stored in batches if lineages.survives(stored.outcome, lineages.newest)}

    def records(self, rollout_ids: Collection[str], whole_groups: bool = False) -> dict[str, RolloutRecord[Any]]:
        """Sealed rollouts or fragments, by id; in a run on stored rollouts those of the place that it has them from.

        Args:
            rollout_ids: Of those wanted; an id that is in no file any more is left out.
            whole_groups: Whether the rest of their groups is wanted, too.
        """
        groups = {rollout_id.rpartition("/")[0] for rollout_id in rollout_ids}
        stored = self._stored_rollouts
        read = self._store.read_records(groups) if stored is None else StoredRollouts.records(stored, groups)
        found = {record.rollout.rollout_id: record for record in read}
        return found if whole_groups else {key: record for key, record in found.items() if key in set(rollout_ids)}

    @property
    def _stored_rollouts(self) -> Path | None:
        """Where a run on stored rollouts has them from; None of a run that generates."""
        source = self.config.replay.from_rollouts if isinstance(self.config, RunConfig) else None
        return None if source is None else Path(source)

    # --- what an update is made of -------------------------------------------------------------------------------

    def config_at(self, update: StoredUpdate, changes: Sequence[str] = ()) -> "RunConfig | FleetRunConfig":
        """The configuration that an update was made under.

        Args:
            update: The update that was made.
            changes: ``learner.loss.preset=grpo`` and the like, on top.

        Raises:
            ConfigError: a change is of no key that an update depends on, or is not valid.
        """
        example = f"for example --set {'learner.loss.preset=grpo' if self.is_language else 'learner.clip=0.1'}"
        for word in changes:
            if not word.startswith(CHANGEABLE):
                raise ConfigError(
                    f"--set {word}: only keys under {CHANGEABLE} act on an update that is made again: its data stay as "
                    f"they are; {example}"
                )
            if _NOT_OF_UPDATES.match(word):
                raise ConfigError(
                    f"--set {word}: {word.partition('=')[0]} acts on a run, and would change nothing of an update that "
                    f"is made again; {example}"
                )
        words = self._taken_back(update.time_s)
        config = self._config(words)
        if not changes:
            return config
        changed = self._config([*words, *with_what_follows(config, changes)])
        if isinstance(config, RunConfig) and isinstance(changed, RunConfig):
            least = config.learner.row_length
            if changed.learner.row_length < least:
                raise ConfigError(f"--set learner.row_length: the run's sequences are up to {least}: leave it out")
        return changed

    def _config(self, words: Sequence[str]) -> "RunConfig | FleetRunConfig":
        """The run's with these changes; loaded once, so that what it leaves out is said once."""
        key = tuple(words)
        if key not in self._configs:
            self._configs[key] = load_config(self.directory.config_path, words, recorded=True)
        return self._configs[key]

    def _taken_back(self, time_s: float) -> list[str]:
        """What resumes after that moment changed, as words that undo it."""
        olds: dict[str, Any] = {}
        for event in reversed(self._resumes):
            if float(event["time"]) > time_s:
                olds |= {key: old for key, (old, _) in event["changes"].items() if _READ.fullmatch(key)}
        absent = {section for key, old in olds.items() if old is None and (section := self._new_section(key, olds))}
        words = [f"{section}=null" for section in sorted(absent)]
        kept = {key: old for key, old in olds.items() if not any(key.startswith(f"{section}.") for section in absent)}
        known = {key.path: key for key in all_keys(type(self.config))}
        for key, old in kept.items():
            described = known.get(re.sub(r"(?<=lessons\.)[^.]+", "*", key))
            value = json.dumps(old)
            if described is not None and old is None and "null" not in described.takes:  # it was no key then
                value = described.default
            words.append(f"{key}={value}")
        return words

    @cached_property
    def _resumes(self) -> list[dict[str, Any]]:
        """In the order of time."""
        found = [event for event in read_events(self.directory.events_path) if event["event"] == "resume"]
        return sorted(found, key=lambda event: float(event["time"]))

    def _new_section(self, key: str, olds: Mapping[str, Any]) -> str | None:
        """The section above a key of which nothing was there before; None where something was."""
        section = key.rpartition(".")[0]
        node: Any = self.directory.read_config()
        for name in section.split("."):
            node = node.get(name) if isinstance(node, dict) else None
        if section.count(".") == 0 or not isinstance(node, dict):
            return None
        return section if all(olds.get(f"{section}.{name}", 0) is None for name in node) else None

    def batch(self, update: StoredUpdate, config: "RunConfig | FleetRunConfig") -> TrainingBatch[Any]:
        """What an update trained on; with advantages of its own where `config` has another estimator.

        Raises:
            ConfigError: rollouts that are needed are not there any more, or the estimator is the batch maker's.
        """
        stored = update.stored
        examples = self._store.read_batch(stored.batch_id)
        if isinstance(config, RunConfig):
            recorded = self.config_at(update)
            assert isinstance(recorded, RunConfig)
            examples = _under_reference(config.learner.kl, recorded.learner.kl, examples)
            examples = self._with_advantages(update, config, recorded, examples)
        else:
            found = self.records(stored.rollout_ids)
            gone = [rollout_id for rollout_id in stored.rollout_ids if rollout_id not in found]
            if gone or not config.replay.store.observations:
                raise ConfigError(
                    f"update {update.step} cannot be made again: of its fragments "
                    + (f"{gone[0]} has expired" if gone else "no observations are stored (replay.store.observations)")
                )
            examples = [FragmentExample(found[rollout_id].rollout) for rollout_id in examples]
        groups = tuple(dict.fromkeys(rollout_id.rpartition("/")[0] for rollout_id in stored.rollout_ids))
        return TrainingBatch(stored.batch_id, stored.version.step, tuple(examples), groups, {})

    def _with_advantages(
        self, update: StoredUpdate, config: RunConfig, recorded: RunConfig, examples: list[RLExample]
    ) -> list[RLExample]:
        if _estimator(config.learner) == _estimator(recorded.learner):
            return examples
        makers = [recorded.replay.batch_maker, *recorded.replay.batch_makers.values()]
        for maker in makers:
            if maker.name not in ("deadline", "recency"):
                raise ConfigError(
                    "--set changes the advantage, and those of this run are its batch maker's "
                    f"(replay.batch_maker.name: {maker.name}): set another key, or learner.loss.advantage="
                    f"{recorded.learner.loss.advantage} as well"
                )
        whole = any(maker.name == "recency" and maker.unit == "rollout" for maker in makers)
        ids = [example.rollout_ids[0] for example in examples]
        records = self.records(ids, whole_groups=whole)
        gone = [rollout_id for rollout_id in ids if rollout_id not in records]
        if gone:
            place = self._stored_rollouts
            why = "has expired (replay.store.max_bytes)" if place is None else f"is not in {place} any more"
            raise ConfigError(
                f"--set changes the advantage, which is of rewards, and rollout {gone[0]} of update {update.step} "
                f"{why}: keep learner.loss.advantage"
            )
        members: dict[str, list[AnyRollout]] = {}
        for rollout_id in dict.fromkeys([*ids, *records]):
            members.setdefault(rollout_id.rpartition("/")[0], []).append(records[rollout_id].rollout)
        trained_with = GroupFilters(recorded.replay.batch_maker).members
        groups = [
            RolloutGroup(records[m[0].rollout_id].group_key, trained_with(m), name) for name, m in members.items()
        ]
        estimator = config.learner.loss.estimator()
        if config.learner.kl.in_reward:
            if any(example.reference_log_probs is None for example in examples):
                raise ConfigError(
                    f"--set learner.kl.place=reward: update {update.step} has no reference log-probabilities stored, "
                    "since its run had no KL to a reference: set learner.kl.place=loss"
                )
            members_of_all = [rollout for group in groups for rollout in group.rollouts]
            return with_kl_in_reward(estimator, members_of_all, examples, config.learner.kl.coefficient)
        values = compute_advantages(estimator, groups)
        by_id = {made.rollout_ids[0]: made for made in assemble_examples(groups, values)}
        return [replace(example, advantage=by_id[example.rollout_ids[0]].advantage) for example in examples]

    # --- the learner ---------------------------------------------------------------------------------------------

    def kind(self, checkpoint: Path) -> PolicyKind:
        """What the run trains; no environment or simulator is made."""
        if self.is_language:
            from penstock.overseer.language.kind import LanguageKind

            return LanguageKind()
        from penstock.model.control import read_control_form
        from penstock.overseer.control.kind import ControlKind

        return ControlKind(read_control_form(checkpoint / "model")[1])

    def start(self, checkpoint: Path) -> RunStart:
        """What a learner of that checkpoint begins with.

        Raises:
            CheckpointError: it is damaged.
        """
        if isinstance(self.config, RunConfig):
            loaded = load_checkpoint(checkpoint, self.config.going_on(checkpoint).model.base)
            return RunStart(loaded.decoder, None, loaded)
        loaded = load_checkpoint(checkpoint, module=self.config.model.module, kwargs=self.config.model.kwargs)
        return RunStart(loaded.policy, None, loaded)

    def notes(self, update: StoredUpdate) -> list[str]:
        """Why the arithmetic of this process may be another than the update's, in words."""
        recorded = dict(self.directory.read_config().get("versions", {}))
        for event in reversed(self._resumes):
            if float(event["time"]) > update.time_s:
                olds = {key: old for key, (old, _) in event["changes"].items()}
                recorded |= {name: olds[key] for name in recorded if (key := f"versions.{name}") in olds}
        recorded |= _arithmetic_at(self.directory, update.time_s)
        present = {name: version(name) for name in PACKAGES if name in recorded} | arithmetic()
        others = {name: now for name, now in present.items() if recorded.get(name, now) != now}
        return [f"{name} was {recorded[name] or 'empty'} and is {now or 'empty'}" for name, now in others.items()]


def check_run_directory(path: Path) -> None:
    """Sees that there is a run.

    Raises:
        ConfigError: there is none.
    """
    if not RunDirectory(path).config_path.is_file():
        raise ConfigError(f"{path} is no run directory: it has no config.yaml; name one, such as runs/cats-1")


PACKAGES = ("penstock", "jax", "jaxlib", "equinox", "optax", "numpy")
"""Those that an update is computed with."""


def compute_as_recorded(path: Path) -> None:
    """Has this process compute as the learner of a run directory did last, with as many threads and XLA's flags.

    Only before JAX has computed anything here. What makes XLA write files is left out.
    """
    recorded = _arithmetic_at(RunDirectory(path), math.inf)
    if recorded:
        flags = [word for word in str(recorded["xla_flags"]).split() if "dump" not in word]
        os.environ["XLA_FLAGS"] = " ".join(flags)
        os.environ["PJRT_NPROC"] = str(int(recorded["processors"]))


def _arithmetic_at(directory: RunDirectory, time_s: float) -> dict[str, Any]:
    """What the run's learner said of itself when it began last before that moment; nothing in runs of before."""
    if not directory.events_path.exists():
        return {}
    events = [event for event in read_events(directory.events_path) if event["event"] == "arithmetic"]
    before = [event for event in events if float(event["time"]) <= time_s]
    return {name: event[name] for event in before[-1:] for name in _ARITHMETIC}


_ARITHMETIC = ("platform", "device", "processors", "xla_flags")


def ready_learner(kind: PolicyKind, config: Any, start: RunStart) -> Any:
    """A learner with its programs, compiled by the very code that a run compiles them by."""
    learner = kind.make_learner(config, start)
    for _ in compile_programs(kind.update_programs(learner, config)):
        pass
    return learner


def handed_on(learner: Any, start: RunStart) -> RunStart:
    """The learner's present state as a start, for one of another configuration."""
    checkpoint = start.checkpoint
    assert isinstance(checkpoint, Checkpoint)
    policy = learner.decoder if hasattr(learner, "decoder") else learner.policy
    return RunStart(policy, None, replace(checkpoint, step=learner.step, learner_arrays=learner.state_arrays()))


def without_fragments(batch: TrainingBatch[Any], left_out: Collection[str]) -> TrainingBatch[Any]:
    """The batch with all steps of some fragments faulty: none of them is trained, and the others keep their places."""

    def masked(example: FragmentExample) -> FragmentExample:
        fragment = example.fragment
        if fragment.rollout_id not in left_out:
            return example
        return FragmentExample(replace(fragment, faults=np.ones_like(fragment.faults)))

    return replace(batch, examples=tuple(masked(example) for example in batch.examples))


def _under_reference(kl: KlConfig, recorded: KlConfig, examples: list[RLExample]) -> list[RLExample]:
    """The examples without what they scored under the recorded reference, where another is asked for.

    Raises:
        ConfigError: the KL is in the reward, which is of those scores.
    """
    changed = [key for key in ("reference", "sync_every", "ema_decay") if getattr(kl, key) != getattr(recorded, key)]
    if not changed or kl.reference is None or recorded.reference is None:
        return examples
    if kl.in_reward:
        raise ConfigError(
            f"--set learner.kl.{changed[0]}: with learner.kl.place: reward the scores under the run's own reference "
            "are in the rewards: set learner.kl.place=loss and learner.kl.estimator=k3, too"
        )
    return [replace(example, reference_log_probs=None) for example in examples]


def _estimator(learner: LearnerConfig) -> tuple[str, str | None, float]:
    """What advantages follow from, but the rewards."""
    return learner.loss.advantage, learner.loss.module, learner.kl.coefficient if learner.kl.in_reward else 0.0
