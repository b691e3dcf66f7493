"""RLlib's EnvRunners: two actors with half of the simulators each, sampling without a learner."""

import os
import sys
import time

from playing import Play, tell

SAMPLE = 32
"""Steps of each simulator in one call."""
_SRC = next(path for path in sys.path if path.endswith("src"))


def make_config(play: Play):
    import ray
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.rl_module import RLModuleSpec
    from ray.tune.registry import register_env

    here = os.path.dirname(os.path.abspath(__file__))
    ray.init(
        num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": f"{_SRC}:{here}"}},
    )  # fmt: skip
    register_env("simulator", lambda _: play.makers()[0]())
    from rllib_module import PooledModule

    return (
        PPOConfig()
        .environment("simulator")
        .env_runners(
            num_env_runners=2,
            num_envs_per_env_runner=max(1, play.envs // 2),
            gym_env_vectorize_mode="async",
            rollout_fragment_length=SAMPLE,
            create_local_env_runner=False,
        )
        .rl_module(rl_module_spec=RLModuleSpec(module_class=PooledModule))
    )


def main(play: Play) -> None:
    from ray.rllib.env.env_runner_group import EnvRunnerGroup

    group = EnvRunnerGroup(config=make_config(play).copy(), local_env_runner=False)
    each = SAMPLE * max(1, play.envs // 2)

    def sample(runner) -> int:
        runner.sample(num_timesteps=each)
        return each

    end_s = time.perf_counter() + play.warm_up_s
    while time.perf_counter() < end_s:
        group.foreach_env_runner(sample, local_env_runner=False)
    steps, begin_s, main_s = 0, time.perf_counter(), time.process_time()
    while (now_s := time.perf_counter()) - begin_s < play.seconds:
        steps += sum(group.foreach_env_runner(sample, local_env_runner=False))
    seconds = now_s - begin_s
    tell({"steps_per_s": steps / seconds, "main_cpu": (time.process_time() - main_s) / seconds})
    group.stop()


if __name__ == "__main__":
    main(Play(sys.argv[1]))
