"""From a simulator's id and arguments to a Gymnasium environment, with errors that a person can act on.

An id is, in this order: a built-in's (``memory``, ``atari:pong``); the dotted path of a callable that gives an
environment (``package.module:callable``, ``path/to/file.py:callable``); one that Gymnasium knows (``CartPole-v1``, or
``package.module:Name-v0``, which imports the module first).
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator

from penstock.types import ConfigError
from penstock.types.errors import raised_at
from penstock.types.importing import load_attribute, load_module, nearest

_OURS = "penstock.environments.simulators"
_STEP_LIMIT = "max_episode_steps"
INCURABLE = (
    TypeError, ValueError, LookupError, AttributeError, NameError, ImportError, AssertionError, NotImplementedError,
    gymnasium.error.Error,
)  # fmt: skip
"""What another attempt would raise again: it is wrong in the code or its arguments, not in the world around."""


@dataclass(frozen=True, slots=True)
class _Builtin:
    """Where a built-in is made.

    Attributes:
        place: Module and callable.
        line: What it is.
        needs: Packages by the modules that it imports.
        argument: What follows the colon of its id; empty: nothing does.
        remedy: How to get the packages.
    """

    place: str
    line: str
    needs: Mapping[str, str]
    argument: str = ""
    remedy: str = "pip install 'penstock[gym]'"


_BUILTINS = {
    "atari": _Builtin(
        "atari:AtariSimulator", "Atari 2600 games, 84 × 84 × 4 grey", {"ale_py": "ale-py", "PIL": "pillow"}, "game"
    ),
    "crafter": _Builtin("crafter:CrafterSimulator", "an open world with 22 achievements", {"crafter": "crafter"}),
    "memory": _Builtin("memory:MemorySimulator", "a cue to be remembered: only for policies with memory", {}),
    "minecraft": _Builtin(
        "minecraft:MinecraftSimulator", "Minecraft through MineStudio", {"minestudio": "minestudio"},
        remedy="pip install minestudio",
    ),  # fmt: skip
    "minigrid": _Builtin(
        "minigrid:MinigridSimulator", "MiniGrid and BabyAI worlds", {"minigrid": "minigrid"}, "world"
    ),
    "synthetic": _Builtin("synthetic:SyntheticSimulator", "chosen frames, times and faults", {}),
    "vizdoom": _Builtin(
        "vizdoom:VizdoomSimulator", "Doom scenarios, the engine a process of its own", {"vizdoom": "vizdoom"},
        "scenario",
    ),
}  # fmt: skip

_CLASSICS = {
    "Acrobot-v1": "swing a two-link arm up",
    "CartPole-v1": "balance a pole on a cart",
    "MountainCar-v0": "drive a weak car up a hill",
    "MountainCarContinuous-v0": "the same with a continuous force",
    "Pendulum-v1": "swing a pendulum up, with a continuous torque",
}


def simulator_ids() -> dict[str, str]:
    """Built-in ids, each with one line; what follows a colon is to be chosen (``atari:<game>``)."""
    ours = {f"{name}:<{one.argument}>" if one.argument else name: one.line for name, one in _BUILTINS.items()}
    return {**_CLASSICS, **ours}


def import_simulator(id: str) -> None:
    """Imports what `make_simulator` would of an id, and makes nothing.

    Raises:
        ConfigError: an unknown id, a missing package, or code that cannot be imported.
    """
    found = _found(id)
    if isinstance(found, EnvSpec):
        _creator(id, found)


def make_simulator(id: str, kwargs: Mapping[str, Any] | None = None) -> gymnasium.Env[Any, Any]:
    """Makes a simulator.

    Args:
        id: See the module.
        kwargs: Its arguments. `max_episode_steps` truncates episodes of any simulator after so many steps.

    Raises:
        ConfigError: an unknown id (with the nearest known ones), a missing package (with how to install it), a wrong
            argument (with those that there are), or a callable that gives something else.
    """
    arguments, found = dict(kwargs or {}), _found(id)
    if isinstance(found, EnvSpec):
        return _made_by_gymnasium(id, found, arguments)
    family, _, chosen = id.partition(":")
    if family in _BUILTINS and chosen:
        argument = _BUILTINS[family].argument
        if argument in arguments:
            raise ConfigError(f"kwargs.{argument} of simulator {id!r}: its id says that already")
        arguments[argument] = chosen
    return _made(id, found, arguments)


def _found(id: str) -> Callable[..., Any] | EnvSpec:
    """What makes simulators of an id: a callable, or what Gymnasium knows of it; its code is imported."""
    family, colon, rest = id.partition(":")
    if family in _BUILTINS:
        return _builtin_factory(id, _BUILTINS[family], rest if colon else None)
    if colon and (".py" in family or rest.isidentifier()):
        return _factory_by_path(id)
    return _gymnasium_spec(id)


def _builtin_factory(id: str, builtin: _Builtin, chosen: str | None) -> Callable[..., Any]:
    name = id.partition(":")[0]
    if bool(chosen) != bool(builtin.argument):
        form = f"{name}:<{builtin.argument}>" if builtin.argument else name
        raise ConfigError(f"simulator {id!r}: write {form}")
    for module, package in builtin.needs.items():
        _require(id, module, package, builtin.remedy)
    module_name, _, callable_name = builtin.place.partition(":")
    return getattr(importlib.import_module(f"{_OURS}.{module_name}"), callable_name)


def _factory_by_path(id: str) -> Callable[..., Any]:
    path = id if ".py:" in id else id.replace(":", ".")
    factory = load_attribute(path, "simulator")
    if not callable(factory):
        raise ConfigError(f"simulator {id!r} is a {type(factory).__name__}: name something that can be called")
    return factory


def _gymnasium_spec(id: str) -> EnvSpec:
    module, colon, name = id.partition(":")
    if colon:
        load_module(module, id, "simulator")
    spec = gymnasium.registry.get(name if colon else id)
    if spec is None:
        known = [*_CLASSICS, *_BUILTINS, *gymnasium.registry]
        raise ConfigError(
            f"simulator {id!r} is unknown{nearest(id, known)}: it is a built-in id ({', '.join(simulator_ids())}), an "
            "id that Gymnasium knows, or package.module:callable"
        )
    return spec


def _creator(id: str, spec: EnvSpec) -> Callable[..., Any]:
    try:
        return spec.entry_point if callable(spec.entry_point) else load_env_creator(str(spec.entry_point))
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
        raise ConfigError(f"simulator {id!r} needs a package that is not installed: {error}") from error


def _made_by_gymnasium(id: str, spec: EnvSpec, arguments: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    try:
        limits = {_STEP_LIMIT: arguments.pop(_STEP_LIMIT)} if _STEP_LIMIT in arguments else {}
        _check_arguments(id, _creator(id, spec), {**spec.kwargs, **arguments})
        return gymnasium.make(spec, disable_env_checker=True, **limits, **arguments)
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
        raise ConfigError(f"simulator {id!r} needs a package that is not installed: {error}") from error
    except INCURABLE as error:
        words = f"{type(error).__name__}: {error}{raised_at(error)}"
        raise ConfigError(f"simulator {id!r} could not be made: {words}") from error


def _made(id: str, factory: Callable[..., Any], arguments: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    limit = None
    if _STEP_LIMIT in arguments and _STEP_LIMIT not in _parameters(factory):
        limit = arguments.pop(_STEP_LIMIT)
        if not isinstance(limit, int) or limit < 1:
            raise ConfigError(f"kwargs.{_STEP_LIMIT} of simulator {id!r} is {limit!r}: write a number of steps")
    _check_arguments(id, factory, arguments)
    try:
        simulator = factory(**arguments)
    except INCURABLE as error:
        words = f"{type(error).__name__}: {error}{raised_at(error)}"
        raise ConfigError(f"simulator {id!r} could not be made: {words}") from error
    if not isinstance(simulator, gymnasium.Env):
        raise ConfigError(f"simulator {id!r} gave a {type(simulator).__name__}: it must give a gymnasium.Env")
    return simulator if limit is None else gymnasium.wrappers.TimeLimit(simulator, limit)


def _parameters(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(factory).parameters
    except ValueError:  # compiled code without a signature: it takes anything until it is called
        return {"arguments": inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)}


def _check_arguments(id: str, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    parameters = _parameters(factory)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [name for name, parameter in parameters.items() if parameter.kind in kinds]
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for name in arguments:
            if name not in named:
                known = ", ".join([*named, _STEP_LIMIT])
                raise ConfigError(
                    f"kwargs.{name}: simulator {id!r} has no such argument{nearest(name, named)}: it takes {known}"
                )
    for name in named:
        if parameters[name].default is inspect.Parameter.empty and name not in arguments:
            raise ConfigError(f"kwargs.{name} is missing: simulator {id!r} requires it")


def _require(id: str, module: str, package: str, remedy: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise ConfigError(f"simulator {id!r}: importing {module} needs {error.name!r}: install it") from error
        raise ConfigError(f"simulator {id!r} needs {package}: {remedy}") from error
