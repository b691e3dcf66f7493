"""A control policy as a folder: ``config.json`` (network, spaces, schema version) and ``model.safetensors``.

No pickle is written or read. Every array must be accounted for. Where the network is somebody's own, ``config.json``
says what made it, and nothing is imported by that word: whoever reads the folder names the code, and is told where it
has changed. Not covered: reading weights of another framework, and changing a policy's spaces.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from safetensors.numpy import save_file

from penstock.model.control.config import ControlModelConfig
from penstock.model.control.policy import ControlPolicy, OwnPolicy, make_control_policy, named_arrays, with_named_arrays
from penstock.model.json_files import read_json
from penstock.model.tensor_files import WEIGHTS_FILE, open_tensors
from penstock.types import CheckpointError, ConfigError, SchemaVersionError, Spaces, WeightsError
from penstock.types.importing import as_path

CONTROL_SCHEMA_VERSION = 1
"""Version of the folder's form."""

KIND = "penstock.control_policy"
"""What ``config.json`` says under ``kind``."""


def save_control_policy(folder: str | Path, policy: ControlPolicy, config: ControlModelConfig, spaces: Spaces) -> None:
    """Writes the policy.

    The folder is made where it is missing. It is not written atomically: write it aside and rename it.

    Args:
        folder: Path of the folder to write.
        policy: The policy whose arrays are saved.
        config: The one that it was made with.
        spaces: The observation and action spaces that it was made with.

    Raises:
        ConfigError: `config` or `spaces` are not the policy's own: the folder could not be read again.
    """
    if config != policy.config or spaces != policy.spaces:
        raise ConfigError("config and spaces must be those that the policy was made with: policy.config, policy.spaces")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.asarray(array) for name, array in named_arrays(policy).items()}
    save_file(tensors, folder / WEIGHTS_FILE)
    content = {
        "kind": KIND,
        "schema_version": CONTROL_SCHEMA_VERSION,
        "model": config.model_dump(mode="json"),
        "spaces": spaces.to_values(),
    }
    if isinstance(policy, OwnPolicy):
        content["code"] = policy.code
    text = json.dumps(content, indent=2, sort_keys=True, allow_nan=False)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def control_model_directory(checkpoint: Path | str) -> Path:
    """Where a control policy lies: the directory itself, or ``model/`` inside a training checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    root = Path(checkpoint)
    found = next((path for path in (root, root / "model") if (path / "config.json").is_file()), None)
    if found is None:
        raise CheckpointError(f"{checkpoint} holds no config.json, nor does its model/: give a checkpoint directory")
    return found


def load_control_policy(
    folder: str | Path, module: str | None = None, kwargs: Mapping[str, Any] | None = None
) -> ControlPolicy:
    """Reads a folder that `save_control_policy` wrote, or a run's checkpoint; the policy carries its config and spaces.

    Args:
        folder: Its path, or that of a training checkpoint, whose ``model/`` it is.
        module: What makes the network where it is one's own, as `ControlModelConfig.module`; unused where it is not.
        kwargs: Where files lie now that it reads: its arguments called ``path`` or ``…_path``.

    Raises:
        CheckpointError: a file is missing or broken, is no control policy, or its arrays do not fit; or its network is
            one's own, and `module` is None.
        SchemaVersionError: a newer Penstock wrote it.
        ConfigError: `module` is no text.
    """
    folder = control_model_directory(folder)
    config, spaces = read_control_form(folder)
    if config.module is not None:
        if module is None:
            raise CheckpointError(
                f"{folder} has a network of somebody's own, which {config.module!r} made, and no code is imported "
                "because a checkpoint names it: name it yourself, as model.module of a recipe (--recipe), or by "
                "load_control_policy(…, module=…)"
            )
        if not isinstance(module, str):
            raise ConfigError(f"module is {module!r}: it must be text{as_path(module)}")
        config = config.moved(module, kwargs or {})
    try:
        policy = make_control_policy(config, spaces, seed=0)
        _tell_of_other_code(folder, policy)
        with open_tensors(folder) as files:
            arrays = {name: files.read(name) for name in files.shapes}
        return with_named_arrays(policy, arrays)
    except (ConfigError, WeightsError) as error:
        whose = "its config.json" if config.module is None else f"what {config.module!r} makes"
        raise CheckpointError(f"{folder} does not fit {whose}: {error}") from error


def _tell_of_other_code(folder: Path, policy: ControlPolicy) -> None:
    """A note where the arrays may fit and yet mean something else; one of before this was recorded says nothing."""
    known = read_json(folder / "config.json").get("code")
    if isinstance(policy, OwnPolicy) and known is not None and known != policy.code:
        logging.getLogger(__name__).warning(
            "%s: what %r makes has changed since this was written (its file, or a number or function in it): the "
            "arrays fit, and are the policy that was trained only if it still computes the same",
            folder,
            policy.config.module,
        )


def read_control_form(folder: str | Path) -> tuple[ControlModelConfig, Spaces]:
    """The network and the spaces of a folder that `save_control_policy` wrote; no array is read.

    Raises:
        CheckpointError: ``config.json`` is missing or broken, or of no control policy.
        SchemaVersionError: a newer Penstock wrote it.
    """
    path = Path(folder) / "config.json"
    content = read_json(path)
    if content.get("kind") != KIND:
        raise CheckpointError(f"{path}: kind is {content.get('kind')!r}, not {KIND!r}: this is no control policy")
    version = content.get("schema_version")
    if not isinstance(version, int) or version < 1:
        raise CheckpointError(f"{path}: schema_version is {version!r}: it must be a positive integer")
    if version > CONTROL_SCHEMA_VERSION:
        raise SchemaVersionError(
            f"{path} has schema version {version}, this Penstock reads up to {CONTROL_SCHEMA_VERSION}: read it with "
            "the Penstock that wrote it, or a newer one"
        )
    try:
        return ControlModelConfig.model_validate(content["model"]), Spaces.from_values(content["spaces"])
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(("model", *map(str, first["loc"])))
        raise CheckpointError(f"{path}: {where}: {first['msg']}") from error
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
