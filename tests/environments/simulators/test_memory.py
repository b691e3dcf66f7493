"""The memory task: 1 for who remembers, 1 / cues for who does not, and nothing that gives the cue away."""

import numpy as np
import pytest

from penstock.environments.simulators import MemorySimulator


def returns(simulator, decide, episodes=400):
    """Returns of episodes; `decide` is told the observation and what it returned last in this episode."""
    found = []
    for seed in range(episodes):
        observation, _ = simulator.reset(seed=seed)
        total, kept, ended = 0.0, None, False
        while not ended:
            action, kept = decide(observation, kept)
            observation, reward, ended, truncated, _ = simulator.step(action)
            assert not truncated
            total += reward
        found.append(total)
    return found


def test_who_remembers_always_gets_1():
    def recall(observation, kept):
        kept = int(observation[:-1].argmax()) if kept is None else kept
        return kept, kept

    assert returns(MemorySimulator(num_cues=5, delay=7), recall) == [1.0] * 400


@pytest.mark.parametrize("num_cues", [2, 4])
def test_who_does_not_is_at_chance_whatever_it_does(num_cues):
    for action in range(num_cues):
        found = returns(MemorySimulator(num_cues), lambda *_, action=action: (action, None), episodes=2000)
        assert np.mean(found) == pytest.approx(1 / num_cues, abs=0.04)


def test_only_the_first_observation_tells_the_cue():
    simulator, seen = MemorySimulator(num_cues=3, delay=4), {}
    for seed in range(30):
        first, _ = simulator.reset(seed=seed)
        seen.setdefault(int(first.argmax()), set()).add(tuple(simulator.step(seed % 3)[0].tobytes() for _ in range(6)))
    assert set(seen) == {0, 1, 2}
    assert len(set.union(*seen.values())) == 1


def test_an_episode_is_cue_delay_and_question():
    simulator = MemorySimulator(num_cues=2, delay=2)
    first, _ = simulator.reset(seed=0)
    cue = int(first.argmax())
    steps = [simulator.step(cue) for _ in range(4)]
    assert first.sum() == 1 and first[-1] == 0
    assert [observation.tolist() for observation, *_ in steps] == [[0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0]]
    assert [step[1:4] for step in steps] == [(0.0, False, False)] * 3 + [(1.0, True, False)]
