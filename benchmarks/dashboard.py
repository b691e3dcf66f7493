"""The dashboard on a large synthetic run: how fast it indexes, answers and scrolls, and what that takes.

    python -m benchmarks.dashboard [--rollouts 1000000] [--updates 50000] [--metrics 200] [--folder FOLDER]

Makes a run directory by the public formats (kept in FOLDER, if one is named, for the next time): groups of eight
rollouts of eight tokens in parts of 50,000, a fate for each, and metrics. No batches: advantages are not indexed. Then
a dashboard in a process of its own reads it, in a cache of its own. Measured: rollouts indexed per second and bytes of
the index for each; once that is done, seconds from the start of a browser's visit to the first curve, the 95th
percentile of filters that were not asked before, the longest frame while a list scrolls, and the server's largest
resident memory. On a machine with other work the server's processor seconds, printed beside, say more than the clock.
Without a browser (extra `dashboard-test` and chromium) what needs one is left out, and said. Exits with 1 where a mark
is missed.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np
import psutil
import pyarrow as pa

from benchmarks.marks import Marks
from penstock.rundir import RunDirectory
from penstock.rundir.parquet import write_parquet
from penstock.rundir.rollout_rows import ROLLOUT_SCHEMA

PART_ROLLOUTS, GROUP, TOKENS = 50_000, 8, 8
LIMIT_S = 900.0


def make_run(path: Path, rollouts: int, updates: int, metrics: int) -> None:
    """Writes the run; groups are trained in the order of their numbers."""
    directory = RunDirectory.create(path, {"model": {"tokenizer": None, "path": None}})
    directory.rollouts.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    for start in range(0, rollouts, PART_ROLLOUTS):
        table = part(rng, start, min(PART_ROLLOUTS, rollouts - start), rollouts, updates)
        write_parquet(directory.rollouts / f"part-{start:012d}.parquet", table)
    with directory.fates_path.open("w") as file:
        for number in range(rollouts):
            step = number * updates // rollouts
            fate = "trained" if number % 50 else "stale_step"
            file.write(
                f'{{"rollout_id": "cats-0-{number // GROUP}/{number % GROUP}", "fate": "{fate}", "reason": '
                f'"{fate} by update {step}", "step": {step}, "lineage": 0, "time": {1e9 + number}}}\n'
            )
    names = [f"train/metric_{number}" for number in range(metrics - 1)] + ["train/reward_mean"]
    with directory.metrics_path.open("w") as file:
        for step in range(1, updates + 1):
            values = (rng.random(metrics) + step / updates).round(6).tolist()
            file.write(json.dumps({"step": step, "time": 1e9 + step, **dict(zip(names, values, strict=True))}) + "\n")
    directory.events_path.write_text('{"time": 1e9, "event": "start", "step": 0}\n')
    directory.write_status({"state": "finished", "step": updates, "steps": updates, "lineage": 0})


def part(rng: np.random.Generator, start: int, count: int, rollouts: int, updates: int) -> pa.Table:
    """Rows of one file."""
    numbers = np.arange(start, start + count)
    groups = [f"cats-0-{number // GROUP}" for number in numbers.tolist()]
    offsets = pa.array(np.arange(0, count * TOKENS + 1, TOKENS), pa.int32())
    flat = count * TOKENS
    steps = np.maximum(numbers * updates // rollouts - rng.integers(0, 3, count), 0).astype(np.int32)
    values = {
        "schema_version": np.ones(count, np.int32), "group_id": groups,
        "group_key": [f"cats:{n // GROUP % 997}" for n in numbers],
        "rollout_id": [f"{group}/{number % GROUP}" for group, number in zip(groups, numbers.tolist(), strict=True)],
        "lesson_id": ["cats"] * count, "env_name": ["cats"] * count, "env_example_id": ["7"] * count,
        "worker_id": [f"rollout-{n // GROUP % 4}" for n in numbers], "timestamp": 1e9 + numbers * 1.0,
        "lineage": np.zeros(count, np.int32),
        "weight_step": steps, "newest_weight_step": steps, "episode_reward": rng.random(count).round(3),
        "finish_reason": np.where(rng.random(count) < 0.1, "length", "stop").tolist(),
    }  # fmt: skip
    lists = {
        "prompt_tokens": np.ones(flat, np.int32), "response_tokens": rng.integers(0, 300, flat).astype(np.int32),
        "response_logprobs": -rng.random(flat).astype(np.float32), "token_rewards": np.zeros(flat, np.float32),
        "response_mask": np.ones(flat, np.bool_), "response_weight_steps": np.repeat(steps, TOKENS),
    }  # fmt: skip
    columns = []
    for field in ROLLOUT_SCHEMA:
        if field.name in values:
            columns.append(pa.array(values[field.name], field.type))
        elif field.name in lists:
            columns.append(pa.ListArray.from_arrays(offsets, pa.array(lists[field.name])).cast(field.type))
        elif field.name == "decoding":
            columns.append(
                pa.array(
                    [{"temperature": 1.0, "max_output_tokens": TOKENS, "stop_token_ids": [], "stop_strings": []}]
                    * count,
                    field.type,
                )
            )
        elif field.name == "timings":
            columns.append(pa.array([[("generate_s", 0.5)]] * count, field.type))
        else:
            columns.append(pa.array([None if field.nullable else []] * count, field.type))
    return pa.Table.from_arrays(columns, schema=ROLLOUT_SCHEMA)


class Watched:
    """A dashboard in a process of its own."""

    def __init__(self, run: Path, cache: Path) -> None:
        command = [sys.executable, "-m", "penstock", "dashboard", str(run), "--port", "0"]
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        self.url = re.findall(r"http://[0-9.:]+", self.process.stdout.readline())[0]

    def ask(self, path: str, **words: str | int | float) -> dict:
        answer = httpx.get(f"{self.url}/api/{path}", params=words, timeout=60)
        answer.raise_for_status()
        return answer.json()

    def wait_until_read(self, name: str) -> float:
        """Seconds until all of a run is in the index."""
        begun = time.monotonic()
        while self.ask(f"runs/{name}")["progress"]:
            if time.monotonic() - begun > LIMIT_S:
                raise TimeoutError(f"the index was not ready within {LIMIT_S:g} s")
            time.sleep(0.2)
        return time.monotonic() - begun

    def processor_s(self) -> float:
        """Seconds of all cores so far."""
        spent = psutil.Process(self.process.pid).cpu_times()
        return spent.user + spent.system

    def most_bytes(self) -> int:
        """Its largest resident memory so far, as the kernel keeps it."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(re.findall(r"VmHWM:\s+(\d+)", status)[0])

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def filter_seconds(watched: Watched, name: str, updates: int) -> list[float]:
    """Of filters that differ each time, so that no list is kept from before."""
    found = []
    for number in range(24):
        words: dict[str, str | int | float] = [
            {"state": "stale_step", "min_reward": number / 100}, {"min_reward": 0.5 + number / 100, "order": "reward"},
            {"from_step": number * updates // 30, "to_step": (number + 3) * updates // 30},
            {"finish": "length", "max_reward": 0.9 - number / 100}, {"search": f"-{number}7"},
            {"min_staleness": 2, "worker": f"rollout-{number % 4}", "min_reward": number / 1000},
        ][number % 6]  # fmt: skip
        begun = time.monotonic()
        watched.ask(f"runs/{name}/groups", limit=100, **words)
        found.append(time.monotonic() - begun)
    return found


FRAMES = """async () => {
  const list = document.querySelector('.virtual');
  let longest = 0, last = performance.now();
  for (let at = 0; at < 120; at++) {
    list.scrollTop += 240;
    await new Promise(requestAnimationFrame);
    longest = Math.max(longest, performance.now() - last);
    last = performance.now();
  }
  return longest;
}"""


def browser_numbers(url: str, name: str) -> tuple[float, float] | None:
    """Seconds to the first curve, and the longest frame in milliseconds; None without a browser."""
    chromium = os.environ.get("PENSTOCK_CHROMIUM") or shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        chromium = None
    if chromium is None:
        return None
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto("about:blank")
        begun = time.monotonic()
        page.goto(f"{url}/#/run/{name}")
        page.locator("canvas").first.wait_for()
        painted = time.monotonic() - begun
        page.goto(f"{url}/#/run/{name}/groups")
        page.locator("a.vrow").first.wait_for()
        frame = page.evaluate(FRAMES)
        browser.close()
    return painted, frame


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument("--updates", type=int, default=50_000)
    parser.add_argument("--metrics", type=int, default=200)
    parser.add_argument("--folder", type=Path, help="keeps the run for the next time")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="penstock-dashboard-") as temporary:
        folder = options.folder or Path(temporary)
        run = folder / f"run-{options.rollouts}-{options.updates}-{options.metrics}"
        if not run.exists():
            print(f"making {run}", flush=True)
            make_run(run, options.rollouts, options.updates, options.metrics)
        return measure(run, Path(temporary) / "cache", options)


def measure(run: Path, cache: Path, options: argparse.Namespace) -> int:
    marks, watched = Marks(), Watched(run, cache)
    try:
        seconds = watched.wait_until_read(run.name)
        indexing = watched.processor_s()
        size = sum(file.stat().st_size for file in (cache / "penstock").iterdir())
        filters = filter_seconds(watched, run.name, options.updates)
        asking = (watched.processor_s() - indexing) / len(filters)
        seen = browser_numbers(watched.url, run.name)
        for page in ("", "/reward", "/ledger", "/choices", "/timeline", "/lessons", "/fleet", "/update?step=400"):
            watched.ask(f"runs/{run.name}{page}")
        watched.ask("runs")
        most_bytes = watched.most_bytes()
    finally:
        watched.end()
    size_of_it = f"{options.rollouts:,} rollouts, {options.updates:,} updates × {options.metrics} metrics"
    print(f"{size_of_it} read in {seconds:.1f} s")
    print(f"of the processor: {indexing:.1f} s to start and read all, {1000 * asking:.0f} ms a filter on average")
    marks.at_least("rollouts per second, metrics among them", options.rollouts / seconds, 50_000)
    marks.at_most("bytes of the index a rollout", size / options.rollouts, 60)
    marks.at_most("filters, 95th percentile, ms", 1000 * float(np.quantile(filters, 0.95)), 300)
    if seen is None:
        print("no browser here: first paint and scrolling were not measured")
    else:
        marks.at_most("first curve after the visit began, s", seen[0], 1.0)
        marks.at_most("longest frame while scrolling, ms", seen[1], 50)
    marks.at_most("largest resident memory of the server, MB", most_bytes / 1e6, 400)
    print("\n".join(marks.lines))
    return int(marks.missed > 0)


if __name__ == "__main__":
    sys.exit(main())
