"""The policy that a KL penalty holds on to: a folder's, or a version of the run's own that is kept.

A kept version travels in the checkpoint. Until it is there the learner's own policy stands in for it with coefficient
0, so that the update is compiled once.
"""

from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from penstock.learner.control_config import ReferenceKlConfig
from penstock.model.control import ControlPolicy, load_control_policy, named_arrays, with_named_arrays
from penstock.types import CheckpointError, ConfigError, WeightsError

_PREFIX = "reference."


class ReferencePolicy:
    """Nothing, where no penalty is configured.

    Args:
        config: The penalty's; None: none.
        policy: The learner's first.

    Raises:
        ConfigError: the folder's policy sees, does or remembers other things than the learner's.
        CheckpointError: the folder cannot be read.
    """

    def __init__(self, config: ReferenceKlConfig | None, policy: ControlPolicy) -> None:
        self._config = config
        self._policy = None if config is None else policy
        if config is not None and config.reference is not None:
            self._policy = load_control_policy(Path(config.reference))
            _check_fits(self._policy, policy, config.reference)

    @property
    def policy(self) -> ControlPolicy | None:
        """What the penalty is computed with."""
        return self._policy

    def coefficient(self, step: int) -> float:
        """Of the penalty in update `step`."""
        return 0.0 if self._config is None else self._config.coefficient_at(step)

    def keep(self, step: int, policy: ControlPolicy) -> None:
        """Version `step` has this policy."""
        if self._own and self._config is not None and step == self._config.reference_version:
            self._policy = policy

    def state_arrays(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps of it."""
        if not self._own or self._policy is None:
            return {}
        return {_PREFIX + name: np.asarray(array) for name, array in named_arrays(self._policy).items()}

    def restore(self, arrays: Mapping[str, np.ndarray], step: int, policy: ControlPolicy) -> dict[str, np.ndarray]:
        """Takes `state_arrays` back; returns what is not its own.

        Raises:
            CheckpointError: there is no reference, or one of another shape, and its version has passed.
        """
        kept = {name.removeprefix(_PREFIX): array for name, array in arrays.items() if name.startswith(_PREFIX)}
        if self._own and self._config is not None:
            if not kept and step > self._config.reference_version:
                raise CheckpointError(
                    f"the checkpoint of version {step} has no reference policy: it was taken without "
                    "learner.reference_kl; name a folder in learner.reference_kl.reference"
                )
            try:
                self._policy = with_named_arrays(policy, kept) if kept else policy
            except WeightsError as error:
                raise CheckpointError(f"the checkpoint's reference policy does not fit: {error}") from error
        return {name: array for name, array in arrays.items() if not name.startswith(_PREFIX)}

    @property
    def _own(self) -> bool:
        return self._config is not None and self._config.reference is None


def _check_fits(reference: ControlPolicy, policy: ControlPolicy, folder: str) -> None:
    if reference.spaces != policy.spaces:
        raise ConfigError(f"learner.reference_kl.reference: {folder} is a policy for other spaces; name another folder")
    states = [jax.tree.map(lambda array: array.shape, each.initial_state(1)) for each in (reference, policy)]
    if states[0] != states[1]:
        raise ConfigError(
            f"learner.reference_kl.reference: {folder} has recurrent state {states[0]}, the learner's policy "
            f"{states[1]}, and fragments carry only that one; name another folder, or give both the same memory"
        )
