"""Trackers: where metrics and sample conversations go, as one that cannot fail.

A service that is down must neither end a run nor vanish without a word: `MultiTracker` counts every failure, reports
each tracker's first one, and goes on with the others. Calls may come from several threads; each tracker sees them one
at a time. `make_tracker` makes the one that the configuration names.

- TensorBoard's event files are written by tensorboardX, which needs no TensorFlow and no torch.
- Trackio writes a project's runs into one SQLite file, MLflow those of one store; neither asks for an account or a
  network. Which run of theirs is this one stands in ``trackio_run`` and ``mlflow_run_id`` in the run directory.
- Weights & Biases drops a metric whose step is smaller than one it has seen, and evaluations of an older version may
  well arrive after a newer update: every call carries the weight step as a metric of its own, and that is the x axis.
  The run's id is kept in ``wandb_id`` in the run directory, so that a resumed run continues the same curves.
- Sample conversations also become lines of JSON, readable with any text tool while the run goes on.

Not covered: the run directory's own ``metrics.jsonl`` (`penstock.rundir.logs`).
"""

import contextlib
import contextvars
import io
import itertools
import json
import logging
import os
import re
import struct
import threading
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, field_validator

from penstock.rundir import JsonLinesLog
from penstock.types import AnyRollout, ConfigError, Mode, UnreachableError

if TYPE_CHECKING:
    from penstock.tracking.config import TrackingConfig


class Tracker(Protocol):
    """Where metrics and sample conversations go."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Takes metrics named ``<group>/<name>`` of one weight step. Steps need not grow from call to call."""
        ...

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Takes conversations in the form of `conversation_of`."""
        ...

    def close(self) -> None:
        """Writes out what is pending. Nothing is logged afterwards."""
        ...


class ServiceConfig(BaseModel):
    """Settings of one service, which make its tracker. Besides, a new one needs a key of `TrackingConfig`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    label: ClassVar[str]
    """The service's name for people."""

    @abstractmethod
    def open(self, run_dir: Path, run_config: Mapping[str, Any]) -> Tracker:
        """The tracker.

        Args:
            run_dir: The run directory; it exists.
            run_config: The resolved configuration, for services that show it.

        Raises:
            ConfigError: the service's package is not installed, or the service cannot be reached.
        """


OnFailure = Callable[[str, Exception], None]
"""Called with a tracker's class name and its error."""


_REST = 10.0
"""So many times as long as a failed call took, its tracker is left alone."""


class MultiTracker:
    """Hands everything to each of several trackers; an error of one is counted and reported once.

    A call that failed late waited for a service that is down, as would the next: for ten times as long that tracker is
    left alone, so that a run is held up for a tenth of its time at most. What it misses counts as failed.

    Args:
        trackers: Any number.
        on_failure: Called with the first error of each tracker, for the run's event log.
    """

    def __init__(self, trackers: Sequence[Tracker], on_failure: OnFailure) -> None:
        self._trackers = [(tracker, threading.Lock()) for tracker in trackers]
        self._rests_until = [0.0] * len(trackers)
        self._on_failure = on_failure
        self._failures: dict[str, int] = {}
        self._counting = threading.Lock()

    @property
    def failures(self) -> dict[str, int]:
        """Tracker class name → how many calls failed so far, or were left out."""
        with self._counting:
            return dict(self._failures)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs metrics everywhere."""
        self._each(lambda tracker: tracker.log(metrics, step))

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Logs conversations everywhere."""
        self._each(lambda tracker: tracker.log_samples(step, samples))

    def close(self) -> None:
        """Closes every tracker."""
        self._rests_until = [0.0] * len(self._trackers)
        self._each(lambda tracker: tracker.close())

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for position, (tracker, lock) in enumerate(self._trackers):
            try:
                with lock:
                    self._call(position, call)
            except Exception as error:  # whatever a service's client raises: the run does not depend on it
                self._count(type(tracker).__name__, error)

    def _call(self, position: int, call: Callable[[Tracker], None]) -> None:
        begun = time.monotonic()
        if begun < self._rests_until[position]:
            raise UnreachableError("it is left alone after a failure that took long")
        try:
            call(self._trackers[position][0])
        except Exception:
            over = time.monotonic()
            self._rests_until[position] = over + _REST * (over - begun)
            raise

    def _count(self, name: str, error: Exception) -> None:
        with self._counting:
            self._failures[name] = self._failures.get(name, 0) + 1
            first = self._failures[name] == 1
        if first:
            self._on_failure(name, error)


def conversation_of(rollout: AnyRollout, mode: Mode = "train") -> dict[str, Any]:
    """The conversation of one rollout as plain data.

    Args:
        rollout: With its turns.
        mode: Whether it is of training, or of an evaluation.

    Returns:
        ``mode``, ``rollout_id``, ``lesson_id``, ``env_name``, ``env_example_id``, ``reward``, ``weight_step`` (None
        before the metadata is attached), ``response_tokens`` (how many), ``finish_reason`` and ``turns``, a list of
        ``{"role": …, "content": …}``.
    """
    return {
        "mode": mode,
        "rollout_id": rollout.rollout_id,
        "lesson_id": rollout.lesson_id,
        "env_name": rollout.env_name,
        "env_example_id": rollout.env_example_id,
        "reward": float(rollout.episode_reward),
        "weight_step": None if rollout.metadata is None else rollout.metadata.weight_step,
        "response_tokens": len(rollout.response_tokens),
        "finish_reason": rollout.finish_reason,
        "turns": [{"role": turn.role, "content": turn.content} for turn in rollout.turns],
    }


class JsonlTracker:
    """Appends one line per conversation: ``{"step": …, …}``, see `conversation_of`.

    Args:
        path: The file; made if missing. An unfinished last line, left by a crash, is cut off.
    """

    def __init__(self, path: Path) -> None:
        self._log = JsonLinesLog(path)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Ignores metrics."""

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Appends the conversations in one write."""
        self._log.append(*({"step": step, **sample} for sample in samples))

    def close(self) -> None:
        """Closes the file."""
        self._log.close()


def make_tracker(
    config: "TrackingConfig",
    run_dir: Path,
    run_config: Mapping[str, Any],
    on_failure: OnFailure,
    others: Sequence[Tracker] = (),
) -> MultiTracker:
    """Makes every tracker that the configuration names, as one.

    Args:
        config: What to track with.
        run_dir: The run directory; it must exist.
        run_config: The resolved configuration, for services that show it.
        on_failure: See `MultiTracker`.
        others: Trackers that are there already, and are closed like its own.

    Raises:
        ConfigError: a service's package is not installed, or the service cannot be reached.
    """
    trackers: list[Tracker] = []
    with contextlib.ExitStack() as on_error:
        for tracker in itertools.chain(others, _each(config, run_dir, run_config)):
            trackers.append(tracker)
            on_error.callback(tracker.close)
        on_error.pop_all()
    return MultiTracker(trackers, on_failure)


def _each(config: "TrackingConfig", run_dir: Path, run_config: Mapping[str, Any]) -> Iterator[Tracker]:
    if config.samples:
        yield JsonlTracker(run_dir / "samples.jsonl")
    for service in config.services:
        yield service.open(run_dir, run_config)


class TensorBoardConfig(ServiceConfig):
    """TensorBoard event files; needs the extra ``penstock[tensorboard]``.

    Attributes:
        directory: Where the event files go; None: ``tensorboard/`` in the run directory.
    """

    label = "TensorBoard"

    directory: str | None = None

    def open(self, run_dir: Path, run_config: Mapping[str, Any]) -> "TensorBoardTracker":
        """A tracker that writes there."""
        return TensorBoardTracker(Path(self.directory) if self.directory else run_dir / "tensorboard")


class TensorBoardTracker:
    """Writes scalars and the text of sample conversations as TensorBoard event files.

    In the caller's thread: that of tensorboardX's own writer ends at a full disk, and whoever logs then waits for ever.

    Args:
        directory: Where the event files go; made if missing.

    Raises:
        ConfigError: tensorboardX is not installed, or nothing can be written there.
    """

    def __init__(self, directory: Path) -> None:
        with _extra("tensorboard", "tensorboardX"):
            from tensorboardX import event_file_writer, record_writer, summary  # pyright: ignore[reportMissingImports]
        self._summary, self._event = summary, event_file_writer.event_pb2.Event
        self._checksum = record_writer.masked_crc32c
        name = f"events.out.tfevents.{time.time():.0f}.{uuid.uuid4().hex[:8]}"
        with _starting("tensorboard", "choose another tracking.tensorboard.directory"):
            directory.mkdir(parents=True, exist_ok=True)
            self._file = (directory / name).open("ab", buffering=0)
            self._append(file_version="brain.Event:2")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Writes one scalar per metric."""
        self._append(*(self._summary.scalar(name, value) for name, value in metrics.items()), step=step)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Writes conversations as preformatted text under ``samples/<lesson>/<position>``, or ``eval_samples/…``."""
        for position, sample in enumerate(samples):
            lines = [f"{turn['role']}: {turn['content']}" for turn in sample["turns"]]
            lines.insert(0, f"reward {sample['reward']:g}")
            indented = "\n".join("    " + line for line in "\n".join(lines).splitlines())
            name = f"{_place_of(sample)}/{sample['lesson_id']}/{position}"
            self._append(self._summary.text(name, indented), step=step)

    def _append(self, *summaries: Any, **fields: Any) -> None:
        """All records or none: readers do not get past half a record."""
        parts: list[bytes] = []
        for summary in summaries or [None]:
            record = self._event(summary=summary, wall_time=time.time(), **fields).SerializeToString()
            for part in (struct.pack("<Q", len(record)), record):
                parts += [part, struct.pack("<I", self._checksum(part))]
        end, left = self._file.seek(0, os.SEEK_END), b"".join(parts)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self._file.truncate(end)
            raise

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _place_of(sample: Mapping[str, Any]) -> str:
    """Under which name a service shows a conversation: what is trained and what is evaluated stay apart."""
    return "eval_samples" if sample.get("mode") == "eval" else "samples"


_COLUMNS = ["weight_step", "rollout_id", "lesson_id", "reward", "finish_reason", "conversation"]


class WandbConfig(ServiceConfig):
    """Weights & Biases; needs the extra ``penstock[wandb]``.

    Attributes:
        project: The project's name.
        entity: User or team; None: the account's default.
        name: The run's name; None: the run directory's.
        mode: ``offline`` writes files that ``wandb sync`` uploads later.
    """

    label = "W&B"

    project: str = Field(default="penstock", min_length=1)
    entity: str | None = None
    name: str | None = None
    mode: Literal["online", "offline"] = "online"

    def open(self, run_dir: Path, run_config: Mapping[str, Any]) -> "WandbTracker":
        """A tracker that logs to the run of this directory, a new one or the one that it began."""
        return WandbTracker(self, run_dir, run_config)


class WandbTracker:
    """Logs to one Weights & Biases run.

    Args:
        config: Project, entity, name and mode.
        run_dir: Names the run, and holds its id and offline files.
        run_config: The resolved configuration, shown beside the curves.

    Raises:
        ConfigError: wandb is not installed, or refuses to start (no account, no network).
    """

    def __init__(self, config: WandbConfig, run_dir: Path, run_config: Mapping[str, Any]) -> None:
        with _extra("wandb", "wandb"):
            import wandb  # pyright: ignore[reportMissingImports]
        self._wandb = wandb
        with _starting("wandb", "run `wandb login`, or set tracking.wandb.mode=offline"):
            self._run = wandb.init(
                project=config.project, entity=config.entity, name=config.name or run_dir.name, mode=config.mode,
                id=_kept(run_dir / "wandb_id", lambda: uuid.uuid4().hex[:12]), resume="allow",
                dir=str(run_dir), config=dict(run_config),
                settings=wandb.Settings(console="off", silent=True),  # the live view owns the terminal
            )  # fmt: skip
        self._run.define_metric("*", step_metric="weight_step")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs metrics over the weight step."""
        self._run.log({**metrics, "weight_step": step})

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Logs conversations as a table, those of evaluations as another."""
        tables: dict[str, list[list[Any]]] = {}
        for sample in samples:
            conversation = "\n".join(f"{turn['role']}: {turn['content']}" for turn in sample["turns"])
            tables.setdefault(_place_of(sample), []).append([*(sample[name] for name in _COLUMNS[:-1]), conversation])
        made = {place: self._wandb.Table(columns=_COLUMNS, data=rows) for place, rows in tables.items()}
        self._run.log({**made, "weight_step": step})

    def close(self) -> None:
        """Uploads what is pending and ends the run there."""
        self._run.finish()


class TrackioConfig(ServiceConfig):
    """Trackio, on this machine; needs the extra ``penstock[trackio]``.

    The project's file lies where ``trackio show`` looks for it: ``TRACKIO_DIR``, or Trackio's folder in one's cache.

    Attributes:
        project: The project's name.
        name: The run's name; None: the run directory's.
    """

    label = "Trackio"

    project: str = Field(default="penstock", min_length=1)
    name: str | None = None

    def open(self, run_dir: Path, run_config: Mapping[str, Any]) -> "TrackioTracker":
        """A tracker that logs to the run of this directory, a new one or the one that it began."""
        return TrackioTracker(self, run_dir, run_config)


class TrackioTracker:
    """Logs to one Trackio run: metrics by step, conversations as traces.

    Trackio writes from a thread of its own, and tells what it could not write as a warning of Python's.

    Args:
        config: Project and name.
        run_dir: Names the run, and says whether it began one.
        run_config: The resolved configuration, shown beside the curves.

    Raises:
        ConfigError: trackio is not installed, or refuses to start.
    """

    def __init__(self, config: TrackioConfig, run_dir: Path, run_config: Mapping[str, Any]) -> None:
        with _extra("trackio", "trackio"):
            import trackio  # pyright: ignore[reportMissingImports]
        self._trackio = trackio
        name = config.name or run_dir.name
        begun = _read(run_dir / "trackio_run") == name
        with _starting("trackio", "mend that, or set tracking.trackio to null"), _silent():
            # in a context of its own: another run of this process keeps its own present one
            self._run = contextvars.copy_context().run(
                trackio.init,
                project=config.project, name=name, config=dict(run_config), resume="allow" if begun else "never",
                embed=False, auto_log_cpu=False, auto_log_gpu=False,
            )  # fmt: skip
        (run_dir / "trackio_run").write_text(name + "\n")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs metrics of the step."""
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Logs each conversation as a trace, with what is known of it besides as its metadata."""
        traces: dict[str, list[Any]] = {}
        for sample in samples:
            known = {name: value for name, value in sample.items() if name != "turns"}
            trace = self._trackio.Trace(messages=list(sample["turns"]), metadata=known)
            traces.setdefault(_place_of(sample), []).append(trace)
        self._run.log(traces, step=step)

    def close(self) -> None:
        """Writes out what is pending."""
        with _silent():
            self._run.finish()


class MlflowConfig(ServiceConfig):
    """MLflow; needs the extra ``penstock[mlflow]``.

    Attributes:
        uri: The store, such as ``sqlite:////data/mlflow.db`` or a server's address; None: ``MLFLOW_TRACKING_URI``,
            and where that is not set ``mlflow.db`` in the run directory.
        experiment: The experiment's name.
        name: The run's name; None: the run directory's.
    """

    label = "MLflow"

    uri: str | None = None
    experiment: str = Field(default="penstock", min_length=1)
    name: str | None = None

    @field_validator("uri")
    @classmethod
    def _no_password(cls, uri: str | None) -> str | None:
        if uri is not None and re.match(r"[^/]*://[^/@]*:[^/@]*@", uri):
            raise ValueError("has a password, which the run directory would keep: set MLFLOW_TRACKING_URI instead")
        return uri

    def open(self, run_dir: Path, run_config: Mapping[str, Any]) -> "MlflowTracker":
        """A tracker that logs to the run of this directory, a new one or the one that it began."""
        return MlflowTracker(self, run_dir, run_config)


_MLFLOW_BATCH, _MLFLOW_NAME, _MLFLOW_VALUE = 100, 250, 6000
"""Parameters of one call, and characters of names and values: MLflow refuses more."""


class MlflowTracker:
    """Logs to one MLflow run: metrics by step, conversations as artifacts, the configuration as parameters.

    Args:
        config: Store, experiment and name.
        run_dir: Names the run, and keeps its id.
        run_config: The resolved configuration; parameters are what it was when the run began, since MLflow lets none
            change, and the artifact ``config.json`` is what it is now.

    Raises:
        ConfigError: MLflow is not installed, or its store cannot be opened.
    """

    def __init__(self, config: MlflowConfig, run_dir: Path, run_config: Mapping[str, Any]) -> None:
        with _extra("mlflow", "mlflow"):
            from mlflow import MlflowClient, entities  # pyright: ignore[reportMissingImports]
        for talkative in ("alembic", "mlflow"):  # of each table that a new store gets
            logging.getLogger(talkative).setLevel(logging.WARNING)
        self._metric = entities.Metric
        uri = config.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run_dir.resolve() / 'mlflow.db'}"
        with _starting("mlflow", "correct tracking.mlflow.uri, or set tracking.mlflow to null"):
            self._client = MlflowClient(tracking_uri=uri)
            kept, name = run_dir / "mlflow_run_id", config.name or run_dir.name
            begun = _read(kept) is not None
            self._run_id = _kept(kept, lambda: _mlflow_run(self._client, config, uri, name))
            if begun:
                self._client.update_run(self._run_id, status="RUNNING")
            else:
                settings = [entities.Param(key, value) for key, value in _settings_of(run_config)]
                for start in range(0, len(settings), _MLFLOW_BATCH):
                    self._client.log_batch(self._run_id, params=settings[start : start + _MLFLOW_BATCH])
            self._client.log_text(self._run_id, json.dumps(run_config, indent=2), "config.json")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs metrics of the step; in their names, characters that MLflow refuses become underscores."""
        now_ms = int(time.time() * 1000)
        numbers = [self._metric(_mlflow_name(name), value, now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=numbers)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Writes each conversation as the artifact ``samples/step-<step>/<rollout>.json``, or ``eval_samples/…``."""
        for sample in samples:
            file = re.sub(r"[^\w.-]", "_", sample["rollout_id"]) + ".json"
            text = json.dumps({"step": step, **sample}, indent=2)
            self._client.log_text(self._run_id, text, f"{_place_of(sample)}/step-{step}/{file}")

    def close(self) -> None:
        """Says that the run is over; one that is resumed takes it up again."""
        self._client.set_terminated(self._run_id)


def _mlflow_run(client: Any, config: MlflowConfig, uri: str, name: str) -> str:
    """A new run's id. Its experiment is made where it is missing; beside a file of SQLite, its artifacts lie there."""
    found = client.get_experiment_by_name(config.experiment)
    file = re.fullmatch(r"sqlite:///(.+)", uri)
    artifacts = (Path(file[1]).resolve().parent / "mlflow_artifacts").as_uri() if file else None
    place = found.experiment_id if found else client.create_experiment(config.experiment, artifact_location=artifacts)
    return client.create_run(place, run_name=name).info.run_id


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w./ :-]", "_", name)[:_MLFLOW_NAME]


def _settings_of(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Dotted keys and their values as text."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _settings_of(value, f"{prefix}{key}.")
        else:
            yield _mlflow_name(f"{prefix}{key}"), str(value)[:_MLFLOW_VALUE]


def _read(path: Path) -> str | None:
    return (path.read_text().strip() or None) if path.exists() else None  # empty: a killed life's, or of a full disk


def _kept(path: Path, make: Callable[[], str]) -> str:
    """What an earlier life of the run wrote there, else what is made now."""
    found = _read(path)
    if found is None:
        path.write_text((found := make()) + "\n")
    return found


_DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # it would tell its makers of this use
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",  # else a call takes four minutes
    "WANDB_FINISH_TIMEOUT": "600", "WANDB_FINISH_TIMEOUT_RAISES": "true",  # no end came before the network was back
}  # fmt: skip


@contextlib.contextmanager
def _extra(name: str, package: str) -> Iterator[None]:
    """Around the import of what only one service needs; what the environment says of it has our defaults."""
    for variable, value in _DEFAULTS.items():
        if variable.startswith(name.upper()):
            os.environ.setdefault(variable, value)
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"tracking.{name} needs {package}, which cannot be imported ({error}): "
            f"pip install 'penstock[{name}]', or set tracking.{name} to null"
        ) from error


@contextlib.contextmanager
def _starting(name: str, remedy: str) -> Iterator[None]:
    """Around a service's start; it has a hierarchy of errors of its own."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"tracking.{name} could not start: {reason}; {remedy}") from error


def _silent() -> contextlib.AbstractContextManager[object]:
    """Keeps a service from printing: the live view owns the terminal."""
    return contextlib.redirect_stdout(io.StringIO())
