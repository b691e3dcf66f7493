import jax.numpy as jnp
import numpy as np
import pytest

from penstock.model.control.encoders import ImageForm, ImpalaCnn, NatureCnn, Pooling, averaging
from penstock.types import ConfigError, LeafSpace


def image_leaf(*shape, dtype="uint8"):
    return LeafSpace("image", "box", shape, dtype)


@pytest.mark.parametrize(
    ("shape", "dtype", "layout", "form"),
    [
        ((84, 80, 3), "uint8", "auto", (84, 80, 3, False)),
        ((4, 84, 80), "uint8", "auto", (84, 80, 4, True)),
        ((84, 80), "uint8", "auto", (84, 80, 1, False)),
        ((16, 16, 32), "float32", "channels_last", (16, 16, 32, False)),
        ((32, 40, 16), "float32", "channels_first", (40, 16, 32, True)),
    ],
)
def test_images_are_recognised(shape, dtype, layout, form):
    found = ImageForm.of(image_leaf(*shape, dtype=dtype), layout)
    assert (found.height, found.width, found.channels, found.channels_first) == form
    assert found.integer == (dtype == "uint8")


@pytest.mark.parametrize(("shape", "dtype"), [((7, 7, 3), "uint8"), ((84, 84), "float32"), ((84,), "uint8")])
def test_grids_and_matrices_are_no_images(shape, dtype):
    assert ImageForm.of(image_leaf(*shape, dtype=dtype), "auto") is None


@pytest.mark.parametrize(("height", "width", "channels_first"), [(32, 48, False), (48, 16, True), (16, 80, False)])
def test_pooling_is_the_mean_over_cells(height, width, channels_first):
    shape = (3, height, width) if channels_first else (height, width, 3)
    pooling = Pooling(ImageForm.of(image_leaf(*shape), "auto"), 16)
    images = np.random.default_rng(0).integers(0, 256, (2, *shape)).astype(np.uint8)
    last = np.moveaxis(images, 1, -1) if channels_first else images
    means = last.reshape(2, 16, height // 16, 16, width // 16, 3).mean(axis=(2, 4)) / 255
    np.testing.assert_allclose(pooling(jnp.asarray(images)), means.reshape(2, -1), rtol=1e-6)


@pytest.mark.slow
def test_white_stays_white_in_cells_too_large_for_exact_sums():
    for side in (256, 320):  # 256 pixels in a cell: exact in 16 bits; 400: by floats
        pooling = Pooling(ImageForm.of(image_leaf(side, side), "auto"), 16)
        rows = pooling(jnp.full((1, side, side), 255, jnp.uint8))
        np.testing.assert_allclose(rows, np.ones((1, 256)), rtol=1e-5)


def test_pooling_shares_pixels_where_sides_do_not_divide():
    expected = [[1 / 3, 1 / 3, 1 / 3, 0, 0], [0, 0, 1 / 3, 1 / 3, 1 / 3]]
    np.testing.assert_allclose(averaging(5, 2), expected, rtol=1e-6)
    pooling = Pooling(ImageForm.of(image_leaf(20, 17, 1, dtype="float32"), "auto"), 16)
    images = np.random.default_rng(0).standard_normal((3, 20, 17, 1)).astype(np.float32)
    np.testing.assert_allclose(pooling(jnp.asarray(images)), mean_of_cells(images), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(84, 84, 4), (97, 61, 3), (210, 160, 3), (33, 4112, 1)])
def test_pooling_of_integers_shares_pixels_too(shape):
    pooling = Pooling(ImageForm.of(image_leaf(*shape), "auto"), 16)
    images = np.random.default_rng(0).integers(0, 256, (2, *shape)).astype(np.uint8)
    np.testing.assert_allclose(pooling(jnp.asarray(images)), mean_of_cells(images / 255.0), atol=1e-6)


def mean_of_cells(images):
    """[n, height, width, channels] to [n, 16 x 16 x channels], cell by cell."""
    n, high, wide, _ = images.shape
    cells = [
        images[:, i * high // 16 : -(-(i + 1) * high // 16), j * wide // 16 : -(-(j + 1) * wide // 16)].mean((1, 2))
        for i in range(16)
        for j in range(16)
    ]
    return np.stack(cells, axis=1).reshape(n, -1)


def test_the_nature_cnn_has_its_published_sizes():
    form = ImageForm.of(image_leaf(4, 84, 84), "auto")
    network = NatureCnn.draw(np.random.default_rng(0), form, 512, "image")
    shapes = [conv.kernel.shape for conv in network.convolutions]
    assert shapes == [(8, 8, 4, 32), (4, 4, 32, 64), (3, 3, 64, 64)]
    assert network.dense.weight.shape == (3136, 512)


def test_the_impala_cnn_has_its_published_sizes():
    form = ImageForm.of(image_leaf(64, 72, 3), "auto")
    network = ImpalaCnn.draw(np.random.default_rng(0), form, (16, 32, 32), 256)
    assert [len(section.blocks) for section in network.sections] == [2, 2, 2]
    assert network.dense.weight.shape == (8 * 9 * 32, 256)


@pytest.mark.parametrize("kind", [NatureCnn, ImpalaCnn])
def test_convolutional_features_see_scaled_pixels_in_either_layout(kind):
    last, first = (ImageForm.of(image_leaf(*shape), "auto") for shape in ((36, 40, 3), (3, 36, 40)))
    floats = ImageForm.of(image_leaf(36, 40, 3, dtype="float32"), "auto")
    networks = [
        kind.draw(np.random.default_rng(0), form, *rest)
        for form in (last, first, floats)
        for rest in [(8, "image") if kind is NatureCnn else ((4, 8), 8)]
    ]
    images = np.random.default_rng(1).integers(0, 256, (2, 36, 40, 3)).astype(np.uint8)
    inputs = (images, np.moveaxis(images, -1, 1), images.astype(np.float32) / 255)
    rows = [np.asarray(network(jnp.asarray(array))) for network, array in zip(networks, inputs, strict=True)]
    assert rows[0].shape == (2, 8) and np.abs(rows[0]).max() > 0
    np.testing.assert_allclose(rows[1], rows[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(rows[2], rows[0], rtol=1e-4, atol=1e-6)


def test_images_too_small_for_the_nature_cnn_are_named_with_a_remedy():
    form = ImageForm.of(image_leaf(32, 32, 3), "auto")
    with pytest.raises(ConfigError, match="'image' is an image of 32 x 32.*use impala_cnn or mlp"):
        NatureCnn.draw(np.random.default_rng(0), form, 8, "image")
