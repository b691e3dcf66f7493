"""Commands about a run that goes on, or has ended: dashboard, rollouts, status, scale, replay, why."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.arguments import (
    RunDir,
    TlsCert,
    TlsKey,
    Trust,
    UpdateStep,
    busy,
    print_report,
    read_token,
    recorded_config,
    text_console,
)
from penstock.types import ConfigError

commands = typer.Typer()


@commands.command(
    short_help="Look at a run's rollouts.",
    epilog="""\b
Example: penstock rollouts runs/cats-1 --step 40
         penstock rollouts runs/cats-1 --show cats-0-7/2 --color advantage
         penstock rollouts runs/cats-1 --eval --step 40
         penstock rollouts runs/cats-1 --sql "select state, count(*) from rollouts group by 1"
         penstock rollouts runs/cats-1 --export hf --select pairs --out cat_pairs
         penstock rollouts runs/cartpole-1 --sql "select task, avg(episode_reward) from fragments group by 1\"""",
)
def rollouts(
    run_dir: RunDir,
    step: Annotated[int | None, typer.Option(help="Groups that this update trained, or that ended at it.")] = None,
    lesson: Annotated[str | None, typer.Option(help="Groups of this lesson.")] = None,
    evaluations: Annotated[
        bool, typer.Option("--eval", help="What was said in evaluations, by the version evaluated; else in training.")
    ] = False,
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
    trust: Annotated[
        bool, typer.Option("--trust", help="Connect to its store in the network, though others than you may name it.")
    ] = False,
) -> int:
    """Look at a run's rollouts: groups by step, conversations token by token, queries, data sets."""
    from penstock.dashboard import RolloutsRequest, show_rollouts

    request = RolloutsRequest(
        run_dir, step=step, lesson=lesson, fate=fate, limit=limit, show=show, color=color, tokens=tokens, sql=sql,
        json=json, export=export, out=out, select=select, min_reward=min_reward, min_margin=min_margin, trust=trust,
        eval=evaluations,
    )  # fmt: skip
    show_rollouts(request, text_console())
    return 0


@commands.command(
    short_help="Show runs in a browser.",
    epilog="""\b
Example: penstock dashboard runs
         penstock dashboard runs/cats-1 --port 0
         penstock dashboard runs/cats-1 --bundle cats-1-report""",
)
def dashboard(
    path: Annotated[
        Path, typer.Argument(metavar="RUN_DIR_OR_PARENT", help="A run directory, or the folder of several.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on; other machines need a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8800,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token that a browser must show; or set PENSTOCK_TOKEN.")
    ] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    bundle: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Write a folder that opens without a server, and serve nothing.")
    ] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Connect to stores in the network, though others than you may name them.")
    ] = False,
) -> int:
    """Show runs in a browser: what happened, why, and whether one is better than another; live runs and dead ones.

    Nothing is written into a run, and nothing of it executed. An index of its rollouts is kept in the user's cache.
    """
    if bundle is not None:
        from penstock.dashboard import write_bundle

        with busy("reading every group's tokens"):
            told = write_bundle(path, bundle, trust)
        print(told)
        return 0
    from functools import partial

    from penstock.dashboard import DashboardSettings, serve_dashboard
    from penstock.rundir.parquet import WithoutPandas

    settings = DashboardSettings(host, port, read_token(token_file), tls_cert, tls_key, trust)
    os.nice(10)  # a run that computes on this machine comes first
    sys.meta_path.insert(0, WithoutPandas())
    serve_dashboard(path, settings, announce=partial(print, flush=True))
    return 0


@commands.command(
    short_help="Draw runs for papers.",
    epilog="""\b
Example: penstock plot runs/cats-1 --out cats.png
         penstock plot runs/grpo-* runs/dapo-* --out seeds.svg --data seeds.csv
         penstock plot old=runs/a old=runs/b new=runs/c new=runs/d --by tokens --out two.pdf
         penstock plot runs/cats-1 --metric train/entropy --metric train/grad_norm --out inside.png""",
)
def plot(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN_DIR", help="Runs, live or dead; NAME=RUN_DIR says to which line one belongs."),
    ],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The picture: .png, .svg or .pdf.")] = None,
    data: Annotated[Path | None, typer.Option(metavar="FILE.csv", help="The numbers that are drawn.")] = None,
    by: Annotated[str, typer.Option(help="Along update, tokens (trained; steps of simulators) or seconds.")] = "update",
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Of metrics.jsonl, a panel each; may be repeated. Else reward, staleness, …"),
    ] = None,
) -> int:
    """Draw runs for papers: reward, held-out reward, staleness and what became of rollouts.

    Runs that differ in nothing but their seed are one line, with the 95% interval of their mean.
    """
    from penstock.dashboard import PlotRequest, plot_runs

    for line in plot_runs(PlotRequest(runs, out, data, by, metric or ())):  # pyright: ignore[reportArgumentType]
        print(line)
    return 0


@commands.command(short_help="Show what runs, lags and waits.", epilog="Example: penstock status runs/cats-1")
def status(
    run_dir: RunDir,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Show what runs, lags and waits in a run: components, weights, throughput, rollouts, the bottleneck."""
    from penstock.dashboard import print_status, print_status_json, read_run_status

    status = read_run_status(run_dir)
    if json:
        print_status_json(status)
    else:
        print_status(status, text_console())
    return 0


@commands.command(
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
    from penstock.overseer.supervisor.scaling import ask_to_scale, parse_sizes

    wanted, status = parse_sizes(sizes), read_run_status(run_dir)
    if status.runtime != "ray":
        raise ConfigError(f"{run_dir} runs in one process (runtime: {status.runtime}): only runtime: ray can be scaled")
    if not status.alive:
        raise ConfigError(f"{run_dir} is {status.state}: only a run that goes on can be scaled")
    for role, count in wanted.items():
        print(ask_to_scale(run_dir, role, count, timeout))
    return 0


@commands.command(
    short_help="Make updates of a run again.",
    epilog="""\b
Example: penstock replay runs/cats-1 --step 40
         penstock replay runs/cats-1 --step 40 --until 45
         penstock replay runs/cats-1 --step 40 --set learner.loss.preset=grpo
         penstock replay runs/cats-1 --step 40 --drop cats-0-117/3""",
)
def replay(
    run_dir: RunDir,
    step: UpdateStep,
    until: Annotated[int | None, typer.Option(help="And those after it, up to this one.")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A learner.… key, from --step on; may be repeated."),
    ] = None,
    drop: Annotated[
        list[str] | None, typer.Option(metavar="ROLLOUT", help="Leave this rollout out; may be repeated.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    trust: Trust = False,
) -> int:
    """Make updates of a run again from its checkpoints and batches, and compare them with what the run recorded.

    Exit code 0: equal bit for bit (or changed by --set and --drop); 1: not equal; 2: they cannot be made again. Nothing
    is written into the run: what was found goes to the user's cache, for the dashboard.
    """
    from penstock.overseer.rerun.replay import replay_updates

    _begin_again(run_dir, trust)
    with busy("making updates again"):
        report = replay_updates(run_dir, step, until, changes or (), drop or (), trust)
    print_report(report, json)
    try:
        report.keep()
    except OSError as error:
        print(f"penstock: the dashboard will not show this replay: {error}", file=sys.stderr)
    return report.exit_code


@commands.command(
    short_help="Say which rollouts moved an update.",
    epilog="""\b
Example: penstock why runs/cats-1 --step 40
         penstock why runs/cats-1 --step 40 --json""",
)
def why(
    run_dir: RunDir,
    step: UpdateStep,
    json: Annotated[bool, typer.Option("--json", help="Print every rollout of it, as JSON.")] = False,
    trust: Trust = False,
) -> int:
    """Say what each rollout did to an update: its gradient, and how much another the update were without it.

    Sums by staleness, version, lesson and the advantage's sign; the ten that moved it most, and those that are unlike
    the others, with their text. What one did is verified by penstock replay --drop. Nothing is written into the run:
    ratios and entropies of its tokens go to the user's cache, for the dashboard.
    """
    from penstock.overseer.rerun.why import explain_update

    _begin_again(run_dir, trust)
    with busy("making the gradient of every rollout"):
        report = explain_update(run_dir, step, trust)
    print_report(report, json)
    try:
        report.keep_tokens()
    except OSError as error:
        print(f"penstock: the dashboard will not colour its tokens by ratio: {error}", file=sys.stderr)
    return 0


def _begin_again(run_dir: Path, trust: bool) -> None:
    """Says what code is imported by the run's word, and computes as it did."""
    from penstock.overseer.rerun.stored_run import check_run_directory, compute_as_recorded

    check_run_directory(run_dir)
    recorded_config(run_dir, (), trust, ("learner",))
    compute_as_recorded(run_dir)
