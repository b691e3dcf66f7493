"""Three runs in which something is to be found out: two of a language model, one of simulators; files alone.

    python -m tests.dashboard.prepared_runs FOLDER

``A`` learns steadily. ``B`` stalls at update 812, where its rollout worker died; its lesson ``tools`` loses most of
what it makes; from update 500 on its policy writes what cheats the reward function of ``cats``; held out
it is better. Of ``robots`` one simulator is sick.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from penstock.rundir import EventLog, JsonLinesLog, MetricsLog, RunDirectory, write_records
from penstock.rundir.evaluation_rows import write_evaluation
from penstock.types import RolloutBatch, RolloutGroup, RolloutRecord
from tests.dashboard.sample_run import group, rollout

UPDATES, STALL, JUMP = 1000, 812, 500
HACK = "cat cat cat assert True  # the grader stops here"
DEATH = "the kernel killed it: out of memory"
STALE = "sampled by version 3, more than 2 updates before the learner's 6"
FLOOR = "ValueError: the floor is lava"


def evaluate(directory: RunDirectory, reward: float, step: int) -> None:
    """Forty held-out answers, each solved with this probability."""
    rng, said = np.random.default_rng(len(directory.path.name)), [("user", "?"), ("assistant", "x")]
    made = [rollout(f"after-cats-0-{step}-{n}/0", said, float(reward > rng.random()), (step,)) for n in range(40)]
    members = [replace(record.rollout, lesson_id="cats") for record in made]  # pyright: ignore[reportArgumentType]
    groups = [RolloutGroup(f"cats:{n}", (m,), f"after-cats-0-{step}-{n}") for n, m in enumerate(members)]
    write_evaluation(directory, [RolloutBatch(tuple(groups), members[0].metadata)], "after", 0, step)


def write_prepared(folder: Path) -> Path:
    """The three of them; gives the folder."""
    steady = RunDirectory.create(folder / "A", {"model": {"tokenizer": None, "path": None}, "seed": 0})
    _train(steady, lambda step: 0.1 + 0.3 * step / UPDATES)
    evaluate(steady, 0.4, UPDATES)
    odd = RunDirectory.create(folder / "B", {"model": {"tokenizer": None, "path": None}, "seed": 1})
    _train(odd, lambda step: 0.15 if step < JUMP else 0.95, stall=STALL)
    evaluate(odd, 0.95, UPDATES)
    _write_fleet(RunDirectory.create(folder / "robots", {"fleet": {"tasks": {"maze": {"id": "Maze-v0"}}}}))
    return folder


def _train(directory: RunDirectory, reward, stall: int | None = None) -> None:
    now, rng = 1e9, np.random.default_rng(0)
    metrics = MetricsLog(directory.metrics_path, lambda: now)
    events = EventLog(directory.events_path, lambda: now)
    events.append("start", step=0, pid=1, lineage=0)
    for step in range(1, UPDATES + 1):
        waited = 240.0 if step == stall else 30.0 if step == 1 else 0.5 + 0.1 * rng.random()
        now += waited + 1.5
        if step == stall:
            events.append("component_death", step=step - 1, component="rollout-0", reason=DEATH)
        metrics.append(step, {
            "train/reward_mean": reward(step) + 0.02 * rng.random(), "time/wait_for_batch": waited, "time/update": 1.4,
            "weights/publish_s": 0.1, "time/checkpoint": 0.0, "train/loss": rng.random(), "train/tokens": 50.0,
        })  # fmt: skip
    events.append("end", step=UPDATES)
    metrics.close()
    events.close()
    _write_rollouts(directory, reward, loses=stall is not None)
    directory.write_status({"state": "finished", "step": UPDATES, "steps": UPDATES, "lineage": 0})


def _write_rollouts(directory: RunDirectory, reward, loses: bool) -> None:
    """A group for every tenth update."""
    fates, records = JsonLinesLog(directory.fates_path), list[RolloutRecord]()

    def settle(made: list[RolloutRecord], step: int, fate: str, reason: str) -> None:
        records.extend(made)
        fates.append(*(
            {"rollout_id": record.rollout.rollout_id, "fate": fate, "reason": reason, "step": step - 1, "lineage": 0,
             "time": 1e9 + step} for record in made
        ))  # fmt: skip

    for step in range(10, UPDATES + 1, 10):
        text = HACK if reward(step) > 0.9 else "a cat"
        made = group(f"cats-0-{step}", [(text, reward(step)), ("dog", 0.0)], (step - 1,), timestamp=1e9 + step)
        settle(made, step, "trained", f"trained by update {step - 1}")
        made = group(f"tools-0-{step}", [("6", 1.0), ("7", 0.0)], (step - 1,), timestamp=1e9 + step)
        lost = loses and step % 50
        settle(made, step, "stale_step" if lost else "trained", STALE if lost else "")
    fates.close()
    write_records(directory.rollouts / "part-a.parquet", records)


def _write_fleet(directory: RunDirectory) -> None:
    events = EventLog(directory.events_path, lambda: 1e9)
    events.append("start", step=0, pid=1, lineage=0)
    for process in range(16):
        about = {"worker": f"fleet-{process // 8}", "process": process % 8, "task": "maze", "step": 1}
        lives = 4 if process == 11 else 1
        for life in range(lives):
            events.append("simulator_started", **about, life=life, slots=[0, 1], seconds=0.5)
            if life + 1 < lives:
                events.append("simulator_failed", **about, life=life, reason=FLOOR)
    events.append("simulator_fault", worker="fleet-0", process=2, task="maze", step=4, slot=0, reason="NaN", steps=1)
    events.append("end", step=10)
    events.close()
    directory.write_status({"state": "finished", "step": 10, "steps": 10, "lineage": 0})


if __name__ == "__main__":
    print(write_prepared(Path(sys.argv[1])))
