"""How prompts reach the cache: which slots copy a neighbour's prompt, and which prompts are prefilled together.

A prompt's cache may be shared by every response to the same prompt under the same weights: the samples of one
request, or of several. Sharing never crosses a weight version, and forgets everything when the engine is idle, so
that what an idle engine does with a submission depends on the submission alone.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.inference.config import EngineConfig
from penstock.inference.responses import Response


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """One prefill: rows of padded prompts, and for every slot the row it takes (−1: none)."""

    tokens: np.ndarray
    source: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Admission:
    """What has to run before newly assigned slots can decode.

    Attributes:
        fork: For every slot the slot whose cache it takes, read before anything is written; None: nothing.
        prefills: In order.
    """

    fork: np.ndarray | None
    prefills: tuple[Prefill, ...]


class PrefixIndex:
    """Knows in which slot the cache of a prompt lies. Cleared whenever weights change or the cache shrinks."""

    def __init__(self) -> None:
        self._slots_of: dict[bytes, set[int]] = defaultdict(set)
        self._prompt_in: dict[int, bytes] = {}

    def find(self, prompt: np.ndarray) -> int | None:
        """The lowest slot that holds this prompt's cache."""
        return min(self._slots_of.get(prompt.tobytes(), ()), default=None)

    def overwrite(self, slot: int, prompt: np.ndarray) -> None:
        """The slot now holds this prompt's cache, and no longer what it held."""
        held = self._prompt_in.get(slot)
        if held is not None:
            self._slots_of[held].discard(slot)
            if not self._slots_of[held]:
                del self._slots_of[held]
        self._prompt_in[slot] = prompt.tobytes()
        self._slots_of[prompt.tobytes()].add(slot)

    def clear(self) -> None:
        """Forgets everything."""
        self._slots_of.clear()
        self._prompt_in.clear()


def plan_admission(assigned: Sequence[tuple[int, Response]], prefixes: PrefixIndex, config: EngineConfig) -> Admission:
    """Decides how each assigned slot gets its prompt's cache, and records it in the index.

    A prompt of one token needs no cache: its only token is decoded.
    """
    fork = np.arange(config.max_slots, dtype=np.int32)
    fresh: dict[bytes, list[int]] = defaultdict(list)
    prompts: dict[bytes, np.ndarray] = {}
    cached = [(slot, response) for slot, response in assigned if len(response.prompt) > 1]
    for slot, response in cached:
        donor = prefixes.find(response.prompt)
        if donor is not None:
            fork[slot] = donor
        else:
            fresh[response.prompt.tobytes()].append(slot)
            prompts[response.prompt.tobytes()] = response.prompt
    for slot, response in assigned:
        prefixes.overwrite(slot, response.prompt)
    forked = bool((fork != np.arange(config.max_slots)).any())
    return Admission(fork if forked else None, _batch(prompts, fresh, config))


def _batch(
    prompts: dict[bytes, np.ndarray], slots_of: dict[bytes, list[int]], config: EngineConfig
) -> tuple[Prefill, ...]:
    """Prompts of like padded length together, in order of arrival, as many as a prefill has rows."""
    by_length: dict[int, list[bytes]] = defaultdict(list)
    for key, prompt in prompts.items():
        by_length[padded_length(len(prompt), config)].append(key)
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


def padded_length(prompt_tokens: int, config: EngineConfig) -> int:
    """The length that a prompt's prefill is padded to; its last token is not prefilled."""
    return next(length for length in config.prefill_buckets if length >= prompt_tokens - 1)
