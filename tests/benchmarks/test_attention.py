"""What the benchmark of attention prints here, at a small shape, and that an error is told."""

import benchmarks.attention
import jax.numpy as jnp
import pytest
from benchmarks.attention import errors, main, segments_of


def test_kernels_of_this_machine_are_exact_and_timed(capsys, monkeypatch):
    monkeypatch.setattr(benchmarks.attention, "HEADS", ((4, 2, 16),))
    assert main(["--tokens", "256", "--length", "128", "--dtype", "float32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "cpu, float32, 256 tokens in rows of 128"
    assert [line.split(",")[2].split()[0] for line in lines[1:]] == ["dense", "blocks"] * 2
    assert all(line.endswith("TFLOP/s") for line in lines[1:])


def test_an_error_is_of_the_result_and_of_each_gradient(monkeypatch):
    monkeypatch.setattr(benchmarks.attention, "CHECKED", 128)
    close = errors("blocks", (4, 2, 16), 4, "float32")
    assert len(close) == 4 and max(close) < 1e-5
    right = benchmarks.attention.attention

    def wrong(query, key, value, segments, kernel):
        return right(query, key, value if kernel == "dense" else value * jnp.float32(1.5), segments, kernel)

    monkeypatch.setattr(benchmarks.attention, "attention", wrong)
    assert errors("blocks", (4, 2, 16), 4, "float32")[0] == pytest.approx(0.5, rel=1e-3)


def test_sequences_of_a_row_are_equal_and_padding_is_behind():
    segments = segments_of(2, 16, 4, padding=4)
    assert segments.ids.tolist() == [[1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 0, 0, 0, 0]] * 2
