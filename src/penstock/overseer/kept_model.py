"""A resumed run keeps the model of its checkpoint: other values for it are bad input, told before anything is done.

Not covered: whether the checkpoint is whole (`penstock.learner.newest_good_checkpoint`).
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.learner.checkpoint_files import read_state
from penstock.model.language.config import ModelConfig
from penstock.overseer.config import RunConfig
from penstock.overseer.plan import model_shape
from penstock.types import CheckpointError, ConfigError


def check_language_resume(config: RunConfig, checkpoint: Path) -> None:
    """Compares the language model that is asked for with that of the checkpoint to go on from.

    A directory named by ``model.path`` may have gone meanwhile: the checkpoint holds all that is needed.

    Raises:
        ConfigError: they differ; the message names every field with both values, and the remedy.
        CheckpointError: the checkpoint holds no language model.
    """
    asked, place = config.model, "model.init" if config.model.init is not None else "model.path"
    if asked.path is not None and not Path(asked.path).is_dir():
        return
    path = checkpoint / "model" / "config.json"
    try:
        trained = ModelConfig.from_hugging_face(json.loads(path.read_text("utf-8")), asked.dtype)
    except (OSError, ValueError, ConfigError) as error:
        raise CheckpointError(f"{path} is not the config of a language model: {error}") from error
    theirs = trained.model_dump(mode="json") | {"dtype": read_state(checkpoint)["dtype"]}
    check_kept(
        model_shape(asked).model_dump(mode="json"),
        theirs,
        checkpoint,
        lambda name: "model.dtype" if name == "dtype" else f"{place}.{name}",
    )


def check_kept(
    asked: Mapping[str, Any], trained: Mapping[str, Any], checkpoint: Path, key: Callable[[str], str]
) -> None:
    """Refuses values that are not those of the checkpoint.

    Args:
        asked: By name, as JSON values.
        trained: Likewise, of the checkpoint.
        checkpoint: Named in the error.
        key: A name's place in the configuration.

    Raises:
        ConfigError: naming every value that differs, both of it, and the remedy.
    """
    others = [name for name in asked if asked[name] != trained[name]]
    if not others:
        return
    differences = ", ".join(f"{key(name)} is {json.dumps(asked[name])}" for name in others)
    values = " ".join(f"{key(name)}={_as_word(trained[name])}" for name in others)
    raise ConfigError(
        f"{differences}, but {checkpoint} was trained with {values}: a resumed run keeps its model; give these "
        "values, or begin a new run"
    )


def _as_word(value: object) -> str:
    """As an override is written on the command line; JSON is YAML."""
    return json.dumps(value, separators=(",", ":"))
