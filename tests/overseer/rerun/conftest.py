"""Small runs of every kind, made once, whose updates are made again."""

import os
from pathlib import Path

import pytest

from penstock.overseer import FleetRunConfig, train
from penstock.overseer.config_loading import build_config
from tests.overseer.conftest import merged, tiny
from tests.overseer.test_control_run import TINY as CONTROL

KEPT = {"overseer": {"checkpoint_every": 2, "keep_every": 4}}
QUIETLY = {"curriculum": {"eval_frequency": 0, "micro_eval_frequency": 0}}
SEVERAL = {
    "learner": {"epochs": 2, "minibatches": 2, "loss": {"preset": "grpo"}, "optimizer": {"name": "adafactor"}},
    "curriculum": {"lessons": {"cats": {"sampling_params": {"n_generations_per_prompt": 6}}}},
}
KL_IN_REWARD = {"coefficient": 0.05, "place": "reward", "reference": "ema"}

OVERLONG = {
    "learner": {
        "loss": {"preset": "dapo"},
        "optimizer": {"name": "muon", "weight_decay": 0.1, "rates": {"embedding": 2.0, "layers.*norm": 0.5}},
        "warm_start": {"steps": 40, "batch_size": 8, "learning_rate": 0.01},
    },
    "replay": {"batch_maker": {"filter_zero_variance": False}},
    "curriculum": {
        "lessons": {
            "cats": {"sampling_params": {"n_generations_per_prompt": 6, "max_output_tokens": 16, "temperature": 1.5}}
        }
    },
}
"""Many answers are cut (the temperature sees to it), and masked by the preset's filter."""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a replay sets for its process is taken back."""
    for name in ("XLA_FLAGS", "PJRT_NPROC"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
        if not os.environ[name]:
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``sync``, ``async``, ``several``, ``values``, ``kl``, ``overlong``, ``resumed``, ``control``: 6 updates each."""
    folder = tmp_path_factory.mktemp("runs")
    six = merged(merged(KEPT, QUIETLY), {"steps": 6})
    train(tiny(six), folder / "sync", quiet=True)
    train(tiny(merged(six, {"async": True})), folder / "async", quiet=True)
    train(tiny(merged(six, SEVERAL)), folder / "several", quiet=True)
    train(tiny(merged(six, {"learner": {"epochs": 2, "loss": {"preset": "ppo"}}})), folder / "values", quiet=True)
    train(tiny(merged(six, {"learner": {"kl": KL_IN_REWARD}})), folder / "kl", quiet=True)
    train(tiny(merged(six, OVERLONG)), folder / "overlong", quiet=True)
    often = merged(six, {"overseer": {"keep_every": 2}})
    train(tiny(merged(often, {"steps": 5})), folder / "resumed", quiet=True)
    for step in (4, 5):
        (folder / "resumed" / "checkpoints" / f"step-{step}").rename(folder / f"lost-{step}")
    more = {"steps": 6, "learner": {"epochs": 2, "optimizer": {"learning_rate": 3e-3, "max_grad_norm": 0.5}}}
    train(tiny(merged(often, more)), folder / "resumed", resume=True, quiet=True)
    control = {"runtime": "local", "steps": 6, "fleet": {"workers": 1}, "overseer": {"keep_every": 2}}
    train(build_config(FleetRunConfig, merged(CONTROL, control)), folder / "control", quiet=True)
    return folder
