"""Runs one measurement in a process of its own, reads its JSON line, and leaves nothing of it behind."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fleet.workloads import Workload

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).with_name("peers")
START_S = 150.0
"""Longest time for a process beside what it measures."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A script, the modules that it needs, in how many rounds it plays at most, and how long it may take to start."""

    script: str
    needs: tuple[str, ...]
    words: str
    most_rounds: int = 99
    start_s: float = START_S


PEERS = {
    "gymnasium": Peer("gymnasium_async.py", ("gymnasium", "numpy"), "Gymnasium AsyncVectorEnv, no policy"),
    "pipes": Peer("pipe_loop.py", ("gymnasium", "numpy"), "pipes and fixed batches"),
    "rllib": Peer("rllib_runners.py", ("ray.rllib", "torch"), "RLlib EnvRunners"),
    "envpool": Peer("envpool_batch.py", ("envpool",), "EnvPool (C++), no policy"),
    "sample_factory": Peer("sample_factory_loop.py", ("sample_factory", "torch"), "Sample Factory, trains", 1, 480.0),
}


class Failed(RuntimeError):
    """A measuring process failed; says how."""


def run(command: list[str], limit_s: float) -> dict[str, float]:
    """The last line of its output, which is JSON.

    Raises:
        Failed: it ended with an error, said nothing, or took too long.
    """
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise Failed(f"it took longer than {limit_s:g} s") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    lines = output.strip().splitlines()
    if process.returncode != 0 or not lines:
        raise Failed((errors.strip().splitlines() or [f"it ended with {process.returncode}"])[-1][:200])
    return json.loads(lines[-1])


def own(workload: Workload, seconds: float, warm_up_s: float) -> dict[str, float]:
    """Our fleet, with this Python."""
    command = [sys.executable, "-m", "benchmarks.fleet.own", workload.name, str(seconds), str(warm_up_s)]
    return run(command, START_S + seconds + warm_up_s)


def peer(name: str, python: str, workload: Workload, seconds: float, warm_up_s: float) -> dict[str, float]:
    """A peer with its Python."""
    play = {
        "simulators": [(some.id, some.kwargs, some.count) for some in workload.simulators],
        "seconds": seconds, "warm_up_s": warm_up_s, "envpool": workload.envpool,
    }  # fmt: skip
    command = [python, str(SCRIPTS / PEERS[name].script), json.dumps(play)]
    return run(command, PEERS[name].start_s + seconds + warm_up_s)


def pythons_of(environments: list[Path]) -> dict[str, str]:
    """For each peer the first environment's Python that has what it needs; a peer that is nowhere is left out."""
    found: dict[str, str] = {}
    for name, one in PEERS.items():
        asking = "import importlib.util, sys; sys.exit(any(importlib.util.find_spec(n) is None for n in sys.argv[1:]))"
        for environment in environments:
            python = str(environment / "bin" / "python")
            tops = [need.partition(".")[0] for need in one.needs]
            if subprocess.run([python, "-c", asking, *tops], timeout=START_S).returncode == 0:
                found[name] = python
                break
    return found
