"""The supervised steps before reinforcement learning: an optimiser of their own, of which nothing stays."""

from typing import final

from penstock.learner.config import LearnerConfig, OptimizerConfig
from penstock.learner.optimizer import OptimizerState, applier, initial_state, learning_rate
from penstock.learner.step import ForwardOptions, supervised_accumulator
from penstock.model.language import Decoder
from penstock.types import ConfigError


@final
class WarmStart:
    """The supervised phase's own optimiser; empty before and after.

    Args:
        config: The learner's; what counts is `warm_start`, without which nothing can be begun.
        options: Of the forward pass.

    Attributes:
        state: The optimiser's; None before and after.
        accumulate: Compiled, as `supervised_accumulator` gives it.
        apply: Compiled optimiser step.
    """

    def __init__(self, config: LearnerConfig, options: ForwardOptions) -> None:
        self._config = config
        self.state: OptimizerState | None = None
        self._steps_done = 0
        if config.warm_start is not None:
            self._optimizer: OptimizerConfig = config.warm_start.optimizer(config.optimizer)
            self.accumulate = supervised_accumulator(options, config.optimizer.frozen)
            self.apply = applier(self._optimizer)

    def begin(self, decoder: Decoder) -> OptimizerState:
        """The state, a new one at the first step.

        Raises:
            ConfigError: no warm start is configured.
        """
        if self._config.warm_start is None:
            raise ConfigError("supervised_update needs learner.warm_start: steps, batch_size, learning_rate")
        return initial_state(self._optimizer, decoder) if self.state is None else self.state

    def learning_rate(self) -> float:
        """Of the next step."""
        assert self._config.warm_start is not None
        self._steps_done += 1
        return learning_rate(self._optimizer, self._steps_done - 1, self._config.warm_start.steps)

    def discard(self) -> None:
        """The phase is over."""
        self.state = None
