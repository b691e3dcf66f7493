"""Generation beside `transformers.generate` and vLLM's CPU build: the same weights, prompts and numbers of tokens.

What `python -m benchmarks.generation --transformers-python PATH --vllm-python PATH` runs. A cell is a model and a load:
so many answers of 64 tokens at once after prompts of 16 that differ, or the *ragged* load: prompts of 16 to 256 tokens
in groups of 8, answers of geometric lengths with mean 48, twice as many as a side answers at once. Nothing ends an
answer but its length. Each side is one process of its own for all loads of a model, in turns: a round is one answer of
every side to the same prompts, in an order that rotates; the first of a cell is not counted. Prompts are new in every
round, so that none is in a cache. All may use all processors; a turn begins when the others take nothing of them any
more (threads of vLLM's go on looking for work for a while). vLLM is there twice: as it comes, which keeps a processor
for its scheduler and computes on the others, and with threads that compute on all; the mark is on the faster.

Not compared: what an answer costs beside its tokens. Only Penstock's side records log-probabilities and versions.
"""

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.campaign import Outcomes
from benchmarks.external import CHECKPOINT, descendants
from benchmarks.marks import Marks
from benchmarks.scale.counting import cpu_seconds

PROMPT_TOKENS, ANSWER_TOKENS = 16, 64
"""Of the loads of equal lengths."""
BATCHES = (1, 8, 32, 64)
RAGGED_ROWS, GROUPS, SAMPLES = 32, 8, 8
SHORTEST_PROMPT, LONGEST_PROMPT, MEAN_ANSWER, LONGEST_ANSWER = 16, 256, 48, 256
"""Of the ragged load."""
MODELS: dict[str, dict[str, int] | None] = {
    "1M": {
        "vocab_size": 4096,
        "hidden_size": 128,
        "intermediate_size": 328,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,  # vLLM's Qwen2 knows heads of hidden_size / heads only
    },
    "6M": {},
    "135M": None,
}
"""By name: what differs from the model of `benchmarks.generation`; None: a checkpoint."""
CASES = [f"{model}-{load}" for model in MODELS for load in (*BATCHES, "ragged")]
EQUAL, RAGGED = {"transformers": 1.5, "vllm": 1.5}, {"transformers": 2.5, "vllm": 1.5}
"""Marks in float32: how many times as many tokens per second as the other side."""
PROCESSORS = ",".join(map(str, sorted(os.sched_getaffinity(0))))
OTHERS: dict[str, dict[str, dict[str, str]]] = {
    "transformers": {"transformers": {}},
    "vllm": {"vLLM": {}, "vLLM on all": {"VLLM_CPU_OMP_THREADS_BIND": PROCESSORS}},
}
"""The sides of each other engine, with what is in their environment."""
IDLE = 0.05
"""Most of a processor that the sides may take whose turn it is not."""
QUIET_S, LIMIT_S = 0.1, 1800.0
"""They have ended when they took nothing for so long; the longest wait, for an answer as well."""
CHECKED_TOKENS = 8
"""Of an answer at temperature 0, which all sides must give alike in float32."""


class Round(NamedTuple):
    """One answer of every side; the key of its outcome.

    Attributes:
        case: Model and load, of `CASES`.
        dtype: Of weights and computation.
        engines: That it is beside.
        number: Of the cell's rounds.
    """

    case: str
    dtype: str
    engines: str
    number: int


class Load(NamedTuple):
    """What is asked for at once.

    Attributes:
        prompts: Token ids.
        lengths: How many tokens answer each.
        rows: Most that a side answers together.
        longest: Tokens of the longest possible prompt and answer.
    """

    prompts: list[list[int]]
    lengths: list[int]
    rows: int
    longest: int


def load_of(case: str, number: int, vocab: int) -> Load:
    """Of a cell's round: lengths are those of every round, tokens of this one alone."""
    which, tokens = case.partition("-")[2], np.random.default_rng(1 + number)
    if which != "ragged":
        rows = int(which)
        prompts = tokens.integers(0, vocab, (rows, PROMPT_TOKENS)).tolist()
        return Load(prompts, [ANSWER_TOKENS] * rows, rows, PROMPT_TOKENS + ANSWER_TOKENS)
    drawn = np.random.default_rng(0)
    prompt_lengths = drawn.integers(SHORTEST_PROMPT, LONGEST_PROMPT + 1, GROUPS)
    lengths = np.minimum(drawn.geometric(1 / MEAN_ANSWER, GROUPS * SAMPLES), LONGEST_ANSWER)
    prompts = [tokens.integers(0, vocab, length).tolist() for length in prompt_lengths]
    return Load(
        [prompt for prompt in prompts for _ in range(SAMPLES)], lengths.tolist(), RAGGED_ROWS,
        LONGEST_PROMPT + LONGEST_ANSWER,
    )  # fmt: skip


class Side:
    """A process that answers loads, line by line.

    Args:
        command: What is run.
        folder: Where its standard error goes.
        environment: Beside this process' own.

    Raises:
        SystemExit: it cannot be run, or ended.
    """

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self._command = command
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".err", delete=False) as said:
            self._errors = Path(said.name)
            try:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True,
                    env={**os.environ, **(environment or {})},
                )  # fmt: skip
            except OSError as error:
                raise SystemExit(f"{command[0]} cannot be run: {error.strerror}; name an interpreter") from error
        self.ready: str = self._answer()["ready"]

    def answer(self, load: Load, temperature: float = 1.0) -> dict[str, Any]:
        """Seconds on the clock and of all processors, how many tokens, and the first answer."""
        pipe, used = self._process.stdin, self.processor_s
        assert pipe is not None
        pipe.write(json.dumps({**load._asdict(), "temperature": temperature}) + "\n")
        pipe.flush()
        found = self._answer()
        if found["tokens"] != sum(load.lengths):
            raise SystemExit(f"{self.ready} gave {found['tokens']} tokens and not {sum(load.lengths)}")
        return {**found, "processor_s": self.processor_s - used}

    @property
    def processor_s(self) -> float:
        """Of the process and of all that it started and that live."""
        return sum(map(cpu_seconds, (self._process.pid, *descendants(self._process.pid))))

    def end(self) -> None:
        """Ends it, and waits for that."""
        self._process.communicate(timeout=120)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], LIMIT_S)[0]:
            raise SystemExit(f"{' '.join(self._command)}: no answer within {LIMIT_S:g} s")
        line = self._process.stdout.readline()
        if not line:
            self.end()
            last = self._errors.read_text(errors="replace").strip().splitlines()[-20:]
            ended = f"{' '.join(self._command)} ended with {self._process.returncode}:"
            raise SystemExit("\n".join([ended, *last]))
        return json.loads(line)


def sides_of(options: argparse.Namespace, folder: Path, dtype: str) -> dict[str, Side]:
    """Starts them all, one after the other."""
    peer = str(Path(__file__).with_name("generation_peer.py"))
    sides = {"penstock": Side([sys.executable, "-m", "benchmarks.generation_table", str(folder), dtype], folder)}
    for other, python in engines_of(options).items():
        for name, environment in OTHERS[other].items():
            sides[name] = Side([python, peer, other, str(folder), dtype], folder, environment)
    return sides


def engines_of(options: argparse.Namespace) -> dict[str, str]:
    """By name: the interpreter of each other engine that is asked for."""
    given = {"transformers": options.transformers_python, "vllm": options.vllm_python}
    return {name: python for name, python in given.items() if python is not None}


def rounds_of(options: argparse.Namespace) -> list[Round]:
    """All that are asked for, by model and dtype, then cell by cell."""
    sides = " ".join(engines_of(options))
    return [
        Round(case, dtype, sides, number)
        for model in MODELS
        for dtype in options.dtype
        for case in options.cases
        if case.partition("-")[0] == model
        for number in range(options.rounds)
    ]


def measure(options: argparse.Namespace) -> Outcomes:
    """Makes the rounds that have no outcome yet."""
    outcomes = Outcomes(options.results)
    missing = [each for each in rounds_of(options) if each not in outcomes]
    for model, dtype in dict.fromkeys((each.case.partition("-")[0], each.dtype) for each in missing):
        with tempfile.TemporaryDirectory(prefix="penstock-generation-") as folder:
            vocab = prepare(Path(folder), model, options.model)
            sides = sides_of(options, Path(folder), dtype)
            for name, side in sides.items():
                print(f"{model} {dtype}: {name} is {side.ready}", file=sys.stderr, flush=True)
            mine = [each for each in missing if each.case.startswith(f"{model}-") and each.dtype == dtype]
            for case in dict.fromkeys(each.case for each in mine):
                warm_up(sides, case, dtype, vocab)
                for each in mine:
                    if each.case == case:
                        outcomes.add(each, one_round(sides, load_of(case, each.number, vocab), each.number))
                print(f"{case} {dtype}: measured", file=sys.stderr, flush=True)
            for side in sides.values():
                side.end()
    return outcomes


def warm_up(sides: Mapping[str, Side], case: str, dtype: str, vocab: int) -> None:
    """A round that does not count, after all have shown that they compute the same.

    Raises:
        SystemExit: they do not.
    """
    load = load_of(case, -1, vocab)
    short = load._replace(lengths=[CHECKED_TOKENS] * len(load.prompts))
    found = {name: side.answer(short, temperature=0.0)["first"] for name, side in sides.items()}
    if dtype == "float32" and len(set(map(tuple, found.values()))) > 1:
        raise SystemExit(f"{case}: the sides compute something else from the same weights: {found}")
    for side in sides.values():
        side.answer(load)


def one_round(sides: Mapping[str, Side], load: Load, number: int) -> dict[str, Any]:
    """By side: seconds, processor seconds, tokens, and processor seconds of all others meanwhile."""
    names, found = list(sides), dict[str, Any]()
    turn = number % len(names)
    for name in names[turn:] + names[:turn]:
        others = [side for other, side in sides.items() if other != name]
        wait_until_quiet(list(sides.values()))
        used = sum(side.processor_s for side in others)
        told = sides[name].answer(load)
        del told["first"]
        found[name] = {**told, "others_s": sum(side.processor_s for side in others) - used}
    return found


def wait_until_quiet(sides: Sequence[Side]) -> None:
    """Returns when nothing of them takes a processor.

    Raises:
        SystemExit: they go on and on.
    """
    used, until = -1.0, time.monotonic() + LIMIT_S
    while (now := sum(side.processor_s for side in sides)) != used:
        if time.monotonic() > until:
            raise SystemExit(f"the sides took processors for {LIMIT_S:g} s that were not asked for anything")
        used = now
        time.sleep(QUIET_S)


def prepare(folder: Path, model: str, checkpoint: Path) -> int:
    """Writes the model as all sides read it; returns how many tokens it knows."""
    import jax

    from benchmarks.generation import MODEL
    from penstock.model.language import Decoder, load_decoder, save_decoder
    from penstock.text import Tokenizer

    changes = MODELS[model]
    if changes is None:
        decoder = load_decoder(str(checkpoint))
    else:
        decoder = Decoder.initialise(MODEL.model_copy(update=changes), jax.random.key(0))
    save_decoder(decoder, folder, Tokenizer.load("penstock" if changes is not None else str(checkpoint)))
    return decoder.config.vocab_size


def ratio(rounds: Sequence[Mapping[str, Any]], side: str, what: str) -> float:
    """The median over rounds of the other side's seconds by Penstock's."""
    return statistics.median(each[side][what] / each["penstock"][what] for each in rounds)


def show(outcomes: Outcomes, asked: Sequence[Round], marks: Marks) -> Iterator[str]:
    """A block per cell, and its marks."""
    for case, dtype in dict.fromkeys((each.case, each.dtype) for each in asked):
        rounds = [outcomes[each] for each in asked if (each.case, each.dtype) == (case, dtype)]
        yield f"{f'{case} {dtype}':<28s}{'tokens/s':>12s}{'Penstock × as many':>20s}{'of processor seconds':>22s}"
        for side in rounds[0]:
            rate = statistics.median(each[side]["tokens"] / each[side]["seconds"] for each in rounds)
            times = f"{ratio(rounds, side, 'seconds'):20.2f}{ratio(rounds, side, 'processor_s'):22.2f}"
            yield f"  {side:<26s}{rate:12,.0f}{times if side != 'penstock' else ''}"
        if dtype == "float32":
            for other in asked[0].engines.split():
                least = (RAGGED if case.endswith("ragged") else EQUAL)[other]
                found = min(ratio(rounds, side, "seconds") for side in OTHERS[other])
                marks.at_least(f"{case}: tokens/s by those of {other}", found, least)
    every = [side for each in asked for side in outcomes[each].values()]
    idle = sum(side["others_s"] for side in every) / sum(side["seconds"] for side in every)
    marks.at_most("processors taken by the sides whose turn it is not", idle, IDLE)


def compare(options: argparse.Namespace) -> int:
    """All cells that are asked for; 1 where a mark is missed."""
    if any(case.startswith("135M") for case in options.cases) and not (options.model / "config.json").is_file():
        raise SystemExit(f"{options.model} holds no model; make {CHECKPOINT}/config.json makes the default one")
    marks = Marks()
    print("\n".join(show(measure(options), rounds_of(options), marks)))
    return marks.report("\nMarks\n")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of the comparison."""
    parser.add_argument("--transformers-python", help="an interpreter with torch and transformers, to compare with")
    parser.add_argument("--vllm-python", help="an interpreter with vLLM, to compare with")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="directory of the model that is called 135M")
    parser.add_argument("--rounds", type=int, default=5, help="of a cell")
    parser.add_argument("--results", type=Path, help="JSON lines; rounds that are in it are not made again")


def work(folder: str, dtype: Any) -> None:
    """Penstock's side."""
    import jax

    from benchmarks.generation import NoText
    from penstock.inference import EngineConfig, GenerationRequest, InferenceEngine
    from penstock.model.language import load_decoder
    from penstock.types import Decoding, WeightVersion

    decoder, engine, shape, made = load_decoder(folder, dtype=dtype), None, None, 0
    print(json.dumps({"ready": f"Penstock, JAX {jax.__version__}"}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if shape != (asked["rows"], asked["longest"]):
            if engine is not None:
                engine.stop(60.0)
            shape = asked["rows"], asked["longest"]
            config = EngineConfig(max_slots=asked["rows"], max_seq_len=asked["longest"])
            engine = InferenceEngine(decoder, WeightVersion(0, 0), NoText(), config)
            engine.start()
            engine.wait_until_ready(600.0)
        assert engine is not None
        began = time.perf_counter()
        requests = []
        for prompt, length in zip(asked["prompts"], asked["lengths"], strict=True):
            decoding = Decoding(
                max_output_tokens=length, stop_token_ids=(decoder.config.vocab_size,), temperature=asked["temperature"]
            )
            requests.append(GenerationRequest(np.array(prompt, np.int32), decoding, made))
            made += 1
        answers = [future.result(1800.0)[0].response_tokens for future in engine.submit(requests)]
        seconds = time.perf_counter() - began
        told = {"seconds": seconds, "tokens": sum(map(len, answers)), "first": answers[0].tolist()}
        print(json.dumps(told), flush=True)
    if engine is not None:
        engine.stop(60.0)


if __name__ == "__main__":
    work(*sys.argv[1:])
