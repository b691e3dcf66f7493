"""A simulator process's own part, without a process: a thread plays it, the test its parent."""

import json
import os
import random
import re
import socket
import threading

import gymnasium.spaces as gym
import numpy as np
import pytest
from tests.fleet.toys import Counter

from penstock.fleet.env_worker import ExitCode, run_env_worker
from penstock.fleet.messages import (
    ARRIVED,
    CLOSE,
    FAILED,
    READY,
    RETIRING,
    STEP,
    EnvWorkerSpec,
    SimulatorFailure,
    packet_socketpair,
)
from penstock.fleet.shared_block import SharedBlock
from penstock.types import Spaces

_ARRIVED = ARRIVED + b"\0"


class _Worded(Counter):
    """Rewards are clipped; the raw ones stand in `info`."""

    def step(self, action):
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, min(reward, 0.5), terminated, truncated, {"raw_reward": reward, "error": False}


class _Talker:
    """The parent of a simulation in a thread."""

    def __init__(self, make=Counter, rows=1, **fields):
        mine, other = packet_socketpair()
        self.channel, self.codes = mine, []
        mine.settimeout(5.0)
        spec = EnvWorkerSpec("w0", 1, 0, 0, tuple(range(rows)), "t", "toy", **fields)
        spec = EnvWorkerSpec.from_values(json.loads(json.dumps(spec.to_values())))
        self._other = other
        self._thread = threading.Thread(
            target=lambda: self.codes.append(run_env_worker(spec, other, lambda id, kwargs: make(**kwargs)))
        )
        self._thread.start()

    def ready(self, rows=1, parts=1):
        packet, fds, _, _ = socket.recv_fds(self.channel, 1 << 16, 1)
        assert packet[:1] == READY
        self.spaces = Spaces.from_values(json.loads(packet[1:])["spaces"])
        self.block = SharedBlock(fds[0], self.spaces, rows)
        os.close(fds[0])
        assert [self.channel.recv(99) for _ in range(parts)] == [ARRIVED + bytes([part]) for part in range(parts)]
        return self.block

    def step(self, *actions):
        self.block.actions[""][:] = actions
        self.channel.send(STEP + b"\0")
        return self.channel.recv(1 << 16)

    def end(self):
        self.channel.close()
        self._thread.join(5.0)
        self._other.close()
        return self.codes


@pytest.fixture
def talk():
    talkers = []

    def begin(*args, **kwargs):
        talkers.append(_Talker(*args, **kwargs))
        return talkers[-1]

    state = random.getstate(), np.random.get_state()
    yield begin
    for talker in talkers:
        talker.end()
    random.setstate(state[0])
    np.random.set_state(state[1])


def test_statistics_count_raw_rewards_and_a_false_error_is_none(talk):
    talker = talk(_Worded, kwargs={"terminate_after": 2})
    block = talker.ready()
    assert talker.step(0) == _ARRIVED and block.rewards.tolist() == [0.5] and not block.faults[0]
    assert talker.step(4) == _ARRIVED and block.rewards.tolist() == [0.5]
    assert block.terminated[0] and block.first[0] and block.returns.tolist() == [2.0] and block.lengths.tolist() == [2]
    assert talker.step(4) == _ARRIVED
    assert not (block.terminated[0] or block.first[0] or block.has_final[0]) and block.lengths.tolist() == [0]


def test_parts_step_apart_in_the_order_of_their_tokens(talk):
    talker = talk(rows=4, parts=2)
    block = talker.ready(4, 2)
    block.actions[""][:] = 1
    for part in b"\1\0\1":
        talker.channel.send(STEP + bytes([part]))
    assert [talker.channel.recv(9) for _ in range(3)] == [ARRIVED + bytes([part]) for part in b"\1\0\1"]
    assert block.observations[""][:, 1].tolist() == [1.0, 1.0, 2.0, 2.0]
    talker.channel.send(STEP + b"\2")
    assert talker.end() == [ExitCode.CLOSED], "there is no third part"


def test_the_clock_tells_the_time_of_an_answer(talk):
    talker = talk()
    block = talker.ready()
    talker.step(1)
    assert 0 < block.clock[2] < 1.0 and block.clock[0] == 0.0


def test_a_replacement_cuts_the_other_episodes_with_their_last_observations(talk):
    class Longer(Counter):
        made = []

        def __init__(self):
            self.made.append(self)
            super().__init__(terminate_after=2 + len(self.made))  # 3, then 4

    talker = talk(Longer, 2, restart_interval_s=0.0001)
    block = talker.ready(2)
    for _ in range(2):
        assert talker.step(1, 2) == _ARRIVED
    assert talker.step(1, 2) == RETIRING
    assert block.terminated.tolist() == [True, False] and block.truncated.tolist() == [False, True]
    assert block.cut.tolist() == [False, True], "the first one ended by itself"
    assert block.has_final.all() and not block.faults.any()
    assert block.final_observations[""][:, 1:].tolist() == [[3.0, 9.0], [3.0, 12.0]]
    assert block.lengths.tolist() == [3, 3] and block.returns.tolist() == [2.25, 3.0]
    assert talker.end() == [ExitCode.RETIRED]


def test_the_episode_that_began_with_random_steps_is_no_whole_one_but_ends_as_any_other(talk):
    talker = talk(rows=2, decorrelate_steps=4, kwargs={"terminate_after": 6})
    block, ends = talker.ready(2), {0: [], 1: []}
    for _ in range(18):
        assert talker.step(1, 1) == _ARRIVED
        for row in np.flatnonzero(block.first).tolist():
            ends[row].append((bool(block.cut[row]), int(block.lengths[row])))
            assert block.terminated[row] and block.has_final[row] and not block.truncated[row]
        assert not block.cut[~block.first].any()
    for told in ends.values():
        assert told[0][0] and 2 < told[0][1] <= 6 and told[1:] == [(False, 6)] * len(told[1:])


@pytest.mark.parametrize("how", ["token", "socket"])
def test_it_closes_its_simulators_when_told_or_left(talk, how):
    closed = []

    class Closing(Counter):
        def close(self):
            closed.append(self)
            raise RuntimeError("it fails to close")

    talker = talk(Closing, 2)
    talker.ready(2)
    if how == "token":
        talker.channel.send(CLOSE)
    assert talker.end() == [ExitCode.CLOSED] and len(closed) == 2


def test_failures_say_where_whose_and_who_is_to_blame(talk):
    talker = talk(rows=2)
    talker.ready(2)
    failure = SimulatorFailure.from_packet(talker.step(0, 7))
    assert (failure.where, failure.slot, failure.blame, failure.kind) == ("stepping", 1, "policy", "PolicyActionError")
    assert "test_env_worker" not in failure.message, "none of the simulator's own code is on the stack"
    assert talker.end() == [ExitCode.FAILED]

    def refuse():
        raise SystemExit(3)

    packet = talk(refuse).channel.recv(1 << 16)
    assert packet[:1] == FAILED
    failure = SimulatorFailure.from_packet(packet)
    assert (failure.where, failure.blame, failure.kind) == ("making", "simulator", "SystemExit")
    assert "refuse" in failure.traceback and re.fullmatch(r"3 \(test_env_worker\.py:\d+\)", failure.message)


def test_long_tracebacks_fit_a_packet():
    failure = SimulatorFailure("stepping", 0, "E", "m" * 99999, "t" * 99999 + "end", "simulator")
    packet = failure.packet()
    assert len(packet) < 1 << 16 and SimulatorFailure.from_packet(packet).traceback.endswith("end")


def _differing(*spaces):
    """Makes simulators that observe in one of these spaces after the other."""
    left = list(spaces)

    def make():
        env = Counter()
        env.observation_space = left.pop(0)
        return env

    return make


def test_simulators_of_a_process_may_have_other_bounds_and_no_other_arrays(talk):
    near, far = (gym.Box(-1, high, (3,), np.int64) for high in (2**30, 2**31 - 1))
    talker = talk(make=_differing(near, far), rows=2)
    talker.ready(rows=2)
    (leaf,) = talker.spaces.observations
    assert (leaf.low, leaf.high) == (-1.0, 2**31 - 1), "by the widest a device knows how to hold them"
    other = talk(make=_differing(near, gym.Box(-1, 9, (4,), np.int64)), rows=2)
    failure = SimulatorFailure.from_packet(other.channel.recv(1 << 16))
    assert "the simulator of slot 1 has other spaces than the first: all that" in failure.message
