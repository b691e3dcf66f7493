"""What images go through: averaging to a small grid, the Nature CNN, the IMPALA CNN.

Images come as the simulator gives them: uint8 or float, [height, width, channels], [channels, height, width] or
[height, width]. uint8 is divided by 255. Not covered: attention over patches, pretrained encoders.
"""

import math
from abc import abstractmethod

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from penstock.model.control.config import ImageLayout
from penstock.model.control.layers import HIDDEN_GAIN, Conv, Dense
from penstock.types import ConfigError, LeafSpace

SMALLEST_IMAGE = 16
"""A box with a shorter side is a grid of numbers, not an image."""

_NATURE = ((8, 32, 4), (4, 64, 2), (3, 64, 1))  # size, channels, stride
_EXACT_PIXELS = 257  # so many uint8 sum to no more than 65,535


class ImageForm(eqx.Module):
    """How a simulator lays an image out. All fields are static."""

    height: int = eqx.field(static=True)
    width: int = eqx.field(static=True)
    channels: int = eqx.field(static=True)
    channels_first: bool = eqx.field(static=True)
    integer: bool = eqx.field(static=True)

    @classmethod
    def of(cls, leaf: LeafSpace, layout: ImageLayout) -> "ImageForm | None":
        """The form of a leaf that is an image; None where it is none."""
        integer = leaf.dtype == "uint8"
        if leaf.kind != "box" or not (len(leaf.shape) == 3 or (len(leaf.shape) == 2 and integer)):
            return None
        first = len(leaf.shape) == 3 and (
            layout == "channels_first" or (layout == "auto" and leaf.shape[0] < leaf.shape[-1])
        )
        channels, height, width = _channels_in_front(leaf.shape, first)
        if min(height, width) < SMALLEST_IMAGE:
            return None
        return cls(height, width, channels, first, integer)

    def with_channels_last(self, images: Num[Array, "batch *image"]) -> Num[Array, "batch high wide channels"]:
        """The same numbers as [batch, height, width, channels]."""
        if self.channels_first:
            return jnp.moveaxis(images, 1, -1)
        return images.reshape(-1, self.height, self.width, self.channels)

    def scaled(self, images: Num[Array, "batch *image"]) -> Float[Array, "batch high wide channels"]:
        """Floats with channels last, uint8 divided by 255."""
        floats = self.with_channels_last(images).astype(jnp.float32)
        return floats / 255 if self.integer else floats


class ImageEncoder(eqx.Module):
    """From images to one row of features each."""

    @abstractmethod
    def __call__(self, images: Num[Array, "batch *image"]) -> Float[Array, "batch features"]:
        """Encodes a batch."""


class Pooling(ImageEncoder):
    """Averages an image to at most `size` by `size` and flattens it; no parameters.

    Cell i of n over a length L averages floor(i L / n) up to, not including, ceil((i + 1) L / n): every pixel counts,
    and where n does not divide L, neighbouring cells share one. A side shorter than `size` is kept.
    """

    form: ImageForm
    size: int = eqx.field(static=True)

    @property
    def features(self) -> int:
        """Of one image."""
        return min(self.size, self.form.height) * min(self.size, self.form.width) * self.form.channels

    def __call__(self, images: Num[Array, "batch *image"]) -> Float[Array, "batch features"]:
        """Encodes a batch."""
        form = self.form
        rows, columns = min(self.size, form.height), min(self.size, form.width)
        pixels = (form.height // rows) * (form.width // columns)
        if form.integer and form.height % rows == 0 and form.width % columns == 0 and pixels <= _EXACT_PIXELS:
            return self._exact(form.with_channels_last(images), rows, columns) / (255.0 * pixels)
        if form.integer and -(-form.height // rows) < _EXACT_PIXELS:
            return self._shared(form.with_channels_last(images), rows, columns)
        floats = form.scaled(images)
        down, across = averaging(form.height, rows), averaging(form.width, columns)
        return jnp.einsum("rh,bhwc,sw->brsc", down, floats, across).reshape(len(images), -1)

    def _exact(self, images: Num[Array, "batch high wide channels"], rows: int, columns: int) -> Array:
        """Sums of whole cells in 16-bit integers, as additions of long or halved runs.

        A sum over the strided axis itself took three times as long on a CPU: 208 µs, not 72, for 32 x 128 x 128 x 3.
        """
        batch, high, wide, channels = images.shape
        strips = images.reshape(batch, rows, high // rows, wide * channels)
        side = wide // columns
        sums = jnp.sum(strips, axis=2, dtype=jnp.uint16).reshape(-1, side * channels)
        while side % 2 == 0:
            side //= 2
            sums = sums[:, : side * channels] + sums[:, side * channels :]
        sums = jnp.sum(sums.reshape(-1, side, channels), axis=1, dtype=jnp.uint16)
        return sums.reshape(batch, -1).astype(jnp.float32)

    def _shared(self, images: Num[Array, "batch high wide channels"], rows: int, columns: int) -> Array:
        """Averages of cells of which neighbours share pixels: exact sums down, then one product across.

        Cells repeat with the greatest common divisor of a side and their number: a sum down is of few slices, and the
        matrix is small. All of it as products took several times as long on a CPU.
        """
        batch, high, wide, channels = images.shape
        bands, blocks = math.gcd(high, rows), math.gcd(wide, columns)
        strips = images.reshape(batch, bands, high // bands, wide * channels)
        cells = [jnp.sum(strips[:, :, a:b], axis=2, dtype=jnp.uint16) for a, b in spans(high // bands, rows // bands)]
        sums = jnp.concatenate(cells, axis=-1).reshape(batch * rows * blocks, -1).astype(jnp.float32)
        across = np.kron(averaging(wide // blocks, columns // blocks), np.eye(channels, dtype=np.float32))
        pixels = 255 * np.array([b - a for a, b in spans(high, rows)], np.float32)
        return ((sums @ across.T).reshape(batch, rows, -1) / pixels[:, None]).reshape(batch, -1)


class NatureCnn(ImageEncoder):
    """Three convolutions and a dense layer, relu after each: Mnih et al. 2015, https://doi.org/10.1038/nature14236."""

    form: ImageForm
    convolutions: tuple[Conv, ...]
    dense: Dense

    @classmethod
    def draw(cls, rng: np.random.Generator, form: ImageForm, features: int, name: str) -> "NatureCnn":
        """For images of that form.

        Raises:
            ConfigError: they are too small for its strides.
        """
        high, wide, channels = form.height, form.width, form.channels
        convolutions: list[Conv] = []
        for size, outputs, stride in _NATURE:
            convolutions.append(Conv.draw(rng, size, channels, outputs, stride, "VALID"))
            high, wide, channels = (high - size) // stride + 1, (wide - size) // stride + 1, outputs
        if min(high, wide) < 1:
            raise ConfigError(
                f"observation {name!r} is an image of {form.height} x {form.width}: network nature_cnn needs at least "
                "36 x 36; use impala_cnn or mlp"
            )
        return cls(form, tuple(convolutions), Dense.draw(rng, high * wide * channels, features, HIDDEN_GAIN))

    def __call__(self, images: Num[Array, "batch *image"]) -> Float[Array, "batch features"]:
        """Encodes a batch."""
        x = self.form.scaled(images)
        for convolution in self.convolutions:
            x = jax.nn.relu(convolution(x))
        return jax.nn.relu(self.dense(x.reshape(len(x), -1)))


class ResidualBlock(eqx.Module):
    """x + conv(relu(conv(relu(x))))."""

    first: Conv
    second: Conv

    def __call__(self, x: Float[Array, "batch high wide channels"]) -> Float[Array, "batch high wide channels"]:
        """Keeps the shape."""
        return x + self.second(jax.nn.relu(self.first(jax.nn.relu(x))))


class Section(eqx.Module):
    """A convolution, maxima over 3 x 3 with stride 2, two residual blocks."""

    convolution: Conv
    blocks: tuple[ResidualBlock, ...]

    @classmethod
    def draw(cls, rng: np.random.Generator, inputs: int, outputs: int) -> "Section":
        """From `inputs` to `outputs` channels."""

        def conv(channels: int) -> Conv:
            return Conv.draw(rng, 3, channels, outputs, 1, "SAME")

        return cls(conv(inputs), tuple(ResidualBlock(conv(outputs), conv(outputs)) for _ in range(2)))

    def __call__(self, x: Float[Array, "batch high wide inputs"]) -> Float[Array, "batch rows columns outputs"]:
        """Halves both sides, rounding up."""
        x = self.convolution(x)
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for block in self.blocks:
            x = block(x)
        return x


class ImpalaCnn(ImageEncoder):
    """Sections of residual blocks and a dense layer: Espeholt et al. 2018, https://arxiv.org/abs/1802.01561."""

    form: ImageForm
    sections: tuple[Section, ...]
    dense: Dense

    @classmethod
    def draw(cls, rng: np.random.Generator, form: ImageForm, channels: tuple[int, ...], features: int) -> "ImpalaCnn":
        """For images of that form, with those channels in its sections."""
        widths = (form.channels, *channels)
        sections = tuple(Section.draw(rng, ins, outs) for ins, outs in zip(widths[:-1], widths[1:], strict=True))
        high, wide = form.height, form.width
        for _ in channels:
            high, wide = -(-high // 2), -(-wide // 2)
        return cls(form, sections, Dense.draw(rng, high * wide * channels[-1], features, HIDDEN_GAIN))

    def __call__(self, images: Num[Array, "batch *image"]) -> Float[Array, "batch features"]:
        """Encodes a batch."""
        x = self.form.scaled(images)
        for section in self.sections:
            x = section(x)
        return jax.nn.relu(self.dense(jax.nn.relu(x).reshape(len(x), -1)))


def averaging(length: int, cells: int) -> np.ndarray:
    """The matrix that averages `length` numbers to `cells`, as `Pooling` says; float32 [cells, length]."""
    matrix = np.zeros((cells, length), np.float32)
    for cell, (start, stop) in enumerate(spans(length, cells)):
        matrix[cell, start:stop] = 1 / (stop - start)
    return matrix


def spans(length: int, cells: int) -> list[tuple[int, int]]:
    """First and one past the last of what each cell averages, as `Pooling` says."""
    return [(cell * length // cells, -(-(cell + 1) * length // cells)) for cell in range(cells)]


def _channels_in_front(shape: tuple[int, ...], channels_first: bool) -> tuple[int, int, int]:
    """Channels, height and width of an image; without an axis for them it has one channel."""
    if len(shape) == 2:
        return 1, shape[0], shape[1]
    return (shape[0], shape[1], shape[2]) if channels_first else (shape[2], shape[0], shape[1])
