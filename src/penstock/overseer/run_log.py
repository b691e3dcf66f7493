"""The single writer of a run's metrics, events and samples; it also feeds the live view.

Every component is handed one of these methods and knows nothing of the files behind them.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.overseer.config import RunConfig
from penstock.overseer.full_disk import RetriedWrites
from penstock.overseer.launch.launcher import ComponentContext
from penstock.overseer.metrics import RolloutMetrics
from penstock.overseer.progress import Progress, Sample
from penstock.overseer.results import Results
from penstock.rundir import EventLog, MetricsLog, RunDirectory
from penstock.tracking import conversation_of, make_tracker
from penstock.types import CompiledProgram, RolloutGroup

if TYPE_CHECKING:
    from penstock.overseer.control_config import FleetRunConfig
    from penstock.overseer.prometheus import PrometheusEndpoint

SHOWN_EVENTS = frozenset(
    {
        "answer_cut", "badly_scaled", "component_death", "data_changed", "disk_full", "evaluated_before",
        "evaluation_failed", "evaluation_slow", "external_engine_failed", "external_engine_relaunches", "files_damaged",
        "files_missing", "goal_reached", "graduated", "group_failed", "isolation", "memory_freed", "prometheus",
        "regressed", "rewind", "rollouts_quarantined", "scale_refused", "solutions_too_long", "started_anew",
        "straggler", "tracker_failed", "unlocked", "update_skipped",
    }
)  # fmt: skip
"""Events that concern the user at once."""


_COMPILED = ("program", "number", "of", "seconds")


class RunLog:
    """Writes what happens to the run directory, the trackers and the view.

    Args:
        directory: Whose metrics.jsonl and events.jsonl are appended to.
        config: The run's; trackers and success thresholds come from it.
        progress: What the view shows.

    Attributes:
        progress: The same.
        step: The present one, of events that say no other.
        failures: Of simulators, in this life of the run.
        last_failure: What the last of them said.
        bottleneck_words: What set the pace of the last update.
    """

    def __init__(self, directory: RunDirectory, config: "RunConfig | FleetRunConfig", progress: Progress) -> None:
        self._metrics = MetricsLog(directory.metrics_path)
        self._events = EventLog(directory.events_path)
        self._writes = RetriedWrites(config.replay.store.full_disk_s)
        self._prometheus = _endpoint(config, directory)
        others = [] if self._prometheus is None else [self._prometheus]
        self._tracker = make_tracker(config.tracking, directory.path, config.dump(), self._tracker_failed, others)
        self._tally = RolloutMetrics.of(config) if isinstance(config, RunConfig) else RolloutMetrics({})
        self.progress = progress
        self.step = 0
        self.failures, self.last_failure = 0, ""
        self.bottleneck_words = ""
        self._bottleneck: str | None = None
        self._of_fork_server = ""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Appends one line of metrics."""
        line = {"time": time.time(), **values}  # of now, however long it waits for room
        self._writes.do(lambda: self._metrics.append(step, line))
        self._tracker.log(values, step)
        self.progress.note_evaluation(step, values)
        if skipped := values.get("train/non_finite", 0.0):
            self.event("update_skipped", step, share=skipped)

    def event(self, kind: str, step: int | None = None, **fields: Any) -> None:
        """Appends one event, of the present step by default, and shows it where it concerns the user."""
        line = {"time": time.time(), "step": self.step if step is None else step, **fields}
        self._writes.do(lambda: self._events.append(kind, **line))
        if kind in SHOWN_EVENTS:
            self.progress.note(_in_words(kind, fields), at_once=kind == "rewind")
        if kind == "compiled":
            self.progress.note_compiled(CompiledProgram(*(fields[name] for name in _COMPILED)), fields["component"])
        elif kind == "goal_reached":
            self.progress.goal = str(fields["reason"])
        elif kind == "component_death":
            self.progress.compiling.pop(fields["component"].partition("#")[0], None)
        else:
            self._note_simulators(kind, fields)

    def evaluation(self, when: str, step: int, results: Results, metrics: Mapping[str, float]) -> None:
        """What an evaluation before or after the training gave; a lesson that failed has the reward None."""
        self.metrics(step, metrics)
        rewards = {name: None if stats.failure else stats.reward_mean for name, stats in results.items()}
        self.event("evaluation", when=when, reward=rewards)

    def bottleneck(self, part: str | None, words: str) -> None:
        """What set the pace of the last update; an event where that is another part than before. None: not known."""
        self.bottleneck_words = words
        if part not in (None, self._bottleneck):
            self.event("bottleneck", part=part, words=words)
            self._bottleneck = part

    def signal(self, words: str) -> None:
        """Shows that the last updates taught nothing, in words; empty where they did. Once per stretch an event."""
        if self.progress.note_signal(words):
            self.event("no_signal", words=words)

    def status(self, content: Mapping[str, Any]) -> None:
        """What status.json says now; Prometheus has it, too."""
        if self._prometheus is not None:
            self._prometheus.note_status(content)

    def announce(self) -> None:
        """Says where Prometheus finds the run's numbers."""
        if self._prometheus is not None:
            self.event("prometheus", url=self._prometheus.url)

    @property
    def no_room(self) -> str:
        """In words, how long there has been no room for what is to be logged; empty where there is."""
        return self._writes.describe()

    def phase(self, words: str) -> None:
        """The run comes to another phase."""
        self.progress.begin_phase(words)
        self.event("phase", phase=words)

    def _note_simulators(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Counts a failure among the events of simulators, and shows what the user is to know at once."""
        words = failure_in_words(kind, fields)
        if words and words != self._of_fork_server:
            self.progress.note(words)
        if kind == "nursery_ready":
            self._of_fork_server = words  # of one; those of the other workers say the same
        if failures := failures_in(kind, fields):
            self.failures, self.last_failure = self.failures + failures, words

    def damage(self, place: str, reason: str) -> None:
        """A file of the run could not be read, and lies in `place` now."""
        self.event("files_damaged", path=place, reason=reason)

    def group(self, group: RolloutGroup) -> None:
        """Counts a training group into the next step's ``rollout/…`` metrics, and shows one of its answers."""
        cut = self._tally.add(group)
        if cut:
            self.event("answer_cut", lesson=group.rollouts[0].lesson_id, reason=cut)
        self.progress.samples.append(Sample.of(conversation_of(group.rollouts[0])))

    def environment(self, lesson_id: str, metrics: Mapping[str, float]) -> None:
        """Counts what an environment says of a training group into the next step's ``env/…`` metrics."""
        self._tally.add_environment(lesson_id, metrics)

    def _tracker_failed(self, name: str, error: Exception) -> None:
        self.event("tracker_failed", tracker=name, message=str(error))

    def close(self) -> None:
        """Closes the logs and the tracker."""
        self._tracker.close()
        self._writes.finish()
        self._metrics.close()
        self._events.close()

    def conversations(self, conversations: Sequence[Mapping[str, Any]], step: int = 0) -> None:
        """Tracks and shows sample conversations that a component chose: of a step, or of the present one."""
        self._tracker.log_samples(step or self.step, conversations)
        self.progress.samples.extend(Sample.of(conversation) for conversation in conversations)

    def take_rollout_metrics(self) -> dict[str, float]:
        """``rollout/<lesson>/…`` and ``env/<lesson>/…`` over the groups since the last call."""
        values = self._tally.take()
        self.progress.note_rollouts(values)
        return values


def _endpoint(config: "RunConfig | FleetRunConfig", directory: RunDirectory) -> "PrometheusEndpoint | None":
    prometheus = config.tracking.prometheus
    if prometheus is None:
        return None
    from penstock.overseer.prometheus import PrometheusEndpoint  # a server, of which most runs in a process have none

    return PrometheusEndpoint(prometheus, directory.path.resolve().name)


def _in_words(kind: str, fields: Mapping[str, Any]) -> str:
    if kind == "component_death":
        return " ".join(f"{fields['component']} died: {fields['reason']}".split())
    if kind in ("external_engine_failed", "external_engine_relaunches"):
        what = "failed" if kind == "external_engine_failed" else "is started anew for each version"
        return " ".join(f"the server of {fields['server']} {what}: {fields['reason']}".split())
    if kind == "answer_cut":
        return f"lesson {fields['lesson']}: an answer was cut {fields['reason']}"
    if kind in ("badly_scaled", "evaluated_before", "evaluation_slow"):
        return str(fields["words"])
    if kind == "disk_full":
        return " ".join(str(fields["reason"]).split())
    if kind == "isolation":
        given = ", ".join(fields["objects"])
        return f"isolation: none for what was given as a Python object ({given}): it runs in this process"
    if kind == "rewind":
        place = "its beginning" if fields["checkpoint"] is None else f"its checkpoint {fields['checkpoint']}"
        return " ".join(f"the run goes back to {place}: {fields['reason']}".split())
    if kind == "update_skipped":
        return f"{fields['share']:.0%} of the update's optimiser steps skipped: the loss or gradient was not finite"
    return " ".join([kind, *(f"{name}={value}" for name, value in fields.items())])


_TOLD_FAILURES = {
    "simulator_failed": "a simulator failed", "simulator_fault": "a simulator failed",
    "simulator_quarantined": "a simulator was given up",
}  # fmt: skip


def simulators_told(ctx: ComponentContext) -> Callable[[str, Mapping[str, Any]], None]:
    """Takes events of workers and simulators for events.jsonl: all are news, but nurseries without troubles."""

    def tell(kind: str, fields: Mapping[str, Any]) -> None:
        if kind != "nursery_ready" or fields["troubles"]:
            ctx.event(kind, **fields)

    return tell


def failures_in(kind: str, fields: Mapping[str, Any]) -> int:
    """How many failures of simulators an event tells of: an end of a process, or steps that went wrong without one."""
    return int(fields["steps"]) if kind == "simulator_fault" else int(kind == "simulator_failed")


def failure_in_words(kind: str, fields: Mapping[str, Any]) -> str:
    """What the user is told at once of such an event, in one line; empty for most."""
    if kind == "nursery_ready":
        left = (f"{id}: {_line(text)}" for id, text in fields["troubles"].items() if id != "threads")
        told = "; ".join(left)
        return f"not imported ahead of its processes, so each of them imports it: {told}" if told else ""
    if kind not in _TOLD_FAILURES:
        return ""
    reason = "; ".join(_line(fields[name]) for name in ("reason", "limit") if fields.get(name))
    return f"{_TOLD_FAILURES[kind]} (task {fields.get('task')}): {reason}"


def _line(text: object) -> str:
    return " ".join(str(text).split())
