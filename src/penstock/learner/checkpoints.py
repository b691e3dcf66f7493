"""Checkpoints: one directory per version, whole or not there.

Layout of ``<root>/step-<n>/``: ``model/`` (written by the learner: a Hugging Face directory, or a control policy's
folder), ``learner.safetensors`` (optimiser state and counters), ``state.json`` (every other component's state),
``manifest.json`` (size and CRC-32 of each file). Beside them may be ``best``, a link to one of them, and ``best.json``,
which says why (`BestCheckpoint`).
Everything is written into ``.tmp-…`` beside it, flushed to the disk, and renamed; the rename is the run's only
commit. Each step is written once. Leftovers of a writer that died are ignored by readers and removed by the next
writer. No pickle. What is written may be a learner itself, which then stands still, or a `LearnerSnapshot`.

Where checkpoints lie, whether they are whole, and what the components other than the learner left in them needs no
array and no JAX: any process may ask.
"""

import json
import math
import os
import re
import shutil
import threading
import uuid
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast, final, get_args, runtime_checkable

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from penstock.learner.config import LearnerConfig
from penstock.model.language.config import Dtype
from penstock.rundir.storage import flush, is_refused
from penstock.types import CheckpointError, ConfigError

if TYPE_CHECKING:
    from penstock.learner.control_config import PpoConfig
    from penstock.learner.control_learner import ControlLearner
    from penstock.learner.learner import Learner
    from penstock.model.control import ControlPolicy
    from penstock.model.language import Decoder

FORMAT_VERSION = 1
TEMPORARY = ".tmp-"
BEST = "best"
_BEST_RECORD = "best.json"

_REMEDY = "move it out of the way, and --resume goes on from the checkpoint before it"


def latest_checkpoint(root: Path) -> Path | None:
    """The checkpoint with the highest step; None where there is none."""
    found = find_checkpoints(root)
    return found[-1] if found else None


def newest_good_checkpoint(root: Path, on_damage: Callable[[str, str], None] | None = None) -> Path | None:
    """The newest checkpoint whose files are what was written; None where there is none.

    A damaged one is put aside, as ``damaged-step-<n>-<id>``, so that the run can write that step again.

    Args:
        root: The run's ``checkpoints`` directory.
        on_damage: Told where a damaged one lies now, and what is wrong with it. None: it stays where it is.

    Raises:
        CheckpointError: the newest whole one was written by a newer Penstock, or one may not be read.
    """
    for path in reversed(find_checkpoints(root)):
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            if is_refused(error):
                raise
            if on_damage is None:
                continue
            aside = root / f"damaged-{path.name}-{uuid.uuid4().hex[:8]}"
            os.rename(path, aside)
            on_damage(str(aside), str(error))
        else:
            read_state(path)
            return path
    return None


def read_states(path: Path) -> dict[str, Any]:
    """State of each component but the learner, by name, for `Checkpointable.restore`.

    Raises:
        CheckpointError: it cannot be read, or a newer Penstock wrote it.
    """
    return dict(read_state(path)["states"])


def read_state(path: Path) -> dict[str, Any]:
    """What ``state.json`` holds.

    Raises:
        CheckpointError: it cannot be read, or a newer Penstock wrote it.
    """
    state = _read_json(path / "state.json")
    if state.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has checkpoint format {state.get('format_version')}, this Penstock reads {FORMAT_VERSION}"
        )
    if not isinstance(state.get("states"), dict):
        raise CheckpointError(f"{path} is damaged: state.json has no states")
    return state


def make_manifest(directory: Path) -> dict[str, dict[str, int]]:
    """Size and CRC-32 of every file of a checkpoint, by relative name."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): _fingerprint(path) for path in files}


def _fingerprint(path: Path) -> dict[str, int]:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return {"bytes": path.stat().st_size, "crc32": checksum}


def verify_checkpoint(path: Path) -> None:
    """Compares every file with the manifest.

    Raises:
        CheckpointError: naming what is missing or damaged.
    """
    try:
        _verify(path)
    except OSError as error:
        raise _cannot_be_read(path, error) from error


def _verify(path: Path) -> None:
    if not path.is_dir():
        raise CheckpointError(f"{path} is no directory: name a checkpoint, for example checkpoints/step-100")
    manifest = _read_json(path / "manifest.json")
    model = "model/config.json" if "model/adapter_config.json" not in manifest else "model/adapter_model.safetensors"
    absent = sorted({"state.json", "learner.safetensors", model} - manifest.keys())
    if absent:
        raise CheckpointError(f"{path} is damaged: its manifest does not name {', '.join(absent)}; {_REMEDY}")
    for name, expected in manifest.items():
        file = _beneath(path, name)
        if not file.is_file():
            raise CheckpointError(f"{path} is incomplete: {name} is missing; {_REMEDY}")
        if _fingerprint(file) != expected:
            raise CheckpointError(f"{path} is damaged: {name} is not what was written; {_REMEDY}")


def _beneath(path: Path, name: str) -> Path:
    """A file of a checkpoint; never one outside it, nor one that no writer could have named so."""
    if len(name) > 255 or not re.fullmatch(r"[\w.-]+(/[\w.-]+)*", name, re.ASCII) or ".." in name.split("/"):
        raise CheckpointError(f"{path} is damaged: its manifest names {name[:100]!r}; {_REMEDY}")
    return path / name


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, no object")
    return content


def find_checkpoints(root: Path) -> list[Path]:
    """All checkpoints, the lowest step first."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if re.fullmatch(r"step-\d+", path.name)]
    return sorted(found, key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


class BestRecord(NamedTuple):
    """What ``best.json`` says.

    Attributes:
        metric: Greatest of all evaluations, such as ``eval/cats/reward_mean``.
        value: Of it.
        evaluated_step: The version that was evaluated.
        step: The checkpoint that is kept for it: of that version, or the first after it that there was.
    """

    metric: str
    value: float
    evaluated_step: int
    step: int


@final
class BestCheckpoint:
    """Which of a run's checkpoints is the best by an evaluation, and the link ``best`` to it. Thread-safe.

    An evaluation of a version without a checkpoint counts for the first one after it. One that is under way keeps its
    checkpoint from being removed. What is known outlives the process: a resumed run compares with it.

    Args:
        root: The run's ``checkpoints`` directory.
        metric: By which it is judged, greater is better; None: a link that was there goes.

    Attributes:
        failure: Why the link could not be written, which is tried again with the next checkpoint or evaluation; empty
            where it was.
    """

    def __init__(self, root: Path, metric: str | None) -> None:
        self.failure = ""
        self._root = root
        self._metric = metric
        self._lock = threading.RLock()
        self._waiting: tuple[float, int] | None = None
        self._evaluating: int | None = None
        for path in root.glob(f".{BEST}*"):
            path.unlink()
        self._record = _read_best(root, metric)
        if self._record is not None:
            self._link(self._record.step)
            return
        for name in (BEST, _BEST_RECORD):
            (root / name).unlink(missing_ok=True)

    def expect(self, step: int) -> None:
        """An evaluation of version `step` begins."""
        with self._lock:
            self._evaluating = step

    def note(self, step: int, value: float | None) -> BestRecord | None:
        """An evaluation of version `step` is over; None: without a value.

        Returns:
            The record of the checkpoint that is the best now, if that is another than before.
        """
        with self._lock:
            self._evaluating = None
            known = max((-math.inf if self._record is None else self._record.value, (self._waiting or (-math.inf,))[0]))
            if value is not None and value > known:
                self._waiting = value, step
            return self._settle()

    @contextmanager
    def settled(self) -> Iterator[None]:
        """A checkpoint was written; inside, nobody else changes what is the best."""
        with self._lock:
            self._settle()
            yield

    @property
    def record(self) -> BestRecord | None:
        """Of the best checkpoint; None where there is none yet."""
        with self._lock:
            return self._record

    def needed(self) -> set[Path]:
        """Checkpoints that must stay: the best, and what an evaluation that goes on may make the best."""
        with self._lock:
            awaited = [self._evaluating, None if self._waiting is None else self._waiting[1]]
            steps = [self._first_from(step) for step in awaited if step is not None]
            steps += [] if self._record is None else [self._record.step]
            return {self._root / f"step-{step}" for step in steps if step is not None}

    def _settle(self) -> BestRecord | None:
        if self._waiting is None or self._metric is None:
            return None
        value, evaluated = self._waiting
        step = self._first_from(evaluated)
        if step is None:
            return None
        record, self.failure = BestRecord(self._metric, value, evaluated, step), ""
        try:
            self._write(record)
        except OSError as error:
            self.failure = str(error)
            return None
        self._waiting, self._record = None, record
        return record

    def _write(self, record: BestRecord) -> None:
        aside = self._root / f".{BEST}.json"
        aside.write_text(json.dumps(record._asdict()))
        flush(aside)
        aside.replace(self._root / _BEST_RECORD)
        self._link(record.step)

    def _link(self, step: int) -> None:
        aside = self._root / f".{BEST}"
        aside.unlink(missing_ok=True)
        aside.symlink_to(f"step-{step}", target_is_directory=True)
        aside.replace(self._root / BEST)

    def _first_from(self, step: int) -> int | None:
        return next((found for found in map(_step_of, find_checkpoints(self._root)) if found >= step), None)


def _read_best(root: Path, metric: str | None) -> BestRecord | None:
    """What an earlier life of the run left, if its checkpoint is there still."""
    try:
        found = json.loads((root / _BEST_RECORD).read_text())
        record = BestRecord(
            str(found["metric"]), float(found["value"]), int(found["evaluated_step"]), int(found["step"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if record.metric == metric and (root / f"step-{record.step}").is_dir() else None


@runtime_checkable
class SavedLearner(Protocol):
    """What a checkpoint needs of a learner, whatever it trains."""

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Optimiser state and counters by name."""
        ...

    def write_model(self, folder: Path, codec: Any) -> dict[str, str]:
        """Writes the policy's folder, with its tokenizer where it has one.

        Returns:
            What tells a reader how to load it: the kind of ``policy``, and its ``dtype``.
        """
        ...


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read back; its policy is loaded when it is first asked for.

    Attributes:
        path: Its directory; ``path / "model"`` is a Hugging Face directory with the tokenizer, or a control policy's
            folder.
        step: The version of the parameters.
        learner_arrays: For `Learner.restore_arrays`.
        states: State of each other component by name, for `Checkpointable.restore`.
        header: What ``state.json`` says of the policy: which kind it is, and its dtype.
        base: Directory of an adapter's base, in place of that which it names.
        module: What makes a control policy's network, where it is one's own; the checkpoint's word is not taken.
        kwargs: Its arguments, which say where the files lie now that it reads.
    """

    path: Path
    step: int
    learner_arrays: dict[str, np.ndarray]
    states: dict[str, Any]
    header: Mapping[str, str]
    base: str | None = None
    module: str | None = None
    kwargs: Mapping[str, Any] | None = None

    @cached_property
    def decoder(self) -> "Decoder":
        """The language policy, in the dtype that it was trained in.

        Raises:
            CheckpointError: it is of a control policy, or cannot be read.
        """
        if self._is_control:
            raise CheckpointError(f"{self.path} holds a control policy, no language policy: name another checkpoint")
        from penstock.model.language import load_decoder

        try:
            return load_decoder(
                self.path / "model",
                cast(Dtype, self.header["dtype"]),
                self.base,
                adapter_dtype=cast(Dtype | None, self.header.get("adapter_dtype")),
            )
        except _UNREADABLE as error:
            raise _cannot_be_read(self.path, error) from error

    @cached_property
    def policy(self) -> "ControlPolicy":
        """The control policy.

        Raises:
            CheckpointError: it is of a language policy, or cannot be read.
        """
        if not self._is_control:
            raise CheckpointError(f"{self.path} holds a language policy, no control policy: name another checkpoint")
        from penstock.model.control import load_control_policy

        try:
            return load_control_policy(self.path / "model", self.module, self.kwargs)
        except _UNREADABLE as error:
            raise _cannot_be_read(self.path, error) from error

    @property
    def _is_control(self) -> bool:
        return self.header["policy"] == "control"


_UNREADABLE = (SafetensorError, ConfigError, OSError, KeyError, TypeError, ValueError, OverflowError)


def _cannot_be_read(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}")


def save_checkpoint(
    root: Path,
    step: int,
    learner: SavedLearner,
    tokenizer: Any,
    states: Mapping[str, Any],
    keep_last: int = 2,
    keep_every: int | None = None,
    best: "BestCheckpoint | None" = None,
) -> Path:
    """Writes ``root/step-<step>`` and returns it once it is on the disk.

    Args:
        root: The run's ``checkpoints`` directory; made if missing. It has one writer.
        step: The version that the learner holds.
        learner: Parameters and optimiser state; nothing may change them meanwhile.
        tokenizer: Goes into ``model/``; None for a control policy.
        states: JSON-serialisable, by component.
        keep_last: How many of the newest checkpoints stay; older ones are removed.
        keep_every: But not those whose step is a multiple of this.
        best: Nor those that it needs; it looks whether the new one is what an evaluation waits for.

    Raises:
        CheckpointError: the step exists already, or a state cannot be written as JSON.
        OSError: of the disk, such as one that is full; another call clears away what was left.
    """
    target = root / f"step-{step}"
    if target.exists():
        raise CheckpointError(f"{target} exists already: a run writes each step once")
    root.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(root)
    temporary = root / f"{TEMPORARY}step-{step}-{uuid.uuid4().hex[:8]}"
    temporary.mkdir()
    try:
        _write(temporary, step, learner, tokenizer, states)
    except SafetensorError as error:  # which tells what the system said in words only
        if "(os error " not in str(error):
            raise
        number = int(str(error).rpartition("(os error ")[2].partition(")")[0])
        raise OSError(number, f"{os.strerror(number)}: {error}", str(temporary)) from error
    _settle(temporary)
    os.rename(temporary, target)
    flush(root)
    with nullcontext() if best is None else best.settled():
        _remove_oldest(root, keep_last, keep_every, {target} if best is None else {target, *best.needed()}, target)
    return target


def load_checkpoint(
    path: Path, base: str | None = None, module: str | None = None, kwargs: Mapping[str, Any] | None = None
) -> Checkpoint:
    """Reads and verifies a checkpoint.

    Args:
        path: Its directory, `checkpoints/step-<n>` of a run.
        base: Directory of an adapter's base, where that has moved.
        module: What makes a control policy's network, where it is one's own (`load_control_policy`).
        kwargs: Its arguments, for the places of files, likewise.

    Raises:
        CheckpointError: naming what is missing, damaged, or from a newer Penstock.
    """
    verify_checkpoint(path)
    state = read_state(path)
    try:
        arrays = safetensors.numpy.load_file(path / "learner.safetensors")
        header = _checked_header(state)
        return Checkpoint(path, int(state["step"]), arrays, dict(state["states"]), header, base, module, kwargs)
    except _UNREADABLE as error:
        raise _cannot_be_read(path, error) from error


def _checked_header(state: Mapping[str, Any]) -> dict[str, str]:
    """What is said of the policy; of a control policy its own folder says the rest."""
    header = {"policy": str(state.get("policy", "language")), "dtype": state.get("dtype", "")}
    if header["policy"] == "language" and header["dtype"] not in map(str, get_args(Dtype)):
        dtype = state["dtype"]
        found = repr(dtype) if isinstance(dtype, str) else f"a {type(dtype).__name__}"
        raise ValueError(f"dtype in state.json is {found:.50}, not one of {', '.join(get_args(Dtype))}")
    if state.get("adapter_dtype") in get_args(Dtype):
        header["adapter_dtype"] = str(state["adapter_dtype"])
    return header


def restore_learner(checkpoint: Checkpoint, config: LearnerConfig, total_steps: int, seed: int = 0) -> "Learner":
    """A learner that goes on exactly where the checkpoint was taken; the seed is the run's.

    Raises:
        CheckpointError: the optimiser state does not fit the model or the configuration.
    """
    from penstock.learner.learner import Learner

    learner = Learner(checkpoint.decoder, config, total_steps, seed)
    learner.restore_arrays(checkpoint.learner_arrays)
    return learner


def restore_control_learner(
    checkpoint: Checkpoint, config: "PpoConfig", total_steps: int, seed: int = 0
) -> "ControlLearner":
    """The same for a control policy; the seed is the run's.

    Raises:
        CheckpointError: the optimiser state does not fit the policy or the configuration.
    """
    from penstock.learner.control_learner import ControlLearner

    learner = ControlLearner(checkpoint.policy, config, total_steps, seed)
    learner.restore_arrays(checkpoint.learner_arrays)
    return learner


def _write(directory: Path, step: int, learner: SavedLearner, tokenizer: Any, states: Mapping[str, Any]) -> None:
    header = learner.write_model(directory / "model", tokenizer)
    safetensors.numpy.save_file(learner.state_arrays(), directory / "learner.safetensors")
    content = {
        "format_version": FORMAT_VERSION,
        "step": step,
        **header,
        "states": states,
    }
    try:
        (directory / "state.json").write_text(json.dumps(content))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"a component's state is not JSON ({error}): {sorted(states)}") from error
    (directory / "manifest.json").write_text(json.dumps(make_manifest(directory), indent=1))


def _remove_oldest(root: Path, keep_last: int, keep_every: int | None, kept: Collection[Path], newest: Path) -> None:
    others = [path for path in find_checkpoints(root) if path != newest]
    for path in others[: max(len(others) + 1 - max(keep_last, 1), 0)]:
        if path in kept or (keep_every is not None and _step_of(path) % keep_every == 0):
            continue
        doomed = root / f"{TEMPORARY}removed-{path.name}-{uuid.uuid4().hex[:8]}"
        os.rename(path, doomed)  # half a checkpoint must never look like one
        shutil.rmtree(doomed)


def _remove_leftovers(root: Path) -> None:
    for path in root.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path)


def _settle(directory: Path) -> None:
    """Flushes all files, and gives them the rights that the umask leaves: safetensors closes its own to others."""
    rights = (directory / "state.json").stat().st_mode & 0o777
    for folder, _, names in os.walk(directory):
        for name in names:
            (Path(folder) / name).chmod(rights)
            flush(Path(folder) / name)
        flush(Path(folder))
