"""The reference that a language policy's KL is measured against: which weights it has, when they change, and its state.

The weights that reinforcement learning begins with, an average of the policy's that begins there, or those of a
directory. It is held by the learner alone, as another decoder of the policy's shape: the policy's compiled functions
score with it. Beside an adapter it is another adapter over the same base, whose arrays it shares: that of the
beginning, which is the adapter off where it was drawn, since its B is 0. What is held is replaced, never changed, so
that another thread may score with what it was given.

A checkpoint keeps the weights, unless they are a directory's, so that a resumed run goes on bit for bit. The average of
a bfloat16 policy is kept in float32: its steps are smaller than a bfloat16's last bit.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np

from penstock.learner.loss_terms import KlConfig
from penstock.learner.optimizer import join_frozen, split_frozen
from penstock.model.language import Decoder, ModelConfig, load_decoder, named_arrays, with_named_arrays
from penstock.model.language.config import read_shape
from penstock.types import CheckpointError, ConfigError, WeightsError

_PREFIX, _AVERAGE = "reference.", "reference_average."
_KEY = "learner.kl.reference"
_THE_FIRST = "the path of a Hugging Face directory, such as the model folder of the run's first checkpoint"


class ReferenceVersion(NamedTuple):
    """One version of the reference.

    Attributes:
        version: How often it has changed.
        decoder: Its parameters; they stay valid.
    """

    version: int
    decoder: Decoder


@final
class ReferenceWeights:
    """Nothing, where no reference is configured.

    Args:
        config: What `learner.kl` says; without a reference nothing is held.
        policy: The learner's first; only its shape is kept.

    Raises:
        ConfigError: the directory's model has another shape than the policy.
        CheckpointError: the directory cannot be read.
    """

    def __init__(self, config: KlConfig, policy: Decoder) -> None:
        self._config = config
        self._held: ReferenceVersion | None = None
        self._average: Decoder | None = None
        if config.directory is not None:
            self._held = ReferenceVersion(0, _loaded(config.directory, policy))

    def current(self, policy: Decoder) -> ReferenceVersion:
        """What scores now; before the first update of a run that is its own reference, `policy`.

        Raises:
            ConfigError: there is no reference.
        """
        if self._config.reference is None:
            raise ConfigError(f"{_KEY} is null, so that there is nothing to score with: name one")
        return self._held or ReferenceVersion(0, policy)

    def keep(self, policy: Decoder) -> None:
        """An update begins with this policy: at the first one it becomes the reference."""
        if self._config.reference is not None and self._held is None:
            self._held = ReferenceVersion(0, policy)

    def follow(self, step: int, policy: Decoder) -> None:
        """The policy has reached version `step`: the reference follows, where it does."""
        config, held = self._config, self._held
        if held is None:
            return
        if config.reference == "ema":
            average = _float32(_trained(held.decoder)) if self._average is None else self._average
            self._average = moved = _moved(config.ema_decay, average, _trained(policy))
            self._held = ReferenceVersion(step, _beside_base(policy, moved))
        elif config.sync_every is not None and step % config.sync_every == 0:
            self._held = ReferenceVersion(step // config.sync_every, policy)

    def state_arrays(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps of it, by name: nothing of a directory's weights, or before an update."""
        held = self._held
        if held is None or (self._config.directory is not None and held.version == 0):
            return {}
        prefix, kept = (_PREFIX, _trained(held.decoder)) if self._average is None else (_AVERAGE, self._average)
        return {prefix + name: np.asarray(array) for name, array in named_arrays(kept).items()}

    def restore(self, arrays: Mapping[str, np.ndarray], step: int, policy: Decoder) -> dict[str, np.ndarray]:
        """Takes `state_arrays` back; returns what is not its own.

        Args:
            arrays: All that a checkpoint holds of a learner, by name.
            step: The version that it is of.
            policy: Of that version.

        Raises:
            CheckpointError: there is none although updates lie behind, it is an average and none is asked for, or it
                has another shape.
        """
        config = self._config
        kept, average = (
            {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
            for prefix in (_PREFIX, _AVERAGE)
        )
        if average and config.reference == "initial":
            raise CheckpointError(
                f"{_KEY} is initial, and the reference in the checkpoint of version {step} is a moving average of the "
                f"policy (it was ema): leave it at ema, or set it to {_THE_FIRST}"
            )
        if average and config.reference == "ema":
            kept = average
        if kept and config.reference is not None:
            synced = 0 if config.sync_every is None else step // config.sync_every
            version = step if config.reference == "ema" else synced
            if config.directory is None or version:
                self._held = ReferenceVersion(version, self._restored(kept, policy))
        elif step and config.directory is None and config.reference is not None:
            raise CheckpointError(
                f"the checkpoint of version {step} has no reference: it was taken without {_KEY}; set {_KEY} to "
                f"{_THE_FIRST}"
            )
        return {name: array for name, array in arrays.items() if not name.startswith((_PREFIX, _AVERAGE))}

    def _restored(self, kept: Mapping[str, np.ndarray], policy: Decoder) -> Decoder:
        try:
            trained = _trained(policy)
            exact = {name: array.astype(np.float32) for name, array in kept.items()}
            average = with_named_arrays(jax.eval_shape(_float32, trained), exact)
            if self._config.reference == "ema":
                self._average = average
            return _beside_base(policy, average)
        except WeightsError as error:
            raise CheckpointError(f"the checkpoint's reference does not fit: {error}") from error


def check_reference(directory: str, found: ModelConfig, policy: ModelConfig) -> None:
    """Refuses a reference that is not of the policy's shape and vocabulary.

    Args:
        directory: Path of the reference, for the error.
        found: What its config.json says.
        policy: What the policy has.

    Raises:
        ConfigError: naming what differs.
    """
    irrelevant = {"dtype", "other_keys", "max_position_embeddings", "base", "lora"}
    if found.lora is not None:
        if policy.lora is None:
            raise ConfigError(
                f"{_KEY} is {directory}: it is an adapter, and the policy has none; merge it by penstock export"
            )
        if name := found.lora.differs_from(policy.lora):
            raise ConfigError(
                f"{_KEY} is {directory}: its adapter's {name} is {getattr(found.lora, name)}, and model.lora.{name} "
                f"{getattr(policy.lora, name)}; give model.lora that shape, or merge that adapter by penstock export"
            )
    theirs, ours = (each.model_dump(mode="json", exclude=irrelevant) for each in (found, policy))
    differing = [f"{name} is {theirs[name]}, the policy's {ours[name]}" for name in ours if theirs[name] != ours[name]]
    if differing:
        raise ConfigError(
            f"{_KEY} is {directory}: its {'; '.join(differing)}; name a model of the policy's own shape and vocabulary"
        )


def _loaded(directory: str, policy: Decoder) -> Decoder:
    """A directory's weights in the policy's shape: beside the policy's own base, where they are an adapter of that.

    A whole model that a policy with an adapter is compared with is a base of its own, with an adapter that is zero.
    """
    found, ours = read_shape(directory, policy.config.dtype), policy.config
    check_reference(directory, found, ours)
    loaded = load_decoder(Path(directory), ours.dtype, lora=ours.lora)
    if loaded.config.base == ours.base and ours.lora is not None:
        return _beside_base(policy, _trained(loaded))
    return with_named_arrays(policy, named_arrays(loaded))


def _trained(decoder: Decoder) -> Decoder:
    """What trains; of an adapter's base nothing: policy and reference share it."""
    return split_frozen(decoder.config.still, decoder)[0]


def _beside_base(policy: Decoder, trained: Decoder) -> Decoder:
    """A decoder of what trains in the policy's dtypes, and the policy's own arrays otherwise."""
    own, rest = split_frozen(policy.config.still, policy)
    likes, arrays = named_arrays(own), named_arrays(trained)
    typed = {name: array.astype(likes[name].dtype) for name, array in arrays.items()}
    return join_frozen(with_named_arrays(own, typed), rest)


def _float32(decoder: Decoder) -> Decoder:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), decoder)


@partial(jax.jit, static_argnums=0)
def _moved(decay: float, average: Decoder, policy: Decoder) -> Decoder:
    return jax.tree.map(lambda old, new: decay * old + (1 - decay) * new.astype(jnp.float32), average, policy)
