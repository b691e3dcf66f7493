"""Checks of constructor arguments that batch makers share."""

from typing import Any, get_args

from penstock.types import ConfigError


def uses_limit(max_samples: int) -> float:
    """How often a rollout may be used; infinity for −1.

    Raises:
        ConfigError: neither −1 nor at least 1.
    """
    if max_samples < 1 and max_samples != -1:
        raise ConfigError(f"max_samples is {max_samples}: it must be at least 1, or -1 for no limit")
    return float("inf") if max_samples == -1 else max_samples


def check_choice(name: str, value: str, choices: Any) -> None:
    """Refuses what is none of a `Literal`'s values.

    Raises:
        ConfigError: naming the argument and the choices.
    """
    if value not in get_args(choices):
        raise ConfigError(f"{name} is {value!r}: it must be one of {', '.join(get_args(choices))}")
