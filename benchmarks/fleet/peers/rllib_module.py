"""The benchmark's policy for RLlib: frames averaged to 16 x 16, two layers of 64."""

import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.torch import TorchRLModule


class PooledModule(TorchRLModule):
    """Actions only."""

    def setup(self) -> None:
        torch.set_num_threads(1)
        shape = self.observation_space.shape
        self._frames = len(shape) == 3
        inputs = 16 * 16 * shape[2] if self._frames else shape[0]
        self._net = torch.nn.Sequential(
            torch.nn.Linear(inputs, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(),
            torch.nn.Linear(64, self.action_space.n),
        )  # fmt: skip

    def _forward(self, batch, **kwargs):
        x = torch.as_tensor(batch[Columns.OBS])
        if self._frames:
            x = torch.nn.functional.adaptive_avg_pool2d(x.permute(0, 3, 1, 2).float() / 255, 16)
        return {Columns.ACTION_DIST_INPUTS: self._net(x.flatten(1).float())}
