"""Any Gymnasium space as named arrays, and back."""

import numpy as np
import pytest
from gymnasium import spaces as gym
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.fleet.spaces import PolicyActionError, SimulatorValueError, leaves_of, make_reader, make_writer, spaces_of
from penstock.types import ConfigError, LeafSpace, Spaces

_sizes = st.lists(st.integers(1, 3), min_size=0, max_size=3).map(tuple)
_leaves = st.one_of(
    st.builds(lambda shape, high: gym.Box(-1.5, high, shape, np.float32), _sizes, st.floats(0.0, 9.0, width=32)),
    st.builds(lambda shape: gym.Box(0, 255, shape, np.uint8), _sizes),
    st.builds(lambda shape: gym.Box(-np.inf, np.inf, shape, np.float64), _sizes),
    st.builds(lambda n, start: gym.Discrete(n, start=start), st.integers(1, 9), st.integers(-5, 5)),
    st.builds(
        lambda n, start: gym.MultiDiscrete(n, start=[start] * len(n)),
        st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(-5, 5),
    ),
    st.builds(lambda shape: gym.MultiBinary(shape), st.lists(st.integers(1, 3), min_size=1, max_size=2)),
    st.builds(lambda most: gym.Text(most, min_length=0, charset="abcäß✓"), st.integers(1, 9)),
)  # fmt: skip
_spaces = st.recursive(
    _leaves,
    lambda inner: (
        st.dictionaries(st.sampled_from(["left", "right", "up"]), inner, min_size=1, max_size=3).map(gym.Dict)
        | st.lists(inner, min_size=1, max_size=3).map(gym.Tuple)
    ),
    max_leaves=5,
)


def _same(one: object, other: object) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(np.all(np.asarray(one) == np.asarray(other)))


@settings(max_examples=60, deadline=None)
@given(_spaces, st.integers(0, 1000))
def test_what_is_written_is_read_again_from_its_own_row_only(space, seed):
    leaves = leaves_of(space, "observation")
    arrays = {leaf.name: leaf.zeros(3) for leaf in leaves}
    space.seed(seed)
    sample = space.sample()

    make_writer(space, arrays)(1, sample)
    read = make_reader(space, arrays)(1)

    assert _same(read, sample)
    assert space.contains(read)
    assert all((array[[0, 2]] == 0).all() for array in arrays.values())
    assert Spaces.from_values(Spaces(leaves, leaves).to_values()) == Spaces(leaves, leaves)


@pytest.mark.parametrize("dtype", [",", "f4,f4", "(2,)f4", "", 4, None, "float999"])
def test_a_leaf_whose_dtype_is_no_name_is_refused(dtype):
    leaves = leaves_of(gym.Box(0, 1, (2,)), "observation")
    values = Spaces(leaves, leaves).to_values()
    values["actions"][0]["dtype"] = dtype
    with pytest.raises(ConfigError, match="these are no spaces: .*(is no name of a dtype|not understood)"):
        Spaces.from_values(values)


def test_leaves_are_named_by_their_path_and_count_from_zero():
    space = gym.Dict(
        {
            "image": gym.Box(0, 255, (4, 4, 3), np.uint8),
            "both": gym.Tuple((gym.Discrete(3, start=-1), gym.MultiDiscrete([2, 5], start=[7, 7]))),
            "speed": gym.Box(np.array([0.0, 1.0]), np.array([2.0, 3.0]), dtype=np.float64),
            "place": gym.Box(np.array([0.0, 1.0]), np.array([np.inf, 3.0]), dtype=np.float64),
            "said": gym.Text(5),
            "lamps": gym.MultiBinary(4),
        }
    )
    assert set(leaves_of(space, "observation")) == {
        LeafSpace("image", "box", (4, 4, 3), "uint8", low=0.0, high=255.0),
        LeafSpace("both.0", "discrete", (), "int64", n=(3,), start=-1),
        LeafSpace("both.1", "multi_discrete", (2,), "int64", n=(2, 5), start=7),
        LeafSpace("speed", "box", (2,), "float64", low=0.0, high=3.0),
        LeafSpace("place", "box", (2,), "float64", low=0.0, high=None),
        LeafSpace("said", "text", (5,), "int32"),
        LeafSpace("lamps", "multi_binary", (4,), "int8"),
    }
    assert leaves_of(gym.Discrete(2), "action")[0].name == ""


def test_starts_are_taken_off_and_put_back():
    space = gym.MultiDiscrete([3, 3], start=[10, 20])
    arrays = {"": np.zeros((1, 2), np.int64)}
    make_writer(space, arrays)(0, np.array([11, 22]))
    assert arrays[""].tolist() == [[1, 2]]
    assert make_reader(space, arrays)(0).tolist() == [11, 22]


@pytest.mark.parametrize(
    "space",
    [gym.Sequence(gym.Discrete(2)), gym.Graph(gym.Discrete(2), None), gym.OneOf((gym.Discrete(2), gym.Discrete(3)))],
)
def test_what_has_no_fixed_size_is_refused_with_a_remedy(space):
    with pytest.raises(ConfigError, match=rf"action space at 'a' is a {type(space).__name__}.*wrap the simulator"):
        spaces_of(gym.Discrete(2), gym.Dict({"a": space}))


def test_empty_spaces_and_repeated_names_are_refused():
    with pytest.raises(ConfigError, match="observation space .* has no leaf"):
        leaves_of(gym.Dict({}), "observation")
    twice = gym.Dict({"a.b": gym.Discrete(2), "a": gym.Dict({"b": gym.Discrete(2)})})
    with pytest.raises(ConfigError, match=r"two leaves named 'a\.b'"):
        leaves_of(twice, "observation")


def test_box_actions_are_clipped_and_must_be_finite():
    space = gym.Box(np.array([-1.0, 0.0], np.float32), np.array([1.0, 2.0], np.float32))
    arrays = {"": np.array([[-3.0, 5.0], [0.5, np.nan]], np.float32)}
    read = make_reader(space, arrays)
    action = read(0)
    assert action.tolist() == [-1.0, 2.0] and action.dtype == np.float32
    action[:] = 9.0
    assert arrays[""][0].tolist() == [-3.0, 5.0]  # the simulator may change its action
    with pytest.raises(PolicyActionError, match="not finite"):
        read(1)


@pytest.mark.parametrize(
    ("space", "row"),
    [
        (gym.Discrete(3, start=5), 3),
        (gym.Discrete(3), -1),
        (gym.MultiDiscrete([2, 2]), [0, 2]),
        (gym.MultiBinary(2), [0, 2]),
    ],
)
def test_choices_outside_the_space_are_named(space, row):
    with pytest.raises(PolicyActionError, match="action ''"):
        make_reader(space, {"": np.array([row])})(0)


def test_integers_of_64_bits_have_the_bounds_of_all_their_elements():
    mixed = gym.Box(np.array([-5, 0]), np.array([7, 2**31]), dtype=np.int64)
    space = gym.Dict({"mixed": mixed, "all": gym.Box(-np.inf, np.inf, (2,), np.int64)})
    leaves = {leaf.name: leaf for leaf in leaves_of(space, "observation")}
    assert leaves["mixed"] == LeafSpace("mixed", "box", (2,), "int64", low=-5, high=2**31)
    with pytest.raises(ConfigError, match=r"box 'mixed' is int64 between -5 and 2147483648: .* Declare the bounds"):
        _ = leaves["mixed"].device_dtype
    with pytest.raises(ConfigError, match=r"box 'all' is int64 between -9\.22.*e\+18 and 9\.22.*e\+18"):
        _ = leaves["all"].device_dtype


F4, NAN, INF = np.float32, np.nan, np.inf
HALF = gym.Box(np.array([-1, -INF], F4), np.array([1, INF], F4))
"""Only its first element has bounds."""


def _written(space, value):
    """The row that a value becomes."""
    (leaf,) = leaves_of(space, "observation")
    array = leaf.zeros(1)
    make_writer(space, {"": array})(0, value)
    return array[0]


@pytest.mark.parametrize(
    ("space", "value", "written"),
    [
        (gym.Box(0, 2**32 - 1, (2,), np.uint64), [0, 2**32 - 1], [0, 2**32 - 1]),
        (gym.Box(0, 2**32 - 1, (2,), np.int64), [0, 2**32 - 1], [0, 2**32 - 1]),
        (gym.Box(-INF, INF, (1,), np.int64), [2**62], [2**62]),
        (gym.Box(0, 255, (2,), np.uint8), np.array([2.0, 255.0]), [2, 255]),
        (gym.Discrete(3, start=-4), -2, 2),
        (gym.Discrete(3, start=4), np.int64(4), 0),
        (gym.Discrete(3), np.array(2.0), 2),
        (gym.MultiDiscrete([3, 3], start=[0, 1]), [2, 3], [2, 2]),
        (gym.MultiBinary(2), np.array([True, False]), [1, 0]),
        (gym.Box(-INF, INF, (2,), F4), np.array([3e38, -1.0]), np.array([3e38, -1.0], F4)),
        (gym.Box(-1, 1, (2,), F4), np.array([1 + 9e-6, -1 - 9e-6], F4), np.array([1 + 9e-6, -1 - 9e-6], F4)),
        (HALF, [1, -1e30], np.array([1, -1e30], F4)),
        (gym.Box(-1, 1, (0,), F4), [], []),
        (gym.Box(-1, 1, (), F4), 0.5, 0.5),
    ],
)
def test_what_lies_in_its_space_is_written_as_it_is(space, value, written):
    assert np.array_equal(_written(space, value), written)


@pytest.mark.attack
@pytest.mark.parametrize(
    ("space", "value", "message"),
    [
        (gym.Box(-INF, INF, (2,), F4), np.array([0, NAN], F4), r"is nan at \[1\]: it must be finite"),
        (gym.Box(-INF, INF, (2,), F4), np.array([INF, 0], F4), r"is inf at \[0\]: it must be finite"),
        (gym.Box(-INF, INF, (1,), np.float64), np.array([1e39]), "is 1e.39 at .*bounds -3.4028e.38 and 3.4028e.38"),
        (gym.Box(-INF, INF, (1,), np.float16), np.array([7e4], F4), ".*bounds -65504 and 65504"),
        (gym.Box(-1, 1, (2, 2), F4), np.array([[0, 0], [0, 1.1]], F4), r"is 1.1\d* at \[1, 1\], outside .* -1 and 1"),
        (gym.Box(-1, 1, (2,), F4), np.array([0, NAN], F4), r"is nan at \[1\]"),
        (HALF, np.array([NAN, 0], F4), r"is nan at \[0\]"),
        (HALF, np.array([-1.1, 0], F4), r"is -1.1\d* at \[0\], .* -1 and 1"),
        (gym.Box(0, 9, (2,), np.int64), np.array([0, 10]), r"is 10 at \[1\], outside its space's bounds 0 and 9"),
        (gym.Box(0, 9, (2,), np.int64), np.array([0, 2**31]), r"is 2147483648 at \[1\]"),
        (gym.Box(0, 9, (1,), np.uint8), np.array([10], np.uint8), "is 10 at"),
        (gym.Box(0, 255, (1,), np.uint8), np.array([256]), r"is 256 at \[0\], outside its space's bounds 0 and 255"),
        (gym.Box(0, 255, (1,), np.uint8), np.array([NAN]), "is nan at"),
        (gym.Box(0, 255, (1,), np.uint8), np.array([2.5]), "= .2.5. has dtype float64: its space says uint8"),
        (gym.Box(-1, 1, (1,), F4), np.array([1 + 0j]), "= .1.+0.j. has dtype complex128: its space says float32"),
        (gym.Box(-1, 1, (1,), F4), [None], "= .None. has dtype object: its space says float32"),
        (gym.Box(-1, 1, (2,), F4), [[1], [1, 2]], "is no array"),
        (gym.Discrete(3, start=4), 7, "is 7, outside its space's bounds 4 and 6"),
        (gym.Discrete(3), -1, "is -1, outside its space's bounds 0 and 2"),
        (gym.Discrete(3), None, "= None has dtype object: its space says int64"),
        (gym.MultiDiscrete([3, 3], start=[0, 1]), np.array([2, 0]), r"is 0 at \[1\], outside .* 1 and 3"),
        (gym.MultiBinary(2), np.array([0, 2]), r"is 2 at \[1\], outside its space's bounds 0 and 1"),
        (gym.Text(3), 5, "is a int: its space says text"),
    ],
)
def test_what_lies_outside_its_space_is_refused_with_element_value_and_bounds(space, value, message):
    with pytest.raises(SimulatorValueError, match=f"^the observation {message}"):
        _written(space, value)


@pytest.mark.attack
def test_a_leaf_of_a_nested_space_is_refused_by_its_name():
    space = gym.Dict({"arm": gym.Tuple((gym.Discrete(2), gym.Box(0, 1, (1,), F4)))})
    arrays = {leaf.name: leaf.zeros(1) for leaf in leaves_of(space, "observation")}
    write = make_writer(space, arrays)
    with pytest.raises(SimulatorValueError, match=r"^observation 'arm.1' is nan at \[0\]: it must be finite$"):
        write(0, {"arm": (1, np.array([NAN], F4))})


def test_observations_of_another_shape_are_named():
    write = make_writer(gym.Dict({"x": gym.Box(0, 1, (2,), np.float32)}), {"x": np.zeros((1, 2), np.float32)})
    with pytest.raises(SimulatorValueError, match=r"observation 'x' has shape \(1,\): its space says \(2,\)"):
        write(0, {"x": np.zeros(1)})
    with pytest.raises(SimulatorValueError, match=r"no part 'x', which its space has: it has 'y'$"):
        write(0, {"y": np.zeros(2)})
    with pytest.raises(SimulatorValueError, match=r"no part 'x', which its space has: it is a float$"):
        write(0, 1.5)
    with pytest.raises(SimulatorValueError, match="7 characters"):
        make_writer(gym.Text(3), {"": np.zeros((1, 3), np.int32)})(0, "toolong")
    with pytest.raises(SimulatorValueError, match=r"has shape \(3,\): its space says \(2,\)"):
        make_writer(gym.MultiDiscrete([2, 2]), {"": np.zeros((1, 2), np.int64)})(0, np.zeros(3, np.int64))
