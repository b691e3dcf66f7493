"""A resumed run keeps the model of its checkpoint: other values for it are bad input, told before anything is done.

Not covered: whether the checkpoint is whole (`penstock.learner.newest_good_checkpoint`).
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.learner.checkpoints import read_state
from penstock.model.language.config import ModelConfig
from penstock.overseer.config import RunConfig
from penstock.overseer.estimate import model_shape
from penstock.text import same_tokenizer
from penstock.types import CheckpointError, ConfigError

VALUES = "give these values"


def check_language_resume(config: RunConfig, checkpoint: Path) -> None:
    """Compares the language model and tokenizer that are asked for with those of the checkpoint to go on from.

    What they were made of may have gone meanwhile: the checkpoint holds all that is needed. Whoever needs the source
    all the same says so.

    Raises:
        ConfigError: the model's shape or dtype differs (the message names every field with both values), or the
            tokenizer does; with the remedy.
        CheckpointError: the checkpoint holds no language model.
    """
    asked, folder = config.model, checkpoint / "model"
    if same_tokenizer(asked.tokenizer_path, folder) is False:
        raise ConfigError(
            f"the tokenizer in {asked.tokenizer_path} is another than that of {checkpoint}: a resumed run keeps its "
            "tokenizer; leave model.tokenizer and model.path as they were, or begin a new run"
        )
    try:
        shape = model_shape(asked)
    except ConfigError:
        return
    path = folder / "config.json"
    try:
        trained = ModelConfig.from_hugging_face(json.loads(path.read_text("utf-8")), asked.dtype)
    except (OSError, ValueError, ConfigError) as error:
        raise CheckpointError(f"{path} is not the config of a language model: {error}") from error
    theirs = trained.model_dump(mode="json") | {"dtype": read_state(checkpoint)["dtype"]}
    place, remedy = "model.init.", VALUES
    if asked.init is None:
        place, remedy = f"{asked.path}: ", "leave model.path as it was"
    check_kept(
        shape.model_dump(mode="json"),
        theirs,
        checkpoint,
        lambda name: "model.dtype" if name == "dtype" else f"{place}{name}",
        remedy,
    )


def check_kept(
    asked: Mapping[str, Any],
    trained: Mapping[str, Any],
    checkpoint: Path,
    key: Callable[[str], str],
    remedy: str = VALUES,
) -> None:
    """Refuses values that are not those of the checkpoint.

    Args:
        asked: By name, as JSON values.
        trained: Likewise, of the checkpoint.
        checkpoint: Named in the error.
        key: A name's place in the configuration.
        remedy: What to do, but for beginning a new run.

    Raises:
        ConfigError: naming every value that differs, both of it, and the remedy.
    """
    others = [name for name in asked if asked[name] != trained[name]]
    if not others:
        return
    differences = ", ".join(f"{key(name)} is {json.dumps(asked[name])}" for name in others)
    values = " ".join(f"{key(name)}={_as_word(trained[name])}" for name in others)
    raise ConfigError(
        f"{differences}, but {checkpoint} was trained with {values}: a resumed run keeps its model; {remedy}, or "
        "begin a new run"
    )


def _as_word(value: object) -> str:
    """As an override is written on the command line; JSON is YAML."""
    return json.dumps(value, separators=(",", ":"))
