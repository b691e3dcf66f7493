"""Continuous batching: which responses run in which slots, how they are admitted, decoded and released.

`RunningBatch` joins the slots (host) with the model runner (device). Only the engine's thread uses it; it knows
no queue, lock or future.

What a slot holds of prompt and response stays there when the response has ended, until the slot is needed: those that
hold nothing are taken first, then the one that was used longest ago. A prompt that begins with the same tokens, be it
of the same request or the next turn of a conversation, takes what there is of them and prefills only the rest: in the
slot that holds them where it goes on with what is there, else in a copy. Tokens are compared one by one: a template
that rewrites what was said before shares what stands before the change. Nothing is shared across a weight version:
what a slot holds is forgotten with the weights that made it.
"""

import time
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.inference.config import EngineConfig
from penstock.inference.decoding import KVCache, ServedWeights
from penstock.inference.dispatch import HostSamples, PrefixIndex, SlotRows
from penstock.inference.meter import ThroughputMeter
from penstock.inference.model_runner import ModelRunner
from penstock.inference.sequence import Response, Scoring
from penstock.model.language import Decoder
from penstock.types import SAMPLING_FIELDS, CompiledProgram, WeightVersion


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """One prefill: rows of padded prompts, and for every slot the row it takes (−1: none)."""

    tokens: np.ndarray
    source: np.ndarray


@dataclass(slots=True, eq=False)
class Filling:
    """A text on its way into the cache by chunks; its slots do not decode before it is there.

    Attributes:
        text: Whose last token is decoded.
        slots: Those that take it, the first of which holds it meanwhile.
        version: Of the weights that began.
        done: Tokens in the cache.
    """

    text: np.ndarray
    slots: list[int]
    version: WeightVersion
    done: int = 0

    @property
    def rest(self) -> np.ndarray:
        """Tokens that are not in the cache yet."""
        return self.text[self.done : -1]


@dataclass(frozen=True, slots=True, eq=False)
class AdmissionPlan:
    """What has to run before newly assigned slots can decode.

    Attributes:
        fork: By slot: the slot whose cache it takes, and how many entries; none of these is written to before.
        prefills: In order.
        short: Texts that are cached but for their end, which is added at once.
        long: Those that go by chunks between dispatches.
        hits: Responses whose prompt, or its beginning, was cached.
        cached: Tokens that these need not prefill.
    """

    fork: dict[int, tuple[int, int]]
    prefills: tuple[Prefill, ...]
    short: tuple[Filling, ...] = ()
    long: tuple[Filling, ...] = ()
    hits: int = 0
    cached: int = 0


def plan_admission(
    assigned: Sequence[tuple[int, Response]],
    prefixes: PrefixIndex,
    config: EngineConfig,
    version: WeightVersion,
    whole: int | None = None,
) -> AdmissionPlan:
    """Decides how each assigned slot gets its prompt's cache, and records it in the index.

    A prompt of one token needs no cache: its only token is decoded.

    Args:
        assigned: Free slots, and the response that each is given to.
        prefixes: Which slots hold which texts.
        config: Shapes and limits of the engine.
        version: Of the weights that prefill.
        whole: `ModelRunner.whole`.
    """
    texts = {response.prompt.tobytes(): response.prompt for _, response in assigned}
    slots_of: dict[bytes, list[int]] = defaultdict(list)
    for slot, response in assigned:
        text = response.prompt[:-1]
        common = _worthwhile(prefixes.common(slot, text), len(text), config, whole)
        prefixes.begin(slot, text[:common])
        if common < len(text):
            slots_of[response.prompt.tobytes()].append(slot)
    fork: dict[int, tuple[int, int]] = {}
    fillings: list[Filling] = []
    fresh: dict[bytes, np.ndarray] = {}
    for key, slots in slots_of.items():
        text = texts[key][:-1]
        donor, most = prefixes.longest(text)
        common = _worthwhile(most, len(text), config, whole)
        if common == len(text):
            fork |= dict.fromkeys(slots, (donor, common))
        elif common:
            slots.sort(key=lambda slot: slot != donor)
            fork |= {} if slots[0] == donor else {slots[0]: (donor, common)}
            fillings.append(Filling(texts[key], slots, version, common))
        else:
            fresh[key] = texts[key]
    prefills, long = _divided(fresh, slots_of, config, version, whole)
    short = [f for f in fillings if whole is None or sum(config.pieces(len(f.rest))) <= whole]
    long += tuple(filling for filling in fillings if filling not in short)
    later = {slot for filling in long for slot in filling.slots}
    for slot, response in assigned:
        if slot not in later:
            prefixes.note(slot, response.prompt[:-1])
    prefilled = {slot for key in fresh for slot in slots_of[key]}
    partly = {slot: filling.done for filling in fillings for slot in filling.slots}
    hits = [partly.get(s, len(r.prompt) - 1) for s, r in assigned if s not in prefilled and len(r.prompt) > 1]
    return AdmissionPlan(fork, prefills, tuple(short), long, len(hits), sum(hits))


def _worthwhile(common: int, text: int, config: EngineConfig, whole: int | None) -> int:
    """How much of what is held of a text of so many tokens is used: all of it, or nothing where that saves nothing."""
    if not common:
        return 0
    padded = config.padded_length(text + 1)
    alone = sum(config.pieces(text)) if whole is not None and padded > whole else padded
    rest = sum(config.pieces(text - common))
    return common if rest < min(alone, sum(config.pieces(text))) else 0


def _divided(
    texts: dict[bytes, np.ndarray],
    slots_of: dict[bytes, list[int]],
    config: EngineConfig,
    version: WeightVersion,
    whole: int | None,
) -> tuple[tuple[Prefill, ...], tuple[Filling, ...]]:
    """Those that are prefilled at once, and those by chunks."""
    long = [key for key, text in texts.items() if whole is not None and config.padded_length(len(text)) > whole]
    short = {key: text for key, text in texts.items() if key not in long}
    fillings = (Filling(texts[key], slots_of[key], version) for key in long)
    return _batch(short, slots_of, config), tuple(fillings)


def _batch(
    prompts: dict[bytes, np.ndarray], slots_of: dict[bytes, list[int]], config: EngineConfig
) -> tuple[Prefill, ...]:
    """Prompts of like padded length together, in order of arrival, as many as a prefill has rows."""
    by_length: dict[int, list[bytes]] = defaultdict(list)
    for key, prompt in prompts.items():
        by_length[config.padded_length(len(prompt))].append(key)
    prefills: list[Prefill] = []
    for length in sorted(by_length):
        keys, rows = by_length[length], config.prefill_row_counts(length)[-1]
        for start in range(0, len(keys), rows):
            chosen = keys[start : start + rows]
            prefills.append(_prefill([(prompts[k], slots_of[k]) for k in chosen], length, config))
    return tuple(prefills)


def _prefill(rows: list[tuple[np.ndarray, list[int]]], length: int, config: EngineConfig) -> Prefill:
    count = next(count for count in config.prefill_row_counts(length) if count >= len(rows))
    tokens = np.zeros((count, length), np.int32)
    source = np.full(config.max_slots, -1, np.int32)
    for row, (prompt, slots) in enumerate(rows):
        tokens[row, : len(prompt) - 1] = prompt[:-1]
        source[slots] = row
    return Prefill(tokens, source)


WORD_BITS = 32


class SlotTable:
    """Fixed slots, some of them running a response.

    Args:
        slots: Number of responses that run at once.
        max_stop_token_ids: Most stop tokens of one response.

    Attributes:
        whole: `SlotRows`, as the device reads them. The array is reused: a dispatch must have ended before it changes.
        rows: Views of it, by name.
    """

    def __init__(self, slots: int, max_stop_token_ids: int) -> None:
        self._responses: list[Response | None] = [None] * slots
        self._free = list(range(slots))
        self.whole = SlotRows.array(slots, max_stop_token_ids)
        self.rows: SlotRows = SlotRows.of(self.whole)

    @property
    def free(self) -> int:
        """Slots without a response."""
        return len(self._free)

    @property
    def running(self) -> int:
        """Slots with a response."""
        return len(self._responses) - len(self._free)

    @property
    def cached_tokens(self) -> int:
        """Positions of the cache that running responses use."""
        return int(self.rows.positions[self.rows.budget > 0].sum())

    def reach(self, steps: int) -> int:
        """Positions that the cache must have so that every running response can take so many steps."""
        rows = self.rows
        return int(np.max((rows.positions + np.minimum(rows.budget, steps))[rows.budget > 0], initial=0))

    def occupied(self) -> Iterator[tuple[int, Response]]:
        """Running responses by ascending slot; the table may be changed meanwhile."""
        for slot, response in enumerate(list(self._responses)):
            if response is not None:
                yield slot, response

    @property
    def unoccupied(self) -> list[int]:
        """Slots without a response, ascending."""
        return list(self._free)

    def assign(self, response: Response, wanted: int | None = None) -> int:
        """Puts a response that has not begun into that slot, or into the lowest free one."""
        slot = self._free[0] if wanted is None else wanted
        self._free.remove(slot)
        self._responses[slot] = response
        rows, decoding = self.rows, response.pending.request.decoding
        rows.tokens[slot] = response.prompt[-1]
        rows.positions[slot] = len(response.prompt) - 1
        rows.budget[slot] = response.remaining_tokens
        rows.seeds[slot] = response.seed >> WORD_BITS, response.seed & (2**WORD_BITS - 1)
        for name, parameter in SAMPLING_FIELDS.items():
            value = getattr(decoding, name)
            rows.sampling[name][slot] = parameter.neutral if value is None else value
        stops = response.pending.stop_token_ids
        rows.stop_token_ids[slot] = -1
        rows.stop_token_ids[slot, : len(stops)] = stops
        return slot

    def hold(self, slot: int) -> None:
        """Its response decodes nothing before `begin`."""
        self.rows.budget[slot] = 0

    def begin(self, slot: int) -> None:
        """Its response goes on."""
        response = self._responses[slot]
        self.rows.budget[slot] = 0 if response is None else response.remaining_tokens

    @property
    def live(self) -> list[tuple[int, Response]]:
        """Running responses that decode, by ascending slot."""
        return [(slot, response) for slot, response in self.occupied() if self.rows.budget[slot] > 0]

    def release(self, slot: int) -> None:
        """Frees a slot; its cache entries stay, its parameters must not slow down the others."""
        self._responses[slot] = None
        self.rows.budget[slot] = 0
        for name, parameter in SAMPLING_FIELDS.items():
            self.rows.sampling[name][slot] = parameter.neutral
        insort(self._free, slot)

    def advance(self, sampled: HostSamples, version: WeightVersion) -> list[tuple[int, Response]]:
        """Gives each response its new tokens; returns those that ended, still in their slots."""
        ended: list[tuple[int, Response]] = []
        for slot, response in self.live:
            count = int(sampled.count[slot])
            tokens = sampled.tokens[:count, slot].tolist()
            logprobs = sampled.logprobs[:count, slot].tolist()
            response.extend(tokens, logprobs, version, sampled.alternatives(slot))
            self.rows.tokens[slot] = tokens[-1]
            self.rows.positions[slot] += count
            self.rows.budget[slot] = response.remaining_tokens
            if response.finish_reason is not None:
                ended.append((slot, response))
        return ended


class RunningBatch:
    """Fixed slots that are refilled as responses end.

    Args:
        decoder: The first weights, or shapes as of `ModelRunner`.
        config: Shapes and limits.
        meter: Counts what runs; for other threads to read.

    Attributes:
        runner: What is on the device.
        slots: What runs.
    """

    def __init__(self, decoder: Decoder, config: EngineConfig, meter: ThroughputMeter) -> None:
        self._config, self._meter = config, meter
        self.runner = ModelRunner(decoder, config)
        self.slots = SlotTable(config.max_slots, config.max_stop_token_ids)
        self._prefixes = PrefixIndex()
        self._version: WeightVersion | None = None
        self._fillings: deque[Filling] = deque()

    def warm_up(self) -> Iterator[CompiledProgram]:
        """Compiles every program; yields each as it is done."""
        return self.runner.warm_up(self.slots.whole)

    def load(self, weights: ServedWeights) -> None:
        """Serves these from the next program on; what others have cached is not shared any more."""
        self.runner.load(weights)
        self._prefixes.clear()
        self._meter.add(weight_swaps=1)

    def admit(self, arrivals: Sequence[Response], version: WeightVersion, fresh_start: bool) -> None:
        """Gives each arrival a slot and its prompt's cache.

        Args:
            arrivals: At most as many as slots are free.
            version: Of the weights that prefill.
            fresh_start: Nothing that was before may show in what follows.
        """
        if fresh_start or version != self._version:  # the same weights by another name, too
            self._prefixes.clear()
        self._version = version
        assigned = self._place(arrivals)
        self._meter.add_waits(arrivals)
        admission = plan_admission(assigned, self._prefixes, self._config, version, self.runner.whole)
        self._hold(admission.long)
        self._fit_window(admission, fresh_start)
        self._fill(admission)
        for response in arrivals:
            response.prefilled_by = version if len(response.prompt) > 1 else None

    def _place(self, arrivals: Sequence[Response]) -> list[tuple[int, Response]]:
        """Into slots that they can go on in, then into others, those last that hold what somebody could use."""
        placed: list[tuple[int, Response]] = []
        rest: list[Response] = []
        homeless: dict[bytes, np.ndarray] = {}  # fewer free slots do not change it
        for response in arrivals:
            text = response.prompt[:-1]
            key = text.tobytes()
            slot = None if key in homeless else self._prefixes.home(text, self.slots.unoccupied)
            if slot is None:
                homeless[key] = text
                rest.append(response)
            else:
                placed.append((self.slots.assign(response, slot), response))
        for text in homeless.values():
            donor, common = self._prefixes.longest(text)
            if common:
                self._prefixes.touch(donor)
        for slot, response in zip(self._prefixes.oldest(self.slots.unoccupied, len(rest)), rest, strict=True):
            placed.append((self.slots.assign(response, slot), response))
        return placed

    def recompute(self, version: WeightVersion) -> None:
        """The cache of all that runs is computed anew, under these weights.

        Args:
            version: Of the weights that are served.
        """
        self._prefixes.clear()
        slots: dict[bytes, list[int]] = defaultdict(list)
        texts: dict[bytes, np.ndarray] = {}
        for slot, response in self.slots.occupied():
            text = np.concatenate([response.prompt, np.array(response.tokens, np.int32)])
            if len(text) > 1:
                slots[text.tobytes()].append(slot)
                texts[text.tobytes()] = text
                response.prefilled_by = version
        self._fillings.clear()
        prefills, long = _divided(texts, slots, self._config, version, self.runner.whole)
        admission = AdmissionPlan({}, prefills, long=long)
        self._hold(long)
        self._fit_window(admission, fresh_start=False)
        self._fill(admission)
        for slot, _ in self.slots.occupied():
            if not any(slot in filling.slots for filling in long):
                self.slots.begin(slot)

    def _hold(self, fillings: Sequence[Filling]) -> None:
        """Takes in long prompts; one that is on its way under the same weights gets more slots."""
        for filling in fillings:
            for slot in filling.slots:
                self.slots.hold(slot)
            same = (f for f in self._fillings if f.version == filling.version and np.array_equal(f.text, filling.text))
            under_way = next(same, None)
            if under_way is None:
                self._fillings.append(filling)
            else:
                under_way.slots += filling.slots

    def _extend(self) -> None:
        """The next chunk of the first long prompt.

        Several where more responses wait for long prompts than go on, or none that goes on has a token yet.
        """
        chunk, left, go_on = self._config.prefill_chunk, self._config.prefill_tokens, bool(self._fillings)
        while go_on:
            filling = self._fillings[0]
            self._add(filling, filling.rest[:chunk])
            if not len(filling.rest):
                for slot in self._fillings.popleft().slots:
                    self.slots.begin(slot)
                    self._prefixes.note(slot, filling.text[:-1])
            left -= chunk
            go_on = left >= chunk and self._fills_on

    @property
    def _fills_on(self) -> bool:
        live, waiting = self.slots.live, sum(len(each.slots) for each in self._fillings)
        begun = any(response.begun_s is not None for _, response in live)
        return bool(live and waiting) and (waiting > len(live) or not begun)

    def _add(self, filling: Filling, tokens: np.ndarray) -> None:
        """Adds the next tokens of a text to the cache; its other slots take it when it is whole."""
        first, *others = filling.slots
        self.runner.extend(tokens, first, filling.done)
        self._meter.add(prefill_tokens=sum(self._config.pieces(len(tokens))))
        filling.done += len(tokens)
        if others and not len(filling.rest):
            self.runner.fork(dict.fromkeys(others, (first, filling.done)))

    def _release(self, slot: int) -> None:
        """Frees a slot; a long prompt that it held begins again in the next of its slots."""
        self.slots.release(slot)
        for filling in self._fillings:
            if slot in filling.slots:
                filling.done = 0 if filling.slots[0] == slot else filling.done
                filling.slots.remove(slot)
        self._fillings = deque(filling for filling in self._fillings if filling.slots)

    def clear(self) -> None:
        """Frees all slots."""
        self._fillings.clear()
        for slot, _ in self.slots.occupied():
            self.slots.release(slot)

    def decode(self, version: WeightVersion) -> list[Response]:
        """Prefills a chunk of a long prompt, where there is one, and runs one dispatch.

        Returns:
            The responses that ended with it, whose slots are free again.
        """
        if self._needed > self.runner.window:
            self.runner.resize(self._bucket(self._needed))
        self._extend()
        running = self.slots.live
        if not running:
            return []
        started = time.monotonic()
        self._note_begun(running)
        self.runner.first = version.step == 0
        beside = any(response.pending.request.alternatives for _, response in running)
        sampled = self.runner.decode(self.slots.whole, beside)
        ended = self.slots.advance(sampled, version)
        self._meter.add_tokens(running, sampled.count)
        for slot, response in ended:
            text = np.concatenate([response.prompt, np.array(response.tokens, np.int32)])
            self._prefixes.note(slot, text[: self.slots.rows.positions[slot]])
            self.slots.release(slot)
        self._meter.add(responses=len(ended))
        self._meter.add_dispatch(started, int(sampled.count.sum()))
        return [response for _, response in ended]

    def _note_begun(self, running: Sequence[tuple[int, Response]]) -> None:
        """Those that decode for the first time do so from now on: their prompts are cached, which is waited for."""
        first = [response for _, response in running if response.begun_s is None]
        now = self.runner.wait() if first else None
        for response in first:
            response.begun_s = now

    def need_decoding(self, prompt_tokens: int, alternatives: bool) -> None:
        """Has compiled, beside what runs, what begins with that prompt and tells alternatives, or else truncates."""
        begun = self._bucket(prompt_tokens + self._config.steps_per_dispatch)
        self.runner.need_decoding((begun, max(begun, self.runner.window)), alternatives)

    def need_scores(self, tokens: int, kept: bool) -> None:
        """Has the programs compiled that score a text of that length, and keep it. For any thread."""
        self.runner.need_scores(self._bucket(tokens), kept)

    def score(self, scoring: Scoring, version: WeightVersion) -> bool:
        """Scores a chunk of a text; all of it by the weights that began it, of that version then.

        Returns:
            Whether that was the last one; the scores are told then.
        """
        runner, tokens = self.runner, scoring.tokens
        if scoring.begun is None:
            scoring.begun = runner.weights, version, runner.scratch(self._bucket(len(tokens)))
        weights, began, cache = scoring.begun
        if scoring.left:
            piece = tokens[scoring.done : scoring.done + runner.scored_at_once + 1]
            cache, part = runner.score(weights, cache, piece, scoring.done, scoring.temperature)
            scoring.begun = weights, began, cache
            scoring.add(part)
            self._meter.add(scored_tokens=len(piece) - 1)
        if scoring.left:
            return False
        if scoring.kept and weights is runner.weights:
            self._keep(tokens[:-1], cache, began)
        scoring.finish(began)
        return True

    def _keep(self, text: np.ndarray, cache: KVCache, version: WeightVersion) -> None:
        """A free slot takes what was cached of a text, as if a response had left it there."""
        if not (len(text) and self.slots.free):
            return
        if version != self._version:
            self._prefixes.clear()
            self._version = version
        (slot,) = self._prefixes.oldest(self.slots.unoccupied, 1)
        if cache.window > self.runner.window:
            self.runner.resize(cache.window)
        self.runner.insert(cache, {slot: (0, len(text))})
        self._prefixes.begin(slot, text)

    def drop_cancelled(self) -> int:
        """Frees the slots of responses that nobody waits for; returns how many."""
        cancelled = [slot for slot, response in self.slots.occupied() if response.pending.future.cancelled()]
        for slot in cancelled:
            self._release(slot)
        return len(cancelled)

    def _fit_window(self, admission: AdmissionPlan, fresh_start: bool) -> None:
        """Grows the cache when needed; shrinks it at a fresh start, or when half of it would do."""
        needed = max([self._needed, *(prefill.tokens.shape[1] for prefill in admission.prefills)])
        if needed > self.runner.window or fresh_start:
            self.runner.resize(self._bucket(needed))
        elif self._bucket(2 * max(needed, self._prefixes.reach)) < self.runner.window:
            self.runner.resize(self._bucket(2 * max(needed, self._prefixes.reach)))

    @property
    def _needed(self) -> int:
        """Positions that the cache must have for the next dispatch."""
        steps = self._config.steps_per_dispatch
        return max([self.slots.reach(steps), *(len(filling.text) + steps for filling in self._fillings)])

    def _bucket(self, needed: int) -> int:
        windows = self._config.window_buckets
        return next((window for window in windows if window >= needed), windows[-1])

    def _fill(self, admission: AdmissionPlan) -> None:
        if admission.fork:
            self.runner.fork(admission.fork)
        self._meter.add(prefix_hits=admission.hits, prefix_tokens=admission.cached)
        for prefill in admission.prefills:
            self.runner.prefill(prefill.tokens, prefill.source)
            self._meter.add(prefill_tokens=prefill.tokens.size)
        for filling in admission.short:
            self._add(filling, filling.rest)
