"""Stand-ins of this process: a pool of scripted simulators, and a policy whose decisions say what they were made of.

A `FakePool` keeps the truth: every step that its simulators took, by slot, to compare fragments and counts with. What
is observed names slot, episode and step, so that a mislabelled step is seen at once.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.fleet.steps import STEP_ROW, ActionBatch, Leaves, StepArrival
from penstock.types import LeafSpace, RunFailed, Spaces, WeightVersion

ACTIONS = 7
CUTS = ("truncated", "cut")
FIRST = WeightVersion(0, 0)


def rows_of(**fields: Sequence[Any]) -> np.ndarray:
    """`STEP_ROW` [n] with these fields; others are 0."""
    rows = np.zeros(len(fields["slots"]), STEP_ROW)
    for name, values in fields.items():
        rows[name] = values
    return rows


def fake_spaces(image: tuple[int, ...] | None = None) -> Spaces:
    observations = (LeafSpace("", "box", (3,), "float32"),)
    if image is not None:
        observations = (
            LeafSpace("image", "box", image, "uint8", low=0, high=255),
            LeafSpace("where", "box", (3,), "float32"),
        )
    return Spaces(observations, (LeafSpace("", "discrete", (), "int64", (ACTIONS,)),))


@dataclass(frozen=True)
class TrueStep:
    observation: tuple[int, int, int]  # slot, episode, step of it
    action: int
    reward: float
    terminated: bool
    truncated: bool
    fault: bool
    final: tuple[int, int, int] | None


@dataclass
class Script:
    """How simulators behave; each function is told slot, episode and the step's number in it.

    `ends` says ``terminated``, ``truncated``, ``cut`` (by a planned restart), or None.
    """

    ends: Callable[[int, int, int], str | None] = lambda slot, episode, step: "terminated" if step == 9 else None
    faults: Callable[[int, int, int], bool] = lambda slot, episode, step: False
    delay_s: Callable[[int], float] = lambda process: 0.0
    kills: Callable[[int, int], bool] = lambda process, acts: False
    restart_s: float = 0.0


@dataclass
class _Process:
    slots: list[int]
    due: float = 0.0
    acts: int = 0
    arrival: StepArrival | None = None
    quarantined: bool = False
    episodes: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)


class FakePool:
    def __init__(
        self,
        processes: int = 4,
        per_process: int = 1,
        script: Script | None = None,
        *,
        image: tuple[int, ...] | None = None,
        tasks: tuple[str, ...] | None = None,
        order: np.random.Generator | None = None,
    ) -> None:
        self.spaces = fake_spaces(image)
        self.num_slots = processes * per_process
        self.tasks = tasks or ("fake",) * self.num_slots
        self.env_names = ("Fake-v0",) * self.num_slots
        self.script = script or Script()
        self.truth: list[list[TrueStep]] = [[] for _ in range(self.num_slots)]
        self.returns: list[list[float]] = [[] for _ in range(self.num_slots)]
        self.started = self.closed = False
        self.most_waited_s = 0.0
        self.polls = 0
        self._sums = [0.0] * self.num_slots
        self._order = order
        self._changed = threading.Condition()
        self._restarts = self._faults = 0
        self._processes = [
            _Process(
                list(range(p * per_process, (p + 1) * per_process)), episodes=[0] * per_process, steps=[0] * per_process
            )
            for p in range(processes)
        ]

    # --- the surface of a pool ---

    @property
    def live_slots(self) -> int:
        return sum(len(process.slots) for process in self._processes if not process.quarantined)

    def given_up(self) -> Mapping[int, str]:
        lost = (process for process in self._processes if process.quarantined)
        return {slot: "told to" for process in lost for slot in process.slots}

    def start(self, timeout_s: float) -> None:
        self.started = True
        for number, process in enumerate(self._processes):
            process.arrival = self._arrival(number, process, acted=False)

    def poll(self, timeout_s: float) -> list[StepArrival]:
        deadline = time.monotonic() + timeout_s
        self.polls += 1
        with self._changed:
            while True:
                if not self.live_slots:
                    raise RunFailed("every simulator process is quarantined; the last reason: told to")
                ready, next_due = self._ready()
                now = time.monotonic()
                if ready or now >= deadline:
                    return ready
                self._changed.wait(max(0.0, min(deadline, next_due) - now))

    def act(self, process: int, actions: Leaves, part: int = 0) -> None:
        assert part == 0
        with self._changed:
            this = self._processes[process]
            assert this.arrival is None, f"process {process} was acted on twice"
            assert all(len(array) == len(this.slots) for array in actions.values())
            if this.quarantined:
                return
            this.acts += 1
            lost = self.script.kills(process, this.acts)
            this.due = time.monotonic() + (self.script.restart_s if lost else self.script.delay_s(process))
            results = [self._step(this, row, int(actions[""][row]), lost) for row in range(len(this.slots))]
            self._restarts += lost
            this.arrival = self._arrival(process, this, acted=True, results=results)
            self._changed.notify_all()

    def counts(self) -> dict[str, int]:
        live = sum(not process.quarantined for process in self._processes)
        return {"live": live, "respawning": 0, "quarantined": len(self._processes) - live,
                "restarts": self._restarts, "faults": self._faults}  # fmt: skip

    def close(self) -> None:
        self.closed = True

    # --- for tests ---

    def quarantine(self, process: int) -> None:
        with self._changed:
            self._processes[process].quarantined = True
            self._changed.notify_all()

    @property
    def steps_taken(self) -> int:
        return sum(len(steps) for steps in self.truth)

    def _ready(self) -> tuple[list[StepArrival], float]:
        now = time.monotonic()
        waiting = [p for p in self._processes if p.arrival is not None and not p.quarantined]
        ready = [process for process in waiting if process.due <= now]
        if self._order is not None and ready:
            self._order.shuffle(ready)
            ready = ready[: int(self._order.integers(1, len(ready) + 1))]
        arrivals = []
        for process in ready:
            arrivals.append(process.arrival)
            process.arrival = None
        return arrivals, min((process.due for process in waiting), default=now + 3600)

    def _step(self, process: _Process, row: int, action: int, lost: bool) -> dict[str, Any]:
        slot, episode, step = process.slots[row], process.episodes[row], process.steps[row]
        end = "truncated" if lost else self.script.ends(slot, episode, step)
        fault = lost or self.script.faults(slot, episode, step)
        reward = 0.0 if lost else float(100 * episode + step + 1)
        if fault and end:
            end = "truncated"  # a fault never terminates
        final = (slot, episode, step + 1) if end and not fault else None
        self._sums[slot] += reward
        self._faults += fault
        self.truth[slot].append(
            TrueStep((slot, episode, step), action, reward, end == "terminated", end in CUTS, fault, final)
        )
        result = {"reward": reward, "end": end, "fault": fault, "final": final, "return": 0.0, "length": 0}
        if end:
            if not fault:
                result |= {"return": self._sums[slot], "length": step + 1}
                self.returns[slot].append(self._sums[slot])
            self._sums[slot] = 0.0
            process.episodes[row], process.steps[row] = episode + 1, 0
        else:
            process.steps[row] = step + 1
        return result

    def _observe(self, where: list[tuple[int, int, int]]) -> Leaves:
        rows = np.array(where, np.float32)
        if len(self.spaces.observations) == 1:
            return {"": rows}
        shape = self.spaces.observations[0].shape
        frames = np.zeros((len(where), *shape), np.uint8) + rows.sum(1).astype(np.uint8).reshape(-1, *[1] * len(shape))
        return {"image": frames, "where": rows}

    def _arrival(
        self, number: int, process: _Process, acted: bool, results: list[dict[str, Any]] | None = None
    ) -> StepArrival:
        k = len(process.slots)
        results = (
            results or [{"reward": 0.0, "end": None, "fault": False, "final": None, "return": 0.0, "length": 0}] * k
        )
        where = list(zip(process.slots, process.episodes, process.steps, strict=True))
        ends = [result["end"] for result in results]
        rows = rows_of(
            slots=process.slots,
            first=[not acted or end is not None for end in ends],
            rewards=[result["reward"] for result in results],
            terminated=[end == "terminated" for end in ends],
            truncated=[end in CUTS for end in ends],
            faults=[result["fault"] for result in results],
            cut=[end == "cut" for end in ends],
            acted=[acted] * k,
            has_final=[result["final"] is not None for result in results],
            returns=[result["return"] for result in results],
            lengths=[result["length"] for result in results],
        )
        finals = self._observe([result["final"] or (0, 0, 0) for result in results])
        return StepArrival(number, rows, self._observe(where), finals, simulate_s=0.001)


class FakePending:
    def __init__(self, decision: ActionBatch, ready_at: float) -> None:
        self._decision, self._ready_at = decision, ready_at

    def done(self) -> bool:
        return time.monotonic() >= self._ready_at

    def result(self) -> ActionBatch:
        time.sleep(max(0.0, self._ready_at - time.monotonic()))
        return self._decision


class FakeRunner:
    """Acts by slot, episode, step and version; its log-probability and value name the weights that it used.

    Weights are one array ``w`` that holds the version's step: value = step of the observation + 1000 · w.
    With `state_size` it counts the steps of each slot's episode, as recurrent state.
    """

    def __init__(
        self,
        slots: int,
        version: WeightVersion | None = FIRST,
        state_size: int = 0,
        inference_s: float = 0.0,
    ) -> None:
        self.waiting: deque[tuple[WeightVersion, Mapping[str, Any]]] = deque(maxlen=1)
        self.batches: deque[np.ndarray] = deque(maxlen=10_000)
        self.inference_s = inference_s
        self.begun = threading.Event()
        self._version = version
        self._w = 0.0 if version is None else float(version.step)
        self._state = np.zeros((slots, state_size), np.float32)

    @property
    def version(self) -> WeightVersion | None:
        return self._version

    def set_weights(self, version: WeightVersion, arrays: Mapping[str, Any]) -> None:
        self.waiting.append((version, arrays))
        if self._version is None:
            self._take()

    def decide(self, slots: np.ndarray, observations: Leaves, first: np.ndarray) -> FakePending:
        self._take()
        assert self._version is not None, "asked to decide without weights"
        assert len(set(slots.tolist())) == len(slots)
        self.batches.append(slots.copy())
        self.begun.set()
        where = next(array for array in observations.values() if array.ndim == 2)[: len(slots)]
        states = {}
        if self._state.shape[1]:
            self._state[slots[first]] = 0
            states = {"h": self._state[slots].copy()}
            self._state[slots] += 1
        decision = ActionBatch(
            actions={"": ((where @ [1, 3, 5] + self._w) % ACTIONS).astype(np.int64)},
            logprobs=(-1 - self._w - where[:, 2] / 100).astype(np.float32),
            values=(where[:, 2] + 1000 * self._w).astype(np.float32),
            version=self._version,
            states=states,
        )
        return FakePending(decision, time.monotonic() + self.inference_s if self.inference_s else 0.0)

    def _take(self) -> None:
        while self.waiting:
            version, arrays = self.waiting.popleft()
            self._version, self._w = version, float(arrays["w"][0])


class ListSink:
    """Keeps every fragment; may be slow, or refuse the whole delivery that would bring a fragment's number."""

    def __init__(self, delay_s: float = 0.0, fails_at: int | None = None, error: Exception | None = None) -> None:
        self.fragments: list[Any] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self._delay_s, self._fails_at, self._error = delay_s, fails_at, error

    def add_batches(self, batches: Any) -> None:
        self.entered.set()
        assert self.gate.wait(30)
        time.sleep(self._delay_s)
        given = [fragment for batch in batches for fragment in batch.rollouts()]
        if self._fails_at is not None and len(self.fragments) + len(given) > self._fails_at:
            raise self._error or ValueError("the sink broke")
        self.fragments.extend(given)
