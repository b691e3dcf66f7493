"""Runs where torch is installed; it is no dependency."""

import numpy as np
import pytest

from penstock.types import LeafSpace, Spaces, WeightsError, WeightVersion

torch = pytest.importorskip("torch")

from penstock.fleet.torch_policy import TorchPolicy  # noqa: E402
from penstock.fleet.user_policy import UserPolicyRunner  # noqa: E402

SPACES = Spaces((LeafSpace("", "box", (3,), "float32"),), (LeafSpace("", "discrete", (), "int64", (4,)),))


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = torch.nn.GRUCell(3, 5)
        self.head = torch.nn.Linear(5, 4)

    def initial_state(self, batch):
        return {"hidden": torch.zeros(batch, 5)}

    def act(self, observations, state, generator):
        hidden = self.cell(observations[""], state["hidden"])
        logprobs = torch.log_softmax(self.head(hidden), -1)
        actions = torch.multinomial(logprobs.exp(), 1, generator=generator)
        chosen = logprobs.gather(1, actions)[:, 0]
        return {"": actions[:, 0]}, chosen, hidden.sum(-1), {"hidden": hidden}


def played(seed, policy, steps=3):
    runner = UserPolicyRunner(TorchPolicy(policy), SPACES, 2, seed)
    observations = {"": np.ones((2, 3), np.float32)}
    return [runner.decide(np.arange(2), observations, np.full(2, t == 0)).result() for t in range(steps)]


def test_a_torch_module_acts_and_remembers():
    policy = Recurrent()
    decisions = played(0, policy)
    hidden = policy.cell(torch.ones(2, 3), torch.zeros(2, 5)).detach().numpy()
    np.testing.assert_array_equal(decisions[0].states["hidden"], np.zeros((2, 5)))
    np.testing.assert_allclose(decisions[1].states["hidden"], hidden, atol=1e-6)
    assert decisions[0].actions[""].dtype == np.int64 and np.isfinite(decisions[0].logprobs).all()


def test_a_rerun_samples_the_same():
    policy = Recurrent()
    one, again, other = (
        np.stack([decision.actions[""] for decision in played(seed, policy, steps=20)]) for seed in (1, 1, 2)
    )
    assert (one == again).all() and (one != other).any()


def test_weights_travel_by_name():
    source, target = TorchPolicy(Recurrent()), TorchPolicy(Recurrent())
    runner = UserPolicyRunner(target, SPACES, 2, seed=0)
    runner.set_weights(WeightVersion(0, 1), source.named_arrays())
    runner.decide(np.arange(2), {"": np.ones((2, 3), np.float32)}, np.ones(2, bool))
    for name, array in source.named_arrays().items():
        np.testing.assert_array_equal(target.named_arrays()[name], array)
    with pytest.raises(WeightsError, match="head.bias is missing"):
        target.set_arrays({name: array for name, array in source.named_arrays().items() if name != "head.bias"})
    with pytest.raises(WeightsError, match=r"head.bias has shape \[3\], not \[4\]"):
        target.set_arrays(source.named_arrays() | {"head.bias": np.zeros(3, np.float32)})
