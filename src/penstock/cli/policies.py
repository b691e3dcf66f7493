"""Commands that make a policy or use one: train, eval, generate, serve, export."""

import os
import sys
import time
from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.arguments import (
    Checkpoint,
    Overrides,
    TlsCert,
    TlsKey,
    Trust,
    busy,
    only,
    print_report,
    read_token,
    recorded_config,
    refuse_run_directory,
    text_console,
)
from penstock.text.safe_text import printable
from penstock.types import ConfigError
from penstock.types.addresses import is_url

if TYPE_CHECKING:
    from penstock.overseer import FleetRunConfig, RunConfig

MOST_TOLD = 5
"""Keys in which a recipe differs from a run that are named."""
commands = typer.Typer()


@commands.command(epilog="Example: penstock train cats steps=50 learner.optimizer.learning_rate=1e-3")
def train(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE", help="A packaged recipe (see penstock recipes) or a YAML file.", show_default=False
        ),
    ] = None,
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where to write; by default runs/<recipe>-<time>. Never overwritten.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from the newest checkpoint: penstock train --resume RUN_DIR [KEY=VALUE]... "
            "The run's own recorded configuration is used.",
        ),
    ] = False,
    from_rollouts: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Train on stored rollouts and generate none: a run directory, a folder of parts, or the Parquet file "
            "of penstock generate.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the resolved config, a memory estimate and the components, and try what the run imports.",
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No live view, only the summary.")] = False,
    trust: Trust = False,
) -> int:
    """Train a policy."""
    from penstock.overseer.config_loading import load_config, split_words

    names, changes = split_words([word for word in (recipe, *(overrides or ())) if word is not None])
    if from_rollouts is not None:
        changes = [*changes, f"replay.from_rollouts={dumps(str(from_rollouts.absolute()))}"]
    if resume:
        source, directory = _resumed(names, run_dir)
        config = recorded_config(directory, changes, trust)
        _tell_differences(names if run_dir is not None else names[:-1], changes, config)
    else:
        source, directory = only(names, "the recipe", "penstock train cats steps=50"), run_dir
        _refuse_trust(trust, "--resume")
        config = load_config(source, changes)
    if dry_run:
        from penstock.overseer.plan import check_code, describe_plan

        checkpoint = None
        if resume:
            from penstock.overseer.training import check_resume

            checkpoint = check_resume(config, directory)
        print(describe_plan(config, checkpoint), flush=True)
        check_code(config, checkpoint)
        return 0
    from penstock.overseer import print_summary, train

    summary = train(config, run_dir=directory, resume=resume, recipe=source, quiet=quiet)
    print_summary(summary, text_console())
    return 0 if summary.complete else 130


@commands.command(
    "eval",
    short_help="Evaluate a checkpoint.",
    epilog="Example: penstock eval runs/cats-1/checkpoints/step-60 --recipe cats --n 128",
)
def evaluate(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A run's checkpoints/step-<n>, a Hugging Face directory, or the URL of a penstock serve.",
        ),
    ],
    overrides: Overrides = None,
    recipe: Annotated[
        str | None, typer.Option(help="Whose lessons; by default those of the checkpoint's own run.")
    ] = None,
    lesson: Annotated[list[str] | None, typer.Option(help="Only this lesson or task; may be repeated.")] = None,
    n: Annotated[int | None, typer.Option(min=1, help="Held-out prompts per lesson, or episodes per task.")] = None,
    generations: Annotated[int, typer.Option(min=1, help="Responses per prompt: the largest k of pass@k.")] = 1,
    k: Annotated[
        list[str] | None,
        typer.Option(help="Of pass@k, such as 1,4; may be repeated. By default 1, 2, 4, … --generations."),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="A checkpoint to compare with, on the same prompts with the same seeds.")
    ] = None,
    rollouts: Annotated[
        Path | None, typer.Option(help="Parquet file for the rollouts; by default evaluations/<checkpoint>-<time>.")
    ] = None,
    video: Annotated[
        Path | None, typer.Option(help="Folder for a film of one episode per task; control policies only.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    trust: Trust = False,
) -> int:
    """Evaluate a checkpoint, with 95% intervals: reward and pass@k on held-out prompts, or returns in simulators.

    model.dtype=bfloat16 computes in bfloat16; without it the recipe, or the checkpoint's own run, says the dtype. A
    server's token is read from PENSTOCK_TOKEN.
    """
    from penstock.overseer.config_loading import load_config

    served = is_url(checkpoint)
    for given in (checkpoint, baseline):
        if given is not None and not is_url(given):
            refuse_run_directory(Path(given))
    if recipe is None and served:
        raise ConfigError("--recipe is missing: it says the lessons; for example: penstock eval URL --recipe cats")
    if recipe is None:
        from penstock.overseer.config_loading import EVALUATED

        config = recorded_config(_run_of(Path(checkpoint)), overrides or [], trust, EVALUATED)
    else:
        _refuse_trust(trust, "the config of the checkpoint's own run")
        config = load_config(recipe, overrides or [])
    from penstock.overseer import FleetRunConfig

    if isinstance(config, FleetRunConfig):
        from penstock.overseer import evaluate_fleet

        language = {"--generations": generations != 1, "--rollouts": rollouts, "--k": k, "--baseline": baseline}
        _refuse_given({name: bool(given) for name, given in language.items()}, "a language policy's")
        if served:
            raise ConfigError(f"{checkpoint} is a server, and {recipe} trains a control policy: give its checkpoint")
        told = None if json else print_report  # before the first film
        report = evaluate_fleet(checkpoint, config, lesson or None, n, video, told)
        if not json:
            report.print_films(text_console())
            return 0
    else:
        from penstock.overseer import evaluate

        _refuse_given({"--video": video is not None}, "a control policy's")
        stamp = time.strftime("%Y%m%d-%H%M%S")
        name = "served" if served else Path(checkpoint).resolve().name
        path, token = rollouts or Path("evaluations") / f"{name}-{stamp}.parquet", read_token(None)
        with busy("evaluating"):
            report = evaluate(
                checkpoint, config, lesson or None, n, generations, path, baseline, _ks(k), token=token or None
            )
    print_report(report, json)
    return 0


@commands.command(
    short_help="Generate rollouts to a file.",
    epilog="Example: penstock generate runs/cats-1/checkpoints/step-60 --n 100 --out rollouts.jsonl",
)
def generate(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE",
            help="A run's checkpoints/step-<n>, a Hugging Face directory, or the URL of a penstock serve; without it "
            "the policy, or the servers, that the recipe says.",
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
    recipe: Annotated[
        str | None, typer.Option(help="Whose lessons; by default those of the checkpoint's own run.")
    ] = None,
    lesson: Annotated[list[str] | None, typer.Option(help="Only this lesson; may be repeated.")] = None,
    n: Annotated[
        int | None, typer.Option(min=1, help="Prompts per lesson; by default its sampling_params.n_prompts.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A .parquet or .jsonl file; by default generated/<source>-<time>.parquet.")
    ] = None,
    held_out: Annotated[bool, typer.Option("--held-out", help="Prompts of evaluations, not of training.")] = False,
    trust: Trust = False,
) -> int:
    """Generate rollouts of a recipe's lessons, with their rewards, to a file: no training.

    A server's token is read from PENSTOCK_TOKEN.
    """
    from penstock.overseer import FleetRunConfig, load_config

    words = list(overrides or [])
    if source is not None and "=" in source and "://" not in source and not os.path.exists(source):
        source, words = None, [source, *words]
    served = is_url(source)
    if source is not None and not served:
        refuse_run_directory(Path(source))
    if recipe is not None:
        _refuse_trust(trust, "the config of the checkpoint's own run")
        config = load_config(recipe, words)
    elif source is None or served:
        raise ConfigError("--recipe is missing: it says the lessons; for example: penstock generate --recipe cats")
    else:
        from penstock.overseer.config_loading import EVALUATED

        config = recorded_config(_run_of(Path(source)), words, trust, EVALUATED)
    if isinstance(config, FleetRunConfig):
        raise ConfigError("penstock generate is for language policies: simulators are played by penstock eval --video")
    from penstock.overseer import generate

    stem = "served" if served else Path(source or recipe or "").resolve().stem
    path = out or Path("generated") / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}.parquet"
    mode = "eval" if held_out else "train"
    with busy("generating"):
        report = generate(source, config, path, lesson or None, n, mode, read_token(None) or None)
    print(report)
    return 0


@commands.command(epilog="Example: penstock serve runs/cats-1/checkpoints/step-60 --port 8000")
def serve(
    checkpoint: Checkpoint,
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="Address to listen on; other machines need a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token that clients must send; or set PENSTOCK_TOKEN.")
    ] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    name: Annotated[str | None, typer.Option(help="The model's name in the API.")] = None,
) -> int:
    """Serve a checkpoint by an OpenAI-compatible API.

    model.dtype=bfloat16 computes in bfloat16; without it it is float32, whatever the checkpoint was saved as.
    """
    from penstock.inference.config import ServeConfig
    from penstock.overseer.config_loading import apply_overrides, build_config

    refuse_run_directory(Path(checkpoint))
    _refuse_token(overrides or [])
    settings: dict[str, Any] = {
        "host": host, "port": port, "token": read_token(token_file), "model_name": name,
        "tls_cert": tls_cert, "tls_key": tls_key,
    }  # fmt: skip
    config = build_config(ServeConfig, apply_overrides(settings, overrides or []))
    from functools import partial

    from penstock.inference import serve
    from penstock.overseer.language.generation import version_of

    serve(checkpoint, config, announce=partial(print, flush=True), step=version_of(checkpoint))
    return 0


@commands.command(
    short_help="Merge an adapter into its base.",
    epilog="Example: penstock export runs/gsm8k-1/checkpoints/step-60 --out merged model.dtype=bfloat16",
)
def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="ADAPTER", help="A run's checkpoints/step-<n>, or a directory as peft saves it.")
    ],
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="The directory to write; must not be there.")] = Path("merged"),
) -> int:
    """Write a Hugging Face directory whose model computes what an adapter and its base do, merged in float32.

    model.dtype=bfloat16 rounds what is merged to bfloat16; without it it is written in float32. model.base=DIR says
    where the base lies, if not where the adapter says.
    """
    from penstock.overseer.config_loading import apply_overrides, build_config
    from penstock.overseer.language.export import ExportConfig, export

    refuse_run_directory(checkpoint)
    config = build_config(ExportConfig, apply_overrides({}, overrides or []))
    print(export(checkpoint, out, config))
    return 0


def _resumed(names: Sequence[str], run_dir: Path | None) -> tuple[str, Path]:
    """The recorded config as a recipe, and the run directory; a recipe beside it changes nothing."""
    example = "penstock train --resume runs/cats-1"
    directory = run_dir if run_dir is not None else Path(only(names[-1:], "the run directory", example))
    from penstock.rundir import RunDirectory

    return str(RunDirectory.open_existing(directory).config_path), directory


def _tell_differences(recipes: Sequence[str], changes: Sequence[str], config: "RunConfig | FleetRunConfig") -> None:
    """Says where a recipe that is named at a resume differs from what the run goes on with."""
    from penstock.overseer.config_loading import differences, load_config

    for recipe in recipes:
        found = differences(config.dump(), load_config(recipe, changes).dump())
        told = [f"{key} ({theirs}; the run has {ours})" for key, (ours, theirs) in found.items()]
        if told:
            more = f" and {len(told) - MOST_TOLD} more" if len(told) > MOST_TOLD else ""
            print(
                printable(
                    f"{recipe} differs in {', '.join(told[:MOST_TOLD])}{more}: a resume goes on with the run's own "
                    "config; what is to change is said as KEY=VALUE"
                ),
                file=sys.stderr,
                flush=True,
            )


def _run_of(checkpoint: Path) -> Path:
    """The run directory that a checkpoint lies in, wherever a link to it lies."""
    for folder in checkpoint.resolve().parents:
        if folder.name == "checkpoints" and (folder.parent / "config.yaml").is_file():
            return folder.parent
    if not checkpoint.exists():
        raise ConfigError(
            f"{checkpoint} does not exist: give a run's checkpoints/step-<n>, or a Hugging Face directory"
        )
    raise ConfigError(f"{checkpoint} lies in no run directory, whose lessons could be taken: give --recipe")


def _refuse_trust(trust: bool, what: str) -> None:
    if trust:
        raise ConfigError(f"--trust goes with {what}: a recipe that you name is yours")


def _refuse_given(given: dict[str, bool], whose: str) -> None:
    for option, is_given in given.items():
        if is_given:
            raise ConfigError(f"{option} is for {whose} evaluation only: leave it out")


def _ks(words: Sequence[str] | None) -> list[int] | None:
    """The ks of pass@k: whole numbers, several of a word apart by commas."""
    if not words:
        return None
    ks = [each.strip() for word in words for each in word.split(",")]
    for each in ks:
        if not each.isdecimal() or int(each) < 1:
            raise ConfigError(f"--k has {each!r}: give whole numbers from 1 on, such as --k 1,4")
    return [int(each) for each in ks]


def _refuse_token(overrides: Sequence[str]) -> None:
    if any(word.partition("=")[0].strip() == "token" for word in overrides):
        raise ConfigError(
            "token on the command line can be read by every user of this machine: put it in a file (--token-file), or "
            "in PENSTOCK_TOKEN"
        )
