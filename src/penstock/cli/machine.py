"""Commands about this machine and what is installed on it: fleet autotune, recipes, doctor."""

from typing import Annotated

import typer

from penstock.cli.arguments import Overrides

commands = typer.Typer()

_fleet = typer.Typer(
    help="Simulator fleets: find a good shape for one.",
    epilog="Example: penstock fleet autotune cartpole",
    rich_markup_mode=None,
    no_args_is_help=True,
)
commands.add_typer(_fleet, name="fleet", short_help="Find a good shape for a simulator fleet.")


@_fleet.command(epilog="Example: penstock fleet autotune crafter --seconds 60")
def autotune(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe with a fleet, or a YAML file.")],
    overrides: Overrides = None,
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


@commands.command(epilog="Example: penstock recipes")
def recipes() -> int:
    """List the recipes that ship."""
    from penstock.overseer.config_loading import recipe_summaries

    summaries = recipe_summaries()
    width = max(map(len, summaries), default=0)
    for name, summary in summaries.items():
        print(f"{name:<{width}}  {summary}")
    return 0


@commands.command(short_help="Check this machine.", epilog="Example: penstock doctor")
def doctor(
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove what killed runs left in this machine's memory, and check nothing.")
    ] = False,
) -> int:
    """Check this machine: versions, devices, memory, disk, parity of engine and learner, speed."""
    from rich.console import Console

    from penstock.overseer.doctor import clean as remove_remains
    from penstock.overseer.doctor import examine, print_checks

    if clean:
        print("\n".join(remove_remains()))
        return 0
    checks = examine()
    print_checks(checks, Console())
    return int(any(check.status == "fail" for check in checks))
