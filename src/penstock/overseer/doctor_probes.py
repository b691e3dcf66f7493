"""The checks of `penstock doctor` that compute: devices, speed, parity of engine and learner, and simulators.

The micro-benchmarks say what this machine gives at this moment, not what it could: another busy process shows.
Of a checkpoint, `examine_checkpoint` does once what a run does all the time: it loads and compiles, answers a few
prompts, compares engine and learner, makes one update and hands its weights to the engine. Nothing is kept.
"""

import dataclasses
import importlib.util
import resource
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
import numpy as np

from penstock.fleet import SimulatorPool
from penstock.fleet.config import FleetConfig, SimulatorConfig
from penstock.inference import EngineConfig, GenerationRequest, InferenceEngine
from penstock.inference.serving import model_directory
from penstock.learner import Learner, LearnerConfig
from penstock.learner.parity import Parity, ParityMonitor, differences_of, example_of
from penstock.model.language import Decoder, InitConfig, ModelConfig, load_policy
from penstock.model.programs import choose_cache, compile_programs
from penstock.overseer.doctor import Check, DoctorConfig, free_memory_bytes
from penstock.overseer.estimate import bytes_text, estimate_memory, model_shape
from penstock.overseer.fitting.chips import copy_bytes, matrix_product_flops
from penstock.text import Tokenizer
from penstock.types import CompiledProgram, Completion, Decoding, RLExample, TrainingBatch, WeightVersion

PARITY_LIMIT = 1e-4
SLOW_GIGAFLOPS, SLOW_GIGABYTES_PER_S = 10.0, 1.0
READY_LIMIT_S = 120.0

_BUSY = "look for other busy processes; every number that a run prints suffers alike"


def check_devices() -> Check:
    """What JAX computes on, and where programs that it compiled stay for the next start."""
    devices = jax.devices()
    names = ", ".join(sorted({device.device_kind for device in devices}))
    detail = f"{len(devices)} × {names} ({jax.default_backend()})"
    if jax.default_backend() == "cpu" and Path("/proc/driver/nvidia").exists():
        return Check("devices", "warn", f"{detail}, but this machine has an NVIDIA GPU", "pip install 'penstock[cuda]'")
    choose_cache()
    kept = jax.config.values["jax_enable_compilation_cache"]
    where = f"kept in {jax.config.values['jax_compilation_cache_dir']}" if kept else "not kept"
    return Check("devices", "ok", f"{detail}; compiled programs are {where}")


def check_matrix_product() -> Check:
    """The rate of a float32 matrix product."""
    rate = matrix_product_flops() / 1e9
    status = "ok" if rate >= SLOW_GIGAFLOPS else "warn"
    return Check("matrix product", status, f"{rate:,.0f} GFLOP/s float32", "" if status == "ok" else _BUSY)


def check_memory_copy() -> Check:
    """The rate of a copy in main memory."""
    rate = copy_bytes() / 1e9
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
        answers = _answers(engine, [tokenizer.encode("one two three")], 24, 4)
    finally:
        engine.stop(READY_LIMIT_S)
    learner = Learner(decoder, LearnerConfig(row_length=64, micro_batch_rows=4), total_steps=1)
    difference = _parity(learner, _examples(answers)).max
    detail = f"log-probabilities of engine and learner differ by at most {difference:.1e} (limit {PARITY_LIMIT:.0e})"
    if not difference <= PARITY_LIMIT:  # so that NaN fails too
        return Check("parity", "fail", detail, "do not train with this installation: reinstall from constraints.txt")
    return Check("parity", "ok", detail)


COMPILE_LIMIT_S, ANSWER_LIMIT_S = 1200.0, 600.0
"""For the next program, and for all answers of one submission."""
MOST_ANSWER_TOKENS = 64
TEXTS = (
    "The capital of France is",
    "Mara has 3 baskets with 12 eggs in each. How many eggs does she have?",
    "def add(a, b):\n",
    "Once upon a time, in a house by the river,",
)
"""Prompts of which parity is measured."""


def examine_checkpoint(checkpoint: Path, config: DoctorConfig) -> list[Check]:
    """What a run that trains this checkpoint would meet on this machine.

    Args:
        checkpoint: A Hugging Face directory, or a run's ``checkpoints/step-<n>``.
        config: Dtype, and the shapes of engine and learner.

    Returns:
        The checks "checkpoint", "compilation", "parity", "generation", "update" and "memory". Without the memory that
        a run is estimated to take, no update is made.

    Raises:
        CheckpointError: nothing can be loaded from there.
        ConfigError: it is a model that is not supported, or the settings do not fit it.
    """
    directory = model_directory(str(checkpoint))
    free_bytes = _free_bytes()
    policy = config.model.policy(directory)
    shape = model_shape(policy)
    length = min(config.inference.max_seq_len, shape.longest_sequence)
    settings = config.inference.model_copy(update={"max_seq_len": length})
    estimated = sum(estimate_memory(shape, settings, config.learner, jax.default_backend() == "cpu").values())
    tokenizer = Tokenizer.load(policy.tokenizer_path, policy.chat_template_kwargs)
    started = time.perf_counter()
    decoder = load_policy(policy, 0, tokenizer)
    loaded = _loaded(shape, time.perf_counter() - started)
    engine = InferenceEngine(decoder, WeightVersion(0, 0), tokenizer, settings)
    learner = Learner(decoder, config.learner, total_steps=1)
    del decoder  # as in a run, nobody but its users keeps it
    try:
        engine.start()
        compiled = [_compilation("engine", engine.compiling(COMPILE_LIMIT_S))]
        if estimated <= free_bytes:
            compiled.append(_compilation("learner", compile_programs(learner.programs())))
        tokens = max(1, min(MOST_ANSWER_TOKENS, min(length, config.learner.row_length) // 2))
        room = min(length, config.learner.row_length) - tokens
        prompts = [tokenizer.render(text)[-room:] for text in TEXTS]
        examples = _examples(_answers(engine, prompts, tokens, 2))
        parity, rounding = _parity(learner, examples), learner.rounding(examples)
        generation = _generation(engine, settings, prompts[1], tokens)
        update = Check("update", "warn", "not tried: it would take more memory than there is")
        if estimated <= free_bytes:
            update = _update(engine, learner, examples)
    finally:
        engine.stop(ANSWER_LIMIT_S)
    memory = _memory(estimated, free_bytes, settings, config.learner)
    return [loaded, *compiled, _judged(parity, rounding, config), generation, update, memory]


def _loaded(shape: ModelConfig, seconds: float) -> Check:
    detail = f"{shape.model_type}, {shape.parameter_count:,} parameters, {shape.dtype}, loaded in {seconds:.1f} s"
    return Check("checkpoint", "ok", detail)


def _compilation(whose: str, programs: Iterable[CompiledProgram]) -> Check:
    """Compiles them, and says how long that took in all and for each."""
    started = time.perf_counter()
    done = sorted(programs, key=lambda program: -program.seconds)
    seconds = time.perf_counter() - started
    each = "\n".join(f"{program.seconds:.2f} s  {program.name}" for program in done)
    return Check(f"{whose}'s compilation", "ok", f"{seconds:.1f} s, {len(done)} programs side by side\n{each}")


def _answers(engine: InferenceEngine, prompts: Sequence[np.ndarray], tokens: int, n: int) -> list[Completion]:
    """`n` to each prompt, at temperature 1."""
    decoding = Decoding(max_output_tokens=tokens)
    requests = [GenerationRequest(prompt, decoding, seed, n) for seed, prompt in enumerate(prompts)]
    return [done for future in engine.submit(requests) for done in future.result(ANSWER_LIMIT_S)]


def _examples(answers: Sequence[Completion]) -> list[RLExample]:
    return [example_of(done, 1.0) for done in answers]


def _parity(learner: Learner, examples: Sequence[RLExample]) -> Parity:
    return Parity.of(differences_of(examples, learner.score(examples), learner.step))


def _judged(parity: Parity, rounding: np.ndarray | None, config: DoctorConfig) -> Check:
    monitor = ParityMonitor(config.learner.parity, config.model.dtype)
    limit = monitor.limit_at_start(rounding)
    detail = f"{parity}; {parity.tokens} tokens in {config.model.dtype}, the limit of the KL is {limit:.3g}"
    if rounding is not None:
        detail += (
            f" at the start and {monitor.limit:g} later; rounding alone makes a KL of {Parity.of(rounding).kl:.3g}"
        )
    if not parity.kl <= limit:  # so that NaN fails too
        remedy = "a run would end at once: see docs/learner.md; learner.parity.kl_limit changes the limit"
        return Check("parity", "fail", f"engine and learner disagree: {detail}", remedy)
    return Check("parity", "ok", detail)


def _generation(engine: InferenceEngine, config: EngineConfig, text: np.ndarray, tokens: int) -> Check:
    """Rates of prefill and decoding with every slot in use, each of the faster of two rounds."""
    slots, longest = config.max_slots, config.max_seq_len - 1
    long = [np.resize(np.roll(text, slot), longest) for slot in range(slots)]  # no two share a cache
    short = [np.resize(np.roll(text, slot), min(longest, 16)) for slot in range(slots)]
    prefill = max(_tokens_per_s(engine, long, 1, len(long[0]))[0] for _ in range(2))
    decode, sampled = max(_tokens_per_s(engine, short, tokens, 0) for _ in range(2))
    detail = (
        f"prefill {prefill:,.0f} tokens/s ({slots} prompts of {longest:,} tokens), decoding {decode:,.0f} tokens/s "
        f"({slots} slots, {sampled:.0f} tokens each)"
    )
    return Check("generation", "ok", detail)


def _tokens_per_s(
    engine: InferenceEngine, prompts: Sequence[np.ndarray], tokens: int, prompt_tokens: int
) -> tuple[float, float]:
    """Tokens per second, and the sampled tokens of a prompt; prompts count `prompt_tokens` each."""
    started = time.perf_counter()
    sampled = sum(len(done.response_tokens) for done in _answers(engine, prompts, tokens, 1))
    counted = len(prompts) * prompt_tokens or sampled
    return counted / (time.perf_counter() - started), sampled / len(prompts)


def _update(engine: InferenceEngine, learner: Learner, examples: Sequence[RLExample]) -> Check:
    """One update on the answers, every other of which counts as good, and the swap of weights that follows."""
    signed = [
        dataclasses.replace(example, advantage=np.where(example.loss_mask, sign, 0).astype(np.float32))
        for example, sign in zip(examples, (1.0, -1.0) * len(examples), strict=False)
    ]
    started = time.perf_counter()
    metrics = learner.update(TrainingBatch("doctor", 0, tuple(signed), (), {}), 0)
    updated = time.perf_counter()
    version = WeightVersion(0, 1)
    engine.set_weights(version, learner.decoder)
    engine.wait_until_served(version, ANSWER_LIMIT_S)
    detail = (
        f"{updated - started:.2f} s on {len(signed)} answers ({metrics['throughput/learner_tokens_per_s']:,.0f} "
        f"tokens/s); the engine has its weights {time.perf_counter() - updated:.2f} s later"
    )
    return Check("update", "ok", detail)


def _memory(estimated: int, free_bytes: int, engine: EngineConfig, learner: LearnerConfig) -> Check:
    """What a run is estimated to take, beside what there was at the beginning and what this process took at most."""
    taken = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    if taken is None:  # a CPU: the process itself
        taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    detail = (
        f"a run takes {bytes_text(estimated)} ({engine.max_slots} slots of {engine.max_seq_len} tokens, "
        f"{learner.micro_batch_rows} × {learner.row_length} at once); taken here at most {bytes_text(taken)}, "
        f"free before {bytes_text(free_bytes)}"
    )
    if estimated > free_bytes:
        remedy = "fewer learner.micro_batch_rows, a shorter learner.row_length, fewer inference.max_slots"
        return Check("memory", "fail", detail, remedy)
    return Check("memory", "ok", detail)


def _free_bytes() -> int:
    """Of the device, or of this machine where the device has no memory of its own."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else free_memory_bytes()


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
