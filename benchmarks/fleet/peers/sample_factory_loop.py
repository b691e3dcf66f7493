"""Sample Factory: a worker for each simulator, its asynchronous PPO training along (it has no mode without)."""

import os
import sys
import tempfile
import threading
import time

from playing import Play, tell

START_S, BATCH_S = 450.0, 60.0


def make_simulator(name, cfg=None, env_config=None, render_mode=None):
    """In a process of Sample Factory's, which gets the same arguments as this one."""
    return Play(os.environ["FLEET_PLAY"]).makers()[0]()


def pooled_encoder(cfg, obs_space):
    """The benchmark's policy: frames averaged to 16 x 16, two layers of 64."""
    import torch
    from sample_factory.model.encoder import Encoder

    class Pooled(Encoder):
        def __init__(self) -> None:
            super().__init__(cfg)
            shape = obs_space["obs"].shape
            self._frames = len(shape) == 3
            inputs = 16 * 16 * shape[2] if self._frames else shape[0]
            self._net = torch.nn.Sequential(
                torch.nn.Linear(inputs, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh()
            )

        def forward(self, observations):
            x = observations["obs"].float()
            if self._frames:
                x = torch.nn.functional.adaptive_avg_pool2d(x.permute(0, 3, 1, 2) / 255, 16)
            return self._net(x.flatten(1))

        def get_out_size(self) -> int:
            return 64

    return Pooled()


def configuration(play: Play, folder: str):
    from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args

    options = {
        "algo": "APPO", "env": "simulator", "experiment": "x", "train_dir": folder, "device": "cpu",
        "num_workers": play.envs, "num_envs_per_worker": 1, "worker_num_splits": 1, "rollout": 32, "batch_size": 1024,
        "use_rnn": False, "normalize_input": False, "normalize_returns": False, "train_for_seconds": 10_000,
        "save_every_sec": 10_000, "set_workers_cpu_affinity": False,
    }  # fmt: skip
    parser, _ = parse_sf_args([f"--{name}={value}" for name, value in options.items()])
    return parse_full_cfg(parser, [f"--{name}={value}" for name, value in options.items()])


def watch(play: Play, runner) -> None:
    """Reads the steps that the learner got, which come a batch at a time, from one batch to another; then ends it."""
    next_batch(runner, START_S)
    time.sleep(play.warm_up_s)
    steps, begin_s = next_batch(runner, BATCH_S)
    main_s = time.process_time()
    time.sleep(play.seconds)
    now, end_s = next_batch(runner, BATCH_S)
    seconds = end_s - begin_s
    runner.told = {"steps_per_s": (now - steps) / seconds, "main_cpu": (time.process_time() - main_s) / seconds}
    runner.cfg.train_for_seconds = -1  # compared, after the next batch, with a clock that stays at 0


def next_batch(runner, limit_s: float) -> tuple[int, float]:
    """Steps after the next batch, and when that was; ends the process where none comes."""
    before, deadline_s = sum(runner.env_steps.values()), time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        if (steps := sum(runner.env_steps.values())) > before:
            return steps, time.perf_counter()
        time.sleep(0.005)
    sys.stderr.write(f"the learner got no step within {limit_s:g} s\n")
    os._exit(1)


def main(play: Play) -> None:
    from sample_factory.algo.utils.context import global_model_factory
    from sample_factory.envs.env_utils import register_env
    from sample_factory.train import make_runner

    register_env("simulator", make_simulator)
    global_model_factory().register_encoder_factory(pooled_encoder)
    with tempfile.TemporaryDirectory() as folder:
        _, runner = make_runner(configuration(play, folder))
        runner.init()
        thread = threading.Thread(target=watch, args=(play, runner), daemon=True)
        thread.start()
        runner.run()
        thread.join()
        tell(runner.told)


if __name__ == "__main__":
    os.environ["FLEET_PLAY"] = sys.argv[1]
    main(Play(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)
