import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from penstock.rollout import Lockstep
from penstock.types import Completion, Decoding, EnvironmentFailure, GenerationCall, NoProgressError

DECODING = Decoding(max_output_tokens=4)


class RecordingContext:
    """Answers every call with its own first token, and remembers what was submitted together."""

    tokenizer = None

    def __init__(self, failing: int | None = None) -> None:
        self.rounds: list[list[int]] = []
        self.failing = failing

    def generate_many(self, calls: list[GenerationCall]) -> list:
        firsts = [int(call.prompts[0][0]) for call in calls]
        self.rounds.append(firsts)
        return [
            EnvironmentFailure(f"prompt {first} is too long") if first == self.failing else [[completion(first)]]
            for first in firsts
        ]


def completion(token: int) -> Completion:
    tokens = np.array([token], np.int32)
    return Completion(tokens, tokens, np.zeros(1, np.float32), np.zeros(1, np.int32), 0, 0, str(token), "stop")


def ask(lockstep: Lockstep, index: int, token: int) -> int:
    prompt = np.array([token], np.int32)
    [[answer]] = lockstep.participant(index).generate([prompt], 1, DECODING, [0])
    return int(answer.response_tokens[0])


def test_all_participants_are_submitted_at_once_in_their_order_whoever_comes_first():
    context = RecordingContext()
    lockstep = Lockstep(context, 3, timeout_s=30)
    first_in = threading.Event()

    def late(index: int) -> int:
        assert first_in.wait(30)
        return ask(lockstep, index, index)

    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(late, 0), pool.submit(late, 1)]
        futures.append(pool.submit(lambda: (first_in.set(), ask(lockstep, 2, 2))[1]))
        assert [future.result(30) for future in futures] == [0, 1, 2]
    assert context.rounds == [[0, 1, 2]]


def test_turns_are_separate_rounds_and_those_who_left_are_not_waited_for():
    context = RecordingContext()
    lockstep = Lockstep(context, 3, timeout_s=30)

    def play(index: int, turns: int) -> None:
        for turn in range(turns):
            ask(lockstep, index, 10 * turn + index)
        lockstep.leave(index)

    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(play, index, turns) for index, turns in enumerate([2, 1, 3])]:
            future.result(30)
    assert context.rounds == [[0, 1, 2], [10, 12], [22]]


def test_one_participants_failure_harms_no_other():
    context = RecordingContext(failing=1)
    lockstep = Lockstep(context, 2, timeout_s=30)
    with ThreadPoolExecutor(2) as pool:
        good, bad = pool.submit(ask, lockstep, 0, 0), pool.submit(ask, lockstep, 1, 1)
        assert good.result(30) == 0
        with pytest.raises(EnvironmentFailure, match="prompt 1 is too long"):
            bad.result(30)


def test_an_engine_failure_reaches_everybody():
    class Broken(RecordingContext):
        def generate_many(self, calls: list[GenerationCall]) -> list:
            raise RuntimeError("device lost")

    lockstep = Lockstep(Broken(), 2, timeout_s=30)
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(ask, lockstep, index, index) for index in range(2)]:
            with pytest.raises(RuntimeError, match="device lost"):
                future.result(30)


def test_a_participant_that_never_comes_is_named_after_the_limit():
    lockstep = Lockstep(RecordingContext(), 2, timeout_s=0.01)
    with pytest.raises(NoProgressError, match="group 0 waited 0.01 s"):
        ask(lockstep, 0, 0)
