"""Every kernel of packed attention that runs on JAX's default device: how exact it is, and how long it takes.

    python -m benchmarks.attention [--tokens 16384] [--length 4096] [--dtype bfloat16] [--kernels triton cudnn]

Shapes are those of Qwen2.5's 0.5B (14 heads of 64 over 2 key heads) and 1.5B (12 of 128 over 2), in rows of one
sequence and of sixty-four. Errors are ‖found − dense‖ / ‖dense‖ of the result and of the gradients of queries, keys and
values; dense is computed in float32 on the CPU, of 1,024 tokens with padding behind them. Times are medians of some,
forward, and forward with backward; FLOP/s count causal pairs of a segment alone, backward as 2.5 times forward. Exits
with 1 where an error is beyond 1e-2 (bfloat16) or 1e-4 (float32), or something is no number.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from penstock.model.language import Segments
from penstock.model.language.attention import attention
from penstock.model.language.attention_choice import AttentionKernel, Platform, platform_named

HEADS = ((14, 2, 64), (12, 2, 128))
"""Query heads, key heads, numbers of each."""
CHECKED = 1024
REPEATS = 5
KERNELS: dict[Platform, tuple[AttentionKernel, ...]] = {
    "cpu": ("dense", "blocks"), "gpu": ("triton", "cudnn", "blocks"), "tpu": ("splash", "blocks"),
}  # fmt: skip
LIMITS = {"bfloat16": 1e-2, "float32": 1e-4}


def segments_of(rows: int, length: int, sequences: int, padding: int = 0) -> Segments:
    """Sequences of equal lengths in each row, and padding behind them."""
    ids = np.repeat(np.arange(sequences) + 1, (length - padding) // sequences)
    return Segments.of(np.pad(ids, (0, length - len(ids)))[None].repeat(rows, axis=0), max(8, sequences))


def drawn(rows: int, length: int, heads: tuple[int, int, int], segments: Segments) -> list[np.ndarray]:
    """Queries, keys, values, and a gradient of the result that is zero at padding; float32."""
    rng = np.random.default_rng(0)
    query, key, dim = heads
    arrays = [rng.standard_normal((rows, length, count, dim), np.float32) for count in (query, key, key, query)]
    arrays[-1] *= np.asarray(segments.ids)[..., None, None] > 0
    return arrays


def runs(kernel: AttentionKernel, segments: Segments) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Compiled queries, keys, values -> result; and these and a gradient -> gradients."""

    def forward(query: Any, key: Any, value: Any) -> Any:
        return attention(query, key, value, segments, kernel)

    return jax.jit(forward), jax.jit(lambda *inputs: jax.vjp(forward, *inputs[:3])[1](inputs[3]))


def errors(kernel: AttentionKernel, heads: tuple[int, int, int], sequences: int, dtype: str) -> list[float]:
    """Of the result, and of the gradients of queries, keys and values, at positions that are no padding."""
    segments = segments_of(1, CHECKED, sequences, padding=CHECKED // 8)
    arrays = [np.asarray(x, jnp.dtype(dtype)) for x in drawn(1, CHECKED, heads, segments)]
    real = np.asarray(segments.ids)[..., None, None] > 0

    def found(kernel: AttentionKernel, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        forward, backward = runs(kernel, segments)
        given = [jnp.asarray(x) for x in inputs]
        return [np.asarray(x, np.float32) for x in (forward(*given[:3]), *backward(*given))]

    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        wanted = found("dense", [x.astype(np.float32) for x in arrays])
    pairs = zip(found(kernel, arrays), wanted, strict=True)
    return [float(np.linalg.norm((x - y) * real) / np.linalg.norm(y * real)) for x, y in pairs]


def median_s(run: Callable[[], object]) -> float:
    """Of `REPEATS`, after one that compiles."""
    jax.block_until_ready(run())
    taken = list[float]()
    for _ in range(REPEATS):
        started = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - started)
    return float(np.median(taken))


def measure(kernel: AttentionKernel, heads: tuple[int, int, int], sequences: int, given: argparse.Namespace) -> str:
    """Times of one, as a line's end."""
    rows = max(given.tokens // given.length, 1)
    segments = segments_of(rows, given.length, sequences)
    query, key, value, gradient = (jnp.asarray(x, given.dtype) for x in drawn(rows, given.length, heads, segments))
    forward, backward = runs(kernel, segments)
    once = median_s(lambda: forward(query, key, value))
    both = median_s(lambda: backward(query, key, value, gradient))
    flops = 2 * rows * heads[0] * heads[2] * given.length**2 / sequences
    return f"{1e3 * once:9.3f} {1e3 * both:9.3f} ms {flops / once / 1e12:7.1f} {3.5 * flops / both / 1e12:7.1f} TFLOP/s"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2**14, help="of all rows")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--dtype", choices=LIMITS, default="bfloat16")
    parser.add_argument("--kernels", nargs="+", choices=get_args(AttentionKernel), help="by default all that run here")
    given = parser.parse_args(words)
    device, beyond = jax.local_devices()[0], 0
    print(f"{device.device_kind}, {given.dtype}, {given.tokens:,} tokens in rows of {given.length:,}")
    for heads in HEADS:
        for sequences in (1, 64):
            for kernel in given.kernels or KERNELS[platform_named(device.platform)]:
                wrong = errors(kernel, heads, sequences, given.dtype)
                beyond += not all(error <= LIMITS[given.dtype] for error in wrong)
                named = f"{heads[0]}/{heads[1]} heads of {heads[2]}, {sequences:2} a row, {kernel:7}"
                cells = " ".join(f"{error:.1e}" for error in wrong)
                print(f"{named} {cells} {measure(kernel, heads, sequences, given)}", flush=True)
    return int(beyond > 0)


if __name__ == "__main__":
    sys.exit(main())
