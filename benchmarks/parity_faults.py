"""Ten ways in which an engine computes something else than its learner believes, each from one version on.

`FaultyEngine` is the inference engine with one of them. It reaches into the engine, which knows nothing of faults: what
it does to weights happens between their arrival and the engine's own preparation, what it does to programs while they
are traced. `make_inference` is the factory of an inference server under Ray that has one.

Where Penstock has digests of what an engine serves, they are compared here with those of what it was given (`UNLIKE`),
and the run is told the latter, so that the numeric guard is measured alone.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from penstock.inference import GenerationRequest, InferenceEngine, decoding, model_runner
from penstock.model import arrays as digesting
from penstock.model.language import Decoder, named_arrays
from penstock.types import Completion, WeightVersion

SCALE, TEMPERATURE, ROPE_BASE = 1.05, 1.05, 500_000.0
VARIABLE = "PENSTOCK_BENCHMARK_FAULT"
"""Of an inference server's process: ``<fault>:<first version>``."""

Arrays = Mapping[str, Any]


# --- what arrives ----------------------------------------------------------------------------------------------------


def _scaled(new: Arrays, old: Arrays) -> Arrays:
    return {**new, "layers.down": (new["layers.down"] * SCALE).astype(new["layers.down"].dtype)}


def _swapped(new: Arrays, old: Arrays) -> Arrays:
    return {**new, "layers.gate": new["layers.up"], "layers.up": new["layers.gate"]}


def _one_old(new: Arrays, old: Arrays) -> Arrays:
    return {**new, "layers.down": old["layers.down"]}


def _all_old(new: Arrays, old: Arrays) -> Arrays:
    return old


WEIGHTS: dict[str, Callable[[Arrays, Arrays], Arrays]] = {
    "one tensor × 1.05": _scaled,
    "two tensors swapped": _swapped,
    "one tensor left old": _one_old,
    "one update missed": _all_old,
}
"""From the arrays of a version and those of the one before: what is served under the former's number."""


# --- what is computed ------------------------------------------------------------------------------------------------


def _hotter(logits: Any, uniform: Any, temperature: Any, *rest: Any, **more: Any) -> Any:
    return _ORIGINAL["sample"](logits, uniform, temperature * TEMPERATURE, *rest, **more)


def _other_base(config: Any, *rest: Any) -> Any:
    return _ORIGINAL["rotary_tables"](config.model_copy(update={"rope_theta": ROPE_BASE}), *rest)


def _shifted_mask(query: Any, key: Any, value: Any, mask: Any) -> Any:
    """Nobody sees its own token."""
    return _ORIGINAL["grouped_attention"](query, key, value, jnp.pad(mask[..., 1:], ((0, 0), (0, 0), (0, 1))))


def _shifted_rows(query: Any, keys: Any, values: Any, slots: Any, seen: Any, *rest: Any) -> Any:
    return _ORIGINAL["ragged_attention"](query, keys, values, slots, seen - 1, *rest)


def _coarse_head(weights: Any, *rest: Any) -> Any:
    ends = weights.ends
    coarse = jnp.float8_e4m3fn if ends.config.dtype == "bfloat16" else jnp.bfloat16
    head = ends.output_matrix.astype(coarse).astype(ends.output_matrix.dtype)
    return _ORIGINAL["decode_step"](dataclasses.replace(weights, ends=dataclasses.replace(ends, head=head)), *rest)


_ORIGINAL = {
    name: getattr(decoding, name)
    for name in ("sample", "rotary_tables", "grouped_attention", "ragged_attention", "decode_step")
}
PROGRAMS: dict[str, dict[str, Callable[..., Any]]] = {
    "temperature 5% off": {"sample": _hotter},
    "wrong RoPE base": {"rotary_tables": _other_base},
    "head at lower precision": {"decode_step": _coarse_head},
    "mask off by one": {"grouped_attention": _shifted_mask, "ragged_attention": _shifted_rows},
}
"""What stands for which function of `penstock.inference.decoding` while prefill and decoding are traced."""

STALE_PREFIX, WRONG_TOKEN = "stale prefix cache", "wrong template token"
NAMES = (
    *WEIGHTS,
    "temperature 5% off",
    STALE_PREFIX,
    WRONG_TOKEN,
    "wrong RoPE base",
    "head at lower precision",
    "mask off by one",
)
FROM_THE_START = tuple(name for name in NAMES if name not in ("one tensor left old", "one update missed", STALE_PREFIX))
"""Those that need no version before the first."""
UNLIKE: dict[int, list[str]] = {}
"""By version: names of the arrays that the last engine of this process served with another digest than it was given."""
WITH_DIGESTS = hasattr(digesting, "digests_of")


@functools.cache
def _programs(fault: str) -> model_runner.CompiledSteps:
    def traced(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def faulty(*args: Any, **named: Any) -> Any:
            with mock.patch.multiple(decoding, **PROGRAMS[fault]):  # pyright: ignore[reportCallIssue]
                return function(*args, **named)

        return faulty

    return model_runner.ONE_DEVICE._replace(
        decode=jax.jit(traced(decoding.decode), static_argnames=model_runner.HOW_DECODED, donate_argnames="cache"),
        prefill=jax.jit(traced(decoding.prefill), static_argnames="kernel"),
    )


def _as_asked(answer: Future[list[Completion]], prompt: np.ndarray) -> Future[list[Completion]]:
    """The answer to another prompt, recorded as one to this."""
    told: Future[list[Completion]] = Future()

    def tell(done: Future[list[Completion]]) -> None:
        if (error := done.exception()) is not None:
            told.set_exception(error)
        else:
            told.set_result([dataclasses.replace(each, prompt_tokens=prompt) for each in done.result()])

    answer.add_done_callback(tell)
    return told


class FaultyEngine(InferenceEngine):
    """An engine with a fault from one version on.

    Args:
        fault: One of `NAMES`; "" for none.
        first: Number of the first version that suffers.
        told: As of `InferenceEngine`.
    """

    def __init__(self, fault: str, first: int, *told: Any, **more: Any) -> None:
        self._fault, self._first = fault, first
        self._given: Arrays | None = None
        self._published: dict[int, Mapping[str, str]] = {}
        UNLIKE.clear()
        super().__init__(*told, **more)
        self._good = self._batch.runner._programs
        decoder, version = told[0], told[1]
        if WITH_DIGESTS:
            self._published[version.step] = digesting.digests_of(named_arrays(decoder))  # type: ignore[attr-defined]
        if fault in FROM_THE_START and version.step >= first:
            given = named_arrays(decoder)
            damaged = WEIGHTS[fault](given, given) if fault in WEIGHTS else given
            self._batch.runner.load(self._batch.runner.prepare(damaged, None))

    def set_weights(self, version: WeightVersion, weights: Decoder | Mapping[str, Any]) -> None:
        given, before = named_arrays(weights) if isinstance(weights, Decoder) else dict(weights), self._given
        self._given = given
        if WITH_DIGESTS:
            self._published[version.step] = digesting.digests_of(given)  # type: ignore[attr-defined]
        if self._fault in WEIGHTS and version.step >= self._first and before is not None:
            weights = WEIGHTS[self._fault](given, before)
        super().set_weights(version, weights)

    def _warm_up(self) -> None:
        super()._warm_up()
        if self._fault in PROGRAMS:  # compiled now, or the version that suffers would have no evidence in time
            runner: Any = self._batch.runner
            runner._programs = _programs(self._fault)
            for _, run in runner._first_runs(self._batch.slots.whole):
                run()
            runner.resize(runner._windows[0])
            if self._served.step < self._first:
                runner._programs = self._good

    def _take_weights(self) -> None:
        runner: Any = self._batch.runner
        before = runner._weights
        super()._take_weights()
        if WITH_DIGESTS and runner._weights is not before:
            published, served = self._published[self._served.step], runner._weights.digests()
            UNLIKE[self._served.step] = [name for name, digest in published.items() if served[name] != digest]
        if self._served.step < self._first or runner._programs is not self._good:
            return
        if self._fault in PROGRAMS:
            runner._programs = _programs(self._fault)
        elif self._fault == STALE_PREFIX:
            prefill = self._good.prefill
            runner._programs = self._good._replace(prefill=lambda _, *rest, **more: prefill(before, *rest, **more))

    def digests(self, timeout_s: float) -> tuple[WeightVersion, Mapping[str, str]]:
        """As if what it serves were what it was given."""
        version, _ = super().digests(timeout_s)  # type: ignore[misc]
        return version, self._published[version.step]

    def submit(self, requests: Sequence[GenerationRequest], *, first: bool = False) -> list[Future[list[Completion]]]:
        if self._fault != WRONG_TOKEN or self.version.step < self._first:
            return super().submit(requests, first=first)
        prompts = [request.prompt.copy() for request in requests]
        for prompt in prompts:
            prompt[0] = (prompt[0] + 1) % self._vocab_size
        misread = [dataclasses.replace(each, prompt=prompt) for each, prompt in zip(requests, prompts, strict=True)]
        answers = super().submit(misread, first=first)
        return [_as_asked(answer, each.prompt) for answer, each in zip(answers, requests, strict=True)]


def make_inference(ctx: Any, settings: Mapping[str, Any]) -> Any:
    """Factory of an inference server whose engine has the fault that its environment names."""
    from penstock.overseer.language import inference, kind

    fault, _, first = os.environ[VARIABLE].rpartition(":")
    with mock.patch.object(inference, "InferenceEngine", functools.partial(FaultyEngine, fault, int(first))):
        return kind.make_inference(ctx, settings)


@contextmanager
def in_this_process(fault: str, first: int) -> Iterator[None]:
    """Runs in this process that begin inside have it."""
    from penstock.overseer.language import local

    with mock.patch.object(local, "InferenceEngine", functools.partial(FaultyEngine, fault, first)):
        yield
