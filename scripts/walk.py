#!/usr/bin/env python3
"""Counts the files of Penstock that one rollout, or one weight version, passes through, by running it.

    .venv/bin/python scripts/walk.py                          # `penstock train cats steps=4`, profiled
    .venv/bin/python scripts/walk.py --transport arrow_flight # one publish, one fetch
    .venv/bin/python scripts/walk.py --list --check           # name the files; exit 1 beyond a limit

To be started with the Python of Penstock's environment, from the root of a checkout (or with `--src`). The run is
written into a temporary directory, which is deleted. It takes one to four minutes on two cores.

What is printed:
  executed    files of which anything ran in this process, an import included; by package; and which of them belong to
              simulators (`fleet/`, `model/control/`): a language run needs none of them
  way         files reachable from the six entry points of a rollout's way (`WAY`), along calls that happened

Limits, known and accepted, so that numbers stay comparable:
  - the union over a whole run, so an upper bound for one rollout; imports do not count as calls here;
  - a call is seen where both frames are Penstock's: what is called back by a library (jitted functions while JAX
    traces them, a generator inside a context manager, a sort key) starts no arrow. The numbers are therefore also
    lower bounds for what a reader has to open; they are for comparison with earlier numbers of this very tool;
  - other processes (reward workers, simulators, Ray) are not seen;
  - threads started before the profiler, and C code, are not seen.
Where an entry point is renamed, `WAY` takes the new name: the tool fails when one of them never ran.
"""

import argparse
import collections
import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

WAY: dict[str, tuple[tuple[str, str], ...]] = {
    "engine turn": (("inference/", "InferenceEngine._step"),),
    "group on a worker": (("rollout/", "RolloutWorker._run_group"),),
    "receiver": (("replay/", "RolloutReceiver.run"),),
    "batch loader": (("replay/", "ReplayDataLoader._run"),),
    "update": (("learner/", "Learner.update"),),
    "after the update": (("replay/", "PacedReplayBuffer.finish_update"), ("replay/", "ReplayBuffer.finish_update")),
}
"""Entry points: (package, qualified name); of several the first that ran is taken."""

LIMITS = {"way files": 45, "way files of replay/": 12, "fleet and control files": 0, "transport files": 9}
"""What the redesign of the source is to reach; every number is `at most`."""


class Calls:
    """Which functions of one source tree ran, and which called which. A profile function for every thread."""

    def __init__(self, src: Path) -> None:
        self._root = str(src) + os.sep
        self._names: dict[CodeType, str | None] = {}
        self.functions: set[str] = set()
        self.edges: set[tuple[str, str]] = set()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """See `sys.setprofile`."""
        if event != "call" or (me := self._name(frame.f_code)) is None:
            return
        self.functions.add(me)
        back = frame.f_back
        if back is not None and (caller := self._name(back.f_code)) is not None:
            self.edges.add((caller, me))

    def _name(self, code: CodeType) -> str | None:
        try:
            return self._names[code]
        except KeyError:
            file = code.co_filename
            name = f"{file[len(self._root) :]}:{code.co_qualname}" if file.startswith(self._root) else None
            self._names[code] = name
            return name

    def start(self) -> None:
        """Watches this thread and every thread that is started from now on."""
        threading.setprofile(self)
        sys.setprofile(self)

    def stop(self) -> None:
        """Watches no further threads."""
        sys.setprofile(None)
        threading.setprofile(None)


def reachable(starts: set[str], edges: set[tuple[str, str]]) -> set[str]:
    """Functions that can be reached along calls, modules' bodies apart."""
    callees: dict[str, set[str]] = collections.defaultdict(set)
    for caller, callee in edges:
        if not callee.endswith(":<module>"):
            callees[caller].add(callee)
    seen, left = set(starts), list(starts)
    while left:
        for callee in callees[left.pop()] - seen:
            seen.add(callee)
            left.append(callee)
    return seen


def files_of(functions: set[str]) -> list[str]:
    """Their files, sorted."""
    return sorted({name.partition(":")[0] for name in functions})


def by_package(files: list[str]) -> dict[str, int]:
    """Files by package; what lies beside the packages under `.`."""
    return dict(sorted(collections.Counter(f.split("/")[0] if "/" in f else "." for f in files).items()))


def entry_points(functions: set[str]) -> set[str]:
    """Today's names of `WAY`; ends the program when one of them never ran."""
    found: set[str] = set()
    for step, alternatives in WAY.items():
        for folder, qualname in alternatives:
            matches = {f for f in functions if f.startswith(folder) and f.partition(":")[2] == qualname}
            if matches:
                found |= matches
                break
        else:
            sys.exit(f"walk: no entry point for «{step}» ran: {alternatives}; add its present name to WAY")
    return found


def run_training(calls: Calls, recipe: str, steps: int) -> dict[str, Any]:
    """Profiles `penstock train`, and counts."""
    from contextlib import redirect_stdout

    with tempfile.TemporaryDirectory(prefix="penstock-walk-") as folder, redirect_stdout(sys.stderr):
        calls.start()
        try:
            from penstock.cli import main

            code = main(["train", recipe, f"steps={steps}", "--run-dir", str(Path(folder) / "run")])
        except SystemExit as end:
            code = end.code
        finally:
            calls.stop()
    if code:
        sys.exit(f"walk: the run failed with {code}")
    executed = files_of(calls.functions)
    way = reachable(entry_points(calls.functions), calls.edges)
    way_files = files_of(way)
    pairs = {(a.partition(":")[0], b.partition(":")[0]) for a, b in calls.edges if a in way and b in way}
    control = [f for f in executed if f.startswith(("fleet/", "model/control"))]
    named = [f for f in executed if f.startswith("fleet/") or any(w in f for w in ("fleet_", "control", "fragment"))]
    return {
        "executed files": len(executed),
        "executed by package": by_package(executed),
        "fleet and control files": len(control),
        "files named fleet, control or fragment": len(named),
        "way functions": len(way),
        "way files": len(way_files),
        "way by package": by_package(way_files),
        "way files of replay/": sum(f.startswith("replay/") for f in way_files),
        "way arrows between files": len([1 for a, b in pairs if a != b]),
        "lists": {"way": way_files, "fleet and control": control, "executed": executed},
    }


def run_transport(calls: Calls, kind: str) -> dict[str, Any]:
    """Profiles one publish and one fetch of two small arrays, and counts; after the imports."""
    import numpy as np

    from penstock.types import WeightVersion
    from penstock.weights import open_broadcaster, open_client
    from penstock.weights.config import WeightsConfig

    config, token = WeightsConfig(transport=kind), "t" * 64
    arrays = {"w": np.ones((4, 4), np.float32), "b": np.zeros(4, np.float32)}
    with tempfile.TemporaryDirectory(prefix="penstock-walk-") as folder:
        broadcaster = open_broadcaster(config, "walk", token, folder)
        calls.start()
        broadcaster.publish(WeightVersion(0, 1), arrays)
        client = open_client(broadcaster.endpoint(), config, token, "client-0")
        version = client.wait_for(None, 30.0)
        assert version is not None and (client.fetch(version)["w"] == 1).all()
        calls.stop()
        client.close()
        broadcaster.close()
    functions = {f for f in calls.functions if not f.endswith(":<module>")}
    files = [f for f in files_of(functions) if f.startswith("weights/")]
    return {
        "transport": kind,
        "transport functions": len([f for f in functions if f.startswith("weights/")]),
        "transport files": len(files),
        "lists": {"transport": files},
    }


def show(numbers: dict[str, Any], with_lists: bool) -> None:
    """As text."""
    for name, value in numbers.items():
        if name == "lists":
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{key} {count}" for key, count in value.items())
        limit = f"   (to be at most {LIMITS[name]})" if name in LIMITS else ""
        print(f"{name:40} {value}{limit}")
    for name, files in numbers["lists"].items() if with_lists else ():
        print(f"\n{name}:", *files, sep="\n  ")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--src", type=Path, default=Path("src/penstock"), help="the package (default: src/penstock)")
    parser.add_argument("--recipe", default="cats", help="a language recipe (default: cats)")
    parser.add_argument("--steps", type=int, default=4, help="updates (default: 4)")
    parser.add_argument("--transport", help="profile a transport instead: arrow_flight, shared_memory or checkpoint")
    parser.add_argument("--list", action="store_true", help="name the files too")
    parser.add_argument("--json", action="store_true", help="print JSON, with the lists")
    parser.add_argument("--check", action="store_true", help="exit 1 where a number is beyond its limit")
    options = parser.parse_args()
    src = options.src.resolve()
    sys.path.insert(0, str(src.parent))  # this tree, not an installed one
    sys.dont_write_bytecode = True
    calls = Calls(src)
    if options.transport:
        numbers = run_transport(calls, options.transport)
    else:
        numbers = run_training(calls, options.recipe, options.steps)
    if options.json:
        print(json.dumps(numbers, indent=1))
    else:
        show(numbers, options.list)
    beyond = [name for name, limit in LIMITS.items() if numbers.get(name, 0) > limit]
    if options.check and beyond:
        print("beyond the limit:", ", ".join(beyond), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
