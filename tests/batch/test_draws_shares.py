import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.batch.draws import LargestRemainder


def test_size_is_proportional_and_even_is_even():
    sizes = {"a": 30, "b": 10}
    assert LargestRemainder("size").split(4, sizes) == {"a": 3, "b": 1}
    assert LargestRemainder("even").split(4, sizes) == {"a": 2, "b": 2}


def test_a_small_environment_gives_its_places_to_the_others():
    assert LargestRemainder("even").split(9, {"a": 30, "b": 1, "c": 30}) == {"a": 4, "b": 1, "c": 4}
    assert LargestRemainder("even").split(6, {"a": 1, "b": 2, "c": 3}) == {"a": 1, "b": 2, "c": 3}
    assert LargestRemainder("even").split(2, {"a": 0, "b": 5}) == {"b": 2}
    assert LargestRemainder("size").split(0, {}) == {}


def test_what_rounding_took_is_given_later():
    """One place per batch: the small environment gets its tenth, and not nothing."""
    shares, got = LargestRemainder("size"), {"big": 0, "small": 0}
    for _ in range(100):
        for name, places in shares.split(1, {"big": 90, "small": 10}).items():
            got[name] += places
    assert got == {"big": 90, "small": 10}


@given(
    st.sampled_from(["size", "even"]),
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 40), min_size=1),
    st.integers(1, 12),
    st.data(),
)
def test_every_place_is_given_and_none_beyond_what_is_there(balance, sizes, batches, data):
    shares = LargestRemainder(balance)
    total = sum(sizes.values())
    for _ in range(batches):
        places = data.draw(st.integers(0, total))
        split = shares.split(places, sizes)
        assert sum(split.values()) == places
        assert all(0 <= granted <= sizes[name] for name, granted in split.items())
        if balance == "size" and total:
            for name, granted in split.items():
                assert abs(granted - places * sizes[name] / total) < 1 + 1e-9


@pytest.mark.parametrize("balance", ["size", "even"])
def test_shares_are_exact_over_many_batches(balance):
    shares, sizes = LargestRemainder(balance), {"a": 50, "b": 30, "c": 21}
    got = dict.fromkeys(sizes, 0)
    for _ in range(300):
        for name, places in shares.split(7, sizes).items():
            got[name] += places
    for name, size in sizes.items():
        assert abs(got[name] - 2100 * (size / 101 if balance == "size" else 1 / 3)) <= 1
