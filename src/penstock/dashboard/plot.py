"""Pictures for papers: curves of runs, several seeds of one recipe pooled, and the numbers behind them.

Runs whose configs differ in nothing but their seed are one line, the mean over seeds with Student's t interval of it
(95%, seeds minus one degrees of freedom): what another seed of the same recipe would be compared with. A line ends
where its shortest run ends, since a mean over fewer seeds would jump there. Along updates only steps count that every
run of the line has; along tokens and seconds, where runs have points of their own, each is interpolated linearly onto
`GRID` points. What a resumed run made anew supersedes what it had been before (`penstock.rundir.curves`).

Matplotlib draws, with the font that it brings; one picture of the same numbers is the same file.
"""

import csv
import io
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from penstock.rundir import RunDirectory, read_events, read_metrics
from penstock.rundir.curves import Curves
from penstock.rundir.logs import LIFE_BEGINS, has_log
from penstock.rundir.storage import write_atomically
from penstock.types import ConfigError
from penstock.types.intervals import mean_interval

Axis = Literal["update", "tokens", "seconds"]
GRID = 200
SUFFIXES = (".png", ".svg", ".pdf")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
"""Okabe and Ito's, which people tell apart however they see colours."""
NO_RECIPE = ("seed", "steps", "versions", "overseer", "tracking", "runtime", "ray", "roles")
"""Sections of a config in which runs of one recipe may differ."""
_LONGEST_NAME = 80
"""Of a line, by the keys that differ."""
FIELDS = ("panel", "line", "by", "x", "mean", "low", "high", "runs")

Points = tuple[np.ndarray, np.ndarray]
"""Where, and how much: float64 [n] each."""
Found = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Of a metric: updates, values, and Unix times."""


@dataclass(frozen=True, slots=True)
class PlotRequest:
    """What is to be drawn.

    Attributes:
        runs: Run directories; ``NAME=DIRECTORY`` puts a run into the line of that name.
        out: The picture; None: only data.
        data: File for the numbers behind it, as CSV; None: none.
        by: Along what.
        metrics: Keys of metrics.jsonl, a panel each; empty: reward, held-out reward, staleness and ledger.

    Raises:
        ConfigError: nothing to write, or a picture of no known kind.
    """

    runs: Sequence[str]
    out: Path | None = None
    data: Path | None = None
    by: Axis = "update"
    metrics: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.out is None and self.data is None:
            raise ConfigError("nothing is to be written: give --out FILE.png, or --data FILE.csv")
        if self.out is not None and self.out.suffix not in SUFFIXES:
            raise ConfigError(f"--out {self.out}: a picture's name ends in {', '.join(SUFFIXES)}")
        if self.by not in get_args(Axis):
            raise ConfigError(f"--by is {self.by!r}: it must be one of {', '.join(get_args(Axis))}")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a panel, or its bars; see the module for how seeds are pooled.

    Attributes:
        panel: Title of the panel.
        name: Of the line.
        x: Where: updates, tokens, seconds; or the fates of rollouts.
        mean: Over the runs.
        low: Lower bound of the 95% interval; NaN for one run.
        high: Upper bound of that interval; NaN for one run.
        runs: How many were pooled.
    """

    panel: str
    name: str
    x: Sequence[float] | Sequence[str]
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    runs: int


def plot_runs(request: PlotRequest) -> list[str]:
    """Writes a picture of runs, and its numbers.

    Returns:
        What the user should know: files written, where a line ends before its longest run does.

    Raises:
        ConfigError: a run is given twice or shares its seed, a metric is in none of them, matplotlib is missing, or a
            file cannot be written.
        RunDirectoryError: there is no run, or its metrics cannot be read.
    """
    pyplot = None if request.out is None else _pyplot()
    pooled = _pooled([_PlottedRun.read(word) for word in request.runs])
    lines, said = _lines(request, pooled)
    for option, path, content in (
        ("--data", request.data, lambda: _csv(lines, request.by)),
        ("--out", request.out, lambda: _picture(pyplot, lines, request)),
    ):
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, content())
            except OSError as error:
                reason = error.strerror or error
                raise ConfigError(f"{option} {path} cannot be written: {reason}: choose another place") from error
            said.append(f"wrote {path}")
    return said


@dataclass(frozen=True, slots=True)
class _PlottedRun:
    path: Path
    line: str
    config: Mapping[str, Any]
    curves: Curves

    @classmethod
    def read(cls, word: str) -> "_PlottedRun":
        name, equals, rest = word.partition("=")
        named = bool(equals) and not Path(word).exists()
        directory = RunDirectory(Path(rest if named else word))
        if not directory.config_path.is_file():
            raise ConfigError(
                f"{directory.path} is not a run directory: it has no config.yaml; give one that "
                "penstock train wrote, such as runs/cats-1"
            )
        curves = Curves(directory.metrics_path)
        while curves.read_on():
            pass
        if not curves.names:
            raise ConfigError(f"{directory.path} has no metrics yet: leave it out")
        return cls(directory.path, name if named else "", directory.read_config(), curves)

    @property
    def lessons(self) -> set[str]:
        """Those, or the tasks, that it has now: a resume may have added some, and removed others."""
        sections = (("curriculum", "lessons"), ("fleet", "tasks"))
        return {name for section, names in sections for name in (self.config.get(section) or {}).get(names) or ()}

    def points(self, metric: "Metric", by: Axis) -> Points:
        """Of a metric along an axis."""
        steps, values, times = metric(self)
        if by == "update" or not len(steps):
            return steps.astype(float), values
        return (_alive_s(self.path, times) if by == "seconds" else np.interp(steps, *self._units())), values

    def _units(self) -> Points:
        """Updates, and how many tokens, or steps of simulators, were trained until then."""
        for name in ("train/tokens", "train/steps"):
            steps, values, _ = self.curves.series(name)
            if len(steps):
                return np.append(0, steps).astype(float), np.append(0.0, np.cumsum(values))
        raise ConfigError(f"{self.path} has no count of tokens that were trained: give --by update or --by seconds")


def _alive_s(path: Path, times: np.ndarray) -> np.ndarray:
    """Seconds in which the run was alive until each time; between its lives nothing counts."""
    events_path = RunDirectory(path).events_path
    events = list(read_events(events_path)) if has_log(events_path) else []
    starts = [float(event["time"]) for event in events if event.get("event") in LIFE_BEGINS] or [float(times[0])]
    rows = [*events, *read_metrics(RunDirectory(path).metrics_path)]  # what was superseded took its time, too
    heard = np.sort([float(row["time"]) for row in rows])
    alive, before = np.zeros(len(times)), 0.0
    for start, following in zip(starts, [*starts[1:], np.inf], strict=True):
        own = (times >= start) & (times < following)
        alive[own] = before + times[own] - start
        within = heard[(heard >= start) & (heard < following)]
        before += float(within[-1] - start) if len(within) else 0.0
    return alive


def _pooled(runs: Sequence[_PlottedRun]) -> dict[str, list[_PlottedRun]]:
    """Runs by the name of their line."""
    if len({run.path.resolve() for run in runs}) < len(runs):
        raise ConfigError("a run is given twice: a line over it would be too sure of itself")
    recipes = [_flat({key: value for key, value in run.config.items() if key not in NO_RECIPE}) for run in runs]
    differing = {key for recipe in recipes for key in recipe if any(recipe[key] != other.get(key) for other in recipes)}
    differing |= {key for recipe in recipes for other in recipes for key in recipe.keys() ^ other.keys()}
    pooled: dict[str, list[_PlottedRun]] = defaultdict(list)
    for run, recipe in zip(runs, recipes, strict=True):
        own = ", ".join(f"{key.rpartition('.')[2]}={recipe.get(key, 'null')}" for key in sorted(differing))
        pooled[run.line or own].append(run)
    for own, members in list(pooled.items()):
        if members[0].line or 0 < len(own) <= _LONGEST_NAME:
            continue
        del pooled[own]  # it says nothing, for they differ in nothing, or too much
        name = members[0].path.resolve().name
        name = name.rpartition("-20")[0] or name  # without the time that a run's default name has
        pooled[name if name not in pooled else str(members[0].path)] = members
    for line, members in pooled.items():
        seeds = [run.config.get("seed") for run in members]
        if len(set(seeds)) < len(seeds):
            names = ", ".join(f"{run.path} (seed {run.config.get('seed')})" for run in members)
            raise ConfigError(f"runs of one line need seeds of their own: {line or 'the line'} has {names}")
    return dict(pooled)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.dumps(value)
    return flat


Metric = Callable[[_PlottedRun], Found]


def _series(name: str) -> Metric:
    return lambda run: run.curves.series(name)


def _mean_of(*forms: tuple[str, str]) -> Metric:
    """The mean over the run's lessons, or tasks, at steps where each has a number."""

    def read(run: _PlottedRun) -> Found:
        for before, after in forms:
            told = [name for name in run.curves.names if name.startswith(before) and name.endswith(after)]
            of_now = [name for name in told if name.removeprefix(before).removesuffix(after) in run.lessons]
            found = [run.curves.series(name) for name in of_now or told]
            if found:
                shared = found[0][0]
                for steps, _, _ in found[1:]:
                    shared = np.intersect1d(shared, steps)
                values = [each[1][np.isin(each[0], shared)] for each in found]
                return shared, np.mean(values, axis=0), found[0][2][np.isin(found[0][0], shared)]
        return np.empty(0), np.empty(0), np.empty(0)

    return read


LEDGER = "rollouts by fate"
PANELS: Mapping[str, Metric] = {
    "reward": _mean_of(("train/reward_mean", ""), ("fleet/", "/reward_mean")),
    "held-out reward": _mean_of(("eval/", "/reward_mean"), ("eval/", "/return_mean"), ("eval_report/", "/reward_mean")),
    "staleness (updates)": _series("replay/staleness_mean"),
}
"""Titles, and what is drawn, where no metric is asked for."""


def _lines(request: PlotRequest, pooled: Mapping[str, Sequence[_PlottedRun]]) -> tuple[list[Line], list[str]]:
    panels = {name: _series(name) for name in request.metrics} or PANELS
    lines: list[Line] = []
    said: list[str] = []
    for panel, metric in panels.items():
        found = []
        for name, runs in pooled.items():
            points = [run.points(metric, request.by) for run in runs]
            missing = [str(run.path) for run, (x, _) in zip(runs, points, strict=True) if not len(x)]
            if missing:
                said.append(f"{panel}: {', '.join(missing)} has no such numbers")
            points = [each for each in points if len(each[0])]
            if points:
                found.append(_line(panel, name, points, request.by))
                said += _shortened(panel, name, points, found[-1])
        if not found and request.metrics:
            known = ", ".join(sorted({name for runs in pooled.values() for run in runs for name in run.curves.names}))
            raise ConfigError(f"--metric {panel} is in none of the runs; they have {known}")
        lines += found
    if not request.metrics:
        lines += [line for name, runs in pooled.items() if (line := _fates(name, runs)) is not None]
    return lines, list(dict.fromkeys(said))


def _line(panel: str, name: str, points: Sequence[Points], by: Axis) -> Line:
    if len(points) == 1:
        x, values = points[0]
        unknown = np.full(len(x), np.nan)
        return Line(panel, name, x.tolist(), values, unknown, unknown, 1)
    if by == "update":
        x = points[0][0]
        for other, _ in points[1:]:
            x = np.intersect1d(x, other)
        values = np.stack([each[np.isin(steps, x)] for steps, each in points])
    else:
        first, last = max(each[0][0] for each in points), min(each[0][-1] for each in points)
        x = np.linspace(first, last, GRID) if last > first else np.empty(0)
        values = np.stack([np.interp(x, *each) for each in points])
    return _pooled_line(panel, name, x.tolist(), values)


def _pooled_line(panel: str, name: str, x: Sequence[float] | Sequence[str], values: np.ndarray) -> Line:
    """Of values [runs, points]."""
    intervals = np.array([mean_interval(column.tolist()) for column in values.T]).reshape(-1, 2)
    intervals[~np.isfinite(intervals)] = np.nan
    return Line(panel, name, x, values.mean(axis=0), intervals[:, 0], intervals[:, 1], len(values))


def _shortened(panel: str, name: str, points: Sequence[Points], line: Line) -> list[str]:
    longest, last = max(float(x[-1]) for x, _ in points), float(line.x[-1]) if len(line.x) else 0.0
    if len(points) < 2 or last >= 0.95 * longest:
        return []
    return [f"{panel}: {name} ends at {last:g}, with its shortest run; the longest goes to {longest:g}"]


def _fates(name: str, runs: Sequence[_PlottedRun]) -> Line | None:
    """Shares of all rollouts that were started, at the end."""
    prefix = "replay/ledger/"
    states = [name.removeprefix(prefix) for name in runs[0].curves.names if name.startswith(prefix)]
    counts = [[run.curves.last(prefix + state) or 0.0 for state in states] for run in runs]
    if "started" not in states or not all(row[states.index("started")] for row in counts):
        return None
    shares = np.array([[each / row[states.index("started")] for each in row] for row in counts])
    kept = [index for index, state in enumerate(states) if state != "started" and shares[:, index].any()]
    return _pooled_line(LEDGER, name, [states[index] for index in kept], shares[:, kept])


def _csv(lines: Sequence[Line], by: Axis) -> bytes:
    """The numbers that are drawn, in the order of panels and lines; an interval that is not known is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(FIELDS)
    for line in lines:
        along = "fate" if line.panel == LEDGER else by
        for x, mean, low, high in zip(line.x, line.mean, line.low, line.high, strict=True):
            ends = ["" if np.isnan(end) else repr(float(end)) for end in (low, high)]
            writer.writerow([line.panel, line.name, along, x, repr(float(mean)), *ends, line.runs])
    return text.getvalue().encode()


def _pyplot() -> Any:
    try:
        import matplotlib  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"a picture needs matplotlib, which cannot be imported ({error}): pip install 'penstock[plot]', or write "
            "the numbers alone with --data FILE.csv"
        ) from error
    matplotlib.use("agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    return pyplot


STYLE = {
    "axes.axisbelow": True, "axes.grid": True, "axes.spines.right": False, "axes.spines.top": False,
    "font.family": "DejaVu Sans", "font.size": 8.0, "grid.color": "#dddddd", "grid.linewidth": 0.5,
    "legend.frameon": False, "lines.linewidth": 1.2, "pdf.fonttype": 42, "svg.fonttype": "path",
    "svg.hashsalt": "penstock",
}  # fmt: skip
PANEL_IN = (3.2, 2.4)
"""Width and height of a panel."""


def _picture(pyplot: Any, lines: Sequence[Line], request: PlotRequest) -> bytes:
    assert request.out is not None
    panels = list(dict.fromkeys(line.panel for line in lines))
    names = list(dict.fromkeys(line.name for line in lines))
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    with pyplot.rc_context(STYLE):
        size = (PANEL_IN[0] * columns, PANEL_IN[1] * rows)
        figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
        for place, axis in enumerate(axes.flat):
            if place >= len(panels):
                axis.set_axis_off()
                continue
            own = [line for line in lines if line.panel == panels[place]]
            _draw_panel(axis, own, names, request.by)
        if len(names) > 1:
            figure.legend(
                *axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(3, len(names))
            )
        content = io.BytesIO()
        kind = request.out.suffix[1:]
        undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {"Software": None}}
        figure.savefig(content, format=kind, dpi=200, metadata=undated[kind])
        pyplot.close(figure)
    return content.getvalue()


def _draw_panel(axis: Any, lines: Sequence[Line], names: Sequence[str], by: Axis) -> None:
    axis.set_title(lines[0].panel, loc="left")
    if lines[0].panel == LEDGER:
        fates = list(dict.fromkeys(str(fate) for line in lines for fate in line.x))
        width = 0.8 / len(lines)
        for place, line in enumerate(lines):
            at = [fates.index(str(fate)) - 0.4 + width * (place + 0.5) for fate in line.x]
            colour = COLOURS[names.index(line.name) % len(COLOURS)]
            ends = np.nan_to_num([line.mean - line.low, line.high - line.mean]) if line.runs > 1 else None
            axis.bar(at, line.mean, width, color=colour, yerr=ends, error_kw={"elinewidth": 0.8})
        axis.set_xticks(range(len(fates)), [fate.replace("_", " ") for fate in fates])
        axis.set_ylabel("share of started")
        return
    for line in lines:
        colour = COLOURS[names.index(line.name) % len(COLOURS)]
        axis.plot(line.x, line.mean, color=colour, label=f"{line.name} ({line.runs})" if line.runs > 1 else line.name)
        if line.runs > 1:
            axis.fill_between(line.x, line.low, line.high, color=colour, alpha=0.2, linewidth=0)
    axis.set_xlabel(by)
