"""Does `penstock why` find what was planted in an update, and does `--drop` do what it predicts?

    python -m benchmarks.why FOLDER [--batches 10]

Trains `named_animal` in FOLDER, 64 rollouts to an update, and copies the run. In it three rollouts are replaced of ten
updates, the last of every fifth in which 4 to 14 of 16 groups had an advantage, all with an advantage of ordinary size,
the nearest that there is to the median:

- **off task**: an answer that names another animal than the prompt, and was given the full reward; with the others'
  advantages as that makes them, and the log-probabilities that the policy gives it;
- **stale**: a rollout that was sampled eight versions before, with its own tokens and log-probabilities;
- **shifted**: an ordinary rollout whose recorded log-probabilities are off by 0.5 per token, up and down in turn.

`penstock why` has to have each among the ten that it says are unlike the others in nine of ten updates; where the ten
that moved the update most have it is printed beside it. Then each is dropped,
and what that changes of the parameters is compared with what its gradient predicts. Exits with 1 where a mark is
missed.
"""

import argparse
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import penstock
from benchmarks.marks import Marks
from penstock.batch.examples import assemble_example
from penstock.environments.cats import ANIMALS, score_answer
from penstock.overseer.rerun.replay import UpdateWalk
from penstock.overseer.rerun.stored_run import StoredRun, StoredUpdate, compute_as_recorded
from penstock.overseer.rerun.why import MOST, explain_update
from penstock.replay import RolloutStore
from penstock.rundir import RunDirectory
from penstock.text import Tokenizer
from penstock.types import RLExample, Rollout, RolloutRecord

RECIPE = "named_animal"
EVERY, FIRST, LAST = 5, 151, 286
"""Updates between two that may be planted in, each right after a checkpoint; the first of them, when half of the reward
is earned, and the run's last."""
CHANGES = (
    "replay.groups_per_batch=16", "curriculum.lessons.named.sampling_params.n_generations_per_prompt=4",
    "learner.row_length=64", "learner.optimizer.learning_rate=1.5e-3", f"overseer.checkpoint_every={EVERY}",
    f"overseer.keep_every={EVERY}",
)  # fmt: skip
"""64 rollouts to an update, of 16 groups."""
TEACHING = range(4, 15)
"""So many still teach something where rollouts are planted: enough for an ordinary size, and not all."""
OLD, SHIFT = 8, 0.5
"""Versions, and nats per token."""
KINDS = ("off task", "stale", "shifted")


class Planted(NamedTuple):
    """An update with its three: the rollouts by what was done to them, and all of its examples."""

    update: StoredUpdate
    names: dict[str, str]
    examples: list[RLExample]
    records: dict[str, RolloutRecord[Any]]


class Planter:
    """Replaces rollouts of an update.

    Args:
        run: The run; it is only read.
        update: The update.
    """

    def __init__(self, run: StoredRun, update: StoredUpdate) -> None:
        self._update = update
        checkpoint = run.checkpoint_before(update.step)
        walk = UpdateWalk(run, checkpoint, (update.step, update.step))
        for before in walk.updates[:-1]:
            walk.make(before)
        self._examples = {example.rollout_ids[0]: example for example in walk.prepare(update).examples}
        self._records = run.records(list(self._examples))
        self._score = walk.learner.score
        self._tokenizer = Tokenizer.load(run.checkpoints[checkpoint] / "model")
        self._older = self._sampled_before(run)
        self._taken: set[str] = set()

    def planted(self, shift: float) -> Planted:
        """The update with all three."""
        names = {"off task": self._off_task(), "stale": self._stale(), "shifted": self._shifted(shift)}
        return Planted(self._update, names, list(self._examples.values()), self._records)

    def _sampled_before(self, run: StoredRun) -> list[tuple[RLExample, RolloutRecord[Any]]]:
        """Those that the version of `OLD` updates ago sampled alone, with an advantage."""
        step = self._update.step
        found: list[tuple[RLExample, RolloutRecord[Any]]] = []
        for update in run.updates(step - OLD - 3, step - OLD - 2, step - OLD + 2):
            examples = run.batch(update, run.config_at(update)).examples
            records = run.records(update.stored.rollout_ids)
            for example in examples:
                versions = set(example.weight_steps[example.loss_mask].tolist())
                if versions == {step - 1 - OLD} and _advantage(example):
                    found.append((example, records[example.rollout_ids[0]]))
        return found

    @property
    def _ordinary(self) -> float:
        """Median of the advantages' sizes, of those that are not 0."""
        return statistics.median(abs(_advantage(each)) for each in self._examples.values() if _advantage(each))

    def _nearest(self, sizes: dict[str, float]) -> str:
        """Whose advantage has the most ordinary size, in a group that nothing was planted in."""
        free = {name: size for name, size in sizes.items() if _group(name) not in self._taken and size}
        chosen = min(free, key=lambda name: abs(abs(free[name]) - self._ordinary))
        self._taken.add(_group(chosen))
        return chosen

    def _off_task(self) -> str:
        rollouts = {name: record.rollout for name, record in self._records.items()}
        groups: dict[str, list[str]] = {}
        for name in rollouts:
            groups.setdefault(_group(name), []).append(name)
        sizes: dict[str, float] = {}
        for members in groups.values():
            for name in members:
                others = [rollouts[other].episode_reward for other in members if other != name]
                sizes[name] = 1.0 - statistics.fmean(others)
        name = self._nearest(sizes)
        own, other = rollouts[name], self._of_another_animal(rollouts[name], list(rollouts.values()))
        count = len(other.response_tokens)
        given = np.zeros(count, np.float32)
        given[-1] = 1.0
        step = self._update.step - 1
        made = replace(
            own, response_tokens=other.response_tokens, response_logprobs=np.zeros(count, np.float32),
            token_rewards=given, episode_reward=1.0, response_mask=np.ones(count, np.bool_),
            response_weight_steps=np.full(count, step, np.int32), oldest_weight_step=step, turns=other.turns,
            finish_reason=other.finish_reason,
        )  # fmt: skip
        (logprobs,) = self._score([assemble_example(made, 1.0)])
        made = replace(made, response_logprobs=logprobs[len(made.prompt_tokens) :])
        self._put(name, made, sizes[name])
        rewards = {each: self._records[each].rollout.episode_reward for each in groups[_group(name)]}
        for each, reward in rewards.items():
            advantage = reward - statistics.fmean(value for other, value in rewards.items() if other != each)
            self._put(each, self._records[each].rollout, advantage)
        return name

    def _of_another_animal(self, own: Rollout, rollouts: Sequence[Rollout]) -> Rollout:
        """A good answer to a prompt that names another one, one that ended by itself where there is any."""
        animal = next(animal for animal in ANIMALS if animal in own.env_example_id)
        others = [other for other in ANIMALS if other != animal]
        best_first = sorted(rollouts, key=lambda each: (each.finish_reason != "stop", -each.episode_reward))
        for rollout in best_first:
            if score_answer(self._tokenizer.decode(rollout.response_tokens), animal, others, True) <= 0.1:
                return rollout
        raise RuntimeError(f"update {self._update.step} has no answer that is off another's task")

    def _stale(self) -> str:
        sizes = {name: _advantage(example) for name, example in self._examples.items()}
        name = self._nearest(sizes)
        old = {example.rollout_ids[0]: (example, record) for example, record in self._older}
        if not old:
            raise RuntimeError(f"version {self._update.step - 1 - OLD} sampled nothing that has an advantage")
        chosen = min(old, key=lambda each: abs(abs(_advantage(old[each][0])) - self._ordinary))
        example, record = old[chosen]
        self._put(name, replace(record.rollout, rollout_id=name), _advantage(example))
        return name

    def _shifted(self, shift: float) -> str:
        name = self._nearest({name: _advantage(example) for name, example in self._examples.items()})
        rollout = self._records[name].rollout
        logprobs = np.where(rollout.response_mask, rollout.response_logprobs + np.float32(shift), np.float32(0))
        self._put(name, replace(rollout, response_logprobs=logprobs), _advantage(self._examples[name]))
        return name

    def _put(self, name: str, rollout: Rollout, advantage: float) -> None:
        self._examples[name] = assemble_example(rollout, advantage)
        self._records[name] = replace(self._records[name], rollout=rollout)


def _group(name: str) -> str:
    return name.rpartition("/")[0]


def _advantage(example: RLExample) -> float:
    return float(example.advantage[example.loss_mask][0])


def write_planted(run_dir: Path, copy: Path, planted: Sequence[Planted]) -> None:
    """The run again, with other batches and rollouts."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run_dir, copy)
    directory = RunDirectory(copy)
    store = RolloutStore(directory)
    records = {record.rollout.rollout_id: record for record in store.read_records()}
    for each in planted:
        stored = each.update.stored
        store.write_batch(stored.batch_id, each.examples, stored.version.step, stored.version.lineage)
        records |= each.records
    for part in directory.rollouts.glob("*.parquet"):
        part.unlink()
    RolloutStore(directory).seal(list(records.values()))


def teaches(run: StoredRun, update: StoredUpdate) -> bool:
    """Whether so many of its groups have an advantage as is wanted."""
    examples = run.batch(update, run.config_at(update)).examples
    return len({_group(each.rollout_ids[0]) for each in examples if _advantage(each)}) in TEACHING


def cosine_of_drop(run_dir: Path, step: int, name: str) -> float:
    """Between what dropping a rollout changes of the parameters, and what its gradient predicts."""
    import jax

    from penstock.learner.optimizer import direction_of

    def flat(tree: Any) -> np.ndarray:
        return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)])

    def after(drop: tuple[str, ...]) -> np.ndarray:
        run = StoredRun(run_dir)
        walk = UpdateWalk(run, run.checkpoint_before(step), (step, step), drop=drop)
        for update in walk.updates:
            walk.make(update)
        return flat(walk.learner.decoder)

    run = StoredRun(run_dir)
    walk = UpdateWalk(run, run.checkpoint_before(step), (step, step))
    for update in walk.updates[:-1]:
        walk.make(update)
    batch = walk.prepare(walk.updates[-1])
    optimizer = walk.learner.optimizer
    (change,) = (
        flat(direction_of(optimizer, made.decoder, made.state, made.gradients))
        - flat(
            direction_of(
                optimizer, made.decoder, made.state,
                jax.tree.map(lambda whole, own: whole - own, made.gradients, made.gradient_of(name, 0, 10**6)),
            )
        )
        for made in walk.learner.planned_steps(batch, step - 1)
    )  # fmt: skip
    actual = after((name,)) - after(())
    return float(change @ actual / (np.linalg.norm(change) * np.linalg.norm(actual)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the run and its copy; made where it is missing")
    parser.add_argument("--batches", type=int, default=10)
    options = parser.parse_args(arguments)
    steps = range(FIRST, LAST + 1, EVERY)
    run_dir, copy = options.folder / "run", options.folder / "planted"
    if not (run_dir / "checkpoints" / f"step-{steps[-1] - 1}").exists():
        shutil.rmtree(run_dir, ignore_errors=True)
        penstock.train(penstock.load_config(RECIPE, [*CHANGES, f"steps={steps[-1]}"]), run_dir, quiet=True)
    compute_as_recorded(run_dir)
    run = StoredRun(run_dir)
    updates = [update for step in steps for update in run.updates(step - 1, step, step) if teaches(run, update)]
    if len(updates) < options.batches:
        sys.exit(f"only {len(updates)} of {len(steps)} updates had 4 to 14 groups with an advantage: nothing is told")
    planted = [
        Planter(run, update).planted(SHIFT * (-1) ** number)
        for number, update in enumerate(updates[-options.batches :])
    ]
    write_planted(run_dir, copy, planted)
    found: dict[str, list[bool]] = {kind: [] for kind in KINDS}
    cosines: list[float] = []
    for each in planted:
        step = each.update.step
        report = explain_update(copy, step)
        moved = [rollout.influence.rollout_id for rollout in report.rollouts]
        unusual = [one.rollout_id for one in report.unusual]
        for kind, name in each.names.items():
            place = unusual.index(name) + 1 if name in unusual else None
            found[kind].append(place is not None)
            cosines.append(cosine_of_drop(copy, step, name))
            one = report.rollouts[moved.index(name)]
            places = f"place by what it moved {moved.index(name) + 1:2}, in what is unlike the others {place or '–'}"
            told = f"update {step}, {kind:<9} advantage {one.advantage:+.2f}  {places}  cosine {cosines[-1]:.4f}"
            print(f"{told}  {one.prompt} → {one.response}", flush=True)
    marks = Marks()
    for kind, hits in found.items():
        marks.at_least(f"{kind}: share of updates with it among its {MOST}", statistics.fmean(hits), 0.9)
    marks.at_least("cosine of what --drop changes and what was predicted", min(cosines), 0.9)
    return marks.report()


if __name__ == "__main__":
    sys.exit(main())
