"""Alternation of arrivals and actions, and deadlines, with the test as the simulator process."""

import json
import os
import socket
import time

import numpy as np
import pytest

from penstock.fleet.config import SimulatorLimits
from penstock.fleet.env_process import ProcessSlot, ProcessState
from penstock.fleet.messages import ARRIVED, READY, RETIRING, STEP
from penstock.fleet.shared_block import PHASE, SINCE, SharedBlock, SimulatorPhase, block_bytes, create_memory
from penstock.types import LeafSpace, Spaces

_SPACES = Spaces((LeafSpace("", "box", (2,), "float32"),), (LeafSpace("", "discrete", (), "int64", n=(3,)),))
_LIMITS = SimulatorLimits(spawn_timeout_s=50.0, reset_timeout_s=20.0, step_timeout_s=10.0, backoff_s=1.0)


class _Life:
    """The other end of a slot's socket."""

    def __init__(self, slot, ticket=0):
        self.slot, self.channel = slot, slot.open_channel(ticket, time.monotonic())

    def ready(self):
        rows = len(self.slot.slots)
        fd = create_memory(block_bytes(_SPACES, rows))
        self.block = SharedBlock(fd, _SPACES, rows)
        self.block.clock[SINCE] = time.monotonic()
        self.block.clock[PHASE] = SimulatorPhase.RESETTING
        socket.send_fds(self.channel, [READY + json.dumps({"spaces": _SPACES.to_values()}).encode()], [fd])
        os.close(fd)
        assert self.slot.receive() is None and self.slot.stage is ProcessState.UP
        return self

    def say(self, token=ARRIVED + b"\0"):
        self.block.clock[PHASE] = SimulatorPhase.RESTING
        self.channel.send(token)
        return self.slot.receive()

    def end(self):
        self.channel.close()
        for fd in self.slot.release():
            os.close(fd)


@pytest.fixture
def slot():
    slot = ProcessSlot(3, "t", np.array([6, 7]), _LIMITS, lambda task, spaces: None)
    yield slot
    for fd in slot.release():
        os.close(fd)


_ACTIONS = {"": np.array([1, 2])}


def test_the_first_arrival_had_no_action_and_later_ones_have(slot):
    life = _Life(slot).ready()
    life.block.observations[""][:] = 5.0
    arrival = life.say()
    assert (arrival.process, arrival.slots.tolist(), arrival.acted.tolist()) == (3, [6, 7], [False, False])
    assert arrival.observations[""].tolist() == [[5.0, 5.0]] * 2 and not arrival.truncated.any()
    assert slot.act(_ACTIONS) is None
    assert life.channel.recv(9) == STEP + b"\0" and life.block.actions[""].tolist() == [1, 2]
    assert life.say().acted.all()
    life.end()


def test_a_lost_action_is_answered_once_and_late_lives_wait_for_it(slot):
    life = _Life(slot).ready()
    life.say()
    life.end()  # between arrival and action
    life = _Life(slot, 1).ready()
    assert life.say() is None
    arrival = slot.act(_ACTIONS)
    assert arrival.faults.all() and arrival.truncated.all() and arrival.acted.all() and slot.lost_actions == 2
    slot.act(_ACTIONS)
    assert life.channel.recv(9) == STEP + b"\0"
    assert life.say().acted.all() and slot.lost_actions == 2
    life.end()


def test_lives_that_fail_before_they_arrive_answer_nothing(slot):
    life = _Life(slot).ready()
    life.say()
    slot.act(_ACTIONS)
    life.end()
    _Life(slot, 1).ready().end()
    life = _Life(slot, 2).ready()
    assert life.say().faults.all() and slot.lost_actions == 2 and slot.life == 2
    life.end()


def test_a_retired_life_has_answered_whatever_becomes_of_the_next_one(slot):
    life = _Life(slot).ready()
    life.say()
    slot.act(_ACTIONS)
    life.block.rewards[:] = 2.0
    life.block.terminated[0] = True
    assert life.say(RETIRING) is None and slot.retired and slot.stage is ProcessState.ENDING
    life.end()
    life = _Life(slot, 1).ready()
    life.end()
    assert not slot.retired
    life = _Life(slot, 2).ready()
    arrival = life.say()
    assert arrival.rewards.tolist() == [2.0, 2.0] and arrival.terminated.tolist() == [True, False]
    assert not arrival.faults.any() and slot.lost_actions == 0
    life.end()


@pytest.mark.parametrize(
    ("phase", "limit_s", "field"),
    [
        (SimulatorPhase.STEPPING, 10.0, "step_timeout_s"),
        (SimulatorPhase.RESETTING, 20.0, "reset_timeout_s"),
        (SimulatorPhase.BUILDING, 50.0, "spawn_timeout_s"),
        (SimulatorPhase.RESTING, 10.0, "step_timeout_s"),  # it did not even take the token
    ],
)
def test_each_phase_has_its_deadline(slot, phase, limit_s, field):
    life = _Life(slot).ready()
    life.say()
    assert slot.overdue(time.monotonic() + 1000.0) is None  # nobody asked it for anything
    slot.act(_ACTIONS)
    life.block.clock[SINCE] = now_s = time.monotonic()
    life.block.clock[PHASE] = phase
    assert slot.overdue(now_s + limit_s - 0.1) is None
    assert field in slot.overdue(now_s + limit_s + 0.1)
    life.block.clock[SINCE] = now_s + 5.0  # the next of its simulators is at work
    assert slot.overdue(now_s + limit_s + 0.1) is None
    life.end()


def test_an_answer_that_is_not_taken_yet_was_in_time(slot):
    life = _Life(slot).ready()
    life.say()
    slot.act(_ACTIONS)
    life.channel.send(ARRIVED + b"\0")
    assert slot.overdue(time.monotonic() + 1000.0) is None
    life.end()


@pytest.fixture
def parted():
    slot = ProcessSlot(0, "t", np.arange(4), _LIMITS, lambda task, spaces: None, parts=2)
    yield slot
    for fd in slot.release():
        os.close(fd)


def _say_of_part(life, part):
    return life.say(ARRIVED + bytes([part]))


def test_parts_alternate_on_their_own(parted):
    life = _Life(parted).ready()
    assert [_say_of_part(life, part).slots.tolist() for part in (0, 1)] == [[0, 1], [2, 3]]
    parted.act(_ACTIONS, 1)
    assert life.channel.recv(9) == STEP + b"\1" and life.block.actions[""].tolist() == [0, 0, 1, 2]
    arrival = _say_of_part(life, 1)
    assert (arrival.part, arrival.acted.tolist()) == (1, [True, True])
    with pytest.raises(ValueError, match="have shape"):
        parted.act({"": np.arange(4)}, 0)
    parted.act(_ACTIONS, 0)
    with pytest.raises(ValueError, match="part 0 of process 0 has no open arrival"):
        parted.act(_ACTIONS, 0)
    life.end()


def test_a_process_is_late_while_one_of_its_parts_is_owed(parted):
    life = _Life(parted).ready()
    _say_of_part(life, 0), _say_of_part(life, 1)
    assert parted.overdue(time.monotonic() + 1000.0) is None
    parted.act(_ACTIONS, 1)
    assert "step_timeout_s" in parted.overdue(time.monotonic() + 11.0)
    life.end()


def test_each_part_loses_its_own_actions(parted):
    life = _Life(parted).ready()
    _say_of_part(life, 0), _say_of_part(life, 1)
    parted.act(_ACTIONS, 0)
    life.end()  # with the actions of part 0; part 1 is not acted on yet
    assert parted.abandoned_actions == 2
    life = _Life(parted, 1).ready()
    assert _say_of_part(life, 0).faults.all() and parted.lost_actions == 2 and parted.abandoned_actions == 0
    assert _say_of_part(life, 1) is None, "held back"
    held = parted.act(_ACTIONS, 1)
    assert held.part == 1 and held.faults.all() and parted.lost_actions == 4
    life.end()


def test_a_part_that_there_is_not_is_nonsense(parted):
    life = _Life(parted).ready()
    assert _say_of_part(life, 2) is None and parted.stage is ProcessState.DYING and "it said" in parted.reason
    life.end()


def test_being_made_has_a_deadline(slot):
    life = _Life(slot)
    slot.forked(0, os.open(os.devnull, os.O_RDONLY), time.monotonic())
    assert slot.overdue(time.monotonic() + 49.0) is None
    assert "spawn_timeout_s = 50" in slot.overdue(time.monotonic() + 51.0)
    life.end()


def test_an_answered_action_ends_a_row_of_failures(slot):
    assert [slot.record.failed(0.0), slot.record.failed(0.0)] == [1.0, 2.0]
    life = _Life(slot).ready()
    life.say()
    assert slot.record.failed(0.0) == 4.0
    slot.act(_ACTIONS)
    life.say()
    assert slot.record.failed(0.0) == 1.0
    life.end()
