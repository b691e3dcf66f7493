"""Keys of a configuration that cannot act in it: each is refused where it says something else than its default.

A config model looks at itself with `refuse_idle` when it is made. What an older ``config.yaml`` holds of such keys is
left out by whoever reads it (`penstock.overseer.config_loading`), so that runs of before can be resumed.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.types.errors import ConfigError


class IdleKeyError(ConfigError, ValueError):
    """A key has a value of its own and could not act.

    Attributes:
        key: Dotted, below the model that raised this.
        why: The reason, in words.
    """

    def __init__(self, key: str, value: object, default: object, why: str) -> None:
        dump = getattr(value, "model_dump", None)  # of a section: what it says otherwise than by default
        given = value if dump is None else dump(mode="json", exclude_defaults=True)
        written, usual = (json.dumps(each, default=str, ensure_ascii=False) for each in (given, default))
        remedy = f"leave it out (or at {usual})" if dump is None else "leave it out"
        super().__init__(f"{key} is {written}, which has no effect: {why}; {remedy}")
        self.key, self.why = key, why


def refuse_idle(
    section: Any, keys: Iterable[str], why: str, *, at: str = "", preset: Mapping[str, Any] | None = None
) -> None:
    """Checks that keys which cannot act are at their defaults.

    Args:
        section: The config model that has them.
        keys: Names of its fields.
        why: What keeps them from acting.
        at: Where the section lies below the model that checks: ``replay.``, say.
        preset: Other defaults of some keys.

    Raises:
        IdleKeyError: one of them has a value of its own.
    """
    fields: Mapping[str, Any] = section.__class__.model_fields
    for key in keys:
        default = fields[key].get_default(call_default_factory=True)
        value = getattr(section, key)
        if value != default and (preset is None or value != preset.get(key, default)):
            raise IdleKeyError(at + key, value, default, why)
