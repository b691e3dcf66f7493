"""Commands that train nothing: fleet autotune, curriculum simulate, env new, fit, recipes, config, doctor."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.arguments import Overrides, busy, only, print_report, refuse_run_directory, text_console
from penstock.types import ConfigError

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
        raise ConfigError(f"{recipe} has no fleet: give a recipe that trains in simulators, such as cartpole")
    from penstock.overseer import autotune

    print_report(autotune(config, seconds, None if json else print), json)
    return 0


_curriculum = typer.Typer(
    help="Curricula: try one without a model.",
    epilog="Example: penstock curriculum simulate arithmetic",
    rich_markup_mode=None,
    no_args_is_help=True,
)
commands.add_typer(_curriculum, name="curriculum", short_help="Try a curriculum without a model.")


@_curriculum.command(epilog="Example: penstock curriculum simulate arithmetic --success 'easy=0.2..0.95/1500'")
def simulate(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe with lessons, or a YAML file.")],
    overrides: Overrides = None,
    success: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LESSON=CURVE",
            help="How a lesson is learned: 0.3 always, or 0.1..0.9/2000 from the one to the other, 63% of the way "
            "after 2000 of its rollouts; may be repeated. Else 0.1..0.95/2000.",
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=0, help="Updates; by default as many as the recipe has.")] = None,
    every: Annotated[int | None, typer.Option(min=1, help="Steps from line to line; by default 20 lines.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print lines and events as JSON.")] = False,
) -> int:
    """Take the recipe's own curriculum through a run whose answers are drawn: what unlocks and graduates when."""
    from penstock.curriculum import LearningCurve, simulate_curriculum
    from penstock.overseer import FleetRunConfig, load_config

    config = load_config(recipe, overrides or [])
    if isinstance(config, FleetRunConfig):
        raise ConfigError(f"{recipe} has no curriculum: give a recipe with lessons, such as arithmetic")
    curves = {}
    for word in success or []:
        lesson, equals, curve = word.partition("=")
        if not equals:
            raise ConfigError(
                f"--success {word!r} is not of the form LESSON=CURVE: write for example easy=0.1..0.9/2000"
            )
        curves[lesson] = LearningCurve.parse(curve)
    total = config.steps if steps is None else steps
    found = simulate_curriculum(
        config.curriculum, curves, total, config.replay.groups_per_batch, config.seed, every or max(1, total // 20)
    )
    print_report(found, json)
    return 0


_env = typer.Typer(
    help="Environments of your own: begin one.",
    epilog="Example: penstock env new spell_backwards",
    rich_markup_mode=None,
    no_args_is_help=True,
)
commands.add_typer(_env, name="env", short_help="Begin an environment of your own.")


@_env.callback()
def _begin() -> None:
    pass


@_env.command(epilog="Example: penstock env new spell_backwards")
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the folder and the module; the class, too.")],
    kind: Annotated[
        str, typer.Option("--kind", metavar="KIND", help="single-turn, multi-turn, or tool: conversations with tools.")
    ] = "single-turn",
) -> int:
    """Write an environment, its test and its recipe into a new folder NAME. All three run as they are."""
    from penstock.environments.scaffold import new_environment
    from penstock.rundir.commands import command_line

    environment, test, recipe = new_environment(name, Path(name), kind)
    width = len(str(test))
    print(f"{environment!s:<{width}}  problems, and what an answer is worth")
    print(f"{test!s:<{width}}  its test, without a model: pytest {test.parent}")
    print(f"{recipe!s:<{width}}  a recipe: {command_line('train', recipe)}")
    return 0


@commands.command(
    short_help="Say whether a run fits hardware that is not here.",
    epilog="""\b
Example: penstock fit gsm8k_smollm2 --target h100:1
         penstock fit gsm8k_smollm2 --target v5e:1 learner.micro_batch_rows=1
         penstock fit cats model.dtype=bfloat16 --target h100:1 --models 0.5b,1.5b,7b --rows 4096,16384
         penstock fit cats model.dtype=bfloat16 --target h100:1 --models 7b --rows 16384 --lora 16""",
)
def fit(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe with lessons, or a YAML file.")],
    overrides: Overrides = None,
    target: Annotated[
        str, typer.Option(metavar="CHIP", help="h100:1, h200:1, a100:1, v5e:1, v6e:1, or cpu for this machine.")
    ] = "cpu",
    models: Annotated[
        str | None,
        typer.Option(metavar="NAME,…", help="In place of the recipe's: 0.5b, 1.5b, 7b (Qwen2.5), or a config.json."),
    ] = None,
    rows: Annotated[
        str | None, typer.Option(metavar="TOKENS,…", help="Of rows and sequences, in place of the recipe's.")
    ] = None,
    lora: Annotated[
        int | None, typer.Option(metavar="RANK", help="Train an adapter of this rank beside each of --models.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> int:
    """Compile a run for a chip that need not be here: what takes its memory, what bounds a step, what would fit.

    Exit code 0: it fits; 1: it does not, with the smallest change that does. Compiled, not run: nothing is measured.
    """
    from penstock.overseer import FleetRunConfig, fit, load_config

    config = load_config(recipe, overrides or [])
    if isinstance(config, FleetRunConfig):
        raise ConfigError(f"{recipe} trains a control policy: give a recipe with lessons, such as cats")
    lengths = [_tokens(word) for word in _words(rows, "--rows")]
    shapes = _words(models, "--models")
    if lengths:
        _refuse_beside("--rows", ("learner.row_length", "learner.row_lengths", "inference.max_seq_len"), overrides)
    if shapes:
        _refuse_beside("--models", ("model.path", "model.init", "model.initial_checkpoint"), overrides)
    with busy(f"compiling for {target}"):
        report = fit(config, target, shapes, lengths, lora)
    print_report(report, json)
    return report.exit_code


def _words(given: str | None, option: str) -> list[str]:
    words = [word.strip() for word in (given or "").split(",") if word.strip()]
    if given is not None and not words:
        raise ConfigError(f"{option} is empty: leave it out for what the recipe says")
    return words


def _refuse_beside(option: str, keys: Sequence[str], overrides: Sequence[str] | None) -> None:
    """Refuses keys of the command line whose place an option takes."""
    from penstock.overseer.config_loading import apply_overrides

    said = apply_overrides({}, overrides or [])
    for key in keys:
        section, _, name = key.partition(".")
        if name in (said.get(section) or {}):
            raise ConfigError(f"{option} takes the place of {key}: leave one of the two out")


def _tokens(word: str) -> int:
    if not word.isdecimal() or int(word) < 2:
        raise ConfigError(f"--rows has {word!r}: give numbers of tokens, such as 4096,16384")
    return int(word)


@commands.command(epilog="Example: penstock recipes")
def recipes() -> int:
    """List the recipes that ship."""
    from penstock.overseer.config_loading import recipe_summaries

    summaries = recipe_summaries()
    width = max(map(len, summaries), default=0)
    for name, summary in summaries.items():
        print(f"{name:<{width}}  {summary}")
    return 0


@commands.command(
    short_help="Say what a key of the configuration means.",
    epilog="Example: penstock config learner.optimizer.learning_rate cats",
)
def config(
    key: Annotated[
        str | None,
        typer.Argument(metavar="KEY", help="A dotted key; without one the sections are listed.", show_default=False),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE", help="Of this recipe or YAML file only, with the value there.", show_default=False
        ),
    ] = None,
) -> int:
    """Say what a key of the configuration means: type, default, meaning, and the keys of a section.

    All keys are in docs/config.md.
    """
    from penstock.overseer.config_loading import load_config
    from penstock.overseer.config_loading.reference import print_key, print_sections

    chosen = None if recipe is None else load_config(recipe)
    if key is None:
        print_sections(text_console())
    else:
        print_key(key, chosen, text_console())
    return 0


@commands.command(
    short_help="Check this machine, or a checkpoint on it.",
    epilog="Example: penstock doctor /models/Qwen2.5-0.5B-Instruct model.dtype=bfloat16",
)
def doctor(
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A run's checkpoints/step-<n>, or a Hugging Face directory; without one the machine is checked.",
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove what killed runs left in this machine's memory, and check nothing.")
    ] = False,
) -> int:
    """Check this machine: versions, devices, memory, disk, parity of engine and learner, speed.

    Of a checkpoint: parity of engine and learner, memory, compile time and tokens/s, before any run trains it. The keys
    are model.dtype, model.chat_template_kwargs, and those of a run's inference and learner.
    """
    from penstock.overseer.config_loading import apply_overrides, build_config, split_words
    from penstock.overseer.doctor import SMALL_SHAPES, DoctorConfig, examine, print_checks
    from penstock.overseer.doctor import clean as remove_remains

    names, changes = split_words([word for word in (checkpoint, *(overrides or ())) if word is not None])
    if names or changes:
        path = Path(only(names, "the checkpoint", "penstock doctor runs/cats-1/checkpoints/step-60"))
        refuse_run_directory(path)
        if clean:
            raise ConfigError("--clean looks at no checkpoint: leave one of the two out")
        config = build_config(DoctorConfig, apply_overrides(SMALL_SHAPES, changes))
        from penstock.overseer.doctor_probes import examine_checkpoint

        checks = examine_checkpoint(path, config)
    elif clean:
        print("\n".join(remove_remains()))
        return 0
    else:
        checks = examine()
    print_checks(checks, text_console())
    return int(any(check.status == "fail" for check in checks))
