"""The shared block: layout, both sides, results."""

import os

import numpy as np
import pytest

from penstock.fleet import shared_block as block_module
from penstock.fleet.shared_block import SharedBlock, block_bytes, create_memory
from penstock.types import ConfigError, LeafSpace, Spaces

_SPACES = Spaces(
    (LeafSpace("image", "box", (3, 3), "uint8"), LeafSpace("", "discrete", (), "int64", n=(2,))),
    (LeafSpace("a", "box", (2,), "float32"),),
)


@pytest.fixture
def pair():
    fd = create_memory(block_bytes(_SPACES, 2))
    blocks = SharedBlock(fd, _SPACES, 2), SharedBlock(fd, _SPACES, 2)
    os.close(fd)
    return blocks


def test_both_sides_see_the_same_arrays(pair):
    mine, other = pair
    mine.observations["image"][1] = 7
    mine.actions["a"][0] = (0.5, -0.5)
    mine.clock[2] = 1.25
    assert other.observations["image"].tolist()[1] == [[7] * 3] * 3 and not other.observations["image"][0].any()
    assert other.actions["a"].tolist() == [[0.5, -0.5], [0.0, 0.0]]
    assert other.clock[2] == 1.25
    assert not other.final_observations["image"].any() and not other.rewards.any()


def test_a_part_is_views_of_its_rows(pair):
    mine, other = pair
    part = mine.part(1, 2)
    part.observations["image"][0], part.actions["a"][0], part.rewards[:] = 5, 0.25, 3.0
    assert other.observations["image"][:, 0, 0].tolist() == [0, 5] and other.actions["a"].tolist() == [
        [0, 0],
        [0.25] * 2,
    ]
    assert other.rewards.tolist() == [0.0, 3.0]
    part.mark_lost()
    assert other.faults.tolist() == other.truncated.tolist() == [False, True] and not other.rewards.any()


def test_arrays_have_the_declared_form_and_lines_of_their_own(pair):
    block = pair[0]
    forms = {
        name: (getattr(block, name).dtype.name, getattr(block, name).shape)
        for name in ("rewards", "returns", "lengths", "first")
    }
    assert forms == {
        "rewards": ("float32", (2,)), "returns": ("float64", (2,)), "lengths": ("int64", (2,)), "first": ("bool", (2,)),
    }  # fmt: skip
    arrays = [
        block.rows,
        block.actions["a"],
        *block.observations.values(),
        *block.final_observations.values(),
    ]
    begins = sorted(array.ctypes.data for array in arrays)
    assert all(begin % 64 == 0 for begin in begins) and len(set(begins)) == len(begins)


def test_arrays_outlive_the_block_that_mapped_them(pair):
    array = pair[0].rewards
    del pair
    array[:] = 3.0
    assert array.tolist() == [3.0, 3.0]


def test_lost_actions_are_cut_by_a_fault_and_never_terminated(pair):
    block = pair[0]
    block.rewards[:], block.returns[:], block.lengths[:] = 5.0, 6.0, 7
    block.terminated[:] = block.cut[:] = block.has_final[:] = True
    block.mark_lost()
    assert block.truncated.all() and block.faults.all()
    assert not block.terminated.any() and not block.cut.any() and not block.has_final.any()
    assert not block.rewards.any() and not block.returns.any() and not block.lengths.any()


def test_results_move_to_another_block_without_what_comes_next(pair):
    old = pair[0]
    fd = create_memory(block_bytes(_SPACES, 2))
    new = SharedBlock(fd, _SPACES, 2)
    os.close(fd)
    old.rewards[:], old.truncated[1], old.final_observations["image"][1], old.observations["image"][1] = 2.0, True, 9, 4
    new.observations["image"][:] = 1
    new.take_results(old)
    assert new.rewards.tolist() == [2.0, 2.0] and new.truncated.tolist() == [False, True]
    assert (new.final_observations["image"][1] == 9).all() and (new.observations["image"] == 1).all()


def test_the_memory_cannot_shrink_and_too_little_is_refused(monkeypatch):
    fd = create_memory(4096)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 10)
    with pytest.raises(ConfigError, match="has 4096 bytes: its spaces need"):
        SharedBlock(fd, Spaces((LeafSpace("", "box", (9999,), "uint8"),), _SPACES.actions), 1)
    os.close(fd)


def test_without_memfd_a_file_that_has_no_name_serves(monkeypatch):
    monkeypatch.delattr(block_module.os, "memfd_create")
    fd = create_memory(block_bytes(_SPACES, 1))
    SharedBlock(fd, _SPACES, 1).rewards[0] = 2.0
    assert SharedBlock(fd, _SPACES, 1).rewards[0] == np.float32(2.0)
    assert os.readlink(f"/proc/self/fd/{fd}").endswith("(deleted)")
    os.close(fd)
