"""The command line.

Exit codes: 0 success; 1 a failed run or check; 2 bad input, with one line on standard error; 130 interrupted.
``PENSTOCK_TRACEBACK=1`` shows the traceback behind any of them. Whatever a command needs is imported inside it, so
that ``penstock --help`` takes a fraction of a second. Nothing is computed here: commands read their words, call
`penstock.overseer`, `penstock.inference` or `penstock.dashboard`, and print what comes back.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

_LONGEST_MESSAGE = 600

_app = typer.Typer(
    name="penstock",
    help="Asynchronous reinforcement learning for language models and simulator agents.",
    epilog="Start with: penstock train cats",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

_Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Changes to the configuration, as dotted keys.", show_default=False),
]
_Checkpoint = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="A run's checkpoints/step-<n>, or a Hugging Face directory.")
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: The words after ``penstock``; None takes the process's.

    Returns:
        The exit code.
    """
    try:
        return int(_app(args=arguments, prog_name="penstock", standalone_mode=False) or 0)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if os.environ.get("PENSTOCK_TRACEBACK"):
            import traceback

            from penstock.dashboard.safe_text import printable

            print(printable(traceback.format_exc(), newlines=True), file=sys.stderr, end="")
        line, code = _explained(error)
        print(f"penstock: {line}", file=sys.stderr)
        return code


@_app.callback(invoke_without_command=True)
def _penstock(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> int:
    if version:
        from importlib.metadata import version as installed_version

        print(f"penstock {installed_version('penstock')}")
    elif context.invoked_subcommand is None:
        print(context.get_help())
    return 0


@_app.command(epilog="Example: penstock train cats steps=50 learner.optimizer.learning_rate=1e-3")
def train(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE", help="A packaged recipe (see penstock recipes) or a YAML file.", show_default=False
        ),
    ] = None,
    overrides: _Overrides = None,
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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved config, a memory estimate and the components.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No live view, only the summary.")] = False,
) -> int:
    """Train a policy."""
    from penstock.overseer.config_loading import load_config, split_words

    names, changes = split_words([word for word in (recipe, *(overrides or ())) if word is not None])
    if resume:
        source, directory = _resumed(names, run_dir)
    else:
        source, directory = _only(names, "the recipe", "penstock train cats steps=50"), run_dir
    config = load_config(source, changes)
    if dry_run:
        from penstock.overseer.plan import describe_plan

        print(describe_plan(config))
        return 0
    from rich.console import Console

    from penstock.overseer import print_summary, train

    summary = train(config, run_dir=directory, resume=resume, recipe=source, quiet=quiet)
    print_summary(summary, Console())
    return 0 if summary.complete else 130


@_app.command(
    "eval",
    short_help="Evaluate a checkpoint.",
    epilog="Example: penstock eval runs/cats-1/checkpoints/step-60 --recipe cats --n 128",
)
def evaluate(
    checkpoint: _Checkpoint,
    overrides: _Overrides = None,
    recipe: Annotated[
        str | None, typer.Option(help="Whose lessons; by default those of the checkpoint's own run.")
    ] = None,
    lesson: Annotated[list[str] | None, typer.Option(help="Only this lesson or task; may be repeated.")] = None,
    n: Annotated[int | None, typer.Option(min=1, help="Held-out prompts per lesson, or episodes per task.")] = None,
    generations: Annotated[int, typer.Option(min=1, help="Responses per prompt: the largest k of pass@k.")] = 1,
    rollouts: Annotated[
        Path | None, typer.Option(help="Parquet file for the rollouts; by default evaluations/<checkpoint>-<time>.")
    ] = None,
    video: Annotated[
        Path | None, typer.Option(help="Folder for a film of one episode per task; control policies only.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> int:
    """Evaluate a checkpoint, with 95% intervals: reward and pass@k on held-out prompts, or returns in simulators."""
    from penstock.overseer.config_loading import load_config

    _refuse_run_directory(checkpoint)
    config = load_config(recipe or _recorded_config(checkpoint), overrides or [])
    from penstock.overseer import FleetRunConfig

    if isinstance(config, FleetRunConfig):
        from penstock.overseer import evaluate_fleet

        _refuse_given({"--generations": generations != 1, "--rollouts": rollouts is not None}, "a language policy's")
        if not json:
            from rich.console import Console

            console = Console()
            evaluate_fleet(checkpoint, config, lesson, n, video, lambda report: report.print(console)).print_films(
                console
            )
            return 0
        report = evaluate_fleet(checkpoint, config, lesson, n, video)
    else:
        from penstock.overseer import evaluate

        _refuse_given({"--video": video is not None}, "a control policy's")
        stamp = time.strftime("%Y%m%d-%H%M%S")
        path = rollouts or Path("evaluations") / f"{checkpoint.resolve().name}-{stamp}.parquet"
        report = evaluate(checkpoint, config, lesson, n, generations, path)
    if json:
        import json as encoder

        print(encoder.dumps(report.to_json(), indent=2))
    else:
        from rich.console import Console

        report.print(Console())
    return 0


@_app.command(epilog="Example: penstock serve runs/cats-1/checkpoints/step-60 --port 8000")
def serve(
    checkpoint: _Checkpoint,
    overrides: _Overrides = None,
    host: Annotated[str, typer.Option(help="Address to listen on; other machines need a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token that clients must send; or set PENSTOCK_TOKEN.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain in PEM, to speak HTTPS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its unencrypted key in PEM.")] = None,
    name: Annotated[str | None, typer.Option(help="The model's name in the API.")] = None,
) -> int:
    """Serve a checkpoint by an OpenAI-compatible API."""
    from penstock.inference.config import ServeConfig
    from penstock.overseer.config_loading import apply_overrides, build_config

    _refuse_run_directory(checkpoint)
    _refuse_token(overrides or [])
    settings: dict[str, Any] = {
        "host": host, "port": port, "token": _token(token_file), "model_name": name,
        "tls_cert": tls_cert, "tls_key": tls_key,
    }  # fmt: skip
    config = build_config(ServeConfig, apply_overrides(settings, overrides or []))
    from functools import partial

    from penstock.inference import serve

    serve(str(checkpoint), config, announce=partial(print, flush=True))
    return 0


@_app.command(
    short_help="Look at a run's rollouts.",
    epilog="""\b
Example: penstock rollouts runs/cats-1 --step 40
         penstock rollouts runs/cats-1 --show cats-0-7/2 --color advantage
         penstock rollouts runs/cats-1 --sql "select state, count(*) from rollouts group by 1"
         penstock rollouts runs/cats-1 --export hf --select pairs --out cat_pairs
         penstock rollouts runs/cartpole-1 --sql "select task, avg(episode_reward) from fragments group by 1\"""",
)
def rollouts(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run directory; the run may go on, or be dead.")],
    step: Annotated[int | None, typer.Option(help="Groups that this update trained, or that ended at it.")] = None,
    lesson: Annotated[str | None, typer.Option(help="Groups of this lesson.")] = None,
    fate: Annotated[
        str | None, typer.Option(help="Groups with a rollout that is trained, waiting, training, stale_step, …")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most groups or rows; else what fits the screen.")] = None,
    show: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Show a rollout, or all of a group; its beginning will do."),
    ] = None,
    color: Annotated[str | None, typer.Option(help="Its tokens by logprob (default), advantage or none.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show its tokens as a table of numbers.")] = False,
    sql: Annotated[str | None, typer.Option(metavar="QUERY", help="Query rollouts, turns, batches and more.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")] = False,
    export: Annotated[str | None, typer.Option(help="Write a data set: jsonl, parquet or hf.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to; never overwritten.")] = None,
    select: Annotated[str | None, typer.Option(help="Of which rollouts: all (default), best of group, pairs.")] = None,
    min_reward: Annotated[float | None, typer.Option(help="Leave out what was rewarded less.")] = None,
    min_margin: Annotated[float | None, typer.Option(help="Leave out pairs whose rewards differ by less.")] = None,
) -> int:
    """Look at a run's rollouts: groups by step, conversations token by token, queries, data sets."""
    from rich.console import Console

    from penstock.dashboard import RolloutsRequest, show_rollouts

    request = RolloutsRequest(
        run_dir, step=step, lesson=lesson, fate=fate, limit=limit, show=show, color=color, tokens=tokens, sql=sql,
        json=json, export=export, out=out, select=select, min_reward=min_reward, min_margin=min_margin,
    )  # fmt: skip
    show_rollouts(request, Console())
    return 0


@_app.command(short_help="Show what runs, lags and waits.", epilog="Example: penstock status runs/cats-1")
def status(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run directory; the run may go on, or be dead.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Show what runs, lags and waits in a run: components, weights, throughput, rollouts, the bottleneck."""
    from rich.console import Console

    from penstock.dashboard import print_status, print_status_json, read_run_status

    status = read_run_status(run_dir)
    if json:
        print_status_json(status)
    else:
        print_status(status, Console())
    return 0


@_app.command(
    short_help="Add or remove workers while a run goes on.", epilog="Example: penstock scale runs/cats-1 rollout=8"
)
def scale(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Of a run under runtime: ray that goes on.")],
    sizes: Annotated[
        list[str], typer.Argument(metavar="ROLE=NUMBER", help="rollout or inference, and how many there shall be.")
    ],
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the overseer's answer.")] = 30.0,
) -> int:
    """Add or remove rollout workers or inference servers while a run goes on; who leaves finishes its work first."""
    from penstock.dashboard import read_run_status
    from penstock.overseer.distributed.scaling import ask_to_scale, parse_sizes
    from penstock.types import ConfigError

    wanted, status = parse_sizes(sizes), read_run_status(run_dir)
    if status.runtime != "ray":
        raise ConfigError(f"{run_dir} runs in one process (runtime: {status.runtime}): only runtime: ray can be scaled")
    if not status.alive:
        raise ConfigError(f"{run_dir} is {status.state}: only a run that goes on can be scaled")
    for role, count in wanted.items():
        print(ask_to_scale(run_dir, role, count, timeout))
    return 0


_fleet = typer.Typer(
    help="Simulator fleets: find a good shape for one.",
    epilog="Example: penstock fleet autotune cartpole",
    rich_markup_mode=None,
    no_args_is_help=True,
)
_app.add_typer(_fleet, name="fleet", short_help="Find a good shape for a simulator fleet.")


@_fleet.command(epilog="Example: penstock fleet autotune crafter --seconds 60")
def autotune(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe with a fleet, or a YAML file.")],
    overrides: _Overrides = None,
    seconds: Annotated[float, typer.Option(min=1, help="For all measurements together.")] = 60.0,
    json: Annotated[bool, typer.Option("--json", help="Print the measurements as JSON.")] = False,
) -> int:
    """Measure how many steps per second this machine makes, and propose workers, simulators and batch size."""
    from penstock.overseer.config_loading import load_config

    config = load_config(recipe, overrides or [])
    from penstock.overseer import FleetRunConfig

    if not isinstance(config, FleetRunConfig):
        from penstock.types import ConfigError

        raise ConfigError(f"{recipe} has no fleet: give a recipe that trains in simulators, such as cartpole")
    from rich.console import Console

    from penstock.overseer import autotune

    report = autotune(config, seconds, None if json else print)
    if json:
        import json as encoder

        print(encoder.dumps(report.to_json(), indent=2))
    else:
        report.print(Console())
    return 0


@_app.command(epilog="Example: penstock recipes")
def recipes() -> int:
    """List the recipes that ship."""
    from penstock.overseer.config_loading import recipe_summaries

    summaries = recipe_summaries()
    width = max(map(len, summaries), default=0)
    for name, summary in summaries.items():
        print(f"{name:<{width}}  {summary}")
    return 0


@_app.command(short_help="Check this machine.", epilog="Example: penstock doctor")
def doctor() -> int:
    """Check this machine: versions, devices, memory, disk, parity of engine and learner, speed."""
    from rich.console import Console

    from penstock.overseer.doctor import examine, print_checks

    checks = examine()
    print_checks(checks, Console())
    return int(any(check.status == "fail" for check in checks))


def _only(names: Sequence[str], what: str, example: str) -> str:
    from penstock.types import ConfigError

    if not names:
        raise ConfigError(f"{what} is missing; for example: {example}")
    if len(names) > 1:
        extra = ", ".join(repr(name) for name in names[1:])
        raise ConfigError(f"{extra} beside {names[0]!r} is not of the form key=value; for example: {example}")
    return names[0]


def _resumed(names: Sequence[str], run_dir: Path | None) -> tuple[str, Path]:
    """The recorded config as a recipe, and the run directory; a recipe's name beside it says nothing new."""
    example = "penstock train --resume runs/cats-1"
    directory = run_dir if run_dir is not None else Path(_only(names[-1:], "the run directory", example))
    from penstock.rundir import RunDirectory

    return str(RunDirectory.open_existing(directory).config_path), directory


def _refuse_run_directory(path: Path) -> None:
    from penstock.types import ConfigError

    steps = [int(found.name.removeprefix("step-")) for found in path.glob("checkpoints/step-*") if found.is_dir()]
    if steps:
        newest = path / "checkpoints" / f"step-{max(steps)}"
        raise ConfigError(f"{path} is a run directory: give one of its checkpoints, such as {newest}")


def _recorded_config(checkpoint: Path) -> str:
    from penstock.types import ConfigError

    for folder in checkpoint.resolve().parents:
        if folder.name == "checkpoints" and (folder.parent / "config.yaml").is_file():
            return str(folder.parent / "config.yaml")
    raise ConfigError(f"{checkpoint} lies in no run directory, whose lessons could be taken: give --recipe")


def _refuse_given(given: dict[str, bool], whose: str) -> None:
    from penstock.types import ConfigError

    for option, is_given in given.items():
        if is_given:
            raise ConfigError(f"{option} is for {whose} evaluation only: leave it out")


def _token(path: Path | None) -> str | None:
    """The server's token; never taken from the command line, which every user of the machine can read."""
    if path is None:
        return os.environ.get("PENSTOCK_TOKEN")
    try:
        return path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        from penstock.types import ConfigError

        raise ConfigError(f"--token-file {path} cannot be read: {error}") from error


def _refuse_token(overrides: Sequence[str]) -> None:
    from penstock.types import ConfigError

    if any(word.partition("=")[0].strip() == "token" for word in overrides):
        raise ConfigError(
            "token on the command line can be read by every user of this machine: put it in a file (--token-file), or "
            "in PENSTOCK_TOKEN"
        )


def _explained(error: Exception) -> tuple[str, int]:
    """One line about an error, and the exit code."""
    usage = getattr(error, "format_message", None)  # of the command-line parser's own errors
    if usage is not None:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "penstock"
        return f"{_one_line(usage())} (see {command} --help)", 2
    from penstock.types import (
        CheckpointError,
        ConfigError,
        PenstockError,
        SchemaVersionError,
        Stopped,
        UnreachableError,
    )

    message = _one_line("; ".join([str(error), *getattr(error, "__notes__", [])]))
    if isinstance(error, ConfigError | CheckpointError | SchemaVersionError):
        return message, 2
    if isinstance(error, Stopped):
        return f"stopped: {message}", 130
    if isinstance(error, UnreachableError):
        return message, 1
    if isinstance(error, PenstockError):
        return f"the run failed: {message}", 1
    return f"unexpected {type(error).__name__}: {message} (PENSTOCK_TRACEBACK=1 shows where)", 1


def _one_line(text: str) -> str:
    """A message in one line that cannot act on the terminal: it may quote what a run, or its policy, wrote."""
    from penstock.dashboard.safe_text import printable

    line = printable(" ".join(text.split()))
    return line if len(line) <= _LONGEST_MESSAGE else line[: _LONGEST_MESSAGE - 1] + "…"
