"""Precision of a language model's arithmetic: products with float32 sums on every platform, and what goes into them.

Engine and learner compute by different programs; whatever rounds does so here, so that both round alike.
"""

from functools import cache, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

FLOAT32 = jnp.dtype(jnp.float32)


def rounded(x: Float[Array, "*shape"], dtype: jnp.dtype) -> Float[Array, "*shape"]:
    """X in `dtype`, truly rounded to it.

    XLA may leave out a conversion to bfloat16 and back (`xla_allow_excess_precision`), in the learner's program and not
    in the engine's: keys that a cache holds are rounded, those of a packed row would not be.
    """
    if x.dtype != jnp.float32 or dtype == jnp.float32:
        return x.astype(dtype)
    found = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, found.nexp, found.nmant).astype(dtype)


def product(subscripts: str, left: Array, right: Array, dtype: jnp.dtype = FLOAT32) -> Array:
    """Einsum of two arrays of one dtype, summed in float32 on every platform.

    Highest precision: an accelerator would otherwise multiply float32 in TF32 or bfloat16. Gradients are products of
    the same kind, with the incoming one rounded to the operands' dtype: else a bfloat16 model would be differentiated
    by float32 products, many times slower on an accelerator.

    Args:
        subscripts: Every index of an operand is in the other one or in the result; no ellipsis.
        left: First operand.
        right: Second operand.
        dtype: Of the result, which is rounded once. An NVIDIA GPU then writes nothing wider: half as much to write and
            to read, of a product that takes a quarter less time.
    """
    return cast(Array, _product(subscripts, dtype, left, right))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(subscripts: str, dtype: jnp.dtype, left: Array, right: Array) -> Array:
    swapped, dimensions, order = _contraction(subscripts)
    if swapped:
        left, right = right, left
    times = partial(jax.lax.dot_general, dimension_numbers=dimensions, precision=jax.lax.Precision.HIGHEST)
    summed = partial(times, preferred_element_type=jnp.float32)
    if dtype == jnp.float32:
        found = summed(left, right)
    else:  # what cuBLAS and Triton sum in float32, whatever they write, others might sum in `dtype`
        found = jax.lax.platform_dependent(
            left, right, cuda=partial(times, preferred_element_type=dtype),
            default=lambda *both: rounded(summed(*both), dtype),
        )  # fmt: skip
    return found if order is None else found.transpose(order)


@cache
def _contraction(subscripts: str) -> tuple[bool, Any, tuple[int, ...] | None]:
    """Whether the operands change places, dimension numbers, and the order of the result's axes; None: as they come.

    `jnp.einsum` says the same, but makes a function to compile at each call: a tenth of the time to trace a model.
    """
    inputs, result = subscripts.split("->")
    left, right = inputs.split(",")
    found = {False: _axes(left, right, result), True: _axes(right, left, result)}
    swapped = found[False][1] is not None and found[True][1] is None
    dimensions, order = found[swapped]
    return swapped, dimensions, order


def _axes(left: str, right: str, result: str) -> tuple[Any, tuple[int, ...] | None]:
    shared = [index for index in left if index in right]
    batch, summed = ([index for index in shared if (index in result) == kept] for kept in (True, False))
    places = [tuple([each.index(index) for index in indices] for each in (left, right)) for indices in (summed, batch)]
    own = [*batch, *(index for index in left + right if index not in shared)]
    order = tuple(own.index(index) for index in result)
    return tuple(places), None if order == tuple(range(len(order))) else order


def _product_forward(subscripts: str, dtype: jnp.dtype, left: Array, right: Array) -> tuple[Array, tuple[Array, Array]]:
    return product(subscripts, left, right, dtype), (left, right)


def _product_backward(
    subscripts: str, dtype: jnp.dtype, operands: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    left, right = operands
    inputs, result = subscripts.split("->")
    first, second = inputs.split(",")
    gradient = rounded(gradient, left.dtype)
    to_left = product(f"{result},{second}->{first}", gradient, right, left.dtype)
    to_right = product(f"{first},{result}->{second}", left, gradient)  # a matrix's is added up in float32
    return to_left, to_right.astype(right.dtype)


_product.defvjp(_product_forward, _product_backward)


def linear(
    x: Float[Array, "*batch inputs"], matrix: Float[Array, "inputs outputs"], dtype: jnp.dtype = FLOAT32
) -> Float[Array, "*batch outputs"]:
    """Multiplies the last axis by a matrix; the result is of `dtype`, rounded once.

    As a product of two matrices, because XLA's CPU compiler otherwise makes a transposed copy of the larger
    operand for every weight gradient: that alone took 17% off the backward pass of a 6M model.
    """
    found = product("ni,io->no", x.reshape(-1, x.shape[-1]), matrix, dtype)
    return found.reshape(*x.shape[:-1], matrix.shape[-1])
