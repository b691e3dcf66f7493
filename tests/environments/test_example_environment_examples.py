"""Drawing and splitting of problems."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.environments.example_environment import draw, split_by_hash, split_by_rank, stable_unit
from penstock.types import generator

LETTERS = list("abcdefghij")


def test_draw_depends_on_the_key_and_is_not_the_first_n_for_ever():
    draws = [draw(LETTERS, 3, generator(seed)) for seed in range(20)]
    assert draw(LETTERS, 3, generator(4)) == draws[4]
    assert len({tuple(d) for d in draws}) > 15
    assert {letter for d in draws for letter in d} == set(LETTERS)


@given(size=st.integers(1, 12), n=st.integers(0, 40), seed=st.integers(0, 2**40))
def test_no_example_comes_again_before_all_have_come(size, n, seed):
    drawn = draw(range(size), n, generator(seed))
    assert len(drawn) == n
    counts = np.bincount(np.array(drawn, int), minlength=size)
    assert counts.max() - counts.min() <= 1


def test_stable_unit_is_the_same_on_every_machine():
    assert stable_unit("cat") == 0x77AF778B51ABD4 / 2**56  # the first 7 bytes of SHA-256("cat")
    assert 0 <= stable_unit("half a pair: \ud83d") < 1


def test_split_by_rank_takes_the_exact_share_and_keeps_the_order():
    train, held_out = split_by_rank(LETTERS, 0.3, str)
    assert len(held_out) == 3
    assert sorted(train + held_out) == LETTERS
    assert train == sorted(train) and held_out == sorted(held_out)
    assert held_out == sorted(sorted(LETTERS, key=stable_unit)[:3])
    assert len(split_by_rank(LETTERS, 0.001, str)[1]) == 1


def test_split_by_hash_moves_nobody_when_examples_are_added():
    words = [f"w{i}" for i in range(200)]
    train, held_out = split_by_hash(words, 0.2, str)
    more_train, more_held_out = split_by_hash([*words, *(f"new{i}" for i in range(50))], 0.2, str)
    assert set(train) <= set(more_train) and set(held_out) <= set(more_held_out)
    assert 20 <= len(held_out) <= 60


@given(st.lists(st.text(max_size=3), min_size=1, max_size=30), st.floats(0.01, 0.99))
def test_split_by_hash_keeps_equals_together_and_leaves_no_side_empty(words, fraction):
    train, held_out = split_by_hash(words, fraction, str)
    assert sorted(train + held_out) == sorted(words)
    assert not set(train) & set(held_out)
    assert (train and held_out) or len(set(words)) == 1
