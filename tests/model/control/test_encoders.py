import jax.numpy as jnp
import numpy as np
import pytest

from penstock.model.control import ControlModelConfig
from penstock.model.control.encoders import (
    Embedding,
    Encoder,
    NumberEncoder,
    ObservationStatistics,
    OneHot,
    TextEncoder,
)
from penstock.types import ConfigError, LeafSpace

IMAGE = LeafSpace("image", "box", (36, 36, 3), "uint8")
VECTOR = LeafSpace("vector", "box", (2, 3), "float64")
CHOICE = LeafSpace("choice", "discrete", (), "int64", (5,))
MANY = LeafSpace("many", "multi_discrete", (2,), "int64", (3, 100))
COINS = LeafSpace("coins", "multi_binary", (4,), "int8")
TEXT = LeafSpace("text", "text", (6,), "int32")
ALL = (IMAGE, VECTOR, CHOICE, MANY, COINS, TEXT)


def encoder(*leaves, **fields):
    config = ControlModelConfig(**({"hidden_sizes": (8,), "image_features": 16} | fields))
    return Encoder.draw(np.random.default_rng(0), config, leaves)


def test_discrete_values_become_one_hot_rows():
    assert OneHot((3,))(jnp.array([2, 0])).tolist() == [[0, 0, 1], [1, 0, 0]]
    assert OneHot((2, 3))(jnp.array([[1, 2], [0, 1]])).tolist() == [[0, 1, 0, 0, 1], [1, 0, 0, 1, 0]]
    assert OneHot((2,) * 2)(jnp.array([[1, 9]])).tolist() == [[0, 1, 0, 1]]  # beyond the last counts as it


def test_large_unsigned_numbers_count_as_the_last_choice():
    numbers = jnp.array([[0, 2**31, 2**32 - 1]], jnp.uint32)
    assert OneHot((2,) * 3)(numbers).tolist() == [[1, 0, 0, 1, 0, 1]]


def test_embeddings_follow_each_other_in_one_table():
    table = jnp.arange(10.0).reshape(5, 2)
    assert Embedding(table, (2, 3))(jnp.array([[1, 0], [0, 2]])).tolist() == [[2, 3, 4, 5], [0, 1, 8, 9]]


def test_text_is_the_mean_of_its_code_points():
    text = TextEncoder(jnp.array([[0.0, 1.0], [2.0, 3.0], [10.0, 20.0]]))
    codes = jnp.array([[0, 1, -1], [-1, -1, -1], [1, 7, -1]])  # 7 is beyond the table: its last row
    assert text(codes).tolist() == [[1, 2], [0, 0], [6, 11.5]]


def test_bytes_are_scaled_and_other_numbers_are_not():
    assert NumberEncoder(2, 1 / 255)(jnp.array([[255, 51]], jnp.uint8)).tolist() == [[1.0, pytest.approx(0.2)]]
    kinds = [encoder(LeafSpace("", "box", (2,), dtype)).flat[0].scale for dtype in ("uint8", "int32", "float32")]
    assert kinds == [1 / 255, 1, 1]


def test_every_leaf_is_encoded_and_the_sizes_add_up(draw):
    made = encoder(*ALL, pooled_size=2, embedding_size=7)
    widths = 2 * 2 * 3 + 6 + 5 + 2 * 7 + 4 + 7
    assert made.mlp.layers[0].weight.shape == (widths, 8)
    assert made.features == 8 and made(draw(ALL, 3)).shape == (3, 8)
    base = made(draw(ALL, 3))
    for leaf in ALL:  # each is seen
        assert np.abs(np.asarray(made(draw(ALL, 3) | draw((leaf,), 3, seed=1)) - base)).max() > 1e-4, leaf.name


def test_convolutions_stand_beside_the_mlp(draw):
    made = encoder(IMAGE, VECTOR, network="nature_cnn")
    assert made.image_names == ("image",) and made.flat_names == ("vector",)
    assert made.features == 24 and made(draw((IMAGE, VECTOR), 2)).shape == (2, 24)
    alone = encoder(IMAGE, network="impala_cnn", impala_channels=(4,))
    assert alone.mlp is None and alone.features == 16 and alone(draw((IMAGE,), 2)).shape == (2, 16)


def test_few_choices_are_one_hot_and_many_are_embedded():
    few, many = encoder(CHOICE).flat[0], encoder(CHOICE, one_hot_limit=4).flat[0]
    assert few == OneHot((5,)) and many.table.shape == (5, 32)


def test_grids_become_one_hot_where_asked():
    grid = LeafSpace("grid", "box", (2, 2, 1), "uint8")
    assert encoder(grid, grid_values=4).flat[0].n == (4, 4, 4, 4)
    assert encoder(grid).flat[0].scale == 1 / 255


def test_a_convolutional_network_without_an_image_is_an_error():
    with pytest.raises(ConfigError, match=r"no observation is an image \(of 'vector' float64\[2, 3\]\): set network"):
        encoder(VECTOR, network="impala_cnn")


def test_statistics_are_of_what_counts_whatever_the_rest_holds():
    leaf = LeafSpace("speed", "box", (2,), "float32")
    picture = LeafSpace("seen", "box", (32, 32), "uint8")
    none = ObservationStatistics.of_none(ControlModelConfig(), (leaf, picture))
    rng = np.random.default_rng(0)
    speeds = (rng.normal(size=(6, 3, 2)) * [3, 0.1] + [1000, -2]).astype(np.float32)
    counted = rng.random((5, 3)) < 0.6
    counts = jnp.asarray(counted)
    speeds[:5][~counted] = np.nan
    observations = {"speed": jnp.asarray(speeds), "seen": jnp.zeros((6, 3, 32, 32), jnp.uint8)}
    untouched = none(observations)
    np.testing.assert_array_equal(untouched["seen"], observations["seen"])
    np.testing.assert_allclose(untouched["speed"][:5][counted][:, 1], speeds[:5][counted][:, 1], rtol=1e-6)
    parts = none.with_steps({"speed": observations["speed"][:3]}, counts[:2])
    parts = parts.with_steps({"speed": observations["speed"][2:]}, jnp.zeros((3, 3), bool))  # nothing counts
    parts = parts.with_steps({"speed": observations["speed"][2:]}, counts[2:])
    used = speeds[:5][counted].astype(np.float64)
    assert parts.names == ("speed",) and float(parts.count) == len(used)
    np.testing.assert_allclose(parts.mean[0], used.mean(0), rtol=1e-6)
    np.testing.assert_allclose(parts.variance[0], used.var(0), rtol=1e-4)
    normalised = np.asarray(parts(observations)["speed"])[:5][counted]
    np.testing.assert_allclose(normalised, (used - used.mean(0)) / used.std(0), atol=2e-3)
    assert float(parts({"speed": jnp.full((1, 2), 1e6)})["speed"].max()) == 10


@pytest.mark.parametrize(("dtype", "large"), [("float32", 3e38), ("float32", -1e20), ("float16", 6e4)])
def test_statistics_of_the_largest_numbers_stay_numbers(dtype, large):
    """A feature that is the largest float now and then is worth little; it must not make the policy NaN."""
    statistics = ObservationStatistics.of_none(ControlModelConfig(), (LeafSpace("range", "box", (2,), dtype),))
    ranges = np.array([[[large, 1.0], [0.0, 3.0]]] * 40, dtype)
    for _ in range(2):
        statistics = statistics.with_steps({"range": jnp.asarray(ranges)}, jnp.ones((40, 2), bool))
        assert np.isfinite(np.asarray(statistics({"range": jnp.asarray(ranges)})["range"])).all()
    np.testing.assert_allclose([statistics.mean[0][1], statistics.variance[0][1]], [2.0, 1.0])
    assert dtype == "float32" or abs(float(statistics.mean[0][0]) - large / 2) < 30


def test_normalising_without_numbers_is_an_error():
    leaves = (LeafSpace("seen", "box", (32, 32), "uint8"), LeafSpace("kind", "discrete", (), "int64", (3,)))
    with pytest.raises(
        ConfigError, match=r"no observation is a box of floats beside images \(of 'seen' uint8\[32, 32\]"
    ):
        ObservationStatistics.of_none(ControlModelConfig(), leaves)
