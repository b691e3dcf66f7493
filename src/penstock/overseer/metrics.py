"""Numbers of a run from the numbers of its parts: components at one moment, groups by lesson, the bottleneck.

Pure functions and small collections. The bottleneck is named from how idle each part was during an update: while the
learner is busy, it sets the pace itself; while it waits, the inference servers do where they are busy, else the replay
buffer, else the rollout workers, who wait for both. Else the admission of groups is too tight.

Pace and time that is left are of the wall clock, over the last updates: a model may be so slow that nothing ends within
any fixed number of seconds.
"""

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from penstock.overseer.config import RunConfig
from penstock.overseer.supervisor.messages import Identity, Report
from penstock.types import AnyRollout, RolloutBatch, RolloutBatchStats, RolloutGroup

Part = Literal["learner", "inference", "replay", "rollout", "admission", "staleness", "simulators"]
"""`admission`: too few groups are admitted; `staleness`: at a budget of zero generation and learner take turns;
`simulators`: of a fleet."""

BUSY = 0.10
"""A learner with less idle time than this sets the pace."""
BUSY_SUPPLIER = 0.25
"""Whoever supplies it is called busy below this."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What sets the pace.

    Attributes:
        part: Which part of the run; None where nothing is known of the learner.
        words: The sentence, with its share and what helps.
    """

    part: Part | None = None
    words: str = ""


def find_bottleneck(
    idle: Mapping[str, float], synchronous: bool = False, local: bool = False
) -> tuple[Bottleneck, dict[str, float]]:
    """Names the bottleneck of one update.

    Args:
        idle: Role → share of the update in which it waited for others, between 0 and 1; roles may be missing.
        synchronous: Whether generation and learner take turns.
        local: Whether all runs in one process, which has one engine and one rollout worker.

    Returns:
        The bottleneck, and the metrics ``time/idle/<role>``.
    """
    shares = {f"time/idle/{role}": share for role, share in sorted(idle.items())}
    if "learner" not in idle:
        return Bottleneck(), shares
    learner = idle["learner"]
    if learner < BUSY:
        remedy = "give it a faster device" if local else "give it faster devices (roles.learner)"
        words = f"learner busy {1 - learner:.0%}: it sets the pace: {remedy}, or train on shorter rollouts"
        return Bottleneck("learner", words), shares
    part, why = _why_it_waits(idle, synchronous, local)
    return Bottleneck(part, f"learner idle {learner:.0%}: {why}"), shares


def seconds_of(metrics: Mapping[str, float]) -> tuple[float, float]:
    """Of an update, by its metrics: how long the learner waited for the batch, and the whole time."""
    waited_s = metrics.get("time/wait_for_batch", 0.0)
    worked = ("time/update", "time/checkpoint", "weights/publish_s")
    return waited_s, waited_s + sum(metrics.get(name, 0.0) for name in worked)


def idle_shares(metrics: Mapping[str, float], engine_busy_s: float) -> dict[str, float]:
    """How idle learner and engine of one process were during an update.

    Args:
        metrics: The update's, with its times.
        engine_busy_s: Seconds in which the engine computed since the update before.

    Returns:
        Role → share of the update's whole time; empty where that is nothing.
    """
    waited_s, whole_s = seconds_of(metrics)
    if whole_s <= 0:
        return {}
    return {"learner": waited_s / whole_s, "inference": min(1.0, max(0.0, 1.0 - engine_busy_s / whole_s))}


def _why_it_waits(idle: Mapping[str, float], synchronous: bool, local: bool) -> tuple[Part, str]:
    inference, replay, rollout = (idle.get(role, 1.0) for role in ("inference", "replay", "rollout"))
    if synchronous:
        return "staleness", "at staleness zero it takes turns with generation: raise replay.staleness_budget"
    if inference < BUSY_SUPPLIER:
        remedy = "raise inference.max_slots, or add servers (runtime: ray, inference.servers)"
        if not local:
            remedy = "add inference servers (inference.servers)"
        return "inference", f"generation is busy {1 - inference:.0%}: {remedy}"
    if replay < BUSY_SUPPLIER:
        remedy = "give it a core and a fast disk of its own (roles.replay), or larger groups"
        return "replay", f"the replay buffer is busy {1 - replay:.0%}: {remedy}"
    if rollout < BUSY_SUPPLIER:
        return "rollout", f"rollout workers are busy {1 - rollout:.0%}: add rollout workers (rollout.workers)"
    remedy = "admit more groups (replay.staleness_budget, replay.groups_per_batch)"
    return "admission", f"generation has not enough to do: {remedy}"


MEANS = frozenset({"inference/kv_used", "inference/proven_bytewise"})
LARGEST = ("_s", "/lag", "_lag", "mib_per_s", "inference_client/servers")
"""Names with these endings are times and the like: the slowest component's counts. Servers each client knows alike."""
LAG = "weights/lag"
"""Of each component, under its name, beside the largest."""


def merge(reports: Iterable[Report]) -> dict[str, float]:
    """Sums over components; the largest of times and lags, and each lag; the mean of shares."""
    found: dict[str, list[float]] = defaultdict(list)
    for report in reports:
        metrics = report.condition.metrics
        for name, value in metrics.items():
            found[name].append(value)
        if LAG in metrics:
            found[f"{LAG}/{report.identity.name}"].append(metrics[LAG])
    return {name: _merged(name, values) for name, values in found.items()}


def _merged(name: str, values: list[float]) -> float:
    if name in MEANS:
        return sum(values) / len(values)
    return max(values) if name.endswith(LARGEST) and not name.endswith("tokens_per_s") else sum(values)


class IdleShares:
    """How idle each role, and each component, was lately.

    Args:
        window_s: Shares are over at least so long: reports come only now and then.
        clock: Monotonic seconds.

    Attributes:
        of_roles: Role → idle share of its components' time in the last whole window.
        of_components: Component → idle share of its own.
    """

    def __init__(self, window_s: float = 3.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.of_roles: dict[str, float] = {}
        self.of_components: dict[str, float] = {}
        self._window_s = window_s
        self._clock = clock
        self._since = clock()
        self._seen: dict[Identity, tuple[float, float]] = {}

    def look(self, reports: Iterable[Report]) -> None:
        """Where the window is over, shares are those since it began."""
        now = self._clock()
        if now - self._since < self._window_s:
            return
        self._since = now
        roles: dict[str, list[tuple[float, float]]] = defaultdict(list)
        components: dict[str, list[tuple[float, float]]] = {}
        for report in reports:
            identity, condition = report.identity, report.condition
            busy_s, idle_s = self._seen.get(identity, (0.0, 0.0))
            self._seen[identity] = (condition.busy_s, condition.idle_s)
            spent = (condition.busy_s - busy_s, condition.idle_s - idle_s)
            roles[identity.role].append(spent)
            components[identity.name] = [spent]
        self.of_roles, self.of_components = _shares(roles), _shares(components)


def _shares(spent: Mapping[str, list[tuple[float, float]]]) -> dict[str, float]:
    """Name → idle share, of (busy, idle) seconds; nothing where no time was spent."""
    whole = {name: (sum(busy for busy, _ in times), sum(idle for _, idle in times)) for name, times in spent.items()}
    return {name: idle / (busy + idle) for name, (busy, idle) in whole.items() if busy + idle > 0}


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """How all components were when the conductor last looked.

    Attributes:
        components: For status.json.
        counters: For the watchdog.
        owes: Who owes progress, in words.
        reports: The newest of each, by name.
    """

    components: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    counters: Mapping[str, float] = field(default_factory=dict[str, float])
    owes: str = "no component was started yet"
    reports: Mapping[str, Report] = field(default_factory=dict[str, Report])

    def facts(self, name: str) -> Mapping[str, Any]:
        """What a component says of itself; nothing where it has not answered."""
        report = self.reports.get(name)
        return report.condition.facts if report is not None else {}

    def numbers(self) -> dict[str, float]:
        """The metrics of all."""
        return merge(self.reports.values())

    def failed_groups(self) -> tuple[int, str]:
        """Groups whose environment or reward function failed, as far as living workers know, and what one said."""
        found = [report.condition.facts for report in self.reports.values() if report.identity.role == "rollout"]
        workers = [facts for facts in found if "groups" in facts]
        said = next((facts["last_failure"] for facts in workers if facts["last_failure"]), "")
        return sum(facts["groups"]["failed"] for facts in workers), said


def success_thresholds(config: RunConfig) -> dict[str, float]:
    """By lesson, the reward from which a rollout counts as a success."""
    return {lesson_id: lesson.success_threshold for lesson_id, lesson in config.curriculum.lessons.items()}


COUNTS = frozenset({"failed_groups", "failed_rollouts"})
"""Of an environment's metrics, what is added up over groups; of all others the mean is taken."""


class RolloutMetrics:
    """Collects groups, and what their environments say of them, until they are asked for. Thread-safe.

    Args:
        thresholds: See `success_thresholds`.
        room: Most tokens of a prompt and its response together; None where nobody knows.
    """

    def __init__(self, thresholds: Mapping[str, float], room: int | None = None) -> None:
        self._thresholds, self._room = thresholds, room
        self._cut: set[str] = set()
        self._lock = threading.Lock()
        self._groups: dict[str, list[RolloutGroup]] = defaultdict(list)
        self._environments: dict[str, dict[str, list[float]]] = {}

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Those of a run."""
        return cls(success_thresholds(config), config.inference.max_seq_len)

    def add_environment(self, lesson_id: str, metrics: Mapping[str, float]) -> None:
        """Takes in what an environment says of one training group, be it delivered or failed."""
        with self._lock:
            found = self._environments.setdefault(lesson_id, {})
            for name, value in metrics.items():
                found.setdefault(name, []).append(value)

    def add(self, group: RolloutGroup) -> str:
        """Takes a group in, filtered or not.

        Returns:
            Once per lesson, how an answer was cut before its limit, for its prompt left too little of the sequence;
            empty otherwise.
        """
        lesson_id = group.rollouts[0].lesson_id
        with self._lock:
            self._groups[lesson_id].append(group)
            cut = None if lesson_id in self._cut else next(filter(self._out_of_room, group.rollouts), None)
            if cut is None:
                return ""
            self._cut.add(lesson_id)
        return (
            f"after {len(cut.response_tokens)} of {cut.decoding.max_output_tokens} tokens: a prompt (here of "
            f"{len(cut.prompt_tokens)}) and its response share inference.max_seq_len = {self._room}; raise it, and "
            "learner.row_length with it, or shorten the prompts"
        )

    def _out_of_room(self, rollout: AnyRollout) -> bool:
        if self._room is None or rollout.finish_reason != "length":
            return False
        response = len(rollout.response_tokens)
        tokens = len(rollout.prompt_tokens) + response - rollout.sample_starts[-1]
        return tokens >= self._room and response < rollout.decoding.max_output_tokens

    def take(self) -> dict[str, float]:
        """``rollout/<lesson>/…`` and ``env/<lesson>/…`` over the groups since the last call."""
        with self._lock:
            groups, self._groups = self._groups, defaultdict(list)
            environments, self._environments = self._environments, {}
        values = {
            f"env/{lesson_id}/{name}": sum(found) if name in COUNTS else sum(found) / len(found)
            for lesson_id, metrics in sorted(environments.items())
            for name, found in metrics.items()
        }
        for lesson_id in sorted(groups):
            batch = RolloutBatch.of(tuple(groups[lesson_id]))
            stats = RolloutBatchStats.of(lesson_id, batch, self._thresholds[lesson_id])
            values |= {
                f"rollout/{lesson_id}/reward_mean": stats.reward_mean,
                f"rollout/{lesson_id}/success_rate": stats.success_rate,
                f"rollout/{lesson_id}/pass_at_k": stats.pass_at_k,
                f"rollout/{lesson_id}/response_tokens": stats.response_tokens,
                f"rollout/{lesson_id}/truncated_fraction": stats.truncated_fraction,
                f"rollout/{lesson_id}/groups": float(stats.groups),
            }
        return values


PACE_UPDATES, PACE_S = 4, 10.0
"""A pace is over at least so many updates and so many seconds, whichever is longer."""


class Pace:
    """Growth per second of what components count, by the wall clock. Thread-safe.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._total, self._grown = 0.0, 0.0
        self._marks: deque[tuple[float, float]] = deque([(clock(), 0.0)])  # when, and how much until then

    def begin(self) -> None:
        """What was before does not count any more: another phase begins."""
        with self._lock:
            self._marks = deque([(self._clock(), self._grown)])

    def note_update(self) -> None:
        """An update was made."""
        with self._lock:
            self._marks.append((self._clock(), self._grown))

    def note(self, total: float) -> float | None:
        """Takes the count in; by one thread, since a count that is older than the last would pass for a fall.

        Args:
            total: Of all components; it falls where one of them is replaced, which is no growth.

        Returns:
            Growth per second; None where there is none yet.
        """
        with self._lock:
            now = self._clock()
            self._grown += max(0.0, total - self._total)
            self._total = total
            marks = self._marks
            while len(marks) > PACE_UPDATES + 1 and marks[1][0] <= now - PACE_S:
                marks.popleft()
            (since, before) = marks[0]
            return (self._grown - before) / (now - since) if now > since and self._grown > before else None


LEAST_INTERVALS, MOST_INTERVALS = 5, 64
"""Between updates: how many must be known for a forecast, and how many it is made of."""


class UpdateTimes:
    """When the last updates were made.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._made: deque[float] = deque(maxlen=MOST_INTERVALS + 1)

    def note(self, at: float | None = None) -> None:
        """One more, now or `at` that time."""
        self._made.append(self._clock() if at is None else at)

    def __len__(self) -> int:
        """How many are known."""
        return len(self._made)

    def _intervals(self) -> list[float]:
        """Seconds between updates; the first, for which programs are compiled, has none before it."""
        made = list(self._made)
        return [after - before for before, after in zip(made, made[1:], strict=False)]

    @property
    def mean_s(self) -> float | None:
        """Seconds from one update to the next, lately, with all that lies between; None before the second."""
        intervals = self._intervals()
        return sum(intervals) / len(intervals) if intervals else None

    def left_s(self, updates: int) -> tuple[float, float] | None:
        """Least and most seconds that so many further updates will likely take; None where too few were made.

        The mean of the last intervals with twice its standard error, and the means of their older and their newer half:
        so a pace that changes widens it. An update that takes longer than any before counts while it does.
        """
        intervals = self._intervals()
        if len(intervals) < LEAST_INTERVALS or updates <= 0:
            return None
        waited = self._clock() - self._made[-1]
        if waited > max(intervals):
            intervals.append(waited)
        count, half = len(intervals), len(intervals) // 2
        mean = sum(intervals) / count
        error = 2 * math.sqrt(sum((each - mean) ** 2 for each in intervals) / (count - 1) / count)
        means = [sum(part) / len(part) for part in (intervals[:half], intervals[half:])]
        least = max(min(mean - error, *means), min(intervals))
        return updates * least, updates * max(mean + error, *means)


NO_SIGNAL_UPDATES = 10
"""So many updates in a row without signal are told."""
MUCH_TRUNCATED = 0.5
"""A larger share of answers that were cut is named as a likely cause."""


@dataclass(slots=True)
class FlatStretch:
    """Updates in a row from which nothing was learned: all rewards of each of their groups were equal.

    Attributes:
        first: The first of the updates, by the version it reached.
        updates: How many there were.
        groups: In all of them together.
        lowest: The smallest of the batches' mean rewards.
        highest: The largest.
        mixed: Whether rewards differed between groups of one batch.
        truncated: Share of answers that were cut at their length limit, lately; None where nobody knows.
    """

    first: int
    updates: int = 0
    groups: int = 0
    lowest: float = math.inf
    highest: float = -math.inf
    mixed: bool = False
    truncated: float | None = None

    def words(self, success_threshold: float) -> str:
        """The numbers, and what would likely help.

        Args:
            success_threshold: The reward from which an answer counts as a success.
        """
        last = self.first + self.updates - 1
        one = not self.mixed and self.lowest == self.highest
        which = f": {self.lowest:.6g}" if one else f", {self.lowest:.3g} to {self.highest:.3g} on average"
        if not self.mixed and self.highest < success_threshold:
            helps = "an easier lesson, a reward that grades steps on the way, or a warm start (learner.warm_start)"
        elif not self.mixed and self.lowest >= success_threshold:
            helps = "a harder lesson"
        else:
            helps = (
                "problems that are solved now and then, more answers to each (sampling_params.n_generations_per_prompt)"
            )
        cut = ""
        if self.truncated is not None and self.truncated >= MUCH_TRUNCATED:
            cut = f"; {self.truncated:.0%} of the answers are cut: first raise sampling_params.max_output_tokens"
        return (
            f"no signal: all {self.groups:,} groups of {self.updates:,} updates ({self.first:,}–{last:,}) had equal "
            f"rewards{which}. What helps: {helps}{cut}"
        )


class SignalWatch:
    """Looks for updates that teach nothing.

    Args:
        success_threshold: The reward from which an answer counts as a success.

    Attributes:
        stretch: The updates in a row without signal, the last update among them; None where that had some.
    """

    def __init__(self, success_threshold: float) -> None:
        self._success_threshold = success_threshold
        self.stretch: FlatStretch | None = None

    def note(self, step: int, metrics: Mapping[str, float], truncated: float | None) -> str:
        """Takes an update in.

        Args:
            step: The version reached.
            metrics: Its own. Groups of equal rewards are no lack of signal where advantages are not zero: rewards may
                be compared with those of other groups, or turn by turn.
            truncated: Share of answers that were cut lately; None where nobody knows.

        Returns:
            The stretch in words, once it is long enough; empty otherwise.
        """
        flat = metrics.get("train/zero_variance_groups", 0.0) >= 1.0
        if not flat or metrics.get("train/advantage_zero_fraction", 1.0) < 1.0:
            self.stretch = None
            return ""
        stretch = self.stretch
        if stretch is None or step != stretch.first + stretch.updates:  # the run went back to a checkpoint
            stretch = self.stretch = FlatStretch(step)
        reward = metrics.get("train/reward_mean", 0.0)
        stretch.updates += 1
        stretch.truncated = truncated
        stretch.groups += int(metrics.get("train/groups", 0.0))
        stretch.lowest, stretch.highest = min(stretch.lowest, reward), max(stretch.highest, reward)
        stretch.mixed = stretch.mixed or metrics.get("train/reward_std", 0.0) > 0.0
        return stretch.words(self._success_threshold) if stretch.updates >= NO_SIGNAL_UPDATES else ""
