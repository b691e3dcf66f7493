import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.types import as_seed, fold, generator

names = st.lists(st.one_of(st.text(max_size=5), st.integers(-5, 5)), max_size=4)


def test_folding_gives_the_same_numbers_for_ever():
    assert fold(0, "cats", 1) == 7490004979545090604
    assert fold(7) == 3390981726289711890


@given(st.integers(0, 2**63), names, names)
def test_different_paths_give_different_seeds(seed: int, left: list, right: list):
    assert 0 <= fold(seed, *left) < 2**63
    assert (fold(seed, *left) == fold(seed, *right)) == (left == right)


def test_a_raw_jax_key_is_a_seed_too():
    assert as_seed(5) == 5
    assert as_seed(np.int64(5)) == 5
    assert as_seed(np.array([0, 42], np.uint32)) == as_seed(np.array([0, 42], np.uint32)) == 2599451884503925656
    assert as_seed(np.array([0, 43], np.uint32)) != as_seed(np.array([0, 42], np.uint32))


def test_generators_of_one_seed_agree():
    assert generator(3).integers(1 << 30) == generator(3).integers(1 << 30)


def test_a_typed_jax_key_is_the_seed_of_its_raw_form():
    assert as_seed(jax.random.key(42)) == as_seed(jax.random.PRNGKey(42)) == 2599451884503925656
    assert as_seed(jax.random.key(43)) != as_seed(jax.random.key(42))
