"""One call of `penstock fit`: a run, or a table of models and row lengths, compiled for a chip; what makes it fit.

*The smallest change* costs a run least, by prices of single changes that add up. One point: half the rows at once, rows
of half the tokens where sequences are no longer, or activations kept one stage less (recomputed, or in the host's
memory). Two: the optimiser's state in the host's memory. Three: half the slots, with which decoding takes nearly twice
as long. Eight: an adapter in the place of the model, which alone changes what is learned. Where none of these is
enough, rows and sequences of half the tokens are tried with them, and of half of that, as long as they hold the longest
answers. The formulas of `penstock.overseer.estimate` say which candidates to try, and the compiler has the last word.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.inference.sequence import check_length
from penstock.model.json_files import read_json
from penstock.model.language.attention_choice import Remat
from penstock.model.language.config import ModelConfig, read_shape
from penstock.model.language.lora import LoraConfig
from penstock.overseer.config import RunConfig
from penstock.overseer.config_loading import load_config
from penstock.overseer.estimate import bytes_text, estimate_memory, model_shape
from penstock.overseer.fitting.chips import parse_target, prepare_compilers
from penstock.types import CheckpointError, ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.overseer.fitting.compiling import ChipCompiler
    from penstock.overseer.fitting.report import FitReport, Remedy


def fit(
    config: RunConfig, target: str, models: Sequence[str] = (), rows: Sequence[int] = (), lora: int | None = None
) -> "FitReport | FitTable":
    """Compiles a run for a chip; loads JAX, and keeps it from looking for hardware.

    Args:
        config: Of the run; its weights need not be there, a `config.json` is enough.
        target: As `parse_target` takes it.
        models: Names of shapes that ship (`shipped_shapes`), or paths of a `config.json`, in place of the run's policy.
        rows: Tokens of rows, and of sequences, in place of the run's.
        lora: Rank of an adapter beside each model that has none, of all matrices; None: as the run says.

    Returns:
        A report, with the smallest change that makes it fit where it does not; of several models or rows a table.

    Raises:
        ConfigError: no such chip, compiler, shape, row length or rank, sequences may be longer than what the model is
            meant for, the run is far beyond the chip, or nothing is known of the engine.
    """
    if config.inference.engine in ("sglang", "openai"):
        raise ConfigError(
            f"inference.engine is {config.inference.engine}: its servers have memory of their own, which is not known "
            "here; with inference.engine=builtin inference.external=null learner and Penstock's engine are counted"
        )
    config.check_trains()
    adaptable = bool(models) or config.model.directory is not None
    if lora is not None:
        _check_lora(lora, config, adaptable)
    named = {name: shape_named(name, config) for name in models} or {"": model_shape(config.model)}
    sized = [of_rows(config, length) for length in rows] or [config]
    if lora is not None:
        named = {name: with_adapter(model, lora) for name, model in named.items()}
    runs = {(name, run.learner.row_length): (run, model) for name, model in named.items() for run in sized}
    for run, model in runs.values():
        if run.inference.external is None:
            check_length(model, run.inference)
    chip = parse_target(target)
    for run, model in runs.values():
        taken = sum(estimate_memory(model, run.inference, run.learner, chip.platform == "cpu").values())
        if taken > _FAR * chip.memory_bytes:
            raise ConfigError(
                f"by formula the run takes {bytes_text(taken)}, more than {_FAR} times what {chip.label} has "
                f"({bytes_text(chip.memory_bytes)}): nothing was compiled; look for a number that is too large"
            )
    if chip.platform != "cpu":
        prepare_compilers()
    from penstock.overseer.fitting.compiling import ChipCompiler

    compiler = ChipCompiler(chip)
    if len(runs) > 1:
        return FitTable({key: fit_run(*run, compiler) for key, run in runs.items()})
    (run,) = runs.values()
    report = fit_run(*run, compiler)
    return report if report.fits else replace(report, remedy=smallest_change(*run, compiler, report, adaptable))


_FAR = 100
"""Times a chip's memory, beyond which nothing is compiled: a compiler would take minutes for it, or all memory."""


def _check_lora(rank: int, config: RunConfig, adaptable: bool) -> None:
    if rank < 1:
        raise ConfigError(f"--lora is {rank}: the rank of an adapter is at least 1")
    if config.model.lora is not None:
        raise ConfigError(f"--lora is {rank}, and model.lora says what adapter the run trains: leave one of them out")
    if not adaptable:
        raise ConfigError(
            "--lora: model.init draws a model, beside which no adapter trains: name a checkpoint by model.path, or "
            "shapes by --models"
        )


def with_adapter(model: ModelConfig, rank: int) -> ModelConfig:
    """The model with an adapter of all matrices; one that it has stays."""
    return model if model.lora is not None else model.with_lora(LoraConfig(rank=rank), "model.lora")


def shipped_shapes() -> dict[str, Any]:
    """Files of shapes that ship, by name."""
    folder = files("penstock.overseer.fitting") / "shapes"
    return {file.name.removesuffix(".json"): file for file in folder.iterdir() if file.name.endswith(".json")}


def shape_named(name: str, config: RunConfig) -> ModelConfig:
    """A shape that ships, by its name or the end of it (``0.5b``); or that of a `config.json` or a checkpoint.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    shipped = shipped_shapes()
    path = Path(name).expanduser()
    found = [file for known, file in shipped.items() if known.lower().endswith(name.lower())]
    if name and len(found) == 1:
        content = json.loads(found[0].read_text("utf-8"))
    elif path.is_file():
        content = read_json(path)
    elif name and path.is_dir():
        inner = path / "model"  # of a training checkpoint
        directory = inner if inner.is_dir() else path
        policy = config.model.model_copy(update={"init": None, "path": str(directory)})
        try:
            return read_shape(str(policy.directory), policy.dtype, policy.base, policy.lora)
        except CheckpointError as error:
            remedy = "give a Hugging Face model directory, or a run's checkpoint"
            raise ConfigError(f"--models names {name!r}: {error}: {remedy}") from error
    else:
        known = ", ".join(sorted(shipped))
        raise ConfigError(f"--models names {name!r}: there are {known}; or give the path of a config.json")
    try:
        model = ModelConfig.from_hugging_face(content, config.model.dtype)
    except ConfigError as error:  # begins with the file's usual name
        raise ConfigError(f"{path}: {str(error).removeprefix('config.json: ')}") from error
    return model if config.model.lora is None else model.with_lora(config.model.lora, "model.lora")


def of_rows(config: RunConfig, length: int) -> RunConfig:
    """The run with rows and sequences of that many tokens."""
    change = {"learner.row_length": length, "learner.row_lengths": [], "inference.max_seq_len": length}
    return load_config(config, change)  # type: ignore[return-value]


def fit_run(config: RunConfig, model: ModelConfig, compiler: "ChipCompiler") -> "FitReport":
    """Compiles all programs of one run and counts."""
    from penstock.overseer.fitting.compiling import RunShapes, compile_run
    from penstock.overseer.fitting.report import make_report

    shapes = RunShapes(config, model, compiler.place)
    programs = compile_run(shapes, compiler, config.inference.external is None)
    return make_report(config, shapes, programs, compiler.chip)


Change = dict[str, Any]
"""New values by dotted key."""


_KEPT: tuple[Remat, ...] = ("none", "products", "layer", "offload")
"""What `learner.remat` keeps on the chip, ever less."""
ADAPTER_KEY, ADAPTER_RANK = "model.lora.rank", 16


def candidates(config: RunConfig, on_cpu: bool, adaptable: bool) -> Iterator[tuple[Change, RunConfig]]:
    """All changes that keep the length of sequences, the smallest first, and the run with each, its adapter left out.

    Args:
        config: Of the run that is to be changed.
        on_cpu: Where there is no other memory to take anything to.
        adaptable: Whether its model is one that an adapter can be trained beside, and has none.
    """
    learner, engine = config.learner, config.inference
    less = _KEPT[_KEPT.index(learner.remat) + 1 :]
    offloads = not on_cpu and learner.optimizer.name == "adamw" and not learner.optimizer.offload
    keys: list[tuple[str, int, list[Any]]] = [
        ("learner.micro_batch_rows", 1, halves(learner.micro_batch_rows)),
        ("learner.row_length", 1, [n for n in halves(learner.row_length) if n >= engine.max_seq_len]),
        ("learner.remat", 1, [kept for kept in less if not (on_cpu and kept == "offload")]),
        ("learner.optimizer.offload", 2, [True] if offloads else []),
        ("inference.max_slots", 3, halves(engine.max_slots)),
        (ADAPTER_KEY, 8, [ADAPTER_RANK] if adaptable else []),
    ]
    choices = [[(0, None), *((price * by, value) for by, value in enumerate(values, 1))] for _, price, values in keys]

    def cost(chosen: tuple[tuple[int, Any], ...]) -> tuple[int, int]:
        return sum(price for price, _ in chosen), sum(price > 0 for price, _ in chosen)

    for chosen in sorted(product(*choices), key=cost)[1:]:
        change = {key: value for (key, *_), (price, value) in zip(keys, chosen, strict=True) if price}
        if "learner.row_length" in change:
            change |= rows_within(config, change["learner.row_length"])
        try:
            yield change, load_config(config, {k: v for k, v in change.items() if k != ADAPTER_KEY})  # type: ignore[misc]
        except ConfigError:  # a rule between keys forbids this one
            continue


def rows_within(config: RunConfig, length: int) -> Change:
    """No rows of more tokens; those of several `learner.row_lengths` that are shorter stay."""
    several = config.learner.row_lengths
    shorter = [each for each in several if each < length]
    return {"learner.row_length": length} | ({"learner.row_lengths": [*shorter, length]} if several else {})


def halves(count: int) -> list[int]:
    """8 -> 4, 2, 1."""
    return [count >> by for by in range(1, count.bit_length())]


def shorter_rows(config: RunConfig) -> Iterator[tuple[Change, RunConfig]]:
    """Rows and sequences of half the tokens, of half of that, …, while they hold a prompt and the longest answer."""
    for length in halves(config.learner.row_length):
        change = rows_within(config, length) | {"inference.max_seq_len": length}
        if length >= config.inference.max_seq_len:
            continue  # one of the candidates
        try:
            yield change, load_config(config, change)  # type: ignore[misc]
        except ConfigError:  # too short for what is asked of the run
            return


_CLOSE = 1.15
"""Within which the formulas are of what compilers allot."""


def smallest_change(
    config: RunConfig, model: ModelConfig, compiler: "ChipCompiler", report: "FitReport", adaptable: bool = False
) -> "Remedy":
    """Looks for it; compiles what the formulas think likely to fit.

    Args:
        config: Of a run that does not fit.
        model: Shape of its policy, and its dtype.
        compiler: Keeps what it compiled, for this run and all that are tried.
        report: Of the run, as `fit_run` made it.
        adaptable: Whether an adapter can be trained beside the model.
    """
    from penstock.overseer.fitting.report import Remedy

    on_cpu, capacity = compiler.chip.platform == "cpu", compiler.chip.memory_bytes

    def estimated(run: RunConfig, model: ModelConfig) -> int:
        return sum(estimate_memory(model, run.inference, run.learner, on_cpu).values())

    def changed_runs() -> Iterator[tuple[Change, RunConfig]]:
        apart = adaptable and model.lora is None
        yield from candidates(config, on_cpu, apart)
        for fewer, shorter in shorter_rows(config):
            yield fewer, shorter
            yield from ((fewer | change, run) for change, run in candidates(shorter, on_cpu, apart))

    def attempt(change: Change, run: RunConfig, changed: ModelConfig) -> Remedy | None:
        try:
            tried = fit_run(run, changed, compiler)
        except ConfigError:  # such as rates of arrays that do not train beside an adapter, whose run would be refused
            return None
        ratios.append(tried.total_bytes / estimated(run, changed))
        return Remedy(_words(change, config), tried.total_bytes) if tried.fits else None

    ratios = [report.total_bytes / estimated(config, model)]  # what compilers allot by what the formulas say
    put_off: list[tuple[Change, RunConfig, ModelConfig]] = []
    found = None
    for change, run in changed_runs():
        try:
            changed = with_adapter(model, change[ADAPTER_KEY]) if ADAPTER_KEY in change else model
        except ConfigError:  # a matrix is smaller than the rank
            continue
        if estimated(run, changed) * max(ratios) > _CLOSE * capacity:
            put_off.append((change, run, changed))
        elif (found := attempt(change, run, changed)) is not None:
            break
    for change, run, changed in put_off:  # smaller ones, that might fit where the formulas say the most
        likely = estimated(run, changed) * min(ratios) <= capacity
        if likely and (smaller := attempt(change, run, changed)) is not None:
            return smaller
    return found or Remedy((), 0)


def _words(change: Change, config: RunConfig) -> tuple[str, ...]:
    """As they are written behind `penstock fit`: beside the model that a recipe draws `model.lora` would be refused."""
    rank = "--lora " if config.model.directory is None else f"{ADAPTER_KEY}="
    return tuple(
        (rank if key == ADAPTER_KEY else f"{key}=") + json.dumps(value, separators=(",", ":"))
        for key, value in change.items()
    )


@dataclass(frozen=True)
class FitTable:
    """Reports by model and tokens of a row.

    Attributes:
        reports: In the order asked for.
    """

    reports: "dict[tuple[str, int], FitReport]"

    @property
    def exit_code(self) -> int:
        """1 where one of them does not fit."""
        return max(report.exit_code for report in self.reports.values())

    def to_json(self) -> list[dict[str, Any]]:
        """Plain data, a row for each."""
        return [{"shape": name, "rows": rows} | report.to_json() for (name, rows), report in self.reports.items()]

    def print(self, console: "Console") -> None:
        """For people, a line for each."""
        from rich.table import Table

        from penstock.overseer.fitting.report import NOT_MEASURED

        first = next(iter(self.reports.values()))
        console.print(f"{first.chip}, {bytes_text(first.capacity_bytes)}: {NOT_MEASURED}\n", highlight=False)
        names = ("model", "row", "fits", "in all", "gradient's temporaries", "KV cache", "more slots", "step ≥", "by")
        table = Table(*names, box=None, pad_edge=False)
        for (name, rows), report in self.reports.items():
            table.add_row(name, f"{rows:,}", *report.cells())
        console.print(table)
