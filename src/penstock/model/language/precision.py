"""Precision of a language model's arithmetic: products with float32 sums on every platform, and what goes into them.

Engine and learner compute by different programs; whatever rounds does so here, so that both round alike.
"""

from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rounded(x: Float[Array, "*shape"], dtype: jnp.dtype) -> Float[Array, "*shape"]:
    """X in `dtype`, truly rounded to it.

    XLA may leave out a conversion to bfloat16 and back (`xla_allow_excess_precision`), in the learner's program and not
    in the engine's: keys that a cache holds are rounded, those of a packed row would not be.
    """
    if x.dtype != jnp.float32 or dtype == jnp.float32:
        return x.astype(dtype)
    found = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, found.nexp, found.nmant).astype(dtype)


def product(subscripts: str, left: Array, right: Array) -> Array:
    """Einsum of two arrays of one dtype, summed and returned in float32, on every platform.

    Highest precision: an accelerator would otherwise multiply float32 in TF32 or bfloat16. Gradients are products of
    the same kind, with the incoming one rounded to the operands' dtype: else a bfloat16 model would be differentiated
    by float32 products, many times slower on an accelerator.

    Args:
        subscripts: Every index of an operand is in the other one or in the result; no ellipsis.
        left: First operand.
        right: Second operand.
    """
    return cast(Array, _product(subscripts, left, right))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(subscripts: str, left: Array, right: Array) -> Array:
    return jnp.einsum(subscripts, left, right, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _product_forward(subscripts: str, left: Array, right: Array) -> tuple[Array, tuple[Array, Array]]:
    return product(subscripts, left, right), (left, right)


def _product_backward(subscripts: str, operands: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    left, right = operands
    inputs, result = subscripts.split("->")
    first, second = inputs.split(",")
    gradient = rounded(gradient, left.dtype)
    to_left = product(f"{result},{second}->{first}", gradient, right)
    to_right = product(f"{first},{result}->{second}", left, gradient)
    return to_left.astype(left.dtype), to_right.astype(right.dtype)


_product.defvjp(_product_forward, _product_backward)
