"""What the pages about whole runs show, as plain data: runs, one run, its curves, ledger, lessons, fleet, one update.

Everything comes from a run's files as `ObservedRun` has read them; what is not stored is said not to be. All texts are
made printable on their way out (`safe`): what a model or a simulator wrote may hold anything.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from penstock.dashboard.findings import (
    findings_page,
    lost_in_words,
    meanwhile,
    sickest_in_words,
    simulators_of,
    update_in_words,
)
from penstock.dashboard.index import AGE
from penstock.dashboard.observation import ObservedRun, ObservedRuns
from penstock.dashboard.rollout_pages import batches_of, choices, group_list, group_page, moved_by, timeline
from penstock.dashboard.status import components, finite, mapping
from penstock.rundir.commands import command_line
from penstock.rundir.logs import LIFE_BEGINS
from penstock.rundir.replayed_updates import HEADLINE, KeptReplay, read_replays
from penstock.text.safe_text import printable
from penstock.types import ConfigError, RunDirectoryError
from penstock.types.intervals import reward_interval, t_quantile

MOST_POINTS = 2000
"""Of one curve."""
MOST_REWARDS = 300
"""Points of the curve of rewards."""
MARKS = {
    "start": "start", "resume": "resume", "checkpoint": "checkpoint", "component_death": "death", "failure": "failure",
    "interrupted": "interrupted", "graduated": "graduated", "unlocked": "unlocked", "regressed": "regressed",
    "rewind": "rewind", "simulator_quarantined": "quarantined", "worker_failed": "worker failed",
    "goal_reached": "goal reached", "best_checkpoint": "best", "disk_full": "disk full", "no_signal": "no signal",
    "weights_differ": "weights differ", "rollouts_quarantined": "quarantined", "end": "end",
}  # fmt: skip
"""Events that are marked on curves, and by what."""
TROUBLES = ("component_death", "failure", "worker_failed", "group_failed", "simulator_failed", "simulator_fault",
            "simulator_quarantined", "disk_full", "weights_differ")  # fmt: skip
"""Events that are counted beside a run's state."""
_QUIET = ("compiled", "phase", "arithmetic", "simulator_started")
MOST_EVENTS = 400
"""Of a run page: the newest, without those of every start."""


def runs_page(runs: ObservedRuns) -> dict[str, Any]:
    """Every run in a line."""
    return {"runs": [_line(run) for run in runs.listed()]}


def run_page(run: ObservedRun) -> dict[str, Any]:
    """What a run is at, and what it can show."""
    status, events = run.status(), run.events()
    told = [event for event in events if event.get("event") not in _QUIET]
    return {
        **_line(run),
        "why": status.why,
        "runtime": status.runtime,
        "directory": str(run.directory.path),
        "phase": status.content.get("phase", ""),
        "words": mapping(status.content.get("training")).get("words", ""),
        "no_signal": mapping(status.content.get("training")).get("no_signal", ""),
        "bottleneck": status.content.get("bottleneck", ""),
        "waiting_for": status.content.get("waiting_for", ""),
        "ledger": status.content.get("ledger", {}),
        "lesson_states": status.content.get("lessons", {}),
        "failures": {name: status.content.get(name) for name in ("groups", "simulators") if status.content.get(name)},
        "events": told[-MOST_EVENTS:],
        "marks": [[mark, event.get("step", 0), event.get("time")] for event in events
                  if (mark := MARKS.get(str(event.get("event"))))],
        "metrics": run.curves.names,
        "index": {"where": run.index.where, "damaged": run.index.damaged},
        "commands": {"status": command_line("status", run.directory.path),
                     "rollouts": command_line("rollouts", run.directory.path)},
    }  # fmt: skip


def curves_page(run: ObservedRun, words: Mapping[str, str]) -> dict[str, Any]:
    """Some metrics: ``names`` with commas between, ``points`` at most, ``from`` and ``to`` a step.

    Raises:
        ConfigError: a number is none.
    """
    points = min(max(_whole(words, "points") or 600, 2), MOST_POINTS)
    first, last = _whole(words, "from"), _whole(words, "to")
    names = [name for name in words.get("names", "").split(",") if name]
    return {"curves": {name: run.curves.picture(name, points, first, last) for name in names}}


def reward_page(run: ObservedRun) -> dict[str, Any]:
    """Reward by update with its 95% interval, groups being the independent draws, and of every evaluation likewise.

    Where there are more updates than `MOST_REWARDS`, 2^k of them are taken together.
    """
    rows = run.index.rows
    last = rows("SELECT max(step) AS last FROM rollouts WHERE state = 'trained'")[0]["last"] or 0
    block = 1
    while last / block > MOST_REWARDS:
        block *= 2
    trained = rows(
        """SELECT b AS block, max(step) AS step, avg(mean) AS mean, stddev_samp(mean) AS spread, count(*) AS groups
        FROM (SELECT r.g, (r.step - 1) // $block AS b, max(r.step) AS step, avg(r.reward) AS mean
              FROM rollouts r WHERE r.state = 'trained' GROUP BY r.g, b) GROUP BY b ORDER BY b""",
        {"block": block},
    )
    return {
        "block": block,
        "trained": [[r["step"], r["mean"], *_t_interval(r["mean"], r["spread"], r["groups"])] for r in trained],
        "held_out": _held_out(run),
    }


def ledger_page(run: ObservedRun) -> dict[str, Any]:
    """Where rollouts came from, how they ended, and what became of them: in rollouts, tokens and seconds."""
    flows = run.index.rows(
        """SELECT g.lesson, coalesce(r.finish, CASE WHEN r.part IS NULL THEN 'not stored' ELSE 'stored' END) AS finish,
               coalesce(r.state, 'waiting') AS state, count(*) AS rollouts,
               coalesce(sum(r.tokens), 0)::BIGINT AS tokens, coalesce(sum(r.seconds), 0)::DOUBLE AS seconds
        FROM rollouts r JOIN groups g USING (g) WHERE g.evaluation IS NULL GROUP BY ALL ORDER BY 4 DESC, 1, 2, 3"""
    )
    reasons = run.index.rows(
        """SELECT r.state, regexp_replace(r.reason, '[0-9]+', '…', 'g') AS reason, g.lesson, count(*) AS rollouts,
               any_value(g.group_id) AS example, min(r.step) AS first, max(r.step) AS last
        FROM rollouts r JOIN groups g USING (g)
        WHERE r.reason IS NOT NULL GROUP BY ALL ORDER BY rollouts DESC, 1, 2, 3 LIMIT 40"""
    )
    ages = run.index.rows(
        f"""SELECT {AGE} AS age, count(*) AS rollouts FROM rollouts r JOIN groups g USING (g)
        WHERE r.state = 'trained' AND r.weight_step IS NOT NULL GROUP BY 1 ORDER BY 1"""
    )
    ledger = mapping(run.status().content.get("ledger"))
    return {"flows": flows, "reasons": reasons, "ages": ages, "ledger": ledger, "words": lost_in_words(run)}


def lessons_page(run: ObservedRun) -> dict[str, Any]:
    """The lessons, what each waits for, and how its rollouts fared; of simulators the tasks."""
    states = mapping(run.status().content.get("lessons"))
    curriculum = mapping(mapping(run.config.get("curriculum")).get("lessons"))
    tasks = mapping(mapping(run.config.get("fleet")).get("tasks"))
    fared = {
        row["lesson"]: row
        for row in run.index.rows(
            """SELECT g.lesson, count(*) AS rollouts, avg(r.reward) AS reward,
                   count(*) FILTER (r.state = 'trained') AS trained,
                   count(*) FILTER (r.state NOT IN ('trained', 'waiting')) AS dropped, avg(r.tokens) AS tokens
            FROM rollouts r JOIN groups g USING (g) WHERE g.evaluation IS NULL AND g.lesson IS NOT NULL
            GROUP BY 1 ORDER BY 1"""
        )
    }
    lessons = []
    for name in dict.fromkeys([*curriculum, *tasks, *states, *fared]):
        config = mapping(curriculum.get(name))
        needs = [mapping(need).get("dependency_id") for need in config.get("dependencies") or ()]
        metrics = [m for m in run.curves.names if f"/{name}/" in m]
        environment = mapping(config.get("environment")).get("env_class") or mapping(tasks.get(name)).get("id", "")
        lessons.append({
            "lesson": name, "state": str(states.get(name, "")), "needs": [str(need) for need in needs if need],
            "environment": str(environment),
            "thresholds": {key: config.get(key) for key in ("start_threshold", "stop_threshold", "success_threshold")},
            "metrics": metrics, **{k: v for k, v in fared.get(name, {}).items() if k != "lesson"},
        })  # fmt: skip
    told = [
        e for e in run.events() if e.get("event") in ("graduated", "unlocked", "regressed", "completed", "data_changed")
    ]
    return {"lessons": lessons, "events": told[-MOST_EVENTS:]}


def fleet_page(run: ObservedRun) -> dict[str, Any]:
    """Components, and every simulator's state as events tell it; films of episodes."""
    status = run.status()
    simulators = simulators_of(run)
    deaths = [e for e in run.events() if str(e.get("event", "")).startswith(("component_", "worker_"))]
    return {
        "alive": status.alive,
        "components": [{"name": name, **fields} for name, fields in components(status.content, status.alive).items()],
        "simulators": simulators,
        "words": sickest_in_words(simulators),
        "events": deaths[-MOST_EVENTS:],
        "account": status.content.get("account", {}),
        "films": films(run),
        "metrics": [name for name in run.curves.names if name.startswith(("fleet/", "time/idle/"))],
    }


def films(run: ObservedRun) -> list[str]:
    """Names of the films of episodes that are there, the newest first."""
    folder = run.directory.videos
    found = (
        [path for path in folder.glob("*.mp4") if path.is_file() and not path.is_symlink()] if folder.is_dir() else []
    )
    return [path.name for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)[:200]]


def film(run: ObservedRun, name: str) -> Path:
    """The file of a film, looked up among those that are there.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in films(run):
        raise ConfigError(f"there is no film {name!r} in this run")
    return run.directory.videos / name


def update_page(run: ObservedRun, step: int) -> dict[str, Any]:
    """What is stored of one update, beside the ones before and after it; what would explain it is a command."""
    groups = run.index.rows(
        f"""SELECT g.group_id, g.lesson, count(*) AS n, avg(r.reward) AS reward, min(r.reward) AS low,
               max(r.reward) AS high, max(abs(r.advantage)) AS advantage, avg(r.tokens) AS tokens,
               max({AGE}) AS staleness
        FROM rollouts r JOIN groups g USING (g)
        WHERE r.step = ? AND (r.state = 'trained' OR r.state IS NULL) AND g.evaluation IS NULL
        GROUP BY g.group_id, g.lesson ORDER BY advantage DESC NULLS LAST LIMIT 500""",
        [step],
    )
    dropped = run.index.rows(
        """SELECT r.state, count(*) AS rollouts FROM rollouts r JOIN groups g USING (g)
        WHERE r.step = ? AND r.state <> 'trained' AND g.evaluation IS NULL GROUP BY 1 ORDER BY 2 DESC""",
        [step],
    )
    numbers: dict[str, Any] = {}
    for name in run.curves.names:
        steps, values, _ = run.curves.series(name)
        here = int(np.searchsorted(steps, step))
        if here < len(steps) and steps[here] == step:
            window = np.concatenate([values[max(0, here - 20) : here], values[here + 1 : here + 21]])
            around = [finite(window.mean()), finite(window.std())] if len(window) > 4 else [None, None]
            numbers[name] = [finite(values[here]), *around]
    path = run.directory.path
    return {
        "step": step,
        "words": update_in_words(run, step),
        "moved": moved_by(run, step),
        "replays": _replays(run, step),
        "groups": groups,
        "dropped": dropped,
        "numbers": numbers,
        "events": meanwhile(run, step)[:200],
        "commands": [command_line(verb, path, "--step", str(step)) for verb in ("why", "replay")],
    }


def _replays(run: ObservedRun, step: int) -> list[dict[str, Any]]:
    """What `penstock replay` found of an update, the newest first, in words and number by number."""
    found: list[KeptReplay] = []
    for batch_id in batches_of(run, step):
        with suppress(RunDirectoryError):  # the next penstock replay takes its place
            found += read_replays(run.directory, batch_id)
    return [
        {
            "as": ", ".join([*one.changes, *(f"without {name}" for name in one.dropped)]) or "as it was",
            "words": _replay_in_words(one),
            "time": one.time,
            "equal": not one.different and one.weights_equal is not False,
            "numbers": [[name, one.stored.get(name), one.recomputed[name], name in one.different] for name in
                        sorted(one.recomputed, key=lambda name: (name not in HEADLINE, name not in one.different))],
        }
        for one in sorted(found, key=lambda one: -one.time)
    ]  # fmt: skip


def _replay_in_words(replay: KeptReplay) -> str:
    total, weights = len(replay.recomputed), replay.weights_equal
    same = total - len(replay.different)
    if replay.changes or replay.dropped:
        return (
            f"Made again from {replay.checkpoint} and changed: {len(replay.different)} of {total} numbers are others."
        )
    kept = {True: "; parameters and optimiser state are those of its checkpoint, bit for bit", None: "",
            False: "; parameters or optimiser state are not those of its checkpoint"}[weights]  # fmt: skip
    notes = f". Not as the run had it: {'; '.join(replay.notes)}" if replay.different and replay.notes else ""
    return f"Made again from {replay.checkpoint}: {same} of {total} numbers equal bit for bit{kept}{notes}."


def safe(value: Any) -> Any:
    """Plain data with every text printable, and numbers that JSON has."""
    if isinstance(value, str):
        return printable(value, newlines=True)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, float | np.floating):
        return finite(float(value))
    if isinstance(value, Mapping):
        return {printable(str(key)): safe(item) for key, item in value.items()}
    return [safe(item) for item in value] if isinstance(value, list | tuple) else value


RUN_PAGES: dict[str, Callable[[ObservedRun, Mapping[str, str]], dict[str, Any]]] = {
    "": lambda run, words: run_page(run),
    "curves": curves_page,
    "reward": lambda run, words: reward_page(run),
    "findings": lambda run, words: findings_page(run),
    "ledger": lambda run, words: ledger_page(run),
    "choices": lambda run, words: choices(run),
    "groups": group_list,
    "group": lambda run, words: group_page(run, words.get("id", "")),
    "timeline": timeline,
    "lessons": lambda run, words: lessons_page(run),
    "fleet": lambda run, words: fleet_page(run),
    "update": lambda run, words: update_page(run, _whole(words, "step") or 0),
}
"""What can be asked of a run, by the last word of its address."""


def _line(run: ObservedRun) -> dict[str, Any]:
    status, events = run.status(), run.events()
    training = mapping(status.content.get("training"))
    held_out = {
        name: [finite(mapping(found).get("score")), mapping(found).get("step")]
        for name, found in mapping(training.get("held_out")).items()
    }
    score, (_, rewards, _) = finite(training.get("score")), run.curves.series(_score_name(run))
    started = [event["time"] for event in events if event.get("event") == "start" and "time" in event]
    counters = (run.curves.counted(name, started) for name in ("inference/tokens_total", "fleet/steps_total"))
    return {
        "name": run.name,
        "kind": "simulators" if run.is_of_simulators else "language",
        "of": ", ".join(_subjects(run)),
        "state": status.state,
        "alive": status.alive,
        "age_s": status.age_s,
        "step": status.content.get("step"),
        "steps": status.content.get("steps") or run.config.get("steps"),
        "lineage": status.content.get("lineage", 0),
        "score": finite(rewards[-1]) if score is None and len(rewards) else score,
        "held_out": held_out or _last_held_out(run),
        "troubles": sum(str(event.get("event")) in TROUBLES for event in events),
        "started": started[0] if started else None,
        "lives": len(started),
        "busy_s": _busy_s(events),
        "generated": next((count for count in counters if count), None),
        "unit": "steps" if run.is_of_simulators else "tokens",
        "ended_by": _ended_by(status.why, events),
        "problem": run.problem,
        "progress": run.progress,
        "version": run.version,
        "spark": run.curves.picture(_score_name(run), 40)["mean"],
    }


def _last_held_out(run: ObservedRun) -> dict[str, list[Any]]:
    """By lesson the reward and step of the newest evaluation whose rollouts are kept, once all of a run is read.

    As in status.json, that on problems which are kept for reports stands apart.
    """
    if run.progress:
        return {}
    rows = run.index.rows(
        """SELECT lesson, arg_max(reward, time) AS reward, arg_max(step, time) AS step
        FROM (SELECT g.lesson || CASE WHEN g.evaluation IN ('eval', 'micro_eval') THEN '' ELSE ' (report)' END
                     AS lesson, r.lineage, r.step, avg(r.reward) AS reward, max(r.time) AS time
              FROM rollouts r JOIN groups g USING (g)
              WHERE g.evaluation IS NOT NULL AND g.lesson IS NOT NULL AND r.reward IS NOT NULL
              GROUP BY g.lesson, g.evaluation, r.lineage, r.step)
        GROUP BY lesson ORDER BY lesson"""
    )
    return {row["lesson"]: [row["reward"], row["step"]] for row in rows}


def _subjects(run: ObservedRun) -> list[str]:
    lessons = mapping(mapping(run.config.get("curriculum")).get("lessons"))
    return [str(name) for name in (*lessons, *mapping(mapping(run.config.get("fleet")).get("tasks")))]


def _score_name(run: ObservedRun) -> str:
    names = run.curves.names
    returns = [name for name in names if name.startswith("fleet/") and name.endswith("/reward_mean")]
    return "train/reward_mean" if "train/reward_mean" in names else (returns or ["train/reward_mean"])[0]


def _busy_s(events: list[dict[str, Any]]) -> float:
    """Seconds from where each life began to its last event: what a run has cost."""
    total, begun, last = 0.0, None, None
    for event in events:
        time = finite(event.get("time"))
        if time is None:
            continue
        if event.get("event") in LIFE_BEGINS:
            total += (last - begun) if begun is not None and last is not None else 0.0
            begun = time
        last = time
    return total + ((last - begun) if begun is not None and last is not None else 0.0)


def _ended_by(why: str, events: list[dict[str, Any]]) -> str:
    """What ended the last life: why it died, its error, the goal that it reached early, or how else."""
    told: dict[str, dict[str, Any]] = {}
    for event in events:
        if (kind := str(event.get("event"))) == "start":
            told = {}
        told[kind] = event
    kind = next((kind for kind in ("failure", "goal_reached", "interrupted", "end") if kind in told), "")
    said = told[kind].get("message") or told[kind].get("reason") if kind in ("failure", "goal_reached") else kind
    return why or str(said or "")


def _held_out(run: ObservedRun) -> list[dict[str, Any]]:
    """Every evaluation of every lesson whose rollouts are kept, with an interval by problems."""
    rows = run.index.rows(
        """SELECT g.lesson, g.evaluation, r.step, r.lineage, list(r.reward ORDER BY r.g, r.position) AS rewards,
               list(g.problem ORDER BY r.g, r.position) AS problems, max(r.time) AS time
        FROM rollouts r JOIN groups g USING (g) WHERE g.evaluation IS NOT NULL AND r.reward IS NOT NULL
        GROUP BY ALL ORDER BY g.lesson, time"""
    )
    found = []
    for row in rows:
        rewards = row.pop("rewards")
        interval = reward_interval(rewards, row.pop("problems"))
        low, high = finite(interval.low), finite(interval.high)
        found.append({**row, "mean": float(np.mean(rewards)), "low": low, "high": high, "rollouts": len(rewards)})
    return found


def _t_interval(mean: float, spread: float | None, groups: int) -> tuple[float | None, float | None]:
    if groups < 2 or spread is None:
        return None, None
    half = t_quantile(groups - 1) * spread / groups**0.5
    return mean - half, mean + half


def _whole(words: Mapping[str, str], name: str) -> int | None:
    word = words.get(name)
    if not word:
        return None
    if not word.lstrip("-").isdecimal() or len(word) > 15:
        raise ConfigError(f"{name} is {word!r:.40}: it must be a whole number")
    return int(word)
