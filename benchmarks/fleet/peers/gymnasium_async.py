"""Gymnasium's AsyncVectorEnv with shared memory; no policy, actions drawn beforehand."""

import itertools
import sys

from playing import Play, measured, tell


def main(play: Play) -> None:
    from gymnasium.vector import AsyncVectorEnv, AutoresetMode

    vector = AsyncVectorEnv(play.makers(), shared_memory=True, autoreset_mode=AutoresetMode.SAME_STEP)
    vector.reset(seed=1)
    vector.action_space.seed(1)
    actions = itertools.cycle([vector.action_space.sample() for _ in range(64)])

    def turn() -> int:
        vector.step(next(actions))
        return play.envs

    tell(measured(play, turn))
    vector.close()


if __name__ == "__main__":
    main(Play(sys.argv[1]))
