"""Whether fragments of synthetic simulators are labelled as they must be, step by step.

A synthetic simulator's state is 16 bits, s' = 25173 s + 512 a + 13849; a frame is the episode's noise plus the upper
byte, the reward that byte / 255. So frames, actions and rewards of a fragment either belong together or not: an action
that was lost, doubled or swapped with another slot's, or a result at the wrong step, leaves no state that explains what
was seen. Not covered: noise (one pixel stands for the frame).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np

from penstock.types import SampleFragment


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """What is kept of a fragment: T steps; pixels of the T + 1 observations, and of the K last ones by their step."""

    group_id: str
    slot: int
    pixels: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    faults: np.ndarray
    first: np.ndarray
    values: np.ndarray
    weight_steps: np.ndarray
    finals: dict[int, int]

    @classmethod
    def of(cls, fragment: SampleFragment) -> Self:
        def pixel(frames: np.ndarray) -> np.ndarray:
            return frames.reshape(len(frames), -1)[:, 0].astype(np.int64)

        finals = pixel(fragment.final_observations[""]) if len(fragment.final_steps) else ()
        return cls(
            fragment.group_id, fragment.slot, pixel(fragment.observations[""]),
            fragment.actions[""].astype(np.int64), fragment.rewards, fragment.terminated, fragment.truncated,
            fragment.faults, fragment.first, fragment.values, fragment.weight_steps,
            {int(step): int(final) for step, final in zip(fragment.final_steps, finals, strict=True)},
        )  # fmt: skip


def problems(every: Iterable[Labels], values_are_versions: bool = False) -> list[str]:
    """What is wrong with fragments of one worker, in words; empty: nothing."""
    found: list[str] = []
    by_slot: dict[int, list[Labels]] = defaultdict(list)
    for labels in every:
        by_slot[labels.slot].append(labels)
        found += [f"{labels.group_id}: {problem}" for problem in _of_one(labels)]
        if values_are_versions and not np.array_equal(labels.values[:-1], labels.weight_steps):
            found.append(f"{labels.group_id}: values are not of the version that it names")
    for several in by_slot.values():
        found += _between(several)
    return found


def _of_one(labels: Labels) -> Iterator[str]:
    if labels.terminated.any():
        yield "terminated, where no episode ever is"
    if not np.array_equal(labels.first[1:], labels.truncated):
        yield "an episode begins where none ended, or the reverse"
    if (labels.faults & ~labels.truncated).any():
        yield "a fault that did not cut its episode"
    if set(np.flatnonzero(labels.truncated & ~labels.faults).tolist()) != set(labels.finals):
        yield "last observations are not where episodes were cut without a fault"
    begin = 0
    for end in [*(np.flatnonzero(labels.truncated) + 1).tolist(), len(labels.rewards)]:
        steps = slice(begin, end - 1 if end > begin and labels.faults[end - 1] else end)
        if steps.stop > steps.start:
            last = labels.finals.get(steps.stop - 1, labels.pixels[steps.stop])
            pixels = np.array([*labels.pixels[steps], last])
            if not explained(pixels, labels.actions[steps], labels.rewards[steps]):
                yield f"no state explains steps {steps.start} to {steps.stop - 1}"
        begin = end


def explained(pixels: np.ndarray, actions: np.ndarray, rewards: np.ndarray) -> bool:
    """Whether some state leads through these n + 1 pixels, n actions and n rewards."""
    uppers = np.rint(rewards.astype(np.float64) * 255).astype(np.int64)
    before = (uppers[0] - (pixels[1] - pixels[0])) % 256
    if ((np.diff(pixels) - np.diff(uppers, prepend=before)) % 256).any():
        return False
    states = before * 256 + np.arange(256)
    for action, upper in zip(actions.tolist(), uppers.tolist(), strict=True):
        states = (25173 * states + 512 * action + 13849) & 0xFFFF
        states = states[states >> 8 == upper]
    return len(states) > 0


def _between(several: list[Labels]) -> Iterator[str]:
    """Fragments of one slot join on, where none is missing between them."""
    numbered = {int(labels.group_id.rpartition("-")[2]): labels for labels in several}
    if len(numbered) != len(several):
        yield f"slot {several[0].slot}: two fragments of one number"
    for number, labels in numbered.items():
        after = numbered.get(number + 1)
        if after is not None and labels.pixels[-1] != after.pixels[0]:
            yield f"{labels.group_id}: the next one does not join on"
