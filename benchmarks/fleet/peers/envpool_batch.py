"""EnvPool's own simulators in C++: two threads, half of the simulators per batch; no policy."""

import sys

import numpy as np
from playing import Play, measured, tell


def main(play: Play) -> None:
    import envpool

    batch = max(1, play.envs // 2)
    pool = envpool.make(play.envpool, env_type="gymnasium", num_envs=play.envs, batch_size=batch, num_threads=2, seed=1)
    actions = np.random.default_rng(1).integers(0, pool.action_space.n, (64, batch))
    pool.async_reset()
    turns = 0

    def turn() -> int:
        nonlocal turns
        told = pool.recv()[-1]
        pool.send(actions[turns % 64], told["env_id"])
        turns += 1
        return batch

    tell(measured(play, turn))


if __name__ == "__main__":
    main(Play(sys.argv[1]))
