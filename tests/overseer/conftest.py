"""A run small enough for a test: a tiny model, the cats task, a few updates in a few seconds."""

import copy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock.overseer import RunConfig
from penstock.overseer.config_loading import build_config

TINY: dict[str, Any] = {
    "seed": 3,
    "steps": 3,
    "model": {"init": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}},
    "curriculum": {
        "lessons": {
            "cats": {
                "environment": {"env_class": "penstock.environments.cats.CatsEnvironment"},
                "sampling_params": {"n_generations_per_prompt": 3, "max_output_tokens": 8},
            }
        },
        "eval_frequency": 2,
        "eval_n_examples": 4,
        "micro_eval_frequency": 1,
        "micro_eval_n_examples": 2,
    },
    "inference": {"max_slots": 12, "max_seq_len": 48, "prefill_rows": 4},
    "replay": {"groups_per_batch": 3},
    "learner": {"row_length": 64, "micro_batch_rows": 2, "optimizer": {"learning_rate": 1e-3}},
}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(base)
    for key, value in changes.items():
        known = result.get(key)
        result[key] = merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return result


def tiny(changes: dict[str, Any] | None = None) -> RunConfig:
    config = merged(TINY, changes or {})
    if config["curriculum"]["micro_eval_frequency"] == 0:
        del config["curriculum"]["micro_eval_n_examples"]
    return build_config(RunConfig, config)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def launchers() -> Iterator[list[object]]:
    """`runtime: ray` without Ray: the launchers that were made, none of which can start anything."""
    made: list[object] = []

    class Launcher:
        machines = 1

        def __init__(self, *_: object) -> None:
            made.append(self)

        def close(self, timeout_s: float) -> None:
            assert timeout_s > 0

        def check_room(self, newcomers: Sequence[object], others: Sequence[object]) -> None:
            assert newcomers and not others

    fake = ModuleType("penstock.overseer.ray")
    fake.__dict__["RayLauncher"] = Launcher
    before = sys.modules.pop(fake.__name__, None)
    sys.modules[fake.__name__] = fake
    yield made
    del sys.modules[fake.__name__]
    if before is not None:
        sys.modules[fake.__name__] = before
