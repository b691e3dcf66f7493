"""From named observations to one row of features: each leaf by itself, side by side, then an MLP.

Leaves that are no images, and images under ``network: mlp``, are flattened and go through the MLP together;
convolutional images have their own features beside the MLP's.

Images go through averaging to a small grid, the Nature CNN or the IMPALA CNN. They come as the simulator gives them:
uint8 or float, [height, width, channels], [channels, height, width] or [height, width]; uint8 is divided by 255.

Not covered: attention over patches, pretrained encoders.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num

from penstock.model.control.config import ControlModelConfig, ImageLayout
from penstock.model.control.layers import HIDDEN_GAIN, Conv, Dense, Mlp
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


class LeafEncoder(eqx.Module):
    """From one leaf to a row of numbers."""

    @abstractmethod
    def __call__(self, values: Num[Array, "batch *leaf"]) -> Float[Array, "batch features"]:
        """Encodes a batch."""


class Pooling(LeafEncoder):
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


class NatureCnn(LeafEncoder):
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


class ImpalaSection(eqx.Module):
    """A convolution, maxima over 3 x 3 with stride 2, two residual blocks."""

    convolution: Conv
    blocks: tuple[ResidualBlock, ...]

    @classmethod
    def draw(cls, rng: np.random.Generator, inputs: int, outputs: int) -> "ImpalaSection":
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


class ImpalaCnn(LeafEncoder):
    """Sections of residual blocks and a dense layer: Espeholt et al. 2018, https://arxiv.org/abs/1802.01561."""

    form: ImageForm
    sections: tuple[ImpalaSection, ...]
    dense: Dense

    @classmethod
    def draw(cls, rng: np.random.Generator, form: ImageForm, channels: tuple[int, ...], features: int) -> "ImpalaCnn":
        """For images of that form, with those channels in its sections."""
        widths = (form.channels, *channels)
        sections = tuple(ImpalaSection.draw(rng, ins, outs) for ins, outs in zip(widths[:-1], widths[1:], strict=True))
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


class NumberEncoder(LeafEncoder):
    """The leaf's numbers as they are, times a constant; no parameters."""

    features: int = eqx.field(static=True)
    scale: float = eqx.field(static=True)

    def __call__(self, values: Num[Array, "batch *leaf"]) -> Float[Array, "batch features"]:
        """Encodes a batch."""
        return values.reshape(-1, self.features).astype(jnp.float32) * self.scale


class OneHot(LeafEncoder):
    """Each element as a row with a single 1; values beyond the last choice count as it. No parameters."""

    n: tuple[int, ...] = eqx.field(static=True)

    def __call__(self, values: Num[Array, "batch *leaf"]) -> Float[Array, "batch features"]:
        """Encodes a batch."""
        flat = values.reshape(len(values), len(self.n))
        if flat.dtype == jnp.uint32:
            flat = jnp.minimum(flat, np.uint32(2**31 - 1))  # larger ones would be negative below
        flat = flat.astype(jnp.int32)
        if len(set(self.n)) == 1:
            choices = jnp.clip(flat, 0, self.n[0] - 1)
            return jax.nn.one_hot(choices, self.n[0], dtype=jnp.float32).reshape(len(values), -1)
        rows = [jax.nn.one_hot(jnp.clip(flat[:, i], 0, n - 1), n, dtype=jnp.float32) for i, n in enumerate(self.n)]
        return jnp.concatenate(rows, axis=-1)


class Embedding(LeafEncoder):
    """Each element as a learned row; one table, in which the elements' choices follow each other."""

    table: Float[Array, "choices width"]
    n: tuple[int, ...] = eqx.field(static=True)

    def __call__(self, values: Num[Array, "batch *leaf"]) -> Float[Array, "batch features"]:
        """Encodes a batch."""
        flat = values.reshape(len(values), len(self.n)).astype(jnp.int32)
        starts = np.concatenate([[0], np.cumsum(self.n)[:-1]]).astype(np.int32)
        return self.table[starts + jnp.clip(flat, 0, np.asarray(self.n, np.int32) - 1)].reshape(len(values), -1)


class TextEncoder(LeafEncoder):
    """The mean of the code points' learned rows; an empty text is zero. Order is not seen."""

    table: Float[Array, "vocabulary width"]

    def __call__(self, values: Num[Array, "batch *leaf"]) -> Float[Array, "batch features"]:
        """Encodes a batch of code points, −1 after the end."""
        codes: Int[Array, "batch length"] = values.reshape(len(values), -1).astype(jnp.int32)
        there = (codes >= 0).astype(jnp.float32)
        rows = self.table[jnp.clip(codes, 0, len(self.table) - 1)]
        total = jnp.einsum("bl,blw->bw", there, rows)
        return total / jnp.maximum(there.sum(axis=-1, keepdims=True), 1.0)


MOST_DEVIATIONS = 10.0
"""What a normalised number is clipped to."""
_LEAST_VARIANCE = 1e-8
_MOST_COUNTED = 1e15  # numbers beyond count as this in the statistics, since the sum of their squares would overflow


class ObservationStatistics(eqx.Module):
    """Mean and variance of each number in observations, over all steps that were learned from; no gradient goes there.

    Parts are merged as by Chan, Golub & LeVeque 1979 (https://doi.org/10.1007/978-3-642-51461-6_3), so that the result
    is that of all steps at once.

    Attributes:
        mean: Of each leaf, float32; 0 before the first step.
        variance: Of each leaf, float32; 1 before the first step.
        count: Of steps.
        names: The leaves' names.
    """

    mean: tuple[Float[Array, "*leaf"], ...]
    variance: tuple[Float[Array, "*leaf"], ...]
    count: Float[Array, ""]
    names: tuple[str, ...] = eqx.field(static=True)

    @classmethod
    def of_none(cls, config: ControlModelConfig, leaves: tuple[LeafSpace, ...]) -> "ObservationStatistics":
        """Before the first step.

        Raises:
            ConfigError: no leaf is of numbers that could be normalised.
        """
        numbers = [leaf for leaf in leaves if _is_of_numbers(leaf, config)]
        if not numbers:
            raise ConfigError(
                f"model.normalize_observations is true, but no observation is a box of floats beside images (of "
                f"{_named(leaves)}): leave it out"
            )
        shapes = [leaf.shape for leaf in numbers]
        return cls(
            tuple(jnp.zeros(shape, jnp.float32) for shape in shapes),
            tuple(jnp.ones(shape, jnp.float32) for shape in shapes),
            jnp.zeros((), jnp.float32),
            tuple(leaf.name for leaf in numbers),
        )

    def __call__(self, observations: Mapping[str, Array]) -> dict[str, Array]:
        """The observations, [batch, …] or [time, batch, …], with numbers normalised."""
        normalised = {
            name: jnp.clip(
                (observations[name] - mean) * jax.lax.rsqrt(variance + _LEAST_VARIANCE),
                -MOST_DEVIATIONS, MOST_DEVIATIONS,
            )
            for name, mean, variance in zip(self.names, self.mean, self.variance, strict=True)
        }  # fmt: skip
        return {**observations, **normalised}

    def with_steps(
        self, observations: Mapping[str, Array], counted: Bool[Array, "time batch"]
    ) -> "ObservationStatistics":
        """With these steps.

        Args:
            observations: [time or more, batch, …]; what comes after the last step does not count.
            counted: Which steps do.
        """
        more = jnp.sum(counted, dtype=jnp.float32)
        total = jnp.maximum(self.count + more, 1.0)

        def merged(name: str, mean: Array, variance: Array) -> tuple[Array, Array]:
            numbers = observations[name][: len(counted)].astype(jnp.float32)
            numbers = jnp.clip(numbers, -_MOST_COUNTED, _MOST_COUNTED)
            here = counted.reshape(*counted.shape, *(1,) * (numbers.ndim - 2))
            own = jnp.sum(jnp.where(here, numbers, 0.0), axis=(0, 1)) / jnp.maximum(more, 1.0)
            squares = jnp.sum(jnp.where(here, (numbers - own) ** 2, 0.0), axis=(0, 1))
            apart, share = own - mean, more / total
            summed = variance * self.count + squares + apart**2 * self.count * share
            return mean + apart * share, jnp.where(more > 0, summed / total, variance)

        pairs = [merged(*each) for each in zip(self.names, self.mean, self.variance, strict=True)]
        means, variances = zip(*pairs, strict=True)
        return ObservationStatistics(means, variances, self.count + more, self.names)


class Encoder(eqx.Module):
    """All observations of one step, as one row of features.

    Attributes:
        flat: Encoders of the leaves that go through the MLP.
        images: Encoders of the leaves that have features of their own.
        mlp: None where there is no flat leaf.
        flat_names: The leaves' names.
        image_names: Names of the leaves in `images`, in its order.
    """

    flat: tuple[LeafEncoder, ...]
    images: tuple[LeafEncoder, ...]
    mlp: Mlp | None
    flat_names: tuple[str, ...] = eqx.field(static=True)
    image_names: tuple[str, ...] = eqx.field(static=True)
    features: int = eqx.field(static=True)

    @classmethod
    def draw(cls, rng: np.random.Generator, config: ControlModelConfig, leaves: tuple[LeafSpace, ...]) -> "Encoder":
        """An encoder for those observations.

        Raises:
            ConfigError: a convolutional network without an image, or with one that is too small.
        """
        images = {leaf.name: form for leaf in leaves if (form := ImageForm.of(leaf, config.image_layout))}
        if config.network == "mlp":
            networks: dict[str, LeafEncoder] = {}
        else:
            networks = {name: _convolutional(rng, config, form, name) for name, form in images.items()}
            if not networks:
                raise ConfigError(
                    f"network is {config.network!r}, but no observation is an image (of {_named(leaves)}): set "
                    "network: mlp"
                )
        flat: dict[str, LeafEncoder] = {}
        width = 0
        for leaf in leaves:
            if leaf.name not in networks:
                form = images.get(leaf.name)
                encoder, more = _flat(rng, config, leaf) if form is None else _pooled(form, config.pooled_size)
                flat[leaf.name] = encoder
                width += more
        mlp = Mlp.draw(rng, width, config.hidden_sizes, config.activation) if flat else None
        features = (config.hidden_sizes[-1] if flat else 0) + config.image_features * len(networks)
        return cls(tuple(flat.values()), tuple(networks.values()), mlp, tuple(flat), tuple(networks), features)

    def __call__(self, observations: Mapping[str, Array]) -> Float[Array, "batch features"]:
        """Encodes [batch, …] arrays by leaf name."""
        rows = [network(observations[name]) for name, network in zip(self.image_names, self.images, strict=True)]
        if self.mlp is not None:
            flat = [encoder(observations[name]) for name, encoder in zip(self.flat_names, self.flat, strict=True)]
            rows.insert(0, self.mlp(_joined(flat)))
        return _joined(rows)


def _joined(rows: list[Array]) -> Float[Array, "batch features"]:
    return rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=-1)


def _convolutional(rng: np.random.Generator, config: ControlModelConfig, form: ImageForm, name: str) -> LeafEncoder:
    if config.network == "nature_cnn":
        return NatureCnn.draw(rng, form, config.image_features, name)
    return ImpalaCnn.draw(rng, form, config.impala_channels, config.image_features)


def _pooled(form: ImageForm, size: int) -> tuple[Pooling, int]:
    pooling = Pooling(form, size)
    return pooling, pooling.features


def _flat(rng: np.random.Generator, config: ControlModelConfig, leaf: LeafSpace) -> tuple[LeafEncoder, int]:
    """The encoder of a leaf that is no image, and the width of its rows."""
    elements = math.prod(leaf.shape)
    if leaf.kind == "text":
        return TextEncoder(_table(rng, config.text_vocabulary, config.embedding_size)), config.embedding_size
    choices = leaf.n
    if leaf.kind == "box" and config.grid_values is not None and np.issubdtype(np.dtype(leaf.dtype), np.integer):
        return OneHot((config.grid_values,) * elements), config.grid_values * elements
    if leaf.kind not in ("discrete", "multi_discrete"):
        return NumberEncoder(elements, 1 / 255 if leaf.dtype == "uint8" else 1.0), elements
    if max(choices) <= config.one_hot_limit:
        return OneHot(choices), sum(choices)
    return Embedding(_table(rng, sum(choices), config.embedding_size), choices), config.embedding_size * len(choices)


def _is_of_numbers(leaf: LeafSpace, config: ControlModelConfig) -> bool:
    floats = leaf.kind == "box" and np.issubdtype(np.dtype(leaf.dtype), np.floating)
    return floats and ImageForm.of(leaf, config.image_layout) is None


def _table(rng: np.random.Generator, rows: int, width: int) -> Array:
    """First embeddings: standard normal, so that each element is about 1, as a one-hot's is."""
    return jnp.asarray(rng.standard_normal((rows, width), np.float32))


def _named(leaves: tuple[LeafSpace, ...]) -> str:
    return ", ".join(f"{leaf.name!r} {leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
