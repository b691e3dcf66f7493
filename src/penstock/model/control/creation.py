"""Draws a control policy for a simulator's spaces."""

import numpy as np

from penstock.model.control.config import ControlModelConfig
from penstock.model.control.encoders import Encoder
from penstock.model.control.heads import ActionHead
from penstock.model.control.layers import Dense
from penstock.model.control.memory import Memory, RecurrentMemory
from penstock.model.control.policy import ControlPolicy
from penstock.model.control.window_memory import WindowMemory
from penstock.types import Spaces, fold, generator


def make_control_policy(config: ControlModelConfig, spaces: Spaces, seed: int) -> ControlPolicy:
    """A policy with first weights drawn from the run's seed.

    Args:
        config: Its network.
        spaces: What it sees and does.
        seed: The run's; the same seed gives the same weights.

    Raises:
        ConfigError: the network does not fit the spaces, or no device holds one of their arrays exactly; the message
            names the leaf and the remedy.
    """
    for leaf in (*spaces.observations, *spaces.actions):
        _ = leaf.device_dtype  # it raises here, before anything is learned
    rng = generator(fold(seed, "model"))
    encoder = Encoder.draw(rng, config, spaces.observations)
    memory = _memory(rng, config, encoder.features)
    width = encoder.features if memory is None else config.memory_size
    heads = tuple(ActionHead.draw(rng, config, leaf, width) for leaf in spaces.actions)
    own = Encoder.draw(rng, config, spaces.observations) if config.value_network == "separate" else None
    return ControlPolicy(encoder, memory, heads, Dense.draw(rng, width, 1, config.value_gain), own, config, spaces)


def _memory(rng: np.random.Generator, config: ControlModelConfig, inputs: int) -> Memory | None:
    if config.memory == "none":
        return None
    if config.memory == "transformer":
        return WindowMemory.draw(
            rng, inputs, config.memory_size, config.memory_layers, config.memory_heads, config.memory_window
        )
    return RecurrentMemory.draw(rng, config.memory, inputs, config.memory_size)
