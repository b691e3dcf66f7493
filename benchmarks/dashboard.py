"""The dashboard on a large synthetic run: how fast it indexes, answers and scrolls, and what that takes.

    python -m benchmarks.dashboard [--rollouts 1000000] [--updates 50000] [--metrics 200] [--folder FOLDER]

Makes a run directory by the public formats (kept in FOLDER, if one is named, for the next time): groups of eight
rollouts of eight tokens in parts of 50,000, one group in eight of two responses, a fate for each, metrics, and the
swaps of one engine. No batches: advantages are not indexed. Then a dashboard in a process of its own reads it, in a
cache of its own. Measured: rollouts indexed per second and bytes of the index for each; once that is done, seconds from
the start of a browser's visit to the frame with the first curve, by the page's own clock, the 95th percentile of
filters that were not asked before, the longest frame while a list scrolls, and the server's largest resident memory. On
a machine with other work the server's processor seconds, printed beside, say more than the clock. Without a browser
(extra `dashboard-test` and chromium) what needs one is left out, and said. Exits with 1 where a mark is missed.

    python -m benchmarks.dashboard --pace [--tiny] [--rounds 15] [--seconds 30] [--folder FOLDER]

How much slower a training run is while its page is open: `penstock train cats` with six million parameters (`--tiny`:
with the recipe's own, which makes four times as many updates and rollouts a second, and the dashboard takes a share of
the processor for each), with a learning rate so small that its answers stay what they are. Two runs of one seed, which
do the same (their updates' tokens are compared; synchronous, so that nothing depends on time), take turns: one goes on
while the other stands still, by as many updates, and of each round the seconds of the same updates are compared.
With: a dashboard that reads the run on, and a client that does what the run's page does in a browser (listens for news,
and asks for all that is drawn anew, at most every two seconds); the browser's own work is not counted, for it is mostly
another machine's. It stands still while its run does, and then looks at once, which counts. The interval is Student's
t over rounds.
"""

import argparse
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import psutil
import pyarrow as pa

from benchmarks.marks import Marks
from penstock.rundir import RunDirectory
from penstock.rundir.parquet import pairs_column, write_parquet
from penstock.rundir.rollout_rows import ROLLOUT_SCHEMA
from penstock.types.generation import STAGES
from penstock.types.intervals import t_quantile

SIX_MILLION = {
    "hidden_size": 256, "intermediate_size": 656, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
"""Of a run whose pace is measured."""
PART_ROLLOUTS, GROUP, TOKENS = 50_000, 8, 8
LIMIT_S = 900.0
REDRAW_S = 2.0
"""A page is drawn anew at most so often, as `app.js` does it."""
CURVES = 12
"""Of a run's page."""
WARM_UPDATES = 30
"""Of a run, before its pace is measured."""


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
    with directory.events_path.open("w") as file:
        file.write('{"time": 1e9, "event": "start", "step": 0}\n')
        for step in range(1, updates + 1):
            file.write(
                f'{{"time": {1e9 + step * rollouts / updates}, "event": "weights_served", "step": {step}, "component": '
                f'"inference-0", "incarnation": 0, "version": [0, {step}]}}\n'
            )
    directory.write_status({"state": "finished", "step": updates, "steps": updates, "lineage": 0})


SPENT = [*STAGES, "tool_s", "reward_s", "generate_s"]


def turns(rng: np.random.Generator, number: int) -> list[dict]:
    """A question and an answer; in one group of eight there is a tool between two answers, and seconds of each."""
    roles = ["user", "assistant", "tool", "assistant"] if number // GROUP % 8 == 0 else ["user", "assistant"]
    made = [
        {"role": role, "content": f"{role} of {number}", "start": 0, "stop": TOKENS, "timings": []} for role in roles
    ]
    if len(roles) > 2:
        for turn, stages in zip(made[1:], (STAGES, ["tool_s"], ["rest_s", *STAGES]), strict=True):
            turn["timings"] = list(zip(stages, rng.exponential(0.05, len(stages)).tolist(), strict=True))
    return made


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
            seconds = rng.exponential(0.1, (count, len(SPENT)))
            seconds[:, -1] += seconds[:, :-2].sum(1)
            columns.append(pairs_column([list(zip(SPENT, row, strict=True)) for row in seconds.tolist()]))
        elif field.name == "turns":
            columns.append(pa.array([turns(rng, number) for number in numbers.tolist()], field.type))
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
        self._client = httpx.Client(timeout=60)  # one for all: each reads every certificate of the machine

    def ask(self, path: str, **words: str | int | float) -> dict:
        answer = self._client.get(f"{self.url}/api/{path}", params=words)
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

    def stop(self) -> None:
        """It stands still until `go_on`."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

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


FIRST_CURVE = """
  globalThis.firstCurve = new Promise((done) => {
    const watch = new MutationObserver(() => {
      if (!document.querySelector('canvas')) return;
      watch.disconnect();
      requestAnimationFrame(() => {  // the frame that shows it; a message comes after it is drawn
        const drawn = new MessageChannel();
        drawn.port1.onmessage = () => done(performance.timeOrigin + performance.now());
        drawn.port2.postMessage(null);
      });
    });
    watch.observe(document, { childList: true, subtree: true });
  });
"""
"""By the page's own clock: Playwright asks for an element after 20, 50, 100, 100 and then every 500 ms."""


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
        page.add_init_script(FIRST_CURVE)
        begun = time.time()
        page.goto(f"{url}/#/run/{name}")
        painted = page.evaluate("() => firstCurve") / 1000 - begun
        page.locator("canvas").first.wait_for()
        page.goto(f"{url}/#/run/{name}/groups")
        page.locator("a.vrow").first.wait_for()
        frame = page.evaluate(FRAMES)
        browser.close()
    return painted, frame


class Page(threading.Thread):
    """What a run's page asks of the dashboard while it is open, from `start` to `close`."""

    def __init__(self, watched: Watched, name: str) -> None:
        super().__init__(daemon=True)
        self._watched, self._address, self._closing = watched, f"runs/{name}", threading.Event()
        self.drawn, self.reads, self.failure = 0, 0, ""

    def run(self) -> None:
        try:
            self._listen()
        except httpx.HTTPError as error:
            self.failure = repr(error)

    def _listen(self) -> None:
        last, drawn, version = -REDRAW_S, None, None
        with httpx.stream("GET", f"{self._watched.url}/api/{self._address}/stream", timeout=LIMIT_S) as stream:
            for line in stream.iter_lines():
                if self._closing.is_set():
                    return
                if not line.startswith("data:"):
                    continue
                news = json.loads(line.removeprefix("data:"))
                self.reads += version not in (None, version := news["version"])
                if time.monotonic() - last < REDRAW_S:
                    continue
                if drawn != (drawn := (news["version"], news["state"])):
                    last = time.monotonic()
                    self._draw()

    def wait_for_reads(self, count: int) -> None:
        """Until the dashboard has read the run on so many times more."""
        begun, before = time.monotonic(), self.reads
        while self.reads < before + count:
            if self.failure or time.monotonic() - begun > LIMIT_S:
                raise TimeoutError(f"the run was not read on: {self.failure or f'not within {LIMIT_S:g} s'}")
            time.sleep(0.05)

    def raise_if_failed(self) -> None:
        if self.failure:
            raise RuntimeError(f"the page was not drawn: {self.failure}")

    def _draw(self) -> None:
        page = self._watched.ask(self._address)
        self._watched.ask(f"{self._address}/curves", names=",".join(page["metrics"][:CURVES]), points=500)
        self._watched.ask(f"{self._address}/reward")
        self._watched.ask(f"{self._address}/findings")
        self.drawn += 1

    def close(self) -> None:
        self._closing.set()
        self.join(60)
        self.raise_if_failed()
        if not self.drawn:
            raise RuntimeError("the page was not drawn: no news came")


class Training:
    """A run that goes on until it is ended, after it was let go on: it stands still at first."""

    def __init__(self, path: Path, tiny: bool) -> None:
        own = [] if tiny else [f"model.init={json.dumps(SIX_MILLION)}"]
        words = [*own, "steps=1000000", "async=false", "learner.optimizer.learning_rate=1e-12"]
        words += ["curriculum.eval_frequency=0", "curriculum.micro_eval_frequency=0"]
        words += ["overseer.checkpoint_every=1000000"]
        command = [sys.executable, "-m", "penstock", "train", "cats", "--run-dir", str(path), *words]
        self.path, self._log = path, tempfile.TemporaryFile()
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        self.stop()
        self._offset = 0
        self.updates: list[tuple[float, float]] = []
        """Of each so far the moment (Unix seconds) when it was done, and its tokens."""

    def look(self) -> int:
        """How many updates there are."""
        if self.process.poll() is not None:
            self._log.seek(0)
            raise RuntimeError(f"the run ended: {self._log.read()[-2000:].decode(errors='replace')}")
        path = RunDirectory(self.path).metrics_path
        if path.exists() and path.stat().st_size > self._offset:
            with path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
            content = content[: content.rfind(b"\n") + 1]
            self._offset += len(content)
            lines = map(json.loads, content.splitlines())
            self.updates += [(line["time"], line["train/tokens"]) for line in lines if "train/loss" in line]
        return len(self.updates)

    def wait_for(self, updates: int) -> None:
        begun = time.monotonic()
        while self.look() < updates:
            if time.monotonic() - begun > LIMIT_S:
                raise TimeoutError(f"no {updates} updates within {LIMIT_S:g} s")
            time.sleep(0.2)

    def stop(self) -> None:
        """It stands still until `go_on`."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self.go_on()
        self.process.terminate()
        self.process.wait(120)
        self._log.close()


def measure_pace(folder: Path, cache: Path, rounds: int, seconds: float, tiny: bool) -> int:
    """Ratios of paces, round by round; see the module."""
    alone, observed = (Training(folder / f"pace-{os.getpid()}-{name}", tiny) for name in ("alone", "observed"))
    watched = None
    found: list[tuple[float, float]] = []
    spent = run_for = 0.0
    try:
        for run in (alone, observed):  # one after the other, each with all cores
            run.go_on()
            run.wait_for(WARM_UPDATES)
            run.stop()
        done = max(run.look() for run in (alone, observed))
        (begun, _), (ended, _) = alone.updates[WARM_UPDATES // 2], alone.updates[-1]
        window = max(10, round(seconds * (len(alone.updates) - 1 - WARM_UPDATES // 2) / (ended - begun)))
        watched = Watched(observed.path, cache)
        watched.wait_until_read(observed.path.name)
        page = Page(watched, observed.path.name)
        page.start()
        watched.stop()
        for number in range(rounds):
            for run in (alone, observed) if number % 2 == 0 else (observed, alone):
                run.go_on()
                run.wait_for(done + 1)  # the first has a pause in it
                before, since = watched.processor_s(), time.time()
                if run is observed:
                    watched.go_on()
                run.wait_for(done + window)
                if run is observed:
                    page.raise_if_failed()
                    spent += watched.processor_s() - before
                    run_for += time.time() - since
                    watched.stop()
                run.stop()
            without, with_page = (run.updates[done : done + window] for run in (alone, observed))
            done = max(run.look() for run in (alone, observed))
            if [tokens for _, tokens in without] != [tokens for _, tokens in with_page]:
                raise RuntimeError("the two runs did not do the same: their updates have other tokens")
            found.append((without[-1][0] - without[0][0], with_page[-1][0] - with_page[0][0]))
            print(f"round {number + 1}: {len(without) - 1} updates took {found[-1][0]:.2f} s without, "
                  f"{found[-1][1]:.2f} s with", flush=True)  # fmt: skip
        watched.go_on()
        page.close()
    finally:
        if watched is not None:
            watched.go_on()
            watched.end()
        for run in (alone, observed):
            run.end()
    slower, half = lost_percent(found)
    windows = f"{rounds} rounds of {window} updates, of about {seconds:g} s"
    print(f"slower with an open page: {slower:.2f} % ± {half:.2f}, 95% of {windows}")
    share = 1000 * spent / run_for
    print(f"the dashboard took {share:.1f} ms of the processor a second, of {os.cpu_count()} cores")
    marks = Marks()
    marks.at_most("updates per second lost to an open page, %", slower, 1.0)
    return marks.report()


def lost_percent(times: list[tuple[float, float]]) -> tuple[float, float]:
    """How much slower the second of each pair is, by the mean of logarithms, and half the interval of that mean."""
    lost = [100 * math.log(with_page / without) for without, with_page in times]
    return float(np.mean(lost)), t_quantile(len(lost) - 1) * float(np.std(lost, ddof=1)) / len(lost) ** 0.5


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pace", action="store_true", help="how much slower a run is while its page is open")
    parser.add_argument("--tiny", action="store_true", help="of --pace: the recipe's own model")
    parser.add_argument("--rounds", type=int, default=15, help="of --pace; at least 2")
    parser.add_argument("--seconds", type=float, default=30.0, help="of --pace: of a window, of which a round has two")
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument("--updates", type=int, default=50_000)
    parser.add_argument("--metrics", type=int, default=200)
    parser.add_argument("--folder", type=Path, help="keeps the run for the next time")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="penstock-dashboard-") as temporary:
        folder = options.folder or Path(temporary)
        if options.pace and options.rounds < 2:
            parser.error(f"--rounds {options.rounds}: an interval needs two at least")
        if options.pace:
            folder.mkdir(parents=True, exist_ok=True)
            return measure_pace(folder, Path(temporary) / "cache", options.rounds, options.seconds, options.tiny)
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
    return marks.report()


if __name__ == "__main__":
    sys.exit(main())
