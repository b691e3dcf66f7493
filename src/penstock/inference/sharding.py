"""How one engine's model is split over several devices of this machine: one mesh axis, named `model`.

Each device holds some of the attention heads with their part of the cache, some columns of the gated MLP, and (where
their number divides) some rows of the vocabulary; norms and all that a request says are on every device. What is split
by columns and then by rows needs one sum over the devices after attention and one after the MLP (Megatron-LM: Shoeybi
et al. 2019, https://arxiv.org/abs/1909.08053); XLA puts them in from the placement alone. Scores are gathered, so every
device draws the same tokens. Sums over devices are rounded in another order than on one; nothing else differs.

Not covered: several machines, several meshes, splitting a head, key heads kept on more than one device.
"""

import dataclasses
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from penstock.inference.decoding import ServedWeights
from penstock.model.language import Decoder, ModelConfig
from penstock.types import ConfigError

MODEL_AXIS = "model"

_COLUMNS = ("query", "key", "value", "query_bias", "key_bias", "value_bias", "gate", "up")
_ROWS = ("output", "down")
_VOCABULARY = ("embedding", "head")

_Tree = TypeVar("_Tree")


@dataclasses.dataclass(frozen=True)
class ModelSplit:
    """Where the parts of a model lie.

    Attributes:
        mesh: The devices, along the axis `model`.
        vocabulary: Whether embedding and output matrix are split too.
    """

    mesh: Mesh
    vocabulary: bool

    @classmethod
    def over(cls, model: ModelConfig, devices: int) -> "ModelSplit":
        """Over that many local devices, the first ones.

        Args:
            model: Its heads, key heads and MLP columns must be multiples of `devices`.
            devices: How many, at least one.

        Raises:
            ConfigError: there are fewer, or the model cannot be split so.
        """
        local = jax.local_devices()
        if devices > len(local):
            raise ConfigError(
                f"inference.model_parallel is {devices}, but this process has {len(local)} device(s) "
                f"({local[0].platform}): lower it, or give the process more devices"
            )
        _check_divides(model, devices)
        mesh = Mesh(np.array(local[:devices]), (MODEL_AXIS,), axis_types=(AxisType.Auto,))
        return cls(mesh, model.vocab_size % devices == 0)

    @property
    def whole(self) -> NamedSharding:
        """On every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def cache(self) -> NamedSharding:
        """Of each array of a cache: (slot, kv head, position, head dim), split by heads."""
        return NamedSharding(self.mesh, PartitionSpec(None, MODEL_AXIS))

    def serve(self, decoder: Decoder) -> ServedWeights:
        """Puts each parameter, part by part, onto its devices; the decoder itself stays where it is."""
        weights = ServedWeights.of(self._place(decoder))
        by_token = NamedSharding(self.mesh, PartitionSpec(None, MODEL_AXIS if self.vocabulary else None))
        return dataclasses.replace(self._place(weights), scores_via=(by_token, self.whole))

    def _place(self, tree: _Tree) -> _Tree:
        shardings = jax.tree_util.tree_map_with_path(
            lambda path, array: NamedSharding(self.mesh, self.specification(path[-1].name, array.ndim)), tree
        )
        return jax.device_put(tree, shardings)

    def specification(self, name: str, ndim: int) -> PartitionSpec:
        """Which axis of a parameter is split, by its field's name in `Decoder` or `Layer`; stacked or not."""
        if name in _COLUMNS:
            return PartitionSpec(*[None] * (ndim - 1), MODEL_AXIS)
        if name in _ROWS:
            return PartitionSpec(*[None] * (ndim - 2), MODEL_AXIS)
        if name in _VOCABULARY and self.vocabulary:
            return PartitionSpec(MODEL_AXIS)
        return PartitionSpec()


def _check_divides(model: ModelConfig, devices: int) -> None:
    counts = {
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "intermediate_size": model.intermediate_size,
    }
    uneven = [f"{name} ({count})" for name, count in counts.items() if count % devices]
    if uneven:
        fits = [n for n in range(1, model.num_key_value_heads + 1) if not any(c % n for c in counts.values())]
        raise ConfigError(
            f"inference.model_parallel: the model cannot be split over {devices} devices, of which {', '.join(uneven)} "
            f"is no multiple: use one of {', '.join(map(str, fits))}"
        )
