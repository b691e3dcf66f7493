"""Targets: which there are, what is refused, and how a compiler is told of a chip that is not here."""

import importlib.util

import pytest

from penstock.overseer.fitting import chips
from penstock.overseer.fitting.chips import CHIPS, parse_target
from penstock.types import ConfigError


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("h900:1", r"--target is 'h900:1': there are h100:1, h200:1, .* and cpu for this machine"),
        ("h100:8", r"--target is 'h100:8': a learner computes on one device, .* give h100:1"),
        ("v5e:", None),
        ("", "--target is ''"),
    ],
)
def test_a_target_is_one_chip_that_is_known(monkeypatch, target, message):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    if message is None:
        assert parse_target(target) is CHIPS["v5e"]
        return
    with pytest.raises(ConfigError, match=message):
        parse_target(target)


@pytest.mark.parametrize(("target", "extra"), [("h100:1", "cuda-fit"), ("v5e:1", "tpu-fit")])
def test_without_its_compiler_one_line_says_what_to_install(monkeypatch, target, extra):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"its compiler is not installed: pip install 'penstock\[{extra}\]'"):
        parse_target(target)


@pytest.mark.parametrize("plugin", ["jax_cuda12_plugin", "jax_cuda13_plugin"])
def test_any_plugin_for_nvidia_compiles(monkeypatch, plugin):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == plugin else None)
    assert parse_target("h100:1") is CHIPS["h100"]


def test_this_machine_has_its_free_memory_and_rates_that_it_gave(monkeypatch):
    monkeypatch.setattr(chips, "free_memory_bytes", lambda: 5)
    monkeypatch.setattr(chips, "matrix_product_flops", lambda: 7.0)
    monkeypatch.setattr(chips, "copy_bytes", lambda: 11.0)
    machine = parse_target("cpu")
    assert (machine.platform, machine.memory_bytes, machine.bytes_per_s) == ("cpu", 5, 22.0)
    assert machine.flops_per_s == {"float32": 7.0, "bfloat16": 7.0}


def test_a_gpu_is_described_in_protobuf_s_text():
    text = chips._text_proto({"a": {"b": 1, "c": 2.5}, "name": '"x"'})
    assert text == 'a { b: 1 c: 2.5 } name: "x"'
    described = chips._text_proto(CHIPS["a100"].described)
    assert "cuda_compute_capability { major: 8 minor: 0 }" in described and "core_count: 108" in described
    assert f"device_memory_size: {85100068864}" in described


def test_rates_of_this_machine_are_positive():
    assert chips.matrix_product_flops() > 1e8 and chips.copy_bytes() > 1e7
