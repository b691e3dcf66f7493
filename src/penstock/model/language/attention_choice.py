"""Which of the ways to compute attention is taken where; loads no JAX, so that plans and estimates ask it, too.

A choice depends on what a program is compiled for, never on what happens to run: the caller says the platform.
"""

from typing import Literal

from penstock.model.language.config import ModelConfig
from penstock.types.errors import ConfigError

AttentionChoice = Literal["auto", "dense", "blocks", "pallas", "cudnn"]
"""As configured; ``auto`` leaves it to the rule of `attention_kernel`."""

AttentionKernel = Literal["dense", "blocks", "triton", "splash", "cudnn"]
"""What computes: ``pallas`` is Triton's kernel on NVIDIA GPUs and splash attention on TPUs."""

Platform = Literal["cpu", "gpu", "tpu"]

Remat = Literal["none", "products", "layer", "offload"]
"""What is kept of a layer for the backward pass, which computes the rest again: all, matrix products, its input (and
what attention gave: see `attends_again`), or its input in the host's memory."""

LONGEST_DENSE: dict[Platform, int] = {"cpu": 128, "gpu": 512, "tpu": 512}
"""Rows up to this many tokens are dense under ``auto``: measured on CPUs, where blocks are twice as fast at 256."""

LONGEST_HEAD = 256
"""Numbers of a head that kernels for NVIDIA GPUs take at most."""


def platform_named(name: str) -> Platform:
    """JAX's name of a platform as one of ours; what is neither a CPU nor a TPU counts as a GPU."""
    return "cpu" if name == "cpu" else "tpu" if name == "tpu" else "gpu"


def attention_kernel(
    choice: AttentionChoice, platform: Platform, length: int, dtype: str, head_dim: int
) -> AttentionKernel:
    """What computes attention over rows of a length.

    ``auto`` is ``dense`` for short rows; for long ones ``blocks`` on CPUs, elsewhere of float32 models, which kernels
    multiply with fewer bits, and of heads that are longer than a GPU's kernel takes; else ``pallas``.

    Args:
        choice: What ``learner.attention`` says.
        platform: What the program is compiled for.
        length: Tokens of a row.
        dtype: The model's, ``float32`` or ``bfloat16``.
        head_dim: Numbers of each of the model's heads.
    """
    if choice == "auto":
        if length <= LONGEST_DENSE[platform]:
            return "dense"
        too_long = platform == "gpu" and head_dim > LONGEST_HEAD
        choice = "blocks" if platform == "cpu" or dtype == "float32" or too_long else "pallas"
    if choice == "pallas":
        return "splash" if platform == "tpu" else "triton"
    return choice


def attends_again(remat: Remat, kernel: AttentionKernel) -> bool:
    """Whether the backward pass computes attention again, since what it gave is not kept with a layer's input.

    Dense attention of short rows is cheap, and what splash attention gives takes twice its room on a TPU, whose memory
    holds heads of 64 numbers as if they had 128.
    """
    return remat == "offload" or (remat == "layer" and kernel in ("dense", "splash"))


def check_attention(
    choice: AttentionChoice, platform: Platform, model: ModelConfig, capability: float | None = None
) -> None:
    """Refuses a choice that cannot act.

    Args:
        choice: What ``learner.attention`` says.
        platform: What programs are compiled for.
        model: Its dtype and shape.
        capability: The GPU's compute capability (9.0 of an H100), where it is known.

    Raises:
        ConfigError: naming the reason and what to take instead.
    """
    reason = None
    if choice == "pallas" and platform == "cpu":
        reason = "it is for GPUs and TPUs, and this runs on a CPU; leave it at auto"
    elif choice == "cudnn" and platform != "gpu":
        reason = f"cuDNN is NVIDIA's, and this runs on a {platform.upper()}; leave it at auto"
    elif choice in ("pallas", "cudnn") and model.dtype == "float32":
        reason = "its kernel multiplies float32 with fewer bits; set model.dtype: bfloat16, or leave it at auto"
    elif choice == "pallas" and platform == "gpu" and model.head_dim > LONGEST_HEAD:
        reason = f"its kernel takes heads of up to {LONGEST_HEAD} numbers, and these have {model.head_dim}; take auto"
    elif model.shortest_window is not None and choice == "cudnn":
        reason = f"its kernel has no window, and layers of this model have one ({model.shortest_window}); take auto"
    elif choice == "cudnn":
        reason = _refusal_of_cudnn(model, capability)
    if reason is not None:
        raise ConfigError(f"learner.attention is {choice}: {reason}")


def _refusal_of_cudnn(model: ModelConfig, capability: float | None) -> str | None:
    if model.head_dim > LONGEST_HEAD or model.head_dim % 8:
        return f"heads of {model.head_dim} are not a multiple of 8 up to {LONGEST_HEAD}; leave it at auto"
    if capability is not None and capability < 9.0:
        return f"packed rows need compute capability 9.0, and this GPU has {capability}; take pallas"
    return None
