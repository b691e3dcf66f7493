"""What peers share: the workload, its simulators, the policy in NumPy, and how a rate is measured. No JAX."""

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "src"))


class Play:
    """One workload, as the first argument says: simulators [(id, kwargs, count), …], seconds, warm_up_s, envpool."""

    def __init__(self, words: str) -> None:
        values = json.loads(words)
        self.kinds = [(id, kwargs) for id, kwargs, count in values["simulators"] for _ in range(count)]
        self.seconds, self.warm_up_s, self.envpool = values["seconds"], values["warm_up_s"], values["envpool"]

    @property
    def envs(self) -> int:
        return len(self.kinds)

    def makers(self) -> list[Callable[[], Any]]:
        """One callable for each simulator."""
        from penstock.environments.simulators import make_simulator

        return [lambda kind=kind: make_simulator(*kind) for kind in self.kinds]


def measured(play: Play, turn: Callable[[], int]) -> dict[str, float]:
    """Calls `turn`, which gives the steps that it made, through the warm-up and then for as long as is measured."""
    end_s = time.perf_counter() + play.warm_up_s
    while time.perf_counter() < end_s:
        turn()
    steps, begin_s, main_s = 0, time.perf_counter(), time.process_time()
    while (now_s := time.perf_counter()) - begin_s < play.seconds:
        steps += turn()
    seconds = now_s - begin_s
    return {"steps_per_s": steps / seconds, "main_cpu": (time.process_time() - main_s) / seconds}


def tell(found: dict[str, float]) -> None:
    """The one line."""
    print(json.dumps(found), flush=True)


class NumpyPolicy:
    """Frames averaged to 16 x 16, two layers of 64, one of the actions sampled."""

    def __init__(self, shape: tuple[int, ...], actions: int) -> None:
        rng = np.random.default_rng(0)
        self.frames = len(shape) == 3
        inputs = 16 * 16 * shape[2] if self.frames else int(np.prod(shape))
        sizes = (inputs, 64, 64, actions)
        self.layers = [rng.standard_normal(two, np.float32) / two[0] ** 0.5 for two in itertools.pairwise(sizes)]
        self.rng = rng

    def act(self, observations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Actions and their log-probabilities for [n, …]."""
        x = observations
        if self.frames:
            n, high, wide, channels = x.shape
            x = x.reshape(n, 16, high // 16, wide * channels).sum(2, dtype=np.uint16)
            x = x.reshape(n, 16, 16, wide // 16, channels).sum(3, dtype=np.uint32) / (255 * (high // 16) * (wide // 16))
        x = x.reshape(len(x), -1).astype(np.float32)
        for weights in self.layers[:-1]:
            x = np.tanh(x @ weights)
        logits = x @ self.layers[-1]
        chosen = (logits + self.rng.gumbel(size=logits.shape)).argmax(1)
        highest = logits.max(1, keepdims=True)
        normaliser = highest[:, 0] + np.log(np.exp(logits - highest).sum(1))
        return chosen, logits[np.arange(len(chosen)), chosen] - normaliser
