"""JSON objects beside a model's tensors, such as ``config.json``. Loads neither JAX nor safetensors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.types.errors import CheckpointError


def write_json(content: Mapping[str, Any], path: Path) -> None:
    """A JSON object, indented and with its keys in order."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: the file is missing, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not an object")
    return content
