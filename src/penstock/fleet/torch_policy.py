"""A PyTorch module as a policy for `UserPolicyRunner`. The only module that imports torch.

The module has `initial_state(batch)` and `act(observations, state, generator)` like any user's policy, but over torch
tensors; here NumPy goes in and comes out, no gradients are kept, and the module's own weights are named arrays, so
that they can be published and fetched. Not covered: training it (Penstock's learners are JAX's), torch.compile.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from jaxtyping import PRNGKeyArray

from penstock.fleet.steps import Leaves
from penstock.types import WeightsError


class TorchPolicy:
    """Adapts a `torch.nn.Module`.

    The module's `act(observations, state, generator)` returns what `UserPolicyRunner` takes, of tensors. `generator` is
    a `torch.Generator` on the module's device, seeded anew for every call, so that a rerun samples the same.
    """

    def __init__(self, module: Any, device: str = "cpu") -> None:
        """Moves the module to the device, in evaluation mode."""
        self._module = module.to(device).eval()
        self._device = torch.device(device)

    def initial_state(self, batch: int) -> dict[str, np.ndarray]:
        """The module's, as NumPy arrays; empty where it has none."""
        with torch.inference_mode():
            return _as_numpy(self._module.initial_state(batch) or {})

    def act(self, observations: Leaves, state: Mapping[str, Any], key: PRNGKeyArray) -> Any:
        """What the module returned, with NumPy arrays for tensors."""
        words = np.asarray(jax.random.key_data(key)).astype(np.uint64)
        generator = torch.Generator(device=self._device)
        generator.manual_seed(int(words[0] << np.uint64(31) ^ words[-1]) % 2**63)
        with torch.inference_mode():
            acted = self._module.act(self._as_tensors(observations), self._as_tensors(state), generator)
            return _as_numpy(acted)

    def set_arrays(self, arrays: Mapping[str, Any]) -> None:
        """Replaces all weights and buffers.

        Raises:
            WeightsError: names or shapes are not those of the module's `state_dict`; the weights stay as they were.
        """
        own = self._module.state_dict()
        problems = [f"{name} is missing" for name in own if name not in arrays]
        problems += [f"{name} is unknown" for name in arrays if name not in own]
        problems += [
            f"{name} has shape {list(arrays[name].shape)}, not {list(tensor.shape)}"
            for name, tensor in own.items()
            if name in arrays and tuple(arrays[name].shape) != tuple(tensor.shape)
        ]
        if problems:
            raise WeightsError(f"weights do not fit the torch module: {'; '.join(problems[:5])}")
        self._module.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})

    def named_arrays(self) -> dict[str, np.ndarray]:
        """Weights and buffers by the names of the module's `state_dict`; copies."""
        return {name: np.array(tensor.detach().cpu().numpy()) for name, tensor in self._module.state_dict().items()}

    def _as_tensors(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {name: torch.from_numpy(np.array(array)).to(self._device) for name, array in arrays.items()}


def _as_numpy(value: Any) -> Any:
    """The same tuple or mapping with NumPy arrays for tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    if isinstance(value, Mapping):
        return {name: _as_numpy(part) for name, part in value.items()}
    return tuple(_as_numpy(part) for part in value) if isinstance(value, tuple) else value
