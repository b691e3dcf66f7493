"""A real checkpoint trained through vLLM, its server killed in the middle; then the same by Penstock's own engine.

    python -m benchmarks.external --vllm PATH [--updates 40] [--seeds 3] [--weights lora directory] [--folder DIR]
    python -m benchmarks.external --vllm PATH --staleness 4 --updates 8 …
    python -m benchmarks.external --vllm PATH --model DIR --problems FILE --rank 0 --weights directory …

By default SmolLM2-135M-Instruct (`make checkpoints/SmolLM2-135M-Instruct/config.json`) with an adapter, on the shipped
word problems, float32, two groups of two short answers an update, staleness budget 1, with each of some seeds. `--vllm`
names the executable of an environment of its own, `--weights` how versions get there: as adapters by name, or as
directories. In the first run through vLLM its process is killed with SIGKILL while it answers requests, when half of
the updates are made. Runs that have ended in `--folder` are not made again, so a campaign that was cut off goes on
where it was; what was begun there begins anew.

Said of each run: updates, how often its server was started and named as failed, the largest parity KL and how many
versions had no evidence of it, rollouts whose digests were not verified, the share of tensors that were compared byte
for byte, whether the ledger closes and the files keep the rules of `benchmarks.chaos.invariants` (no rollout trained on
weights of no version), mean reward, and processor seconds with all processes that the run started. Exits with 1 where a
mark is missed. Updates of one run follow from one another, so that how far they scatter says nothing of what a second
run does: rewards are within noise where the mean rewards of the engines' runs differ by no more than those of equal
runs would nineteen times in twenty (Student's t of their scatter between seeds).
"""

import argparse
import json
import math
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.chaos.invariants import books, violations
from benchmarks.marks import Marks
from benchmarks.updates import update_rows
from penstock.replay import RolloutStore
from penstock.rundir import RunDirectory, read_events, read_status
from penstock.types.intervals import t_quantile

CHECKPOINT = Path("checkpoints/SmolLM2-135M-Instruct")
PARITY_KL = {"float32": 1e-6, "bfloat16": 1e-2}
"""Most of an update, by dtype."""
LIMIT_S = 3600.0
"""Longest wait for one run."""
POLL_S = 0.2
CPU_SHARE = "0.2"
"""Of this machine's memory, for vLLM where it has no card: weights, and a cache for a few short answers."""
PROMPT = "{question} Answer with #### and the number alone: #### 12"


def overrides(given: argparse.Namespace) -> list[str]:
    """What makes the recipe as small as asked for; the same for every engine."""
    lesson, length = "curriculum.lessons.gsm8k", given.prompt_tokens + given.tokens
    lora = json.dumps({"rank": given.rank} if given.rank else None)
    problems = [f"{lesson}.environment.env_args.path={given.problems}"] if given.problems else []
    return [
        "gsm8k_smollm2", f"steps={given.updates}", f"model.path={given.model}", f"model.dtype={given.dtype}",
        f"model.lora={lora}", f"{lesson}.environment.env_args.prompt_format={json.dumps(PROMPT)}", *problems,
        f"{lesson}.sampling_params.n_generations_per_prompt={given.samples}",
        f"{lesson}.sampling_params.max_output_tokens={given.tokens}", "curriculum.eval_n_examples=2",
        f"curriculum.eval_frequency={given.updates}", f"inference.max_slots={given.groups * given.samples}",
        f"inference.max_seq_len={length}", f"replay.groups_per_batch={given.groups}",
        f"replay.staleness_budget={given.staleness}", f"learner.row_length={length}",
        f"learner.micro_batch_rows={given.rows}", f"learner.optimizer.learning_rate={given.learning_rate}",
        f"overseer.checkpoint_every={given.updates}", "learner.parity.wait_s=60",
        "learner.parity.canary_prompts=4", "learner.parity.canary_tokens=8",
    ]  # fmt: skip


def through_vllm(given: argparse.Namespace, weights: str) -> list[str]:
    """What makes a vLLM server answer."""
    words = ["--gpu-memory-utilization", given.vllm_share or CPU_SHARE]
    words += [] if given.vllm_share else ["--enforce-eager"]
    external = {"launch": [given.vllm, "serve", "{model}", *words], "weights": weights}
    return ["inference.engine=vllm", f"inference.external={json.dumps(external)}"]


class Measured(NamedTuple):
    """One run that has ended.

    Attributes:
        updates: Lines of its metrics.
        events: Of its log.
        status: Its last.
        faults: Rules that its files break, and why its ledger does not close.
        killed_running: Requests that its server had when it was killed; None where it was not.
        cpu_s: Processor seconds of all that it started.
    """

    updates: list[dict[str, Any]]
    events: list[dict[str, Any]]
    status: Mapping[str, Any]
    faults: list[str]
    killed_running: float | None
    cpu_s: float

    def named(self, event: str) -> list[dict[str, Any]]:
        return [each for each in self.events if each["event"] == event]

    def numbers(self, name: str) -> list[float]:
        return [float(line[name]) for line in self.updates if name in line]

    @property
    def reward(self) -> float:
        """Mean over updates."""
        return statistics.fmean(self.numbers("train/reward_mean"))


def descendants(pid: int) -> Iterator[int]:
    """Processes that a process has started, and those that these have."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except OSError:
            continue
        for child in children:
            yield child
            yield from descendants(child)


def server_of(pid: int, word: str) -> int | None:
    """The process that a run's server is: the child of the one that guards it, which has its words among its own.

    Args:
        pid: The run's, or that of whatever else started the server.
        word: Of the server's command, such as its executable or port.
    """
    for each in descendants(pid):
        try:
            words = Path(f"/proc/{each}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[1:2] == [b"-c"] and word.encode() in words:
            return next(descendants(each), None)
    return None


def running_at(url: str) -> float:
    """Requests that a server answers at the moment, by its own word."""
    try:
        page = httpx.get(f"{url}/metrics", timeout=5.0, trust_env=False).text
    except httpx.HTTPError:
        return 0.0
    lines = [line for line in page.splitlines() if line.startswith("vllm:num_requests_running")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def run(words: Sequence[str], folder: Path, kill_after: int) -> Measured:
    """Trains in a process of its own; kills its server as soon as it answers something, `kill_after` updates on.

    One that ended there before is read, and not made again.

    Raises:
        RuntimeError: it failed, or did not end.
    """
    ended = folder.with_suffix(".json")
    if ended.exists():
        return read_run(folder, **json.loads(ended.read_text()))
    shutil.rmtree(folder, ignore_errors=True)
    before = _cpu_s()
    command = [sys.executable, "-m", "penstock", "train", *words, "--quiet", f"--run-dir={folder}"]
    killed: float | None = None
    with folder.with_suffix(".out").open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        try:
            limit = time.monotonic() + LIMIT_S
            while process.poll() is None and time.monotonic() < limit:
                if kill_after and killed is None and update_rows(folder)[kill_after - 1 :]:
                    killed = kill_answering(process.pid, folder)
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    if process.returncode != 0:
        said_at_last = folder.with_suffix(".out").read_text()
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {said_at_last}")
    ended.write_text(json.dumps({"killed_running": killed, "cpu_s": _cpu_s() - before}))
    return read_run(folder, **json.loads(ended.read_text()))


def read_run(folder: Path, killed_running: float | None, cpu_s: float) -> Measured:
    """A run that has ended."""
    directory = RunDirectory(folder)
    found = books(RolloutStore(directory).history())
    faults = violations(directory) + ([] if found.closed else [f"the ledger does not close: {found.states}"])
    status = read_status(folder / "status.json") or {}
    events = list(read_events(folder / "events.jsonl"))
    return Measured(update_rows(folder), events, status, faults, killed_running, cpu_s)


def kill_answering(pid: int, folder: Path) -> float | None:
    """Kills a run's server with SIGKILL, if it answers something.

    Args:
        pid: Of the run.
        folder: Its directory.

    Returns:
        How many requests it had; None where there is no server yet, or it has none.
    """
    urls = [each["url"] for each in read_events(folder / "events.jsonl") if each["event"] == "external_engine"]
    running = running_at(urls[-1]) if urls else 0.0
    server = server_of(pid, urls[-1].rpartition(":")[2]) if running else None
    if server is None:
        return None
    os.kill(server, signal.SIGKILL)
    return running


def _cpu_s() -> float:
    """Of children that have ended, and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def show(name: str, found: Measured) -> None:
    """One run, in a few lines."""
    parity, ledger = found.numbers("train/parity_kl") or [math.nan], found.status.get("ledger", {})
    started, running = len(found.named("external_engine")), found.killed_running
    print(f"\n{name}: {len(found.updates)} updates, {found.cpu_s:.0f} processor seconds")
    if started:
        killed = "" if running is None else f"; one killed while it answered {running:g} requests"
        print(f"  servers started: {started}{killed}")
    for failure in found.named("external_engine_failed"):
        print(f"  named: {failure['reason'][:160]}")
    print(f"  parity KL at most {max(parity):.2e}, median {statistics.median(parity):.2e}, of {len(parity)} updates")
    print(f"  versions without evidence: {max(found.numbers('train/parity_unchecked'), default=math.nan):g}")
    print(f"  rollouts not verified: {max(found.numbers('replay/unverified'), default=math.nan):g}")
    if shares := found.numbers("inference/proven_bytewise"):
        print(f"  tensors compared byte for byte: {min(shares):.3f}")
    print(f"  ledger {dict(ledger)}; rules broken: {found.faults or 'none'}")
    print(f"  reward {found.reward:.4f}; seconds per update {_seconds(found):.2f}")


def _list(numbers: Sequence[float]) -> str:
    return " ".join(f"{number:.4f}" for number in numbers)


def _seconds(found: Measured) -> float:
    times = [line["time"] for line in found.updates]
    return statistics.median([later - earlier for earlier, later in zip(times, times[1:], strict=False)] or [math.nan])


def apart(theirs: Sequence[float], ours: Sequence[float]) -> tuple[float, float]:
    """How far means of runs are apart, and how far those of equal runs would be at most nineteen times in twenty.

    Args:
        theirs: Of one engine's runs, which scatter as the other's do; two or more.
        ours: Of the other's.
    """
    freedom = len(theirs) + len(ours) - 2
    squares = sum((len(each) - 1) * statistics.variance(each) for each in (theirs, ours))
    error = math.sqrt(squares / freedom * (1 / len(theirs) + 1 / len(ours)))
    return abs(statistics.fmean(theirs) - statistics.fmean(ours)), t_quantile(freedom) * error


def judge(marks: Marks, name: str, found: Measured, given: argparse.Namespace, killed: bool = True) -> None:
    """The marks of a run through vLLM, of which the server was killed in the middle or not."""
    kl = PARITY_KL[given.dtype]
    marks.at_least(f"{name}: updates", len(found.updates), given.updates)
    if killed:
        marks.at_least(f"{name}: requests running when it was killed", found.killed_running or 0.0, 1)
        marks.at_least(f"{name}: failures named", len(found.named("external_engine_failed")), 1)
    marks.at_most(f"{name}: parity KL", max(found.numbers("train/parity_kl"), default=math.inf), kl)
    unchecked = max(found.numbers("train/parity_unchecked"), default=math.inf)
    marks.at_most(f"{name}: versions without evidence", unchecked, int(killed))
    marks.at_most(f"{name}: rollouts not verified", max(found.numbers("replay/unverified"), default=math.inf), 0)
    marks.at_most(f"{name}: rules that its files break", len(found.faults), 0)


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="executable of vLLM, in an environment of its own")
    parser.add_argument("--vllm-share", help="of a card, for vLLM; without one it compiles nothing, as on CPUs")
    parser.add_argument("--weights", nargs="+", choices=["lora", "directory"], default=["lora"])
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    parser.add_argument("--problems", type=Path, help="JSONL with question and answer; by default those that ship")
    parser.add_argument("--dtype", choices=list(PARITY_KL), default="float32")
    parser.add_argument("--rank", type=int, default=8, help="of the adapter; 0 trains the whole model")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--memory-fraction", help="of the card, for JAX")
    for name, default, meaning in (
        ("updates", 40, "that are made"), ("seeds", 3, "of runs of each engine; 2 or more"),
        ("staleness", 1, "updates by which what is trained may be old"),
        ("groups", 2, "of an update"), ("samples", 2, "of a group"),
        ("prompt-tokens", 80, "room for a prompt"), ("tokens", 16, "most of an answer"),
        ("rows", 4, "of a micro-batch"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=meaning)
    parser.add_argument("--folder", type=Path, help="where the runs stay, and go on; by default they are removed")
    given = parser.parse_args(words)
    if not (given.model / "config.json").is_file():
        parser.error(f"{given.model} holds no model; make {CHECKPOINT}/config.json makes the default one")
    if given.rank == 0 and "lora" in given.weights:
        parser.error("--rank 0 trains the whole model, which goes by --weights directory")
    if given.seeds < 2:
        parser.error(f"--seeds is {given.seeds}: how far equal runs are apart takes 2 or more")
    return given


def main(words: Sequence[str] | None = None) -> int:
    given = parsed(words)
    if given.memory_fraction:
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = given.memory_fraction
    marks, common = Marks(), overrides(given)
    with tempfile.TemporaryDirectory() as passing:
        folder = given.folder or Path(passing)
        folder.mkdir(parents=True, exist_ok=True)
        rewards: dict[str, list[float]] = {}
        for seed in range(given.seeds):
            asked = [*common, f"seed={seed}"]
            for weights in given.weights:
                name, kill_after = f"vLLM, {weights}", 0 if seed else max(1, given.updates // 2)
                words_of = [*asked, *through_vllm(given, weights)]
                found = run(words_of, folder / f"{weights}-{seed}", kill_after)
                show(f"{name}, seed {seed}", found)
                judge(marks, f"{name}, seed {seed}", found, given, bool(kill_after))
                rewards.setdefault(name, []).append(found.reward)
            builtin = run(asked, folder / f"builtin-{seed}", 0)
            show(f"Penstock, seed {seed}", builtin)
            rewards.setdefault("Penstock", []).append(builtin.reward)
        ours = rewards.pop("Penstock")
        for name, theirs in rewards.items():
            between, noise = apart(theirs, ours)
            print(f"\n{name}: rewards {_list(theirs)}, Penstock's {_list(ours)}")
            print(f"  {between:.4f} apart; of equal runs at most {noise:.4f} nineteen times in twenty")
            marks.at_most(f"{name}: 1,000 times how far rewards are apart", 1e3 * between, 1e3 * noise)
    return marks.report("\n")


if __name__ == "__main__":
    sys.exit(main())
