"""A server under streaming clients that come, go and give up, while its weights change every second.

    python -m benchmarks.serving [--clients 64] [--requests 2000] [--slots 32] [--tokens 48] [--cancelled 0.2]

The server is a process of its own: a random model in the shape of `benchmarks.steps` behind the HTTP API, with a new
version every `--swap-s` seconds. Clients stream chats and completions in turn, through httpx on loopback; a share of
the requests is given up after a few events, or the first. An answer is right where it ends as its body says: events of
one id, one finish reason, as many tokens as its usage tells, and ``[DONE]``. Afterwards nothing may run or wait any
more, and as many answers as there are slots must run at once again. Exits with 1 where a mark is missed.

Times are the clients': to the first token (TTFT, with the wait for a slot, of which there are fewer than clients), and
from one event with text to the next (ITL; an event may hold several tokens of a dispatch).
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.marks import Marks

START_S, ANSWER_S, IDLE_S = 300.0, 120.0, 30.0
"""Longest wait for the server, for one event of an answer, and for slots to be free."""
MODEL, PROMPT_TOKENS = "served", 64
RUNNING, WAITING = "penstock_inference_running", "penstock_inference_waiting"


@dataclass
class Found:
    """What the clients saw.

    Attributes:
        outcomes: How many requests ended how; anything but ``complete`` and ``cancelled`` is an error.
        first_s: Seconds to the first token.
        gaps_s: Between events with text.
        tokens: Of complete answers.
        versions: Fingerprints of all events: one for each version that was served.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    tokens: int = 0
    versions: set[str] = field(default_factory=set)


def child(slots: int, tokens: int, swap_s: float) -> None:
    """The server: prints its URL, and serves until its input ends."""
    import jax

    from benchmarks.steps import SHAPE
    from penstock.inference import EngineConfig, InferenceEngine
    from penstock.inference.http_server import HttpServer
    from penstock.inference.server import create_app
    from penstock.model.language import Decoder, InitConfig
    from penstock.text import Tokenizer
    from penstock.types import WeightVersion

    tokenizer = Tokenizer.load("penstock")
    size = tokenizer.vocab_size
    shape = InitConfig.model_validate(SHAPE | {"vocab_size": size}).model(size, "float32")
    decoders = [Decoder.initialise(shape, jax.random.key(seed)) for seed in range(2)]
    config = EngineConfig(max_slots=slots, max_seq_len=PROMPT_TOKENS + tokens)
    engine = InferenceEngine(decoders[0], WeightVersion(0, 0), tokenizer, config)
    ending = threading.Event()
    engine.start()
    engine.wait_until_ready(START_S)
    server = HttpServer(create_app(engine, tokenizer, MODEL))
    server.start()
    print(json.dumps({"url": server.url}), flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), ending.set()), daemon=True).start()
    swaps = 0
    while not ending.wait(swap_s):
        swaps += 1
        engine.set_weights(WeightVersion(0, swaps), decoders[swaps % 2])
    server.stop()
    engine.stop(IDLE_S)


def events_of(lines: Sequence[str]) -> str:
    """How a stream ended, by its ``data:`` lines: ``complete``, or what is wrong with it."""
    if not lines or lines[-1] != "[DONE]":
        return "no [DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    if any("error" in event for event in events):
        return next(str(event["error"]["message"]) for event in events if "error" in event)
    if len({event["id"] for event in events}) != 1:
        return "events of several ids"
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"] if choice["finish_reason"]]
    if len(reasons) != 1:
        return f"finish reasons {reasons}"
    if [event["usage"]["completion_tokens"] for event in events if event.get("usage")] != [_tokens(events)]:
        return "usage is not what was streamed"
    return "complete"


def _tokens(events: Sequence[dict[str, Any]]) -> int:
    return sum(len(choice.get("token_ids") or ()) for event in events for choice in event["choices"])


async def one(client: httpx.AsyncClient, number: int, options: argparse.Namespace, found: Found) -> None:
    """One request, to its end or until it is given up."""
    rng = random.Random(number)
    leave_after = rng.randint(0, 3) if rng.random() < options.cancelled else None
    common = {
        "model": MODEL, "max_tokens": rng.randint(1, options.tokens), "seed": number, "stream": True,
        "stream_options": {"include_usage": True}, "return_token_ids": True,
    }  # fmt: skip
    text = f"Tell me about number {number}."
    if number % 2:
        path, body = "/v1/chat/completions", common | {"messages": [{"role": "user", "content": text}]}
    else:
        path, body = "/v1/completions", common | {"prompt": text}
    began, last, lines = time.monotonic(), 0.0, list[str]()
    async with client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            found.outcomes[f"{response.status_code}: {(await response.aread()).decode()[:200]}"] += 1
            return
        async for data in _data(response):
            now = time.monotonic()
            lines.append(data)
            if not last:
                found.first_s.append(now - began)
            elif data != "[DONE]":
                found.gaps_s.append(now - last)
            last = now
            if leave_after is not None and len(lines) > leave_after and data != "[DONE]":
                found.outcomes["cancelled"] += 1
                return
    found.outcomes[events_of(lines)] += 1
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    found.tokens += _tokens(events)
    found.versions.update(event["system_fingerprint"] for event in events)


async def _data(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


async def clients(url: str, options: argparse.Namespace, found: Found) -> None:
    """All requests, so many clients at once; each goes on with the next."""
    numbers = iter(range(options.requests))
    limits = httpx.Limits(max_connections=options.clients, max_keepalive_connections=options.clients)
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S, limits=limits) as client:

        async def go_on() -> None:
            for number in numbers:
                try:
                    await one(client, number, options, found)
                except httpx.HTTPError as error:
                    found.outcomes[f"{type(error).__name__}: {error}"] += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(options.clients):
                group.create_task(go_on())


def gauge(text: str, name: str) -> float:
    """A number of ``/metrics`` without labels."""
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))


def wait_for(url: str, name: str, value: float) -> bool:
    """Whether a gauge has that value within the limit."""
    until = time.monotonic() + IDLE_S
    with httpx.Client(base_url=url, timeout=ANSWER_S) as client:
        while gauge(client.get("/metrics").text, name) != value:
            if time.monotonic() > until:
                return False
    return True


async def _full(url: str, options: argparse.Namespace) -> bool:
    """Whether so many requests run at once again as there are slots."""
    body = {"model": MODEL, "prompt": "again", "max_tokens": options.tokens + PROMPT_TOKENS // 2, "temperature": 0}
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S) as client:
        asked = asyncio.create_task(client.post("/v1/completions", json=body | {"n": options.slots}))
        full = await asyncio.to_thread(wait_for, url, RUNNING, float(options.slots))
        return (await asked).status_code == 200 and full


def measure(options: argparse.Namespace) -> tuple[Found, float, bool, bool]:
    """What clients found, in how many seconds, whether all slots were free afterwards, and all could be had again.

    Raises:
        RuntimeError: the server failed.
    """
    words = [sys.executable, "-m", "benchmarks.serving", "--child", *map(str, (options.slots, options.tokens))]
    server = subprocess.Popen([*words, str(options.swap_s)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        if not line:
            raise RuntimeError(f"the server ended with {server.wait(IDLE_S)} before it served")
        url, found, began = json.loads(line)["url"], Found(), time.monotonic()
        asyncio.run(clients(url, options, found))
        seconds = time.monotonic() - began
        free = all(wait_for(url, name, 0.0) for name in (RUNNING, WAITING))
        again = asyncio.run(_full(url, options))
        server.communicate(timeout=2 * IDLE_S)
        if server.returncode != 0:
            raise RuntimeError(f"the server ended with {server.returncode}")
        return found, seconds, free, again
    finally:
        server.kill()


def quantiles(seconds: Sequence[float]) -> str:
    """p50 and p99 in milliseconds."""
    if len(seconds) < 2:
        return "too few"
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return f"p50 {cuts[49] * 1e3:8.1f} ms   p99 {cuts[98] * 1e3:8.1f} ms"


def judged(found: Found, options: argparse.Namespace, free: bool, again: bool) -> Marks:
    """Marks: no error, every request accounted for, weights that changed, every slot back."""
    marks = Marks()
    errors = {words: count for words, count in found.outcomes.items() if words not in ("complete", "cancelled")}
    marks.at_most("requests that ended in an error", sum(errors.values()), 0)
    marks.at_least("requests accounted for", sum(found.outcomes.values()), options.requests)
    marks.at_least("changes of weights meanwhile", len(found.versions) - 1, 1)
    marks.at_least("nothing runs or waits afterwards", float(free), 1)
    marks.at_least(f"{options.slots} requests run at once again", float(again), 1)
    marks.lines += [f"  {count} × {words}" for words, count in errors.items()]
    return marks


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48, help="most of an answer")
    parser.add_argument("--cancelled", type=float, default=0.2, help="share of requests that are given up")
    parser.add_argument("--swap-s", type=float, default=1.0)
    parser.add_argument("--child", nargs=3, metavar=("SLOTS", "TOKENS", "SWAP_S"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        child(int(options.child[0]), int(options.child[1]), float(options.child[2]))
        return 0
    found, seconds, free, again = measure(options)
    complete, cancelled = found.outcomes["complete"], found.outcomes["cancelled"]
    print(
        f"{options.clients} clients, {options.requests} requests, {options.slots} slots: {complete} complete, "
        f"{cancelled} given up, {len(found.versions)} versions, in {seconds:.1f} s\n"
        f"  complete answers      {found.tokens / seconds:8,.0f} tokens/s\n"
        f"  time to first token   {quantiles(found.first_s)}\n"
        f"  between events        {quantiles(found.gaps_s)}\n\nMarks"
    )
    marks = judged(found, options, free, again)
    return marks.report()


if __name__ == "__main__":
    sys.exit(main())
