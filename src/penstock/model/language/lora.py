"""Low-rank adapters beside a frozen model: their shape, and both as PEFT's `adapter_config.json`.

A matrix W [in, out] that is adapted computes x W + s · (x A) B, with A [in, rank] and B [rank, out] (Hu et al. 2021,
https://arxiv.org/abs/2106.09685); s is alpha / rank, or alpha / √rank where it is rank-stabilised (Kalajdzievski 2023,
https://arxiv.org/abs/2312.03732). PEFT's names are those of Hugging Face's modules (`q_proj`, …). Whatever an
`adapter_config.json` says that would change the mathematics otherwise is refused by name, never ignored.

Not covered: adapters of embeddings, head, norms and biases; other ranks for some layers; dropout; DoRA.
"""

import json
import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from penstock.model.json_files import read_json
from penstock.types.errors import CheckpointError, ConfigError

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

MATRICES: dict[Target, str] = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "output",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
"""A layer's matrices by PEFT's names, in the order in which they are computed."""
ALL_LINEAR = "all-linear"
_SHAPE = ("rank", "alpha", "targets", "use_rslora")
"""Keys by which two adapters compute something else."""
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


class LoraConfig(BaseModel):
    """A low-rank adapter, which trains in the place of the model: the matrices x W + s · (x A) B.

    Attributes:
        rank: Columns of A and rows of B.
        alpha: s is alpha / rank.
        targets: Which matrices: of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, or ``all-linear``.
        dtype: Of A and B; None: the model's. What trains in bfloat16 has a float32 master, as a whole model has.
        use_rslora: s is alpha / √rank instead.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int = Field(default=16, gt=0)
    alpha: float = Field(default=32.0, gt=0, allow_inf_nan=False)
    targets: tuple[Target, ...] = tuple(MATRICES)
    dtype: Literal["float32", "bfloat16"] | None = None
    use_rslora: bool = False

    @field_validator("targets", mode="before")
    @classmethod
    def _all(cls, value: Any) -> Any:
        if isinstance(value, str) and value != ALL_LINEAR:
            raise ValueError(f"is {value!r}: give a list of some of {', '.join(MATRICES)}, or {ALL_LINEAR} for all")
        return tuple(MATRICES) if value == ALL_LINEAR else value

    @field_validator("targets")
    @classmethod
    def _in_order(cls, value: tuple[Target, ...]) -> tuple[Target, ...]:
        if not value:
            raise ValueError(f"names no matrix: give some of {', '.join(MATRICES)}, or {ALL_LINEAR}")
        return tuple(target for target in MATRICES if target in value)

    @property
    def scale(self) -> float:
        """S, what (x A) B is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)

    @property
    def matrices(self) -> tuple[str, ...]:
        """The targets by their names in a `Layer`."""
        return tuple(MATRICES[target] for target in self.targets)

    def in_dtype(self, dtype: Literal["float32", "bfloat16"]) -> "LoraConfig":
        """The same in that dtype, where it has none of its own."""
        return self.model_copy(update={"dtype": self.dtype or dtype})

    def checked(self, asked: "LoraConfig | None", directory: str) -> "LoraConfig":
        """This shape, of an adapter that was found, in the dtype that is asked for.

        Args:
            asked: What a recipe wants; None: whatever there is.
            directory: Path of the adapter, for the error.

        Raises:
            ConfigError: naming the first key that differs, with both values.
        """
        if asked is None:
            return self
        if name := self.differs_from(asked):
            raise ConfigError(
                f"model.lora.{name} is {getattr(asked, name)}, and the adapter in {directory} has "
                f"{getattr(self, name)}: leave model.lora out to go on training that adapter, say all of its shape "
                f"where only the dtype is to be another ({self._as_words()}), or name its base to begin another"
            )
        return asked

    def differs_from(self, other: "LoraConfig") -> str | None:
        """The first key by which the two compute something else; None: they have one shape."""
        return next((name for name in _SHAPE if getattr(self, name) != getattr(other, name)), None)

    def _as_words(self) -> str:
        """Its shape as words of the command line."""
        shape = self.model_dump(mode="json", include={*_SHAPE})
        return " ".join(f"model.lora.{name}={json.dumps(shape[name], separators=(',', ':'))}" for name in _SHAPE)

    def check_fits(self, sizes: Mapping[str, tuple[int, ...]], source: str) -> None:
        """Refuses a rank that a matrix does not have.

        Args:
            sizes: (layers, in, out) of the matrices, by their names in a `Layer`.
            source: Who asks for it, for the error.

        Raises:
            ConfigError: naming the first matrix that is smaller.
        """
        for target in self.targets:
            _, inputs, outputs = sizes[MATRICES[target]]
            if self.rank > min(inputs, outputs):
                raise ConfigError(
                    f"{source}.rank is {self.rank}, and {target} is {inputs} × {outputs}: its rank is at most "
                    f"{min(inputs, outputs)}; lower the rank, or leave {target} out of targets"
                )


def is_adapter(directory: str | Path) -> bool:
    """Whether a directory holds an adapter in place of a model."""
    return (Path(directory) / CONFIG_FILE).is_file()


def read_adapter_config(directory: str | Path) -> tuple[LoraConfig, str]:
    """The shape of a directory's adapter, and the directory of its base as it is named there.

    Raises:
        CheckpointError: the file cannot be read.
        ConfigError: it asks for something that is not supported.
    """
    path = Path(directory) / CONFIG_FILE
    content = read_json(path)
    for name, (neutral, why) in _NEUTRAL.items():
        if content.get(name) and content[name] not in neutral:
            raise ConfigError(f"{path}: {name} is {reprlib.repr(content[name])}: {why}")
    if content.get("peft_type") != "LORA":
        raise ConfigError(f"{path}: peft_type is {reprlib.repr(content.get('peft_type'))}: only LORA is supported")
    fields = {
        "rank": content.get("r"),
        "alpha": content.get("lora_alpha"),
        "targets": _targets(path, content.get("target_modules")),
        "use_rslora": bool(content.get("use_rslora")),
    }
    try:
        config = LoraConfig.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = _OUTER.get(str(first["loc"][0]), first["loc"][0])
        remedy = f": {_OTHER_MATRIX}" if name == "target_modules" and first["type"] == "literal_error" else ""
        raise ConfigError(f"{path}: {name} has {reprlib.repr(first['input'])}: {first['msg']}{remedy}") from error
    base = content.get("base_model_name_or_path")
    return config, base if isinstance(base, str) else ""


_OUTER = {"rank": "r", "alpha": "lora_alpha", "targets": "target_modules"}
_LAYERWISE = "all layers must have the same adapter: train it so, or merge it by peft's merge_and_unload"
_OTHER = "that is another adapter than x W + s (x A) B: merge it by peft's merge_and_unload, and give the merged model"
_OTHER_MATRIX = "merge it by peft's merge_and_unload, and give the merged model"
_CHANGED_BASE = "that changes the base, too: save it with peft's path_initial_model_for_weight_conversion"
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "layers_to_transform", "layer_replication"), ((), _LAYERWISE)),
    **dict.fromkeys(("use_dora", "use_qalora", "lora_bias", "modules_to_save", "fan_in_fan_out"), ((), _OTHER)),
    **dict.fromkeys(("target_parameters", "trainable_token_indices", "alora_invocation_tokens"), ((), _OTHER)),
    **dict.fromkeys(("arrow_config", "kasa_config", "use_bdlora", "velora_config", "monteclora_config"), ((), _OTHER)),
    "bias": (("none",), _OTHER),
    "init_lora_weights": ((True, "gaussian", "orthogonal", "eva"), _CHANGED_BASE),
}
"""Of an `adapter_config.json` what must be empty or one of these, and why."""


def _targets(path: Path, value: Any) -> Any:
    """The last parts of module names, as they are or as PEFT shortens them."""
    if value == ALL_LINEAR:
        return value
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ConfigError(
            f"{path}: target_modules is {reprlib.repr(value)}: give a list of module names, such as q_proj and v_proj"
        )
    return tuple(dict.fromkeys(each.rpartition(".")[2] for each in value))


def write_adapter_config(config: LoraConfig, base: str) -> dict[str, Any]:
    """The content of an `adapter_config.json` that PEFT reads as this adapter.

    Args:
        config: The shape that is written.
        base: Path of the base's directory.
    """
    alpha = int(config.alpha) if config.alpha == int(config.alpha) else config.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": alpha,
        "target_modules": list(config.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": config.use_rslora,
        "inference_mode": True,
    }


def base_directory(directory: str | Path, named: str, other: str | None = None) -> Path:
    """Where an adapter's base lies.

    Args:
        directory: Path of the adapter.
        named: What its `adapter_config.json` names; a relative path begins at the adapter's directory, or else at the
            working directory.
        other: A directory that is taken instead.

    Raises:
        CheckpointError: there is no such directory; the message has the remedy.
    """
    places = [Path(other)] if other is not None else [Path(directory) / named, Path(named)]
    for place in places:
        if (named or other) and (place / "config.json").is_file():
            return Path(os.path.abspath(place))
    raise CheckpointError(
        f"{directory} is an adapter of {other or named or 'a base that it does not name'}, where no config.json lies: "
        "put the base there, or name its directory by model.base"
    )
