"""The learner's loop against fakes: the order of an update, what is waited for, and what a stop leaves."""

import pytest

from penstock.overseer.training_loop import TrainingLoop
from penstock.types import NoProgressError, RunFailed, Stopped, TrainingBatch


class Fakes:
    """Learner, replay buffer and broadcaster in one, writing down what happens."""

    def __init__(self, waits: int = 0) -> None:
        self.step = 0
        self.seen: list[str] = []
        self.waits = waits
        self.checkpoint_every = 1

    def next_batch(self, step: int, timeout_s: float) -> TrainingBatch:
        if self.waits:
            self.waits -= 1
            raise NoProgressError("no batch yet")
        self.seen.append(f"batch {step}")
        return TrainingBatch("id", step, (), (), {})

    def update(self, batch: TrainingBatch, step: int) -> dict[str, float]:
        self.step += 1
        return {"train/loss": 1.0}

    def before_update(self, batch: TrainingBatch) -> None:
        self.seen.append(f"before {batch.step}")

    def after_update(self) -> dict[str, float]:
        self.seen.append(f"after {self.step}")
        return {}

    def finish_update(self, step: int) -> None:
        self.seen.append(f"finish {step}")

    def set_current_step(self, step: int) -> None:
        self.seen.append(f"current {step}")

    def publish(self) -> None:
        self.seen.append(f"publish {self.step}")

    def on_step(self, step: int, metrics) -> None:
        self.seen.append(f"metrics {step}")

    def checkpoint_due(self, step: int) -> bool:
        return step % self.checkpoint_every == 0

    def save(self, step: int) -> None:
        self.seen.append(f"checkpoint {step}")

    def wait_until_saved(self) -> None:
        self.seen.append("saved")


def loop_of(fakes: Fakes, steps: int = 2, checkpoint_every: int = 1, publish_first: bool = False) -> TrainingLoop:
    fakes.checkpoint_every = checkpoint_every
    return TrainingLoop(fakes, fakes, fakes, fakes, steps, publish_first)


def test_when_no_batch_can_come_the_last_version_is_kept():
    fakes = Fakes()
    loop = loop_of(fakes, steps=9, checkpoint_every=100)

    def next_batch(step, timeout_s):
        if step == 2:
            raise RunFailed("32 groups failed")
        return TrainingBatch("id", step, (), (), {})

    fakes.next_batch = next_batch
    with pytest.raises(RunFailed, match="32 groups failed"):
        loop.run()
    assert fakes.seen[-2:] == ["checkpoint 2", "saved"]


def test_a_checkpoint_that_fails_too_does_not_hide_what_ended_the_run():
    fakes = Fakes()

    def save(step):
        raise OSError("no space left")

    def next_batch(step, timeout_s):
        if step == 1:
            raise RunFailed("32 groups failed")
        return TrainingBatch("id", step, (), (), {})

    fakes.next_batch, fakes.save = next_batch, save
    with pytest.raises(RunFailed, match="32 groups failed") as failure:
        loop_of(fakes, steps=9, checkpoint_every=100).run()
    assert failure.value.__notes__ == ["and the checkpoint of step 1 could not be saved: no space left"]


def test_a_version_is_committed_and_measured_before_it_is_published_and_the_last_is_not_published():
    fakes = Fakes()
    loop = loop_of(fakes)
    loop.run()
    first = ["publish 0", "batch 0", "before 0", "after 1", "finish 0", "current 1", "checkpoint 1", "metrics 1"]
    second = ["publish 1", "batch 1", "before 1", "after 2", "finish 1", "current 2", "checkpoint 2", "metrics 2"]
    assert fakes.seen == [*first, *second, "saved"]
    assert loop.doing == "done at step 2"


def test_where_generation_runs_ahead_a_version_is_published_once_and_before_it_is_saved():
    fakes = Fakes()
    loop_of(fakes, steps=3, checkpoint_every=2, publish_first=True).run()
    told = [what for what in fakes.seen if what.startswith(("publish", "checkpoint", "metrics", "current"))]
    first = ["publish 0", "current 1", "publish 1", "metrics 1", "current 2", "publish 2", "checkpoint 2", "metrics 2"]
    assert told == [*first, "current 3", "metrics 3", "checkpoint 3"]


def test_a_batch_is_waited_for_as_long_as_it_takes():
    """Who owes progress is the overseer's to judge, which ends a run where nobody moves."""
    fakes = Fakes(waits=3)
    loop_of(fakes).run()
    assert fakes.step == 2


def test_a_stop_while_waiting_checkpoints_the_version_reached():
    fakes = Fakes()
    fakes.next_batch = lambda step, timeout_s, give=fakes.next_batch: give(step, timeout_s) if step == 0 else stop()

    def stop() -> TrainingBatch:
        raise Stopped("closed")

    loop_of(fakes, steps=9, checkpoint_every=50).run()
    assert fakes.seen[-3:] == ["publish 1", "checkpoint 1", "saved"]
