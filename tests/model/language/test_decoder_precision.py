"""How exact matrix products are, on either side of a run: asked of the programs, not of one platform's results."""

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.batch import RowShape
from penstock.inference.decoding import ServedWeights, create_cache, decode_step, prefill, tables_of
from penstock.inference.dispatch import SlotRows
from penstock.learner import LearnerConfig
from penstock.learner.losses import LossInputs, TokenLoss, policy_token_loss
from penstock.learner.micro_batches import empty_micro_batch
from penstock.learner.step import ForwardOptions, LossOptions, accumulate, head_outputs, zeros
from penstock.model.language.precision import product, rounded

OPTIONS = ForwardOptions(remat="layer", head_tile_tokens=7)


def products(jaxpr: Any) -> Iterator[Any]:
    """Every product of a program, those of its loops and branches included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from products(inner)


def micro_batch() -> Any:
    return jax.tree.map(jnp.asarray, empty_micro_batch(RowShape(16, 2)))


def update(decoder: Any) -> Any:
    """A learner's micro-batch: forward and backward pass."""
    loss = LearnerConfig().loss

    def token_loss(inputs: LossInputs) -> TokenLoss:
        return policy_token_loss(loss, inputs)

    return accumulate(LossOptions(token_loss), OPTIONS, decoder, zeros(decoder), micro_batch())


def scores(decoder: Any) -> Any:
    return head_outputs(decoder, micro_batch(), OPTIONS)


def slot_rows() -> SlotRows:
    return jax.tree.map(jnp.asarray, SlotRows.of(SlotRows.array(3, 1)))


def decoding(decoder: Any) -> Any:
    cache, rows = create_cache(decoder.config, 3, 16), slot_rows()
    tables = tables_of(decoder.config, rows.positions)
    return decode_step(ServedWeights.of(decoder), cache, rows, rows.budget == 0, tables)


def decoding_ragged_rows(decoder: Any) -> Any:
    cache, rows = create_cache(decoder.config, 3, 16), slot_rows()
    tables = tables_of(decoder.config, rows.positions)
    return decode_step(ServedWeights.of(decoder), cache, rows, rows.budget == 0, tables, "ragged")


def prefilling(decoder: Any) -> Any:
    return prefill(ServedWeights.of(decoder), jnp.zeros((2, 8), jnp.int32))


@pytest.mark.parametrize("program", [update, scores, decoding, decoding_ragged_rows, prefilling])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_product_of_both_sides_has_the_highest_precision_and_float32_sums(tiny_decoder, program, dtype):
    decoder = tiny_decoder(dtype=dtype, model_type="qwen3")
    found = list(products(jax.make_jaxpr(program)(decoder).jaxpr))
    assert len(found) >= 9  # seven matrices and two products of attention
    highest = (jax.lax.Precision.HIGHEST,) * 2
    assert {equation.params["precision"] for equation in found} == {highest}
    # No product of a bfloat16 model widens its operands: an accelerator would be many times slower.
    assert {str(var.aval.dtype) for equation in found for var in equation.invars} == {dtype}
    text = jax.jit(program).lower(decoder).as_text()
    assert dtype == "float32" or "bf16" in text
    results = re.findall(r"dot_general .*-> tensor<[0-9x]*(\w+)>", text)
    assert len(results) >= 9 and set(results) == {"f32"}


def test_a_product_for_nvidia_writes_what_is_read_and_sums_in_float32_elsewhere():
    left, right = jnp.ones((8, 4), jnp.bfloat16), jnp.ones((4, 8), jnp.bfloat16)
    run = jax.jit(lambda left, right: product("ni,io->no", left, right, left.dtype))
    for platform, written in (("cuda", "bf16"), ("tpu", "f32"), ("cpu", "f32")):
        text = run.trace(left, right).lower(lowering_platforms=(platform,)).as_text()
        assert re.findall(r"dot_general .*-> tensor<8x8x(\w+)>", text) == [written]


def test_a_product_is_rounded_once():
    rng = np.random.default_rng(0)
    left, right = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((8, 300), (300, 8)))
    found = product("ni,io->no", left, right, left.dtype)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, rounded(product("ni,io->no", left, right), left.dtype))
    assert jax.grad(lambda left: product("ni,io->no", left, right, left.dtype).astype(float).sum())(left).shape == (
        8,
        300,
    )


def test_the_lowered_program_says_so_too(tiny_decoder):
    text = jax.jit(decoding).lower(tiny_decoder()).as_text()
    lines = [line for line in text.splitlines() if "dot_general" in line]
    assert lines and all(line.count("HIGHEST") == 2 for line in lines)


def test_a_product_is_differentiated_as_einsum_is():
    rng = np.random.default_rng(0)
    left, right = (jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in ((2, 3, 4), (2, 5, 4)))
    weight = jnp.asarray(rng.standard_normal((2, 3, 5), np.float32))
    for function in (product, jnp.einsum):
        gradients = jax.grad(lambda a, b, f=function: (f("bqd,bkd->bqk", a, b) * weight).sum(), (0, 1))(left, right)
        np.testing.assert_allclose(gradients[0], jnp.einsum("bqk,bkd->bqd", weight, right), rtol=1e-5)
        np.testing.assert_allclose(gradients[1], jnp.einsum("bqk,bqd->bkd", weight, left), rtol=1e-5)


def test_a_sum_of_bfloat16_is_not_rounded_on_its_way():
    ones = jnp.ones((1, 1024), jnp.bfloat16)  # beyond 256 a bfloat16 sum of ones stands still
    assert float(product("ni,io->no", ones, ones.T)[0, 0]) == 1024.0


def test_rounding_is_to_the_nearest_and_of_nothing_where_there_is_nothing_to_round():
    x = jnp.array([1.0, 1 + 2**-8, 1 + 3 * 2**-9])  # bfloat16 has 7 bits behind the point: ties to even
    assert rounded(x, jnp.dtype(jnp.bfloat16)).tolist() == [1.0, 1.0, 1 + 2**-7]
    assert rounded(x, jnp.dtype(jnp.float32)) is x


def test_the_residual_stream_is_float32_and_the_cache_and_hidden_states_are_not(tiny_decoder):
    decoder = tiny_decoder(dtype="bfloat16")
    assert decoder.embed(jnp.array([3])).dtype == jnp.float32
    x = jnp.ones((2, 16))
    assert decoder.normalise(x).dtype == jnp.bfloat16
    cos = sin = jnp.ones((2, 3))
    projected = decoder.layers_apart()[0].project(x, cos, sin)
    assert {array.dtype for array in projected} == {jnp.dtype(jnp.bfloat16)}
    assert decoder.layers_apart()[0].finish(x, projected[0]).dtype == jnp.float32
