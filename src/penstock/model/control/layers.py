"""Dense and convolutional layers with orthogonal first weights.

NumPy draws the weights: compiling a generator for every shape would cost a short run more than the training of its
first seconds. Matrices are [in, out], kernels [height, width, in, out], images [batch, height, width, channels].
"""

import math
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from penstock.model.control.config import Activation

HIDDEN_GAIN = math.sqrt(2.0)
"""Gain of layers that an activation follows: relu halves the mean square, and tanh is treated alike."""

ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {"tanh": jnp.tanh, "relu": jax.nn.relu, "silu": jax.nn.silu}


def orthogonal(rng: np.random.Generator, rows: int, columns: int, gain: float) -> np.ndarray:
    """A matrix whose rows or columns, whichever are fewer, are orthogonal and have length `gain`.

    Saxe et al. 2014, https://arxiv.org/abs/1312.6120: the Q of a normal matrix's QR, with the signs of R's diagonal so
    that it is uniform over such matrices.

    Returns:
        float32 [rows, columns].
    """
    normal = rng.standard_normal((max(rows, columns), min(rows, columns)), np.float32)
    q, r = np.linalg.qr(normal)
    q *= np.where(np.diagonal(r) < 0, -1, 1).astype(np.float32)
    return np.ascontiguousarray(q if rows >= columns else q.T) * np.float32(gain)


class Dense(eqx.Module):
    """x · weight + bias."""

    weight: Float[Array, "inputs outputs"]
    bias: Float[Array, " outputs"]

    @classmethod
    def draw(cls, rng: np.random.Generator, inputs: int, outputs: int, gain: float) -> "Dense":
        """Orthogonal weight of that gain, zero bias."""
        return cls(jnp.asarray(orthogonal(rng, inputs, outputs, gain)), jnp.zeros(outputs, jnp.float32))

    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
        """Acts on the last axis; the product is of two matrices, which XLA's CPU compiler does best."""
        product = x.reshape(-1, x.shape[-1]) @ self.weight
        return (product + self.bias).reshape(*x.shape[:-1], self.weight.shape[1])


class Mlp(eqx.Module):
    """Dense layers, each with an activation after it."""

    layers: tuple[Dense, ...]
    activation: Activation = eqx.field(static=True)

    @classmethod
    def draw(cls, rng: np.random.Generator, inputs: int, sizes: Sequence[int], activation: Activation) -> "Mlp":
        """Layers of those widths."""
        widths = (inputs, *sizes)
        pairs = zip(widths[:-1], widths[1:], strict=True)
        return cls(tuple(Dense.draw(rng, ins, outs, HIDDEN_GAIN) for ins, outs in pairs), activation)

    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
        """Acts on the last axis."""
        for layer in self.layers:
            x = ACTIVATIONS[self.activation](layer(x))
        return x


class Conv(eqx.Module):
    """A convolution over [batch, height, width, channels]."""

    kernel: Float[Array, "height width inputs outputs"]
    bias: Float[Array, " outputs"]
    stride: int = eqx.field(static=True)
    padding: str = eqx.field(static=True)

    @classmethod
    def draw(cls, rng: np.random.Generator, size: int, inputs: int, outputs: int, stride: int, padding: str) -> "Conv":
        """An orthogonal kernel (as a matrix from a patch to the channels), zero bias."""
        matrix = orthogonal(rng, size * size * inputs, outputs, HIDDEN_GAIN)
        kernel = jnp.asarray(matrix.reshape(size, size, inputs, outputs))
        return cls(kernel, jnp.zeros(outputs, jnp.float32), stride, padding)

    def __call__(self, x: Float[Array, "batch high wide inputs"]) -> Float[Array, "batch rows columns outputs"]:
        """Convolves each image."""
        convolved = jax.lax.conv_general_dilated(
            x, self.kernel, (self.stride, self.stride), self.padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return convolved + self.bias
