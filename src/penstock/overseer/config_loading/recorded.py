"""The config that a run directory holds, and the code that it names.

`named_code` says which code a recorded config names, before it runs: a run directory may have been written by others.
`CODE_KEYS` is the one list of keys whose value is imported, or decides what other processes run. What is Penstock's own
is not mentioned. Nothing is imported for that.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from penstock.batch.config import BUILT_IN_MAKERS, BatchMakerConfig
from penstock.learner.config import PRESET_FILTERS, PRESETS, LossConfig
from penstock.overseer.config_loading.keys import matches
from penstock.overseer.config_loading.loading import Overrides, assignments, load_config
from penstock.replay.config import ReplayBufferConfig
from penstock.rundir import RunDirectory
from penstock.types import ConfigError
from penstock.types.importing import OBJECT, locate

if TYPE_CHECKING:
    from penstock.overseer.config import RunConfig
    from penstock.overseer.control_config import FleetRunConfig

CODE_KEYS = (
    "curriculum.lessons.*.environment.env_class",
    "curriculum.lessons.*.environment.env_args.agent",
    "curriculum.lessons.*.environment.env_args.env_id",
    "curriculum.lessons.*.environment.env_args.reward",
    "curriculum.lessons.*.environment.env_args.reward.*",
    "learner.loss.module",
    "model.module",
    "replay.batch_maker.name",
    "replay.batch_makers.*.name",
    "fleet.tasks.*.id",
    "fleet.tasks.*.kwargs.callbacks.*",
    "fleet.tasks.*.kwargs.callbacks.*.path",
    "ray.address",
    "ray.runtime_env",
    "roles.*.env",
)
"""Keys whose value is imported, by `load_attribute` or Gymnasium; the last three reach code by way of Ray. A ``*``
stands for any key, or any place in a list."""

_SHOWN_CHARACTERS = 300
_PRESET, _ASYNC = ["learner", "loss", "preset"], ["async"]

EVALUATED = ("curriculum", "fleet", "model")
"""The sections whose code an evaluation imports."""


@dataclass(frozen=True, slots=True)
class NamedCode:
    """One key that names code.

    Attributes:
        key: Its dotted path.
        value: What it says.
        place: The file that is imported, or what happens instead.
    """

    key: str
    value: str
    place: str

    def __str__(self) -> str:
        return f"{self.key}: {self.value} ({self.place})"


def named_code(values: Mapping[str, Any], sections: Sequence[str] | None = None) -> list[NamedCode]:
    """What a config has imported that is not Penstock's own.

    Args:
        values: The config as plain data.
        sections: Look into these only; by default all.
    """
    found: list[NamedCode] = []
    for pattern in CODE_KEYS:
        keys = pattern.split(".")
        if sections is not None and keys[0] not in sections:
            continue
        for key, value in matches(values, keys):
            place = _place(key, value, values.get("runtime"))
            if place is not None:
                found.append(NamedCode(key, f"{value!s:.{_SHOWN_CHARACTERS}}", place))
    return found


def load_recorded_config(
    directory: RunDirectory, overrides: Overrides, trust: bool, sections: Sequence[str] | None = None
) -> "tuple[RunConfig | FleetRunConfig, list[NamedCode]]":
    """The config that a run directory holds, with changes, and the code that it names.

    Args:
        directory: Of the run whose config it is; nothing in it is changed.
        overrides: The user's own, as of `load_config`, laid over what is recorded.
        trust: Take it although others than the user may have written it.
        sections: The top-level keys whose code is going to be imported; by default all.

    Raises:
        ConfigError: others may have written it; or it is not valid.
    """
    if any(keys in (_PRESET, _ASYNC) for keys, *_ in assignments(overrides)):
        overrides = with_what_follows(load_config(directory.config_path, recorded=True), overrides)
    config = load_config(directory.config_path, overrides, recorded=True)
    code = named_code(config.dump(), sections)
    reason = None if trust else directory.why_foreign()
    if reason is not None:
        names = "; ".join(map(str, code)) or "Penstock's own code only"
        raise ConfigError(
            f"{reason}, and what {directory.config_path} names is imported: give --trust if you know who wrote it, or "
            f"a recipe of your own; it names {names}"
        )
    return config, code


def with_what_follows(config: "RunConfig | FleetRunConfig", changes: Overrides) -> Overrides:
    """Changes of a recorded config, and before them all that another loss preset or ``async`` among them changes.

    A recorded config has every key written down, so that a preset would fill in nothing, and the staleness budget of a
    synchronous run stay at zero. What the recorded ones filled in, filters included, gives way; what somebody set
    beside them stays.

    Args:
        config: What is recorded.
        changes: As of `load_config`.
    """
    from penstock.overseer.config import RunConfig

    if not isinstance(config, RunConfig):
        return changes
    told = {tuple(keys): value for keys, value, _ in assignments(changes)}
    loss = config.learner.loss
    preset = str(told.get(tuple(_PRESET)))
    old, new = ({"preset": each} for each in (loss.preset, preset if preset in PRESETS else loss.preset))
    sections = {
        "learner.loss": (loss.model_dump(mode="json"), *_filled(LossConfig, old, new)),
        "replay.batch_maker": (
            config.replay.batch_maker.model_dump(mode="json"),
            *_filled(BatchMakerConfig, *(PRESET_FILTERS.get(each["preset"], {}) for each in (old, new))),
        ),
    }
    filled = {
        f"{section}.{name}": after[name]
        for section, (values, before, after) in sections.items()
        for name in values
        if values[name] == before[name] != after[name] and name != "preset"
    }
    if told.get(tuple(_ASYNC)) is True and not config.asynchronous:
        replay, usual = config.replay, ReplayBufferConfig()
        filled["replay.staleness_budget"] = usual.staleness_budget
        filled["replay.max_rollout_step_delay"] = max(replay.max_rollout_step_delay, usual.max_rollout_step_delay)
    if isinstance(changes, Mapping):
        return {**filled, **changes}
    words = [changes] if isinstance(changes, str) else changes
    return [*(f"{key}={json.dumps(value)}" for key, value in filled.items()), *words]


def _filled(model: type[BaseModel], *given: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [model.model_validate(each).model_dump(mode="json") for each in given]


def _place(key: str, value: Any, runtime: Any) -> str | None:
    """Where a value leads; None where it names no code, or only Penstock's own."""
    if key.startswith(("ray.", "roles.")):
        reached = "whoever runs that cluster" if key == "ray.address" else "handed to Ray's processes"
        return reached if value and runtime == "ray" else None
    if key.endswith(".env_args.agent") and isinstance(value, list):
        return "started as a program"
    if not isinstance(value, str) or value.startswith(OBJECT) or _is_built_in(key, value):
        return None
    if key.endswith(".env_id") and ".py:" not in value:  # a module, as verifiers finds it
        value = f"{value.rpartition('/')[2].replace('-', '_')}.load_environment"
    return locate(value) or "not found"


def _is_built_in(key: str, value: str) -> bool:
    """Whether a value names Penstock's own code, or a simulator by an id that Gymnasium has."""
    if value in BUILT_IN_MAKERS or (value.startswith("penstock.") and ".py:" not in value):
        return True
    if key.startswith("fleet.") and key.endswith(".id"):
        from penstock.environments.simulators import simulator_ids

        return ":" not in value or value.partition(":")[0] in {name.partition(":")[0] for name in simulator_ids()}
    return False


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What differs between two configs: by key, what one has and the other; None where a key is missing."""
    old, new = _flat(before), _flat(after)
    keys = [*old, *(key for key in new if key not in old)]
    return {key: [old.get(key), new.get(key)] for key in keys if old.get(key) != new.get(key)}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
