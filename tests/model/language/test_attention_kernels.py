"""Every way to compute attention over packed rows against the dense one, values and gradients."""

from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.model.language import Segments
from penstock.model.language.attention import BLOCK, attention, block_attention, first_blocks, visible_ranges
from penstock.model.language.attention_choice import LONGEST_HEAD, attention_kernel, check_attention
from penstock.model.language.chip_attention import (
    SMALL_CHIPS,
    TILE,
    Blocks,
    Tuning,
    splash_attention,
    triton_attention,
    tuning_of,
)
from penstock.types import ConfigError

LENGTH = 150
PACKINGS = {
    "one segment": [150],
    "64 segments": [2] * 60 + [7] * 3 + [9],
    "one-token segments": [1] * 40 + [50, 1, 30],
    "padding": [20, 45],
}


def drawn(lengths, heads=4, kv_heads=2, head_dim=8, dtype=jnp.float32):
    """Queries, keys, values, a gradient of the result that is zero at padding, and segments; the second row is one."""
    rng = np.random.default_rng(0)
    ids = np.concatenate([np.repeat(np.arange(len(lengths)) + 1, lengths), np.zeros(LENGTH - sum(lengths), int)])
    segments = Segments.of(np.stack([ids, np.ones(LENGTH, int)]))
    shapes = [(2, LENGTH, heads, head_dim)] * 2 + [(2, LENGTH, kv_heads, head_dim)] * 2
    query, gradient, key, value = (rng.standard_normal(shape, np.float32) for shape in shapes)
    gradient[segments.ids == 0] = 0
    return [jnp.asarray(x, dtype) for x in (query, key, value, gradient)], segments


SMALL_BLOCKS = Tuning(Blocks(64, 32, 4, 2), Blocks(32, 64, 4, 2), Blocks(32, 32, 4, 2))
KERNELS = {
    "blocks of 32": lambda *x, segments, window: block_attention(*x, segments, window, 32),
    "triton": lambda *x, segments, window: triton_attention(*x, *visible_ranges(segments, window), interpret=True),
    "triton by small blocks": lambda *x, segments, window: triton_attention(
        *x, *visible_ranges(segments, window), interpret=True, tuning=SMALL_BLOCKS
    ),
    "splash": lambda *x, segments, window: splash_attention(*x, segments.ids, window, interpret=True),
}


@cache
def compiled(kernel, window):
    """Compiled (arrays, segments) -> results of real positions and gradients of queries, keys, values; float32."""
    run = KERNELS.get(kernel) or (lambda *x, segments, window: attention(*x, segments, kernel, window))

    def both(arrays, segments):
        (*inputs, gradient), real = arrays, segments.ids[..., None, None] > 0
        masked = lambda *inputs: jnp.where(real, run(*inputs, segments=segments, window=window), 0)  # noqa: E731
        found, backward = jax.vjp(masked, *inputs)
        return [x.astype(jnp.float32) for x in (found, *backward(gradient))]

    return jax.jit(both)


def assert_as_dense(kernel, arrays, segments, window=None, tolerance=1e-5):
    expected = compiled("dense", window)(arrays, segments)
    for found, wanted in zip(compiled(kernel, window)(arrays, segments), expected, strict=True):
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("window", [None, 5, 70])
def test_blocks_are_as_dense(packing, window):
    arrays, segments = drawn(PACKINGS[packing])
    assert_as_dense("blocks of 32", arrays, segments, window)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 6, 5), (6, 1, 16)])
def test_blocks_are_as_dense_whatever_the_heads(heads, kv_heads, head_dim):
    arrays, segments = drawn(PACKINGS["64 segments"], heads, kv_heads, head_dim)
    assert_as_dense("blocks", arrays, segments)


def test_blocks_of_bfloat16_are_as_dense():
    arrays, segments = drawn(PACKINGS["padding"], dtype=jnp.bfloat16)
    assert_as_dense("blocks of 32", arrays, segments, tolerance=2e-2)


@pytest.mark.parametrize("kernel", ["blocks of 32", "triton by small blocks"])
def test_weights_of_bfloat16_are_rounded_alike(kernel):
    """Where each kernel rounds them in its own way, half of the results differ in their last bit."""
    arrays, segments = drawn(PACKINGS["one segment"], dtype=jnp.bfloat16)
    dense, found = (compiled(each, None)(arrays, segments)[0] for each in ("dense", kernel))
    assert np.mean(found != dense) < 1e-2


def test_packed_is_as_unpacked():
    """A segment alone in its row has, by blocks, the results and gradients that it has beside others."""
    arrays, segments = drawn([20, 45, 30])
    packed = compiled("blocks", None)(arrays, segments)
    moved = [jnp.zeros_like(x).at[0, :30].set(x[0, 65:95]) for x in arrays]
    ids = np.zeros((2, LENGTH))
    ids[0, :30] = 1
    for found, whole in zip(compiled("blocks", None)(moved, Segments.of(ids)), packed, strict=True):
        np.testing.assert_allclose(found[0, :30], whole[0, 65:95], atol=1e-5)


@pytest.mark.parametrize(("packing", "window"), [("64 segments", None), ("padding", 70)])
def test_blocks_of_a_gpu_are_as_dense_when_interpreted(packing, window):
    """Blocks smaller than the row, so that all three ranges of the kernels' loops are there."""
    arrays, segments = drawn(PACKINGS[packing])
    assert_as_dense("triton by small blocks", arrays, segments, window)


@pytest.mark.slow
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_kernels_for_other_chips_are_as_dense_when_interpreted(packing, dtype):
    """Keys stand for several query heads; the length is no multiple of a tile."""
    arrays, segments = drawn(PACKINGS[packing], dtype=dtype)
    close = 1e-5 if dtype == jnp.float32 else 2e-2
    for window in (None, 5, 70):
        assert_as_dense("triton", arrays, segments, window, close)
        assert_as_dense("triton by small blocks", arrays, segments, window, close)
        assert_as_dense("splash", arrays, segments, window, close)


@pytest.mark.parametrize(
    ("head_dim", "capability"), [(64, None), (64, "8.9"), (96, "9.0"), (256, "8.0"), (256, "12.0")]
)
def test_blocks_of_a_gpu_fit_its_shared_memory(monkeypatch, head_dim, capability):
    """As Triton allots it: the block's own arrays once, those that it meets once a stage; bfloat16."""
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability=capability)])
    found, wide = tuning_of(head_dim), 2 * max(64, 1 << (head_dim - 1).bit_length())
    for part, own in ((found.forward, 1), (found.queries, 2), (found.keys, 2)):
        assert wide * (own * part.own + 2 * part.stages * part.met) <= (99 if capability in SMALL_CHIPS else 163) * 1024
        assert TILE % part.own == TILE % part.met == 0


def test_a_position_sees_its_segment_and_window_up_to_itself():
    segments = Segments(*map(jnp.asarray, Segments.of([[1] * 3 + [2] * 4 + [0]])))
    first, last = visible_ranges(segments, None)
    assert first.tolist() == [[0, 0, 0, 3, 3, 3, 3, 7]]
    assert last.tolist() == [[2, 2, 2, 6, 6, 6, 6, 7]]
    first, last = visible_ranges(segments, 2)
    assert first.tolist() == [[0, 0, 1, 3, 3, 4, 5, 7]]
    assert last.tolist() == [[1, 2, 2, 4, 5, 6, 6, 7]]


def test_a_block_meets_only_what_it_may_see():
    segments = Segments(*map(jnp.asarray, Segments.of([[1] * 3 + [2] * 6 + [3] * 5 + [0] * 6])))
    # Blocks of 4: of segments 1 and 2, of 2, of 2 and 3, of 3 and padding, of padding, which meets none.
    assert first_blocks(segments, 4, None).tolist() == [[0, 0, 0, 2, 5]]
    assert first_blocks(segments, 4, 2).tolist() == [[0, 0, 1, 2, 5]]


def test_time_follows_the_segments_not_the_square_of_the_row():
    """The trip count of the loop over keys, read from its bounds: 32 segments of a block each meet themselves."""
    ids = np.repeat(np.arange(32) + 1, 4)[None]
    segments = Segments.of(ids)
    first = np.asarray(first_blocks(Segments(*map(jnp.asarray, segments)), 4, None))[0]
    assert (np.arange(32) + 1 - first).sum() == 32


def test_only_dense_makes_an_array_of_length_by_length():
    (query, key, value, gradient), segments = drawn([150])

    def text(kernel):
        def run(query, key, value, gradient):
            return jax.vjp(lambda *inputs: attention(*inputs, segments, kernel), query, key, value)[1](gradient)

        return jax.jit(run).lower(query, key, value, gradient).compile().as_text()

    square = f"{LENGTH},{LENGTH}]"
    assert square in text("dense")
    blocks = text("blocks")
    padded = LENGTH + -LENGTH % BLOCK
    assert square not in blocks and f"{padded},{padded}]" not in blocks


def test_segments_of_ids():
    segments = Segments.of([[1, 1, 2, 0], [1, 2, 3, 4], [0, 0, 0, 0]])
    assert segments.starts.tolist() == [[0, 2, -1, -1], [0, 1, 2, 3], [-1, -1, -1, -1]]
    assert segments.lengths.tolist() == [[2, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    assert Segments.of([[1, 1, 2, 2]], most=2).starts.tolist() == [[0, 2]]
    with pytest.raises(ValueError, match="a row of 3 segments, where there is room for 2"):
        Segments.of([[1, 2, 3, 3]], most=2)


def test_a_kernel_without_a_window_refuses_one_that_cuts():
    (query, key, value, _), segments = drawn([150])
    with pytest.raises(NotImplementedError, match="attention by cudnn has no window"):
        attention(query, key, value, segments, "cudnn", window=149)


@pytest.mark.parametrize(
    ("platform", "length", "dtype", "kernel"),
    [
        ("cpu", 128, "float32", "dense"),
        ("cpu", 129, "float32", "blocks"),
        ("cpu", 4096, "bfloat16", "blocks"),
        ("gpu", 512, "bfloat16", "dense"),
        ("gpu", 513, "bfloat16", "triton"),
        ("gpu", 4096, "float32", "blocks"),
        ("tpu", 4096, "bfloat16", "splash"),
        ("tpu", 4096, "float32", "blocks"),
    ],
)
def test_what_is_taken_where(platform, length, dtype, kernel):
    assert attention_kernel("auto", platform, length, dtype, 64) == kernel


def test_heads_that_no_gpu_kernel_takes_are_attended_by_blocks():
    assert attention_kernel("auto", "gpu", 4096, "bfloat16", LONGEST_HEAD) == "triton"
    assert attention_kernel("auto", "gpu", 4096, "bfloat16", LONGEST_HEAD + 8) == "blocks"
    assert attention_kernel("auto", "tpu", 4096, "bfloat16", LONGEST_HEAD + 8) == "splash"


def test_what_is_asked_for_is_taken():
    assert attention_kernel("dense", "gpu", 10**6, "bfloat16", 64) == "dense"
    assert attention_kernel("blocks", "cpu", 8, "float32", 64) == "blocks"
    assert attention_kernel("pallas", "tpu", 8, "bfloat16", 64) == "splash"
    assert attention_kernel("pallas", "gpu", 8, "bfloat16", 64) == "triton"


@pytest.mark.parametrize(
    ("choice", "platform", "changes", "capability", "reason"),
    [
        ("pallas", "cpu", {}, None, "it is for GPUs and TPUs, and this runs on a CPU; leave it at auto"),
        ("pallas", "gpu", {"dtype": "float32"}, 9.0, "its kernel multiplies float32 with fewer bits"),
        ("cudnn", "cpu", {}, None, "cuDNN is NVIDIA's, and this runs on a CPU"),
        ("cudnn", "tpu", {}, None, "cuDNN is NVIDIA's, and this runs on a TPU"),
        ("pallas", "cpu", {"dtype": "float32"}, None, "it is for GPUs and TPUs, and this runs on a CPU"),
        ("cudnn", "cpu", {"dtype": "float32"}, None, "cuDNN is NVIDIA's, and this runs on a CPU"),
        ("cudnn", "gpu", {"dtype": "float32"}, 9.0, "its kernel multiplies float32 with fewer bits"),
        ("cudnn", "gpu", {"sliding_window": 9}, 9.0, r"its kernel has no window, and layers .* have one \(9\)"),
        ("pallas", "gpu", {"head_dim": 264}, 9.0, "its kernel takes heads of up to 256 numbers, and these have 264"),
        ("cudnn", "gpu", {"head_dim": 264}, 9.0, "heads of 264 are not a multiple of 8 up to 256"),
        ("cudnn", "gpu", {"head_dim": 64}, 8.0, "packed rows need compute capability 9.0, and this GPU has 8.0"),
    ],
)
def test_what_cannot_act_is_refused_with_the_reason(tiny_config, choice, platform, changes, capability, reason):
    model = tiny_config(**{"dtype": "bfloat16", **changes})
    with pytest.raises(ConfigError, match=f"learner.attention is {choice}: {reason}"):
        check_attention(choice, platform, model, capability)
    usual = tiny_config(dtype="bfloat16", head_dim=64)
    for fine in ("auto", "dense", "blocks", *(("pallas", "cudnn") if platform == "gpu" else ())):
        check_attention(fine, platform, usual, 9.0)
