"""What a run's page says at once, in sentences: where it stalled, when reward rose, what was thrown away, who is sick.

Each comes from what the run recorded and says nothing where that shows nothing; where a page shows more, it is named.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.dashboard.observation import ObservedRun

SLOW = 5.0
"""An update of so many times the median, and of `SLOW_S`, is a stall."""
SLOW_S = 5.0
AROUND = 20
"""Updates before and after one that it is compared with."""
RISE_WINDOW = 10
"""Updates before and after a rise of reward."""
RISE, RISE_SIGMAS = 0.25, 4.0
"""Of the whole range, and of the standard error of the difference: less is no rise to speak of."""
MOST_LESSONS = 3
_PARTS = {
    "time/wait_for_batch": "waiting for a batch", "time/update": "in the learner's update",
    "time/checkpoint": "saving a checkpoint", "weights/publish_s": "publishing weights",
}  # fmt: skip


def findings_page(run: ObservedRun) -> dict[str, Any]:
    """``findings``: each a ``name``, ``words``, and ``links`` of text, page and what is asked of the page."""
    found = [_stall(run), _rise(run), _thrown_away(run), _sick(run), _unchecked(run)]
    return {"findings": [each for each in found if each is not None]}


def update_in_words(run: ObservedRun, step: int) -> list[str]:
    """How long an update took and where its time went, and what happened meanwhile; of one never made, why not."""
    seconds = _seconds(run)
    steps = seconds.pop("step")
    here = int(np.searchsorted(steps, step))
    told = meanwhile(run, step)
    troubles = [words for event in told if (words := _trouble(event))]
    if here == len(steps) or steps[here] != step:
        return [*_never_made(run, step, steps), *troubles]
    whole = np.sum(list(seconds.values()), axis=0)
    around = np.delete(whole[max(0, here - AROUND) : here + AROUND + 1], min(here, AROUND))
    took = f"It took {_span(whole[here])}"
    if len(around):
        usual = float(np.median(around))
        times = whole[here] / usual if usual > 0 else 1.0
        took += f", {times:.3g} times the {_span(usual)} of the updates around it" if times >= 2 else ", as usual"
    parts = sorted(((float(values[here]), words) for (words, values) in seconds.items()), reverse=True)
    spent = ", ".join(f"{_span(value)} {words}" for value, words in parts if value > 0.01 * whole[here])
    bottleneck = [str(event["words"]) for event in told if event.get("event") == "bottleneck" and event.get("words")]
    return [f"{took}: {spent}." if spent else f"{took}.", *bottleneck[-1:], *troubles]


def meanwhile(run: ObservedRun, step: int) -> list[dict[str, Any]]:
    """Events around an update, by the version it made; what held one up while it was made is not its successor's."""
    at = [(event.get("step"), event) for event in run.events()]
    return [event for when, event in at if when == step - 1 or (when == step and not _trouble(event))]


_LOST = {"stale_step": "with weights too old to train on", "stale_time": "finished too long ago"}


def lost_in_words(run: ObservedRun) -> list[str]:
    """Of the lessons that lost rollouts, the greatest losers first: how many, and the commonest reason."""
    rows = run.index.rows(
        """SELECT lesson, sum(n)::BIGINT AS settled, coalesce(sum(n) FILTER (state <> 'trained'), 0)::BIGINT AS lost,
               max(n) FILTER (state <> 'trained') AS most,
               first(state ORDER BY n DESC, state) FILTER (state <> 'trained') AS state
        FROM (SELECT coalesce(g.lesson, 'unknown') AS lesson, r.state, count(*) AS n
              FROM rollouts r JOIN groups g USING (g)
              WHERE g.evaluation IS NULL AND r.state IS NOT NULL AND r.state <> 'waiting' GROUP BY ALL)
        GROUP BY lesson HAVING lost > 0 ORDER BY lost DESC, lesson"""
    )
    told = []
    for row in rows[:MOST_LESSONS]:
        reason = run.index.rows(
            """SELECT r.reason, count(*) AS n FROM rollouts r JOIN groups g USING (g)
            WHERE coalesce(g.lesson, 'unknown') = $lesson AND r.state = $state AND r.reason IS NOT NULL
            AND g.evaluation IS NULL GROUP BY ALL ORDER BY n DESC, reason LIMIT 1""",
            {"lesson": row["lesson"], "state": row["state"]},
        )
        why = f": {reason[0]['reason']}" if reason else ""
        share = row["lost"] / row["settled"]
        named = f"{row['most']:,} of them {_LOST.get(row['state'], row['state'].replace('_', ' '))}{why}"
        told.append(f"{row['lesson']} lost {row['lost']:,} of {row['settled']:,} rollouts ({share:.0%}), {named}")
    left = len(rows) - len(told)
    return told + ([f"{left} more lessons lost some"] if left else [])


def sickest_in_words(simulators: list[dict[str, Any]]) -> str:
    """Of rows of the fleet's page, the sickest first; empty where none had trouble."""
    troubled = [row for row in simulators if row["failures"] or row["faults"]]
    if not troubled:
        return ""
    row = troubled[0]
    of = f", of the {len(troubled)} of {len(simulators)} that had trouble" if len(troubled) > 1 else ""
    last = f"; the last: {row['last']}" if row["last"] else ""
    counts = (
        f"{_count(row['failures'], 'failure')}, {_count(row['faults'], 'fault')} in {_count(row['starts'], 'life')}"
    )
    state = f", now {row['state']}" if row.get("state") in ("failed", "quarantined") else ""
    second = troubled[1] if len(troubled) > 1 else None
    then = (
        f". Next: {second['simulator']}, {_count(second['failures'], 'failure')}, {_count(second['faults'], 'fault')}"
        if second is not None
        else ""
    )
    return f"{row['simulator']} (task {row['task']}) is the sickest{of}: {counts}{state}{last}{then}"


def simulators_of(run: ObservedRun) -> list[dict[str, Any]]:
    """Every simulator process as events tell of it, the sickest first."""
    simulators: dict[str, dict[str, Any]] = {}
    for event in run.events():
        kind = str(event.get("event"))
        if not kind.startswith("simulator_") or "process" not in event:
            continue
        key = f"{event.get('worker')} process {event['process']}"
        row = simulators.setdefault(
            key, {"simulator": key, "task": event.get("task"), "starts": 0, "faults": 0, "failures": 0, "last": ""}
        )
        # A fault is of an episode: the process that tells of it goes on.
        states = {"started": "live", "fault": row.get("state", "live"), "retired": "ended"}
        row["state"] = states.get(kind.removeprefix("simulator_"), kind.removeprefix("simulator_"))
        row["since"] = event.get("time")
        row["starts"] += kind == "simulator_started"
        row["faults"] += kind == "simulator_fault"
        row["failures"] += kind == "simulator_failed"
        if kind in ("simulator_fault", "simulator_failed", "simulator_quarantined"):
            row["last"] = str(event.get("reason") or event.get("message") or event.get("error") or kind)
            row["last_time"] = event.get("time")
        if kind == "simulator_started":
            row["slots"], row["seconds"] = len(event.get("slots") or ()), event.get("seconds")
    return sorted(simulators.values(), key=lambda row: (-row["failures"], -row["faults"], row["simulator"]))


def _stall(run: ObservedRun) -> dict[str, Any] | None:
    """The slowest update; the first of each life, which compiles, is not looked at."""
    seconds = _seconds(run)
    steps = seconds.pop("step")
    if len(steps) < 2 * AROUND:
        return None
    begun = [event.get("step", 0) + 1 for event in run.events() if event.get("event") == "start"]
    whole = np.where(np.isin(steps, [steps[0], *begun]), 0.0, np.sum(list(seconds.values()), axis=0))
    slowest, usual = int(np.argmax(whole)), float(np.median(whole))
    if whole[slowest] < max(SLOW_S, SLOW * usual):
        return None
    value, part = max((float(values[slowest]), words) for words, values in seconds.items())
    step = int(steps[slowest])
    died = [f"{event.get('component')} had died ({event.get('reason') or 'it was not told why'})"
            for event in meanwhile(run, step) if event.get("event") == "component_death"]  # fmt: skip
    words = f"update {step:,} took {_span(whole[slowest])}, others {_span(usual)}: {_span(value)} of it {part}"
    words += f"; {died[-1]}" if died else ""
    return {"name": "Slowest", "words": words, "links": [[f"Update {step:,}", "update", {"step": step}]]}


def _rise(run: ObservedRun) -> dict[str, Any] | None:
    """Where the mean of the updates from one on is most above that of those before it."""
    steps, values, _ = run.curves.series("train/reward_mean")
    width = RISE_WINDOW
    if len(steps) < 2 * width:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(values, width)
    means, variances = windows.mean(axis=1), windows.var(axis=1, ddof=1)
    rises = means[width:] - means[:-width]
    at = int(np.argmax(rises))
    noise = float(np.sqrt((variances[at] + variances[at + width]) / width))
    if rises[at] <= max(RISE_SIGMAS * noise, RISE * float(np.ptp(values)), 0.0):
        return None
    step = int(steps[at + width])
    words = f"rose most at update {step:,}: {means[at]:.3g} in the {width} before, {means[at + width]:.3g} from it on"
    links = [*_written(run, step), [f"Update {step:,}", "update", {"step": step}]]
    return {"name": "Reward", "words": words, "links": links}


def _written(run: ObservedRun, step: int) -> list[list[Any]]:
    """Links to the best group after a rise, of the lesson whose reward rose most, and to its last one before."""
    best = run.index.rows(
        """WITH near AS (SELECT g.group_id, g.lesson, r.reward, r.step, r.step >= $step AS late
            FROM rollouts r JOIN groups g USING (g) WHERE r.step >= $step - $width AND r.step < $step + $width
            AND r.state = 'trained' AND g.evaluation IS NULL AND r.reward IS NOT NULL),
        risen AS (SELECT lesson FROM near GROUP BY lesson HAVING count(*) FILTER (late) > 0
            ORDER BY avg(reward) FILTER (late) - avg(reward) FILTER (NOT late) DESC NULLS LAST LIMIT 1)
        SELECT group_id, lesson FROM near JOIN risen USING (lesson) WHERE late ORDER BY reward DESC, step LIMIT 1""",
        {"step": step, "width": RISE_WINDOW},
    )
    before = run.index.rows(
        """SELECT g.group_id, g.lesson FROM rollouts r JOIN groups g USING (g)
        WHERE g.lesson = $lesson AND r.step < $step AND r.state = 'trained' AND g.evaluation IS NULL
        ORDER BY r.step DESC, g.group_id LIMIT 1""",
        {"lesson": best[0]["lesson"] if best else None, "step": step},
    )
    texts = [*(("What was written for {}", row) for row in best), *(("before it for {}", row) for row in before)]
    return [[text.format(row["lesson"]), "group", {"id": row["group_id"]}] for text, row in texts]


def _thrown_away(run: ObservedRun) -> dict[str, Any] | None:
    told = lost_in_words(run)
    return {"name": "Thrown away", "words": "; ".join(told), "links": [["Ledger", "ledger", {}]]} if told else None


def _sick(run: ObservedRun) -> dict[str, Any] | None:
    words = sickest_in_words(simulators_of(run))
    return {"name": "Simulators", "words": words, "links": [["Fleet", "fleet", {}]]} if words else None


def _unchecked(run: ObservedRun) -> dict[str, Any] | None:
    """Versions whose engines nothing was compared of; with several engines each counts."""
    steps, values, _ = run.curves.series("train/parity_unchecked")
    if not len(values) or not values[-1]:
        return None
    since = int(steps[np.argmax(values > 0)])
    words = f"{_count(int(values[-1]), 'time')} an engine gave nothing to compare of a version that was trained on"
    return {"name": "Parity", "words": words, "links": [[f"First: update {since:,}", "update", {"step": since}]]}


def _seconds(run: ObservedRun) -> dict[str, np.ndarray]:
    """``step``, and by what it was spent on the seconds of each update; [updates]."""
    series = {words: run.curves.series(name) for name, words in _PARTS.items()}
    steps = series[_PARTS["time/update"]][0]
    found = {"step": steps}
    for words, (own, values, _) in series.items():
        found[words] = np.zeros(len(steps))
        found[words][np.isin(steps, own)] = values[np.isin(own, steps)]
    return found


def _never_made(run: ObservedRun, step: int, steps: np.ndarray) -> list[str]:
    status = run.status()
    last = status.content.get("step")
    if isinstance(last, int) and step > last:
        verb = "is at" if status.alive else "got as far as"
        why = f": {status.why}" if status.why else ""
        waits = str(status.content.get("waiting_for", ""))
        told = [f"It was not made{' yet' if status.alive else ''}: the run {verb} version {last:,}{why}."]
        return told + ([f"{'Waiting' if status.alive else 'Last waiting'} for: {waits}"] if waits else [])
    return [] if not len(steps) else ["No seconds of it are recorded."]


def _trouble(event: Mapping[str, Any]) -> str:
    """Of an event that holds a run up, in words; empty for others."""
    kind = str(event.get("event"))
    why = str(event.get("reason") or event.get("message") or event.get("error") or "")
    if kind == "component_death":
        return f"{event.get('component')} died: {why}"
    if kind in ("failure", "interrupted", "disk_full", "group_failed", "worker_failed", "external_engine_failed"):
        return f"{kind.replace('_', ' ')}: {why}"
    return ""


def _span(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 7200 else f"{seconds:.3g} s"


def _count(number: int, noun: str) -> str:
    plural = {"life": "lives"}.get(noun, f"{noun}s")
    return f"{number:,} {noun if number == 1 else plural}"
