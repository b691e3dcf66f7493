"""A process and a pipe for each simulator, and a loop that infers for exactly half of them at a time.

After the description of MineStudio's online worker, in our own words: observations are pickled; the loop polls the
pipes without rest until as many requests wait as a batch holds; 64 steps of a simulator are a fragment.
"""

import multiprocessing
import sys

import numpy as np
from playing import NumpyPolicy, Play, measured, tell

FRAGMENT = 64


def simulate(make, seed, link) -> None:
    simulator = make()
    observation, _ = simulator.reset(seed=seed)
    link.send((simulator.observation_space.shape, int(simulator.action_space.n)))
    reward, terminated, truncated = 0.0, False, False
    while True:
        link.send((observation, float(reward), terminated, truncated))
        action = link.recv()
        if action is None:
            return
        observation, reward, terminated, truncated, _ = simulator.step(action)
        if terminated or truncated:
            observation, _ = simulator.reset()


class Loop:
    """The worker's side."""

    def __init__(self, play: Play) -> None:
        context = multiprocessing.get_context("fork")
        self.links, self.batch = [], max(1, play.envs // 2)
        for number, make in enumerate(play.makers()):
            mine, other = context.Pipe()
            context.Process(target=simulate, args=(make, number, other), daemon=True).start()
            self.links.append(mine)
        shape, actions = [link.recv() for link in self.links][0]
        self.policy = NumpyPolicy(shape, actions)
        self.waiting = {}
        self.steps = [[] for _ in self.links]
        self.fragments = 0

    def turn(self) -> int:
        while len(self.waiting) < self.batch:
            for number, link in enumerate(self.links):
                if number not in self.waiting and len(self.waiting) < self.batch and link.poll(0):
                    self.waiting[number] = link.recv()
        numbers = list(self.waiting)
        actions, logprobs = self.policy.act(np.stack([self.waiting[number][0] for number in numbers]))
        for number, action in zip(numbers, actions, strict=True):
            self.links[number].send(int(action))
        for number, action, logprob in zip(numbers, actions, logprobs, strict=True):
            self.keep(number, (*self.waiting.pop(number), int(action), float(logprob)))
        return len(numbers)

    def keep(self, number, step) -> None:
        self.steps[number].append(step)
        if len(self.steps[number]) == FRAGMENT + 1:
            np.stack([one[0] for one in self.steps[number]])
            self.steps[number] = [step]
            self.fragments += 1


def main(play: Play) -> None:
    tell(measured(play, Loop(play).turn))


if __name__ == "__main__":
    main(Play(sys.argv[1]))
