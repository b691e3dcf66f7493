"""A run in a process of its own, to be ended: `python -m tests.overseer.ending_child KIND RUN_DIR [POINT]`.

Trains 100,000 tiny updates of a language or control policy. At POINT, if one is named, it kills itself by SIGKILL.
SIGHUP is as the variable HANGUP says: `default`, or `ignored` as under nohup.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.learner import checkpoints
from penstock.overseer import train, training
from penstock.overseer.run import Run
from penstock.overseer.trainer import LearnerComponent
from penstock.rundir import RunDirectory
from tests.overseer.conftest import tiny as tiny_language
from tests.overseer.test_fleet_training import tiny as tiny_control

POINTS: dict[str, tuple[Any, str]] = {
    "before the config": (RunDirectory, "write_config"),
    "before the log": (training, "RunLog"),
    "in the first evaluation of a language policy": (Run, "evaluate"),
    "in the first evaluation of a control policy": (Run, "evaluate"),
    "in the first checkpoint": (checkpoints, "_settle"),
    "in a checkpoint beside the training": (checkpoints, "_settle"),
}
BESIDE_STEP = 6
"""Version in whose checkpoint the last of these points is: it dies two updates later, the files not renamed."""


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_beside(settle: Callable[[Path], None]) -> Callable[[Path], None]:
    """Has the checkpoint of version `BESIDE_STEP` wait in its thread until the learner has made two further updates."""
    made, on_step = threading.Event(), LearnerComponent.on_step

    def note(self: LearnerComponent, step: int, metrics: Any) -> None:
        on_step(self, step, metrics)
        if step >= BESIDE_STEP + 2:
            made.set()

    def settle_or_die(directory: Path) -> None:
        if f"step-{BESIDE_STEP}-" in directory.name:
            assert made.wait(60.0) and threading.current_thread().name == "learner-0.checkpoint"
            die()
        settle(directory)

    LearnerComponent.on_step = note
    return settle_or_die


def main(kind: str, run_dir: str, point: str | None = None) -> None:
    ignored = os.environ.get("HANGUP") == "ignored"
    signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    if point is not None:
        owner, name = POINTS[point]
        found = getattr(owner, name)
        assert callable(found)
        setattr(owner, name, die_beside(found) if point.endswith("beside the training") else die)
    tiny: Callable[[Any], Any] = tiny_language if kind == "language" else tiny_control
    changes = {"overseer": {"checkpoint_every": 3}} if point and point.endswith("beside the training") else {}
    summary = train(tiny({"steps": 100_000, **changes}), run_dir, quiet=True)
    sys.exit(0 if summary.complete else 130)


if __name__ == "__main__":
    main(*sys.argv[1:])
