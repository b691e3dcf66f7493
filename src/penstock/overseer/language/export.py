"""`penstock export`: an adapter merged into its base, as a model's directory that needs neither Penstock nor peft."""

import os
import shutil
import uuid
from pathlib import Path

import jax.numpy as jnp
from pydantic import BaseModel

from penstock.inference.serving import model_directory
from penstock.model.language import Decoder, load_decoder, named_arrays, save_decoder
from penstock.model.language.config import LoadingConfig
from penstock.model.language.hugging_face import with_merged
from penstock.model.language.lora import is_adapter
from penstock.rundir.storage import check_place
from penstock.text import Tokenizer
from penstock.types import ConfigError


class ExportConfig(BaseModel, frozen=True, extra="forbid"):
    """What is written.

    Attributes:
        model: In what dtype, and where an adapter's base lies.
    """

    model: LoadingConfig = LoadingConfig()


def export(checkpoint: Path | str, out: Path, config: ExportConfig) -> Path:
    """Writes a Hugging Face directory whose model computes what an adapter and its base do.

    Both are read and merged in float32; each matrix is rounded once, to the dtype that is asked for. The directory is
    written aside and renamed.

    Args:
        checkpoint: An adapter's directory, or a run's ``checkpoints/step-<n>`` that holds one.
        out: Path of what is written; must not be there.
        config: Dtype and base.

    Raises:
        CheckpointError: adapter or base cannot be read.
        ConfigError: it is no adapter, or `out` is there, or cannot be.
    """
    directory = model_directory(str(checkpoint))
    if not is_adapter(directory):
        raise ConfigError(f"{checkpoint} is no adapter but a whole model: copy {directory} as it is")
    if out.exists():
        raise ConfigError(f"--out {out} exists: name a directory that is not there")
    check_place(out, "--out")
    policy = config.model.policy(directory)
    tokenizer = Tokenizer.load(policy.tokenizer_path)
    merged = with_merged(load_decoder(directory, "float32", policy.base))
    shape = merged.config.model_copy(update={"dtype": policy.dtype})
    arrays = {name: array.astype(jnp.dtype(policy.dtype)) for name, array in named_arrays(merged).items()}
    aside = out.with_name(f".tmp-{out.name}-{uuid.uuid4().hex[:8]}")
    try:
        save_decoder(Decoder.from_arrays(shape, arrays), aside, tokenizer)
        for file in aside.iterdir():  # safetensors closes its own to others
            file.chmod((aside / "config.json").stat().st_mode)
        os.rename(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return out
