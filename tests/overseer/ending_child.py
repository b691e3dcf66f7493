"""A run in a process of its own, to be ended: `python -m tests.overseer.ending_child KIND RUN_DIR [POINT]`.

Trains 100,000 tiny updates of a language or control policy. At POINT, if one is named, it kills itself by SIGKILL.
SIGHUP is as the variable HANGUP says: `default`, or `ignored` as under nohup.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from penstock.learner import checkpoints
from penstock.overseer import train, training
from penstock.overseer.run import Run
from penstock.rundir import RunDirectory
from tests.overseer.conftest import tiny as tiny_language
from tests.overseer.test_fleet_training import tiny as tiny_control

POINTS: dict[str, tuple[Any, str]] = {
    "before the config": (RunDirectory, "write_config"),
    "before the log": (training, "RunLog"),
    "in the first evaluation of a language policy": (Run, "evaluate"),
    "in the first evaluation of a control policy": (Run, "evaluate"),
    "in the first checkpoint": (checkpoints, "_settle"),
}


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(kind: str, run_dir: str, point: str | None = None) -> None:
    ignored = os.environ.get("HANGUP") == "ignored"
    signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    if point is not None:
        owner, name = POINTS[point]
        assert callable(getattr(owner, name))
        setattr(owner, name, die)
    tiny: Callable[[Any], Any] = tiny_language if kind == "language" else tiny_control
    summary = train(tiny({"steps": 100_000}), run_dir, quiet=True)
    sys.exit(0 if summary.complete else 130)


if __name__ == "__main__":
    main(*sys.argv[1:])
