"""Continuous batching: one thread that keeps the slots full and decodes all of them together.

Each turn of the loop takes new weights, admits waiting requests into free slots, runs one dispatch of several
decode steps, and completes what ended. Requests join and leave only between dispatches, and weights change only
there, so every token has exactly one version. Given one `submit` into an idle engine that forgets, everything that
follows is a function of that submission and the weights; any other takes from its cache what a prompt begins with.

An exception in the thread fails every pending future and is raised again by the next call.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Literal

import jax
import numpy as np
from jaxtyping import Array

from penstock.inference.config import EngineConfig
from penstock.inference.decoding import ServedWeights
from penstock.inference.meter import LatencyHistogram, ThroughputMeter
from penstock.inference.model_runner import ModelRunner
from penstock.inference.scheduler import RunningBatch
from penstock.inference.sequence import (
    GenerationRequest,
    PendingRequest,
    Response,
    Scoring,
    check_length,
    check_request,
    check_scoring,
)
from penstock.model.arrays import check_fits, named_leaves
from penstock.model.language import Decoder, ModelConfig
from penstock.model.programs import LazyPrograms, Programs
from penstock.types import (
    CompiledProgram,
    Completion,
    Decoding,
    NoProgressError,
    PromptScores,
    RunFailed,
    Stopped,
    TextCodec,
    WeightVersion,
)

PauseMode = Literal["keep", "wait", "abort"]
"""What becomes of running responses while an engine is paused."""

IDLE_WAKE_S = 60.0
"""An idle engine waits to be notified; it wakes this often so that no wait is unbounded."""

GATHER_S, _MOST_GATHERS = 0.003, 4
"""Seconds that an idle engine, which several asked at a time before, waits for the next who asks; how many times."""


class InferenceEngine:
    """Generates responses to many requests at once.

    Args:
        decoder: The first weights.
        version: Lineage and step of `decoder`.
        tokenizer: Stop tokens, and the text of responses.
        config: Shapes and limits.
        name: Said by every completion; unique in the run, so that a replaced server is another one.
        begun: Has `first_programs` compiled already, or begun; for an engine that is started lazily.

    Raises:
        ConfigError: the sequence length exceeds what the model is meant for.
    """

    def __init__(
        self,
        decoder: Decoder,
        version: WeightVersion,
        tokenizer: TextCodec,
        config: EngineConfig,
        name: str = "",
        begun: LazyPrograms | None = None,
    ) -> None:
        check_length(decoder.config, config)
        self._tokenizer, self._config, self._name = tokenizer, config, name
        self._vocab_size = decoder.config.vocab_size
        self._shapes: dict[str, jax.ShapeDtypeStruct] = named_leaves(jax.eval_shape(lambda: decoder))
        self._meter = ThroughputMeter()
        self._batch = RunningBatch(decoder, config, self._meter)
        self._changed = threading.Condition()  # guards everything below
        self._waiting: deque[Response] = deque()
        self._scorings: deque[Scoring] = deque()
        self._served = version
        self._next_weights: tuple[WeightVersion, ServedWeights] | None = None
        self._open_responses = self._calls = self._running = self._cached_tokens = 0
        self._compiled: list[CompiledProgram] = []
        self._begun = begun
        self._programs: LazyPrograms | None = None
        self._lazily = self._rest_asked = self._ready = self._stopping = False
        self._fresh_start = self._asked_by_several = self._paused = self._recompute = False
        self._failure: BaseException | None = None
        self._pause: PauseMode | None = None
        self._thread = threading.Thread(target=self._run, name="inference-engine", daemon=True)

    @staticmethod
    def first_programs(model: ModelConfig, config: EngineConfig) -> Programs:
        """What an engine for such a model needs first that is started lazily, from shapes alone; none over devices."""
        decoder = Decoder.of_shapes(model)
        first = ModelRunner(decoder, config).first_programs()
        return {"layers apart": lambda: decoder.lower_apart().compile(), **first} if first else {}

    @property
    def config(self) -> EngineConfig:
        """Shapes and limits."""
        return self._config

    @property
    def version(self) -> WeightVersion:
        """The version that a request submitted now is sampled with (or a newer one)."""
        with self._changed:
            return self._served if self._next_weights is None else self._next_weights[0]

    def start(self, lazily: bool = False) -> None:
        """Starts the thread.

        Args:
            lazily: It serves at once, and compiles each program when it is needed first, the rest after `compile_rest`;
                else it first compiles every program, as it does in any case for several devices.
        """
        self._lazily = lazily
        self._thread.start()

    def compile_rest(self) -> None:
        """Has all that was not needed yet compiled while it serves; more than once is once."""
        with self._changed:
            if self._rest_asked or self._programs is None:
                return
            self._rest_asked = True
        self._programs.compile()
        with self._changed:
            self._note_ready()

    def compile_no_more(self) -> None:
        """Takes `compile_rest` back: what nobody has begun is compiled when it is needed, as before."""
        with self._changed:
            asked, self._rest_asked = self._rest_asked, False
            if asked and self._programs is not None:
                self._programs.forgo()

    def wait_until_ready(self, timeout_s: float) -> None:
        """Returns when every program is compiled; as `compiling`, which says what is done meanwhile."""
        list(self.compiling(timeout_s))

    def compiling(self, timeout_s: float | None) -> Iterator[CompiledProgram]:
        """Each program as it is compiled; ends when all are. For one caller or several.

        Args:
            timeout_s: Longest wait for the next program, however long all of them take. None for an engine that was
                started lazily: what nobody needs or asks for is never compiled.

        Raises:
            NoProgressError: no program was compiled for so long.
            RunFailed: the engine failed meanwhile.
            Stopped: it was stopped meanwhile.
        """
        told = 0
        while True:
            with self._changed:
                self._wait_for(lambda told=told: len(self._compiled) > told or self._ready, timeout_s)
                news, ready = self._compiled[told:], self._ready
            if not (news or ready):
                raise NoProgressError(
                    f"the inference engine was not ready after {timeout_s} s without another compiled program "
                    f"({told} before)"
                )
            yield from news
            told += len(news)
            if ready:
                return

    def submit(self, requests: Sequence[GenerationRequest], *, first: bool = False) -> list[Future[list[Completion]]]:
        """Enqueues requests, all at once and in this order; none of them if one is invalid.

        Args:
            requests: What to answer.
            first: Before all others that wait.

        Returns:
            For each request a future of its n completions in order. A cancelled future frees its slots.

        Raises:
            EnvironmentFailure: a prompt does not fit.
            ConfigError: decoding parameters are out of range.
            Stopped: the engine was stopped.
            RunFailed: the engine failed.
        """
        for request in requests:
            self.check(request)
        for request in requests:
            if request.alternatives or (request.decoding.truncation and not self._config.always_truncates):
                self._batch.need_decoding(len(request.prompt), request.alternatives > 0)
        pending = [PendingRequest.of(request, self._tokenizer, self._config) for request in requests]
        responses = [Response.of(p, i, self._tokenizer) for p in pending for i in range(p.request.n)]
        with self._changed:
            self._refuse_if_ended()
            self._fresh_start |= self._config.forgets and self._open_responses == 0
            self._open_responses += len(responses)
            if first:
                self._waiting.extendleft(reversed(responses))
            else:
                self._waiting.extend(responses)
            self._calls += 1
            self._changed.notify_all()
        self._meter.add(prompts=len(requests))
        return [p.future for p in pending]

    def score(
        self, texts: Sequence[np.ndarray], temperature: float = 1.0, alternatives: int = 0, kept: bool = False
    ) -> list[Future[PromptScores]]:
        """Enqueues given texts to be scored, none of them if one is invalid.

        Each is scored by one version of the weights, in halves of `EngineConfig.prefill_chunk` tokens between two
        dispatches, one text after the other, and with a cache of its own: what is generated meanwhile does not change.

        Args:
            texts: int32 [p] each, at most `EngineConfig.max_seq_len` tokens.
            temperature: Divides the logits, as it does for what is sampled; 0 leaves them.
            alternatives: How many of the most probable tokens are told at each position.
            kept: Whether a free slot takes what was cached, so that what goes on from a text need not prefill it.

        Returns:
            A future for each; one that is cancelled is not scored.

        Raises:
            EnvironmentFailure: a text is empty or too long, or has unknown tokens.
            ConfigError: temperature or alternatives are out of range.
            Stopped: the engine was stopped; the futures, too, where it is stopped or paused by abortion meanwhile.
            RunFailed: the engine failed.
        """
        scorings = [Scoring(text, temperature, alternatives, kept) for text in texts]
        for scoring in scorings:
            check_scoring(scoring, self._config, self._vocab_size)
        with self._changed:
            self._refuse_if_ended()
        for length in {len(text) for text in texts}:
            self._batch.need_scores(length, kept)
        with self._changed:
            self._refuse_if_ended()
            self._scorings.extend(scorings)
            self._changed.notify_all()
        return [scoring.future for scoring in scorings]

    def canary(
        self, version: WeightVersion, prompts: Sequence[np.ndarray], max_tokens: int, timeout_s: float
    ) -> list[Completion]:
        """Answers prompts with that version, ahead of all that waits: evidence of what the engine computes.

        Args:
            version: Waited for; where a newer one serves, what comes back says so.
            prompts: int32 [p]; those that leave no room for an answer are cut at their beginning.
            max_tokens: Of the longest answer.
            timeout_s: Longest wait, in seconds.

        Returns:
            One completion per prompt, at temperature 1; none where it takes longer.

        Raises:
            RunFailed: the engine failed.
            Stopped: it was stopped.
        """
        limit = time.monotonic() + timeout_s
        try:
            self.wait_until_served(version, timeout_s)
        except NoProgressError:
            return []
        decoding, room = Decoding(max_output_tokens=max_tokens), self._config.max_seq_len - max_tokens
        requests = [GenerationRequest(prompt[-max(room, 1) :], decoding, version.step) for prompt in prompts]
        futures = self.submit(requests, first=True)
        wait(futures, max(0.0, limit - time.monotonic()))
        late = [future for future in futures if not future.done()]
        for future in late:
            future.cancel()  # frees its slot
        return [] if late else [future.result()[0] for future in futures]

    def check(self, request: GenerationRequest) -> None:
        """Raises what `submit` would raise about this request alone."""
        check_request(request, self._config, self._vocab_size)

    def set_weights(self, version: WeightVersion, weights: Decoder | Mapping[str, Array | np.ndarray]) -> None:
        """Serves these weights from the next dispatch on; responses that run go on with them.

        They are brought into the form that they are served in here, while generation goes on: the swap itself, between
        two dispatches, changes a reference.

        Args:
            version: Recorded for every token that they sample.
            weights: A decoder as the first, or some of its arrays by name, beside which the others stay. JAX's are kept
                by reference, so they must not be donated; those in host memory are copied, and cast if need be.

        Raises:
            WeightsError: the shape differs.
        """
        whole = isinstance(weights, Decoder)
        arrays = named_leaves(weights) if whole else weights
        check_fits(self._shapes, arrays, "the engine", partly=not whole)
        with self._changed:
            self._refuse_if_ended()
            held = None if self._next_weights is None else self._next_weights[1]
        prepared = self._batch.runner.prepare(arrays, held)
        with self._changed:
            self._refuse_if_ended()
            self._next_weights = (version, prepared)
            self._changed.notify_all()

    def wait_until_served(self, version: WeightVersion, timeout_s: float) -> None:
        """Returns when every later dispatch uses that version, or a newer one.

        Raises:
            NoProgressError: that took longer.
            RunFailed: the engine failed meanwhile.
            Stopped: it was stopped meanwhile.
        """
        with self._changed:
            if not self._wait_for(lambda: self._served >= version, timeout_s):
                raise NoProgressError(f"the engine still served {self._served} and not {version} after {timeout_s} s")

    def digests(self, timeout_s: float) -> tuple[WeightVersion, dict[str, str]]:
        """What it serves, read from where the next dispatch reads it: the version, and each array's digest.

        Args:
            timeout_s: Longest wait for weights that were given and are not swapped in yet.

        Raises:
            NoProgressError: they were not in time.
            RunFailed: the engine failed meanwhile.
            Stopped: it was stopped meanwhile.
        """
        with self._changed:
            if not self._wait_for(lambda: self._next_weights is None, timeout_s):
                raise NoProgressError(f"the inference engine had not swapped its weights after {timeout_s} s")
            version, weights = self._served, self._batch.runner.weights
        return version, self._batch.runner.digests(weights)

    @property
    def paused(self) -> bool:
        """Whether nothing is computed until `resume`."""
        with self._changed:
            return self._paused

    def pause(self, mode: PauseMode, clear_cache: bool, timeout_s: float) -> None:
        """Computes nothing more; later requests wait, and weights are taken meanwhile.

        Args:
            mode: What becomes of running responses: kept for `resume`, waited for, or aborted with those not begun.
            clear_cache: Those that are kept compute their cache anew when they go on, under the weights of then.
            timeout_s: Longest wait, in seconds.

        Raises:
            NoProgressError: they took longer, and the engine pauses when they are done; or `resume` came before.
            RunFailed: the engine failed meanwhile.
            Stopped: it was stopped meanwhile.
        """
        with self._changed:
            self._refuse_if_ended()
            self._pause, self._recompute, self._paused = mode, clear_cache, False
            self._changed.notify_all()
            if not self._wait_for(lambda: self._paused or self._pause is None, timeout_s):
                raise NoProgressError(f"the inference engine had not paused after {timeout_s} s")
            if not self._paused:
                raise NoProgressError("the inference engine was resumed before it had paused")

    def resume(self) -> None:
        """Goes on after `pause`."""
        with self._changed:
            self._pause, self._paused = None, False
            self._changed.notify_all()

    def rename_version(self, version: WeightVersion) -> None:
        """What is served now is called so, from the next token on."""
        with self._changed:
            self._refuse_if_ended()
            self._served = version

    @property
    def busy_s(self) -> float:
        """Seconds in which it prefilled or decoded, since its start."""
        return self._meter.busy_s

    def stats(self) -> dict[str, float]:
        """Numbers for the metrics log, named ``inference/…``."""
        capacity = self._config.max_slots * self._config.max_seq_len
        with self._changed:
            waiting = float(len(self._waiting) + len(self._scorings))
            gauges = {"running": float(self._running), "waiting": waiting, "kv_used": self._cached_tokens / capacity}
        return {f"inference/{name}": value for name, value in (self._meter.read() | gauges).items()}

    def latencies(self) -> dict[str, LatencyHistogram]:
        """How long responses took, by the names of `penstock.inference.meter.LATENCIES`."""
        return self._meter.latencies()

    def raise_if_failed(self) -> None:
        """Raises RunFailed, caused by the original error, if the engine's thread died."""
        with self._changed:
            self._refuse_if_failed()

    def stop(self, timeout_s: float) -> None:
        """Ends the thread; pending requests complete as "aborted" with what they have.

        Raises:
            NoProgressError: the thread did not end in time (a dispatch hangs); its futures then stay pending.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            programs = self._programs
        if programs is not None:
            programs.drop()
        if self._thread.ident is None:
            self._abort()
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise NoProgressError(f"the inference engine did not stop within {timeout_s} s")

    # The engine's thread.

    def _run(self) -> None:
        try:
            if not (self._lazily and self._begin()):
                self._warm_up()
            while self._wait_for_work():
                self._step()
            self._abort()
        except BaseException as error:  # whatever it was, those who wait must get it
            self._fail(error)

    def _begin(self) -> bool:
        programs = self._batch.runner.begin(self._note_compiled, self._begun)
        with self._changed:
            self._programs = programs
        return programs is not None

    def _note_compiled(self, done: CompiledProgram | BaseException) -> None:
        """From whichever thread compiled it."""
        with self._changed:
            if isinstance(done, BaseException):
                self._failure = self._failure or done
            else:
                self._compiled.append(done)
                self._note_ready()
            self._changed.notify_all()

    def _note_ready(self) -> None:
        if self._programs is not None and self._rest_asked:
            self._ready = len(self._compiled) == len(self._programs)

    def _warm_up(self) -> None:
        for program in self._batch.warm_up():
            with self._changed:
                self._compiled.append(program)
                self._changed.notify_all()
            if self._stopping:
                return
        with self._changed:
            self._ready = True
            self._changed.notify_all()

    def _wait_for_work(self) -> bool:
        """Blocks while there is nothing to do; False when the engine is to stop."""
        with self._changed:
            if not self._has_work() and self._calls:  # since it was idle last
                self._asked_by_several, self._calls = self._calls > 1, 0
            idle = not self._batch.slots.running
            while not (self._stopping or self._next_weights or self._has_work()):
                if self._pause is not None and not self._paused:
                    self._paused = True
                    self._changed.notify_all()
                self._changed.wait(IDLE_WAKE_S)
            if idle and self._asked_by_several and self._waiting:
                self._gather()
            return not self._stopping

    def _gather(self) -> None:
        """Waits while others ask along with the first: one prefill and one decode step serve all of them alike."""
        deadline, calls = time.monotonic() + _MOST_GATHERS * GATHER_S, 0
        while calls < self._calls and len(self._waiting) < self._batch.slots.free and time.monotonic() < deadline:
            calls = self._calls
            self._changed.wait_for(lambda before=calls: self._stopping or self._calls > before, GATHER_S)

    def _has_work(self) -> bool:
        """What a pause leaves of it: waited for is what runs, aborted is everything that came before it."""
        if self._pause is None:
            return bool(self._waiting or self._batch.slots.running or self._scorings)
        running = self._batch.slots.running + (bool(self._scorings) and self._scorings[0].begun is not None)
        left = {"keep": 0, "wait": running, "abort": running + len(self._waiting) + len(self._scorings)}
        return not self._paused and left[self._pause] > 0

    def _step(self) -> None:
        self._take_weights()
        self._drop_cancelled()
        with self._changed:
            pause, aborts = self._pause, self._pause == "abort" and not self._paused
            recompute, self._recompute = self._recompute and pause is None, self._recompute and pause is not None
        if aborts:
            aborted = self._abort()
            self._batch.clear()
            self._close(aborted)
        if recompute:
            self._batch.recompute(self._served)
        if pause is None:
            self._admit()
        elif pause != "wait":
            return
        self._score(begin=pause is None)
        ended = self._batch.decode(self._served)
        self._close(len(ended))
        for response in ended:
            response.finish(self._tokenizer, self._served, self._name)

    def _take_weights(self) -> None:
        with self._changed:
            if self._next_weights is not None:
                version, weights = self._next_weights
                self._batch.load(weights)
                self._served, self._next_weights = version, None
                self._changed.notify_all()

    def _drop_cancelled(self) -> None:
        with self._changed:
            kept = deque(r for r in self._waiting if not r.pending.future.cancelled())
            dropped, self._waiting = len(self._waiting) - len(kept), kept
        self._close(dropped + self._batch.drop_cancelled())

    def _admit(self) -> None:
        with self._changed:
            fresh_start, self._fresh_start = self._fresh_start, False
            count = min(self._batch.slots.free, len(self._waiting))
            arrivals = [self._waiting.popleft() for _ in range(count)]
        self._batch.admit(arrivals, self._served, fresh_start)

    def _score(self, begin: bool) -> None:
        """A chunk of the first text that somebody waits for."""
        with self._changed:
            while self._scorings and self._scorings[0].future.cancelled():
                self._scorings.popleft()
            first = self._scorings[0] if self._scorings else None
        if first is None or not (begin or first.begun):
            return
        if self._batch.score(first, self._served):
            with self._changed:
                self._scorings.popleft()

    def _close(self, responses: int) -> None:
        """Runs before any future is resolved: whoever then submits finds an idle engine."""
        with self._changed:
            self._open_responses -= responses
            self._running, self._cached_tokens = self._batch.slots.running, self._batch.slots.cached_tokens

    def _abort(self) -> int:
        """What waits and what runs ends as it is; returns how many responses that is."""
        self._fail_scorings(Stopped("the inference engine was stopped, or paused, before the text was scored"))
        return self._end(lambda response: response.finish(self._tokenizer, self._served, self._name))

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()
        self._fail_scorings(error)
        self._end(lambda response: response.pending.fail(error))

    def _fail_scorings(self, error: BaseException) -> None:
        with self._changed:
            unfinished, self._scorings = self._scorings, deque()
        for scoring in unfinished:
            scoring.fail(error)

    def _end(self, settle: Callable[[Response], None]) -> int:
        with self._changed:
            waiting, self._waiting = self._waiting, deque()
        unfinished = [*(response for _, response in self._batch.slots.occupied()), *waiting]
        for response in unfinished:
            if not response.pending.future.done():
                settle(response)
        return len(unfinished)

    def _wait_for(self, there: Callable[[], bool], timeout_s: float | None) -> bool:
        """Whether it came to that in time; for threads that hold the lock. Raises where the engine ended meanwhile."""
        self._changed.wait_for(lambda: there() or self._stopping or self._failure, timeout_s)
        self._refuse_if_ended()
        return there()

    def _refuse_if_failed(self) -> None:
        if self._failure is not None:
            raise RunFailed(f"the inference engine failed: {self._failure!r}") from self._failure

    def _refuse_if_ended(self) -> None:
        self._refuse_if_failed()
        if self._stopping:
            raise Stopped("the inference engine was stopped")
