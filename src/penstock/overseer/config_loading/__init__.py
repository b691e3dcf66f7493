"""From a recipe's name and ``key=value`` words to a validated config, and what the keys of a config mean."""

from penstock.overseer.config_loading.keys import ConfigKey, all_keys, is_key, is_secret, keys_at
from penstock.overseer.config_loading.loading import (
    apply_overrides,
    build_config,
    load_config,
    load_recipe,
    recipe_summaries,
    split_words,
)
from penstock.overseer.config_loading.recorded import (
    CODE_KEYS,
    EVALUATED,
    NamedCode,
    differences,
    load_recorded_config,
    named_code,
    with_what_follows,
)
from penstock.overseer.config_loading.suggestions import Suggestion, suggest

__all__ = [
    "CODE_KEYS", "EVALUATED", "ConfigKey", "NamedCode", "Suggestion", "all_keys", "apply_overrides", "build_config",
    "differences", "is_key", "is_secret", "keys_at", "load_config", "load_recipe", "load_recorded_config", "named_code",
    "recipe_summaries", "split_words", "suggest", "with_what_follows",
]  # fmt: skip
