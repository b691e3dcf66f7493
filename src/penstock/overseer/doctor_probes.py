"""The checks of `penstock doctor` that compute: devices, speed, parity of engine and learner, and simulators.

The micro-benchmarks say what this machine gives at this moment, not what it could: another busy process shows.
"""

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from penstock.batch import example_from_rollout
from penstock.fleet import SimulatorPool
from penstock.fleet.config import FleetConfig, SimulatorConfig
from penstock.inference import EngineConfig, GenerationRequest, InferenceEngine
from penstock.learner import Learner, LearnerConfig
from penstock.model.language import Decoder, InitConfig
from penstock.overseer.doctor import Check
from penstock.text import Tokenizer
from penstock.types import Completion, Decoding, Rollout, RolloutMetadata, WeightVersion

PARITY_LIMIT = 1e-4
SLOW_GIGAFLOPS, SLOW_GIGABYTES_PER_S = 10.0, 1.0
READY_LIMIT_S = 120.0

_SIDE = 1024
_COPY_BYTES = 128 * 2**20
_BUSY = "look for other busy processes; every number that a run prints suffers alike"


def check_devices() -> Check:
    """What JAX computes on."""
    devices = jax.devices()
    names = ", ".join(sorted({device.device_kind for device in devices}))
    detail = f"{len(devices)} × {names} ({jax.default_backend()})"
    if jax.default_backend() == "cpu" and Path("/proc/driver/nvidia").exists():
        return Check("devices", "warn", f"{detail}, but this machine has an NVIDIA GPU", "pip install 'penstock[cuda]'")
    cache = jax.config.values["jax_compilation_cache_dir"]
    if jax.default_backend() == "cpu" and cache and jax.config.values["jax_enable_compilation_cache"]:
        remedy = "unset JAX_COMPILATION_CACHE_DIR: on CPUs, policies trained with programs from there learned nothing"
        return Check("devices", "warn", f"{detail}; runs do not use JAX's cache in {cache}", remedy)
    return Check("devices", "ok", detail)


def check_matrix_product() -> Check:
    """The rate of a float32 matrix product."""
    matrix = jnp.ones((_SIDE, _SIDE), jnp.float32)
    multiply = jax.jit(jnp.matmul)
    seconds = _best_s(lambda: multiply(matrix, matrix).block_until_ready())
    rate = 2 * _SIDE**3 / seconds / 1e9
    status = "ok" if rate >= SLOW_GIGAFLOPS else "warn"
    return Check("matrix product", status, f"{rate:,.0f} GFLOP/s float32", "" if status == "ok" else _BUSY)


def check_memory_copy() -> Check:
    """The rate of a copy in main memory."""
    source = np.ones(_COPY_BYTES, np.uint8)
    target = np.empty_like(source)
    seconds = _best_s(lambda: np.copyto(target, source))
    rate = _COPY_BYTES / seconds / 1e9
    status = "ok" if rate >= SLOW_GIGABYTES_PER_S else "warn"
    return Check("memory copy", status, f"{rate:.1f} GB/s", "" if status == "ok" else _BUSY)


def check_parity() -> Check:
    """Whether a tiny random policy has the same log-probabilities in the engine and in the learner."""
    tokenizer = Tokenizer.load("penstock")
    shape = InitConfig(hidden_size=32, num_key_value_heads=2).model(tokenizer.vocab_size, "float32")
    decoder = Decoder.initialise(shape, jax.random.key(0))
    engine = InferenceEngine(decoder, WeightVersion(0, 0), tokenizer, EngineConfig(max_slots=4, max_seq_len=64))
    engine.start()
    try:
        engine.wait_until_ready(READY_LIMIT_S)
        request = GenerationRequest(tokenizer.encode("one two three"), Decoding(max_output_tokens=24), seed=0, n=4)
        completions = engine.submit([request])[0].result(READY_LIMIT_S)
    finally:
        engine.stop(READY_LIMIT_S)
    difference = largest_difference(decoder, completions)
    detail = f"log-probabilities of engine and learner differ by at most {difference:.1e} (limit {PARITY_LIMIT:.0e})"
    if not difference <= PARITY_LIMIT:  # so that NaN fails too
        return Check("parity", "fail", detail, "do not train with this installation: reinstall from constraints.txt")
    return Check("parity", "ok", detail)


def largest_difference(decoder: Decoder, completions: list[Completion]) -> float:
    """Largest |engine − learner| over all sampled tokens."""
    learner = Learner(decoder, LearnerConfig(row_length=64, micro_batch_rows=4), total_steps=1)
    scores = learner.score([example_from_rollout(_rollout(done), 0.0, 64) for done in completions])
    differences = [
        np.abs(score[len(done.prompt_tokens) :][: len(done.response_tokens)] - done.response_logprobs).max()
        for score, done in zip(scores, completions, strict=True)
    ]
    return float(max(differences))


def _rollout(done: Completion) -> Rollout:
    return Rollout(
        env_name="doctor",
        env_example_id="0",
        prompt_tokens=done.prompt_tokens,
        response_tokens=done.response_tokens,
        response_logprobs=done.response_logprobs,
        token_rewards=np.zeros(len(done.response_tokens), np.float32),
        episode_reward=0.0,
        response_weight_steps=done.weight_steps,
        oldest_weight_step=done.oldest_weight_step,
        metadata=RolloutMetadata("doctor", time.time(), done.oldest_weight_step),
    )


def _best_s(call: Callable[[], object], repeats: int = 5) -> float:
    """Seconds of the fastest of several calls, after one that compiles and pages in."""
    call()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


STEPS_S = 0.3
START_LIMIT_S = 60.0
PROCESSES, EACH = 2, 8
EXTRAS = ("ale_py", "crafter", "vizdoom", "minigrid", "av", "minestudio")
"""What simulators and films need beyond the core, by the modules that are imported."""


def check_simulators() -> Check:
    """Steps a small fleet of CartPole without a policy."""
    config = FleetConfig(
        tasks={"cartpole": SimulatorConfig(id="CartPole-v1")}, envs_per_worker=PROCESSES * EACH, envs_per_process=EACH
    )
    pool = SimulatorPool(config, "doctor", 0)
    try:
        began = time.perf_counter()
        pool.start(START_LIMIT_S)
        started_s = time.perf_counter() - began
        steps_per_s = _rate(pool)
    finally:
        pool.close()
    there = [name for name in EXTRAS if importlib.util.find_spec(name) is not None]
    absent = [name for name in EXTRAS if name not in there]
    detail = (
        f"CartPole in {PROCESSES} processes up after {started_s:.2f} s, {steps_per_s:,.0f} steps/s without a policy; "
        f"packages there: {', '.join(there) or 'none'}; not there: {', '.join(absent) or 'none'}"
    )
    return Check("simulators", "ok", detail)


def _rate(pool: SimulatorPool) -> float:
    """Steps per second with actions of zero."""
    actions = {leaf.name: leaf.zeros(EACH) for leaf in pool.spaces.actions}
    steps, began = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - began) < STEPS_S:
        for arrival in pool.poll(STEPS_S):
            steps += int(np.count_nonzero(arrival.acted))
            pool.act(arrival.process, actions)
    return steps / elapsed_s
