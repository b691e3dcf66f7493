"""One part of a process: what is carried, lost, held back, and refused; without a process."""

import os

import numpy as np
import pytest

from penstock.fleet.env_process import ProcessPart
from penstock.fleet.shared_block import SharedBlock, block_bytes, create_memory
from penstock.types import LeafSpace, Spaces

_SPACES = Spaces((LeafSpace("", "box", (2,), "float32"),), (LeafSpace("", "discrete", (), "int64", n=(3,)),))
_ACTIONS = {"": np.array([1, 2])}


@pytest.fixture
def part():
    return ProcessPart(3, 1, np.array([6, 7]))


def begin_life(part):
    """Rows of a new block, with the part's life begun on them."""
    fd = create_memory(block_bytes(_SPACES, 4))
    rows = SharedBlock(fd, _SPACES, 4).part(2, 4)
    os.close(fd)
    rows.slots[:] = part.slots
    part.begin_life(rows)
    return rows


def test_arrivals_and_actions_alternate(part):
    rows = begin_life(part)
    assert part.fresh and not part.resting and not part.waits_for_answer
    arrival = part.arrive(0.5)
    assert (arrival.process, arrival.part, arrival.simulate_s) == (3, 1, 0.5)
    assert arrival.slots.tolist() == [6, 7] and not arrival.acted.any() and part.resting
    assert part.act(_ACTIONS) and rows.actions[""].tolist() == [1, 2]
    assert part.released() is None and part.waits_for_answer and not part.resting
    with pytest.raises(ValueError, match="part 1 of process 3 has no open arrival"):
        part.act(_ACTIONS)
    assert part.arrive(0.5).acted.all() and not part.waits_for_answer


def test_actions_of_another_shape_are_refused_and_leave_the_arrival_open(part):
    begin_life(part)
    part.arrive(0.0)
    with pytest.raises(ValueError, match=r"have shape \(3,\): they must have \(2,\)"):
        part.act({"": np.arange(3)})
    assert part.act(_ACTIONS)


def test_what_a_retired_life_said_is_said_by_the_next_one_that_arrives(part):
    rows = begin_life(part)
    part.arrive(0.0)
    part.act(_ACTIONS)
    rows.rewards[:], rows.final_observations[""][:] = 2.0, 7.0
    part.carry()
    assert not part.resting
    part.end_life()
    begin_life(part)
    part.end_life()  # it failed before it arrived
    begin_life(part)
    arrival = part.arrive(0.0)
    assert arrival.rewards.tolist() == [2.0, 2.0] and arrival.final_observations[""].tolist() == [[7.0, 7.0]] * 2
    assert not arrival.faults.any() and part.lost_actions == 0


def test_an_arrival_is_held_back_while_the_last_one_is_open(part):
    begin_life(part)
    part.arrive(0.0)
    part.end_life()
    rows = begin_life(part)
    assert part.arrive(0.25) is None and part.resting and part.lost_actions == 0
    assert not part.act(_ACTIONS), "they are lost"
    arrival = part.released()
    assert arrival.simulate_s == 0.25 and arrival.faults.all() and arrival.truncated.all() and arrival.acted.all()
    assert not rows.actions[""].any() and part.lost_actions == 2 and part.released() is None


def test_actions_for_a_part_that_is_gone_are_lost(part):
    begin_life(part)
    part.arrive(0.0)
    part.end_life()
    assert not part.act(_ACTIONS) and part.released() is None and part.waits_for_answer
    begin_life(part)
    assert part.arrive(0.0).faults.all() and part.lost_actions == 2
