"""Splitting an engine over devices. What needs two of them is in `two_devices`, run with a host that has two."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.inference import EngineConfig, InferenceEngine
from penstock.inference.config import InferenceConfig
from penstock.inference.model_runner import ModelRunner, ModelSplit
from penstock.types import ConfigError, WeightVersion

PROCESS_TIMEOUT_S = 240
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_host_devices():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-m",
        "slow or not slow",
        "tests/inference/two_devices.py",
    ]
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PROCESS_TIMEOUT_S
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]


def test_more_devices_than_there_are_is_a_config_error(decoder, codec):
    with pytest.raises(ConfigError, match=r"inference\.model_parallel is 1000, but this process has \d+ device"):
        InferenceEngine(decoder, WeightVersion(0, 0), codec, EngineConfig(max_seq_len=64, model_parallel=1000))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, r"key_value_heads \(3\) is no .*use one of 1, 3$"),
        ({"intermediate_size": 51}, r"intermediate_size \(51\) is no multiple: use one of 1$"),
    ],
)  # fmt: skip
def test_what_does_not_divide_is_named(make_decoder, monkeypatch, fields, message):
    monkeypatch.setattr("jax.local_devices", lambda: ["first", "second"])
    with pytest.raises(ConfigError, match=message):
        ModelSplit.over(make_decoder(**fields).config, 2)


def test_one_device_is_the_default_and_is_not_split(decoder, config):
    assert EngineConfig().model_parallel == InferenceConfig().model_parallel == 1
    runner = ModelRunner(decoder, config)
    assert runner._split is None and runner._weights.scores_via == ()
    assert runner._weights.ends.embedding is decoder.embedding
