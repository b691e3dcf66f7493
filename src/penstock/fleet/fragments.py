"""Cuts what a worker's slots do into fragments of L steps, vectorised over slots.

Each slot has room for L + 1 steps: what was seen and decided at 0 … L, and what steps 0 … L − 1 led to. When step L is
decided the reward of step L − 1 is known too: the first L steps become a fragment, whose bootstrap observation and
value are step L's, and step L begins the next buffer. So every step is in one fragment, and a slot's fragments join on.

Every decision is one step started, and every started step is in exactly one place of the account: acting, buffered, or
with a fragment that was cut. Steps of two lineages of the run never share a fragment: what the older one left in a
buffer is discarded and counted as stale. With `keep_states`, the recurrent state is kept wherever the version changes
inside a buffer, so that a fragment can be cut exactly there when its older steps are stale (`cut_stale`).

Room is kept one leaf at a time: small leaves in one block, written for all slots of a batch in one call and copied out
likewise. Large leaves (frames) have an array for each slot, which a fragment takes over without a copy; the slot then
gets another one. That is one which an earlier fragment had, where nobody holds that fragment any more: the system's
fresh pages cost ten times what writing a frame into used ones does (2 µs for 48 KiB).

Not covered: sending, and when steps are too old (`sender`).
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.fleet.accounting import StepBooks
from penstock.fleet.policy import Simulators
from penstock.fleet.rollout_loop import is_large
from penstock.fleet.steps import STEP_ROW, ActionBatch, Leaves, StepBatch, whole_rows
from penstock.types import LeafSpace, RolloutMetadata, RunFailed, SampleFragment

_LENT_PER_SLOT = 4  # arrays that are remembered; fragments beyond them are freed as usual
_LOOKED_AT = 8  # of them at each exchange
_OWN_REFERENCES = 2  # the variable, and the argument of getrefcount


class BlockBuffer:
    """[n, L + 1, …] in one array.

    Args:
        leaf: What one step holds.
        slots: Number of simulators, n.
        length: Steps of a fragment, L.
    """

    def __init__(self, leaf: LeafSpace, slots: int, length: int) -> None:
        self._steps = leaf.zeros(slots, length + 1)
        self._flat = self._steps.reshape(-1, *leaf.shape)
        self._length = length

    def write(self, slots: np.ndarray, at: np.ndarray, values: np.ndarray) -> None:
        """Row i goes to step `at[i]` of slot `slots[i]`."""
        self._flat[slots * (self._length + 1) + at] = values

    def take(self, slots: np.ndarray) -> Sequence[np.ndarray]:
        """The L + 1 steps of each of these slots; step L begins their next buffers."""
        taken = self._steps[slots]
        self._steps[slots, 0] = taken[:, self._length]
        return taken  # type: ignore[return-value]  # its rows are what is asked for


class SlotBuffer:
    """[L + 1, …] for each slot. The arguments are `BlockBuffer`'s."""

    def __init__(self, leaf: LeafSpace, slots: int, length: int) -> None:
        self._length = length
        self._arrays = [np.full((length + 1, *leaf.shape), 0, leaf.dtype) for _ in range(slots)]  # touches its pages
        self._lent: deque[np.ndarray] = deque(maxlen=_LENT_PER_SLOT * slots)

    def write(self, slots: np.ndarray, at: np.ndarray, values: np.ndarray) -> None:
        """Row i goes to step `at[i]` of slot `slots[i]`."""
        for slot, step, row in zip(slots.tolist(), at.tolist(), values, strict=True):
            self._arrays[slot][step] = row

    def take(self, slots: np.ndarray) -> Sequence[np.ndarray]:
        """The L + 1 steps of each of these slots, without a copy; step L begins their next buffers."""
        return [self._exchange(slot) for slot in slots.tolist()]

    def _exchange(self, slot: int) -> np.ndarray:
        taken = self._arrays[slot]
        returned = self._returned()
        self._arrays[slot] = np.empty_like(taken) if returned is None else returned
        self._arrays[slot][0] = taken[self._length]
        self._lent.append(taken)
        return taken[:]

    def _returned(self) -> np.ndarray | None:
        """An array that was lent, and of which no view is left: every view counts as a reference to it."""
        for _ in range(min(_LOOKED_AT, len(self._lent))):
            array = self._lent.popleft()
            if sys.getrefcount(array) == _OWN_REFERENCES:
                return array
            self._lent.append(array)
        return None


def step_buffer(leaf: LeafSpace, slots: int, length: int) -> BlockBuffer | SlotBuffer:
    """The kind that suits the leaf's size."""
    return (SlotBuffer if is_large(leaf) else BlockBuffer)(leaf, slots, length)


_RESULTS = ("rewards", "terminated", "truncated", "faults")
_DECISIONS = {
    "first": np.bool_, "logprobs": np.float32, "values": np.float32, "weight_steps": np.int32, "episodes": np.int64,
}  # fmt: skip
_ONE_MORE = ("first", "values")
_SPENT = ("generate_s", "policy_s", "simulate_s")


@dataclass(frozen=True, slots=True, eq=False)
class UnsentFragment:
    """A fragment on its way.

    Attributes:
        fragment: With metadata.
        states: Recurrent states before those steps from which it may begin anew, by step, by leaf name.
    """

    fragment: SampleFragment
    states: dict[int, Leaves] = field(default_factory=dict[int, Leaves])


class FragmentCutter:
    """Takes inference batches, gives fragments. For one thread.

    Args:
        pool: The started simulators: their spaces, and the task and environment's name of every slot.
        length: L, steps in a fragment.
        worker_id: The rollout worker, for the fragments' metadata.
        name: Begins the fragments' ids; unique to the worker's incarnation.
        keep_states: Keep the recurrent state at every change of version.
        clock: Unix seconds.

    Attributes:
        books: Told where the steps are; those of fragments that are handed out wait. Its own, until others are set.
    """

    def __init__(
        self,
        pool: Simulators,
        length: int,
        worker_id: str,
        name: str,
        *,
        keep_states: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        spaces, n = pool.spaces, len(pool.tasks)
        self._tasks, self._env_names, self._length = pool.tasks, pool.env_names, length
        self._worker_id, self._name, self._clock = worker_id, name, clock
        self._keep_states = keep_states
        self._observations = {leaf.name: step_buffer(leaf, n, length) for leaf in spaces.observations}
        self._actions = {leaf.name: step_buffer(leaf, n, length) for leaf in spaces.actions}
        self._results = whole_rows(np.zeros((n, length + 1), STEP_ROW))  # column j: what step j led to
        self._decisions = {name: np.zeros((n, length + 1), dtype) for name, dtype in _DECISIONS.items()}
        self._flat_results = self._results.reshape(-1)
        self._flat = {name: array.reshape(-1) for name, array in self._decisions.items()}
        self._no_finals = {leaf.name: leaf.zeros(0) for leaf in spaces.observations}
        self._filled = np.zeros(n, np.int64)  # steps decided in this buffer
        self._episode = np.zeros(n, np.int64)
        self._lineage = -1
        self._older: set[int] = set()  # slots whose buffer holds steps of an older lineage
        self._weight_step = np.full(n, -1, np.int64)
        self._begun = np.zeros(n)  # when the fragment in the buffer did
        self._policy_s, self._simulate_s = np.zeros(n), np.zeros(n)  # since then
        self._fragments = [0] * n
        self._finals: list[list[tuple[int, Leaves]]] = [[] for _ in range(n)]
        self._states: list[dict[int, Leaves]] = [{} for _ in range(n)]
        self.books = StepBooks()

    def add(self, batch: StepBatch) -> list[UnsentFragment]:
        """Takes a batch in.

        Returns:
            The fragments that it completes, in the order of its slots.

        Raises:
            RunFailed: a slot has a result without an action, or an action without a result.
        """
        slots, acted = batch.slots.copy(), batch.acted
        at = self._filled[slots]
        if (wrong := acted != (at > 0)).any():
            raise RunFailed(
                f"slots {slots[wrong].tolist()} have a result without an action, or an action without a result"
            )
        self._episode[slots] += batch.first & acted
        stale = self._discard_older_lineage(batch.decision.version.lineage, slots, at)
        self._spend(batch, slots, at)
        now = slots * (self._length + 1) + at
        self._write_results(batch, slots, at, now)
        self._write_decisions(batch, slots, at, now)
        complete = np.flatnonzero(at == self._length)
        cut = self._cut(batch, complete) if len(complete) else []
        at[complete] = 0
        self._filled[slots] = at + 1
        decided, done, cut_steps = len(slots), int(np.count_nonzero(acted)), len(cut) * self._length
        self.books.add(
            started=decided, acting=decided - done, buffered=done - cut_steps - stale, waiting=cut_steps, stale=stale
        )
        return cut

    def _discard_older_lineage(self, lineage: int, slots: np.ndarray, at: np.ndarray) -> int:
        if lineage != self._lineage:
            self._older.update(np.flatnonzero(self._filled).tolist())
            self._lineage = lineage
        if not self._older:
            return 0
        steps = 0
        for row, slot in enumerate(slots.tolist()):
            if slot in self._older:
                self._older.remove(slot)
                steps += int(at[row])
                at[row] = 0
                self._finals[slot], self._states[slot] = [], {}
        return steps

    def _spend(self, batch: StepBatch, slots: np.ndarray, at: np.ndarray) -> None:
        # What a fragment waits for after its first decision, up to the one behind its last result.
        self._policy_s[slots] += batch.inference_s
        self._simulate_s[slots] += batch.simulate_s
        if not at.all():
            self._begin(slots[at == 0], self._clock())

    def _begin(self, slots: np.ndarray, now: float) -> None:
        self._begun[slots] = now
        self._policy_s[slots] = self._simulate_s[slots] = 0.0

    def _write_results(self, batch: StepBatch, slots: np.ndarray, at: np.ndarray, now: np.ndarray) -> None:
        # Where there was no step before, this writes to a last column, which holds no results.
        self._flat_results[now - 1] = whole_rows(batch.rows)
        if not batch.has_final.any():
            return
        for row in np.flatnonzero(batch.has_final & (at > 0)).tolist():
            final = {leaf: array[row].copy() for leaf, array in batch.final_observations.items()}
            self._finals[slots[row]].append((int(at[row]) - 1, final))

    def _write_decisions(self, batch: StepBatch, slots: np.ndarray, at: np.ndarray, now: np.ndarray) -> None:
        decision = batch.decision
        self._flat["first"][now] = batch.first
        self._flat["logprobs"][now] = decision.logprobs
        self._flat["values"][now] = decision.values
        self._flat["weight_steps"][now] = decision.version.step
        self._flat["episodes"][now] = self._episode[slots]
        for leaf, buffer in self._observations.items():
            buffer.write(slots, at, batch.observations[leaf])
        for leaf, buffer in self._actions.items():
            buffer.write(slots, at, decision.actions[leaf])
        if decision.states:
            self._write_states(slots, at, decision)

    def _write_states(self, slots: np.ndarray, at: np.ndarray, decision: ActionBatch) -> None:
        begins = at == 0
        if self._keep_states:
            begins |= (self._weight_step[slots] != decision.version.step) & (at < self._length)
            self._weight_step[slots] = decision.version.step
        rows = np.flatnonzero(begins)
        for row, state in zip(rows.tolist(), _rows_of(decision.states, rows), strict=True):
            self._states[slots[row]][int(at[row])] = state

    def _cut(self, batch: StepBatch, rows: np.ndarray) -> list[UnsentFragment]:
        slots, last = batch.slots[rows], self._length
        results = self._results[slots].view(STEP_ROW)
        scalars = {name: np.ascontiguousarray(results[name]) for name in _RESULTS}
        for name, array in self._decisions.items():
            scalars[name] = array[slots]
            array[slots, 0] = scalars[name][:, last]
        observations = {leaf: buffer.take(slots) for leaf, buffer in self._observations.items()}
        actions = {leaf: buffer.take(slots) for leaf, buffer in self._actions.items()}
        lineage, now = batch.decision.version.lineage, self._clock()
        generate_s = np.maximum(now - self._begun[slots], 0.0).tolist()
        spent = zip(generate_s, self._policy_s[slots].tolist(), self._simulate_s[slots].tolist(), strict=True)
        cut: list[UnsentFragment] = []
        for i, (slot, seconds) in enumerate(zip(slots.tolist(), spent, strict=True)):
            states = self._states[slot]
            fragment = SampleFragment(
                task=self._tasks[slot],
                env_name=self._env_names[slot],
                group_id=f"{self._name}-{slot}-{self._fragments[slot]}",
                slot=slot,
                observations={leaf: taken[i] for leaf, taken in observations.items()},
                actions={leaf: taken[i][:last] for leaf, taken in actions.items()},
                **{name: array[i] if name in _ONE_MORE else array[i, :last] for name, array in scalars.items()},
                final_steps=np.array([step for step, _ in self._finals[slot]], np.int32),
                final_observations=self._final_observations(slot),
                initial_state=states.pop(0, {}),
                timings=dict(zip(_SPENT, seconds, strict=True)),
                metadata=RolloutMetadata(self._worker_id, now, int(scalars["weight_steps"][i, :last].min()), lineage),
            )
            cut.append(UnsentFragment(fragment, states))
            self._fragments[slot] += 1
            self._finals[slot] = []
        self._begin(slots, now)
        self._carry_states(slots, rows, batch.decision)
        return cut

    def _carry_states(self, slots: np.ndarray, rows: np.ndarray, decision: ActionBatch) -> None:
        if not decision.states:
            return
        for slot, state in zip(slots.tolist(), _rows_of(decision.states, rows), strict=True):
            self._states[slot] = {0: state}

    def _final_observations(self, slot: int) -> Leaves:
        finals = [final for _, final in self._finals[slot]]
        if not finals:
            return self._no_finals
        return {leaf: np.stack([final[leaf] for final in finals]) for leaf in self._no_finals}


def _rows_of(states: Leaves, rows: np.ndarray) -> list[Leaves]:
    """Each row's state. Only rows that are kept are read, so that a lazy mapping moves no others."""
    if not len(rows):
        return []
    kept = {leaf: np.asarray(array[rows]) for leaf, array in states.items()}
    return [{leaf: array[i] for leaf, array in kept.items()} for i in range(len(rows))]
