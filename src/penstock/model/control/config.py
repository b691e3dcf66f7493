"""What a control policy is made of: of the parts that keys choose, or by somebody's own code. Loads no JAX.

The spaces are not in here: the simulators give them, and `make_control_policy` fits the network to them. Not covered:
action masks, mixed precision.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from penstock.types.idle_keys import refuse_idle

NetworkKind = Literal["mlp", "nature_cnn", "impala_cnn"]
MemoryKind = Literal["none", "gru", "lstm", "transformer"]
Activation = Literal["tanh", "relu", "silu"]
ImageLayout = Literal["auto", "channels_last", "channels_first"]
Width = Annotated[int, Field(gt=0, le=65536)]


class ControlModelConfig(BaseModel):
    """The network between observations and actions: an encoder per observation, memory, and heads.

    Observations that are no images go, side by side, through an MLP of `hidden_sizes`. An image is a box of
    three axes, or of two where it is of uint8, with both sides at least 16.

    Attributes:
        module: A network of one's own, ``package.module:name`` or ``path/to/file.py:name``: called with the spaces, a
            seed below 2³¹ and `kwargs`, it gives a `penstock.model.control.ControlNetwork`. Of the other keys only
            `normalize_observations` and `image_layout` then act.
        kwargs: Further arguments of `module`.
        network: What images go through: ``mlp`` averages them to `pooled_size` and lets the MLP have them;
            ``nature_cnn`` (Mnih et al. 2015) and ``impala_cnn`` (Espeholt et al. 2018) are convolutions.
        hidden_sizes: Widths of the MLP's layers.
        activation: Between them.
        pooled_size: Side of the averaged image, for ``mlp``.
        image_features: Width of a convolutional network's last layer.
        impala_channels: Channels of each section of ``impala_cnn``.
        image_layout: Where an image's channels are; ``auto``: the shorter of the first and last axis.
        grid_values: Integer boxes that are no images (a grid of object codes, say) become one-hot with so many values;
            larger ones count as the last. None: they are numbers, uint8 divided by 255.
        normalize_observations: Numbers (boxes of floats that are no images) less their mean, divided by their standard
            deviation, both over all steps that were trained on, and clipped to [−10, 10].
        one_hot_limit: A discrete observation with more choices is embedded, not one-hot.
        embedding_size: Width of such an embedding, and of text's.
        text_vocabulary: Code points from here on share one embedding.
        memory: What is remembered between steps.
        memory_size: Width of the recurrent state, or of the transformer.
        memory_layers: Of the transformer; recurrent memory has one.
        memory_heads: Attention heads of the transformer.
        memory_window: Steps that the transformer sees, the present one included.
        value_network: ``shared``: one encoder for actions and values; ``separate``: two (only without memory).
        policy_gain: Gain of the action head's first weights; small: the first policy is close to uniform.
        value_gain: Gain of the value head's; 0: values begin at zero.
        initial_log_std: Of Gaussian actions, before training.
        state_dependent_std: Whether the standard deviation depends on the observation.
        log_std_range: What the log standard deviation is clipped to.
        dtype: Of parameters and activations.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    module: str | None = None
    kwargs: dict[str, Any] = {}
    network: NetworkKind = "mlp"
    hidden_sizes: tuple[Width, ...] = Field(default=(64, 64), min_length=1)
    activation: Activation = "tanh"
    pooled_size: int = Field(default=16, ge=1, le=1024)
    image_features: int = Field(default=512, ge=1, le=65536)
    impala_channels: tuple[Width, ...] = Field(default=(16, 32, 32), min_length=1)
    image_layout: ImageLayout = "auto"
    grid_values: int | None = Field(default=None, ge=2, le=65536)
    normalize_observations: bool = False
    one_hot_limit: int = Field(default=64, ge=0)
    embedding_size: int = Field(default=32, ge=1, le=65536)
    text_vocabulary: int = Field(default=256, ge=2, le=1_114_112)
    memory: MemoryKind = "none"
    memory_size: int = Field(default=128, ge=1, le=65536)
    memory_layers: int = Field(default=1, ge=1, le=1000)
    memory_heads: int = Field(default=4, ge=1, le=65536)
    memory_window: int = Field(default=32, ge=1, le=65536)
    value_network: Literal["shared", "separate"] = "shared"
    policy_gain: float = Field(default=0.01, ge=0)
    value_gain: float = Field(default=1.0, ge=0)
    initial_log_std: float = 0.0
    state_dependent_std: bool = False
    log_std_range: tuple[float, float] = (-5.0, 2.0)
    dtype: Literal["float32"] = "float32"

    def __hash__(self) -> int:
        """Without `kwargs`, which may hold lists."""
        return hash(tuple(value for name, value in self if name != "kwargs"))

    def moved(self, module: str, kwargs: Mapping[str, Any]) -> "ControlModelConfig":
        """The same network, where code and files lie elsewhere now, which is nothing that was trained.

        Args:
            module: Where its code lies.
            kwargs: Of these only texts called ``path`` or ``…_path`` are taken, in the place of its own.
        """
        places = {
            name: kwargs[name]
            for name, value in self.kwargs.items()
            if (name == "path" or name.endswith("_path"))
            and isinstance(value, str)
            and isinstance(kwargs.get(name), str)
        }
        return self.model_copy(update={"module": module, "kwargs": {**self.kwargs, **places}})

    @model_validator(mode="after")
    def _one_network(self) -> "ControlModelConfig":
        if self.module is None:
            refuse_idle(self, ("kwargs",), "they are arguments of module, which is null")
            return self
        own = ("module", "kwargs", "normalize_observations", "image_layout", "dtype")
        why = f"module makes the network, {self.module!r}, which gets only kwargs"
        refuse_idle(self, [name for name in type(self).model_fields if name not in own], why)
        if not self.normalize_observations:
            refuse_idle(self, ("image_layout",), f"{why}, and observations are not normalised")
        return self

    @model_validator(mode="after")
    def _memory_fits(self) -> "ControlModelConfig":
        if self.memory == "transformer" and self.memory_size % self.memory_heads:
            raise ValueError(
                f"memory_size is {self.memory_size}, no multiple of memory_heads = {self.memory_heads}: "
                "choose a multiple"
            )
        if self.memory != "transformer" and self.memory_layers != 1:
            raise ValueError(
                f"memory_layers is {self.memory_layers}, but memory is {self.memory!r}, which has one: "
                "leave memory_layers out, or set memory: transformer"
            )
        if self.memory != "none" and self.value_network == "separate":
            raise ValueError(
                f"value_network is 'separate' and memory is {self.memory!r}: values would not see the memory; "
                "set value_network: shared, or memory: none"
            )
        return self

    @model_validator(mode="after")
    def _std_fits(self) -> "ControlModelConfig":
        low, high = self.log_std_range
        if not low < high:
            raise ValueError(f"log_std_range is [{low}, {high}]: its first number must be less than its second")
        if not low <= self.initial_log_std <= high:
            raise ValueError(
                f"initial_log_std is {self.initial_log_std}, outside log_std_range = [{low}, {high}], where it has no "
                "gradient: widen the range"
            )
        return self
