"""Environments and reward functions that are given to a run as Python objects, from a script or a notebook's cell.

They run in the process of the run. Its config holds their names in place of paths (`penstock.types.importing.OBJECT`),
by which whoever reads it later is told that they must be given again. Not covered: what is named by a path.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from penstock.curriculum.config import EnvironmentConfig
from penstock.environments import Environment, load_environment
from penstock.environments.loading import given_environment, takes_argument
from penstock.overseer.config import RunConfig
from penstock.types import ConfigError, EnvironmentSpec
from penstock.types.importing import OBJECT, name_of_object

GivenEnvironment = Environment | type[Environment]
"""An instance, or a class that is called without arguments."""
RewardFunction = Callable[..., Any]
GivenReward = str | RewardFunction | Sequence[str | RewardFunction]
"""A function, or several; those with a path run in processes of their own."""

_Given = TypeVar("_Given")


@dataclass(frozen=True, slots=True)
class GivenObjects:
    """What was given, made ready.

    Attributes:
        config: The run's, with the names of what was given.
        environments: By lesson.
        words: Each object in words.
    """

    config: RunConfig
    environments: Mapping[str, Environment]
    words: tuple[str, ...]


def take_objects(
    config: RunConfig,
    environment: GivenEnvironment | Mapping[str, GivenEnvironment] | None,
    reward: GivenReward | Mapping[str, GivenReward] | None,
) -> GivenObjects:
    """Puts objects in the place of what a config names.

    Args:
        config: Of the run, with the names of what is replaced.
        environment: The environment of the only lesson, or environments by lesson.
        reward: What the lesson's environment takes as `reward`, or that by lesson. Weights of what it replaces are gone
            with it: each function given weighs 1.

    Raises:
        ConfigError: the run is of many processes, the lesson is unknown or not said, or an environment cannot be made.
    """
    configs = {name: lesson.environment for name, lesson in config.curriculum.lessons.items()}
    environments: dict[str, Environment] = {}
    words: list[str] = []
    for name, given in _by_lesson(environment, configs, "environment").items():
        environments[name] = given_environment(given)
        configs[name] = EnvironmentConfig(env_class=name_of_object(given))
        words.append(f"environment {_short(given)}")
    for name, given in _by_lesson(reward, configs, "reward").items():
        if name in environments:
            raise ConfigError(
                f"reward and environment are both given for lesson {name!r}: give the function to the environment"
            )
        several = [given] if isinstance(given, str) or not isinstance(given, Sequence) else given
        for each in several:
            if not isinstance(each, str) and not callable(each):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(
                    f"reward has {each!r:.60}: give a function, its path (rewards.py:score), or a list of both"
                )
        functions = [_anchored(each) if isinstance(each, str) else each for each in several]
        spec = configs[name].spec
        others = {key: value for key, value in spec.env_args.items() if key != "reward_weights"}
        environments[name] = _rewarded(EnvironmentSpec(spec.env_class, others), functions)
        named = [each if isinstance(each, str) else name_of_object(each) for each in functions]
        configs[name] = EnvironmentConfig(env_class=spec.env_class, env_args={**others, "reward": named})
        words.extend(f"reward {_short(each)}" for each in functions if not isinstance(each, str))
    if words and config.runtime != "local":
        raise ConfigError(
            f"{words[0]} is a Python object, which stays in this process, and runtime is {config.runtime}: name code "
            "that every process can import (env_class: tasks.py:MyEnvironment, reward: rewards.py:score), or set "
            'runtime="local"'
        )
    lessons = {
        name: lesson.model_copy(update={"environment": configs[name]})
        for name, lesson in config.curriculum.lessons.items()
    }
    curriculum = config.curriculum.model_copy(update={"lessons": lessons})
    return GivenObjects(config.model_copy(update={"curriculum": curriculum}), environments, tuple(words))


def _rewarded(spec: EnvironmentSpec, functions: list[str | RewardFunction]) -> Environment:
    if not takes_argument(spec.env_class, "reward"):
        raise ConfigError(
            f"reward is given, and {spec.env_class} takes none: it scores by itself; give another "
            "environment=…, such as JsonlEnvironment(path, reward=…)"
        )
    return load_environment(EnvironmentSpec(spec.env_class, {**spec.env_args, "reward": functions}))


def _by_lesson(given: _Given | Mapping[str, _Given] | None, lessons: Mapping[str, Any], name: str) -> dict[str, _Given]:
    if given is None:
        return {}
    if isinstance(given, Mapping):
        chosen = cast(Mapping[str, _Given], given)
        unknown = [str(lesson) for lesson in chosen if lesson not in lessons]
        if unknown:
            raise ConfigError(
                f"{name} is given for {', '.join(unknown)}: no such lesson; there are {', '.join(lessons)}"
            )
        return dict(chosen)
    if len(lessons) > 1:
        raise ConfigError(
            f"{name} is one for {len(lessons)} lessons ({', '.join(lessons)}): say for which, "
            f"{name}={{{next(iter(lessons))!r}: …}}"
        )
    return {next(iter(lessons)): given}


def _anchored(path: str) -> str:
    """A file's path counts from the working directory, and means the same when the run is resumed."""
    file, is_file, name = path.rpartition(".py:")
    return f"{os.path.abspath(os.path.expanduser(file))}.py:{name}" if is_file else path


def _short(given: Any) -> str:
    return name_of_object(given).removeprefix(OBJECT).rpartition(".")[2]
