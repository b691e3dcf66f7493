"""How an environment is named in a config."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """An environment class by dotted path, with the arguments it is made with.

    Attributes:
        env_class: For example ``penstock.environments.cats.CatsEnvironment``.
        env_args: Keyword arguments.
    """

    env_class: str
    env_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
