"""A real checkpoint, from the loader to what is saved: `make test-smollm2`.

The directory is what `scripts/make_smollm2.py` makes. `transformers` with torch runs in a process of the environment
that `make test-torch` uses, too.
"""

import json
import os
import re
import resource
import subprocess
import sys
import threading
import time
import zlib
from dataclasses import replace
from pathlib import Path

import httpx
import jax.numpy as jnp
import numpy as np
import pytest

import penstock
from penstock.batch import example_from_pair
from penstock.inference import EngineConfig, EngineContext, InferenceEngine
from penstock.inference.config import ServeConfig
from penstock.inference.serving import serve
from penstock.learner import CorrectionConfig, Learner, LearnerConfig, LossConfig, OptimizerConfig
from penstock.model.language import PolicyConfig, Segments, load_decoder, load_policy, named_arrays
from penstock.model.language.config import LoadingConfig
from penstock.model.language.decoder import decoder_digests
from penstock.overseer.language.export import ExportConfig, export
from penstock.rundir import read_events, read_metrics
from penstock.text import Tokenizer
from penstock.types import Decoding, TrainingBatch, WeightVersion
from penstock.weights import InProcessBroadcaster, trained_arrays

ROOT = Path(__file__).parents[1]
SMOLLM2 = ROOT / "checkpoints" / "SmolLM2-135M-Instruct"
TORCH_PYTHON = ROOT / ".venv-torch" / "bin" / "python"
UPDATES = 20

pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not SMOLLM2.is_dir(), reason=f"{SMOLLM2} is missing: make test-smollm2 makes it"),
]
QUESTIONS = [
    "What is the capital of France?",
    "Mara has 3 baskets with 12 eggs in each. How many eggs does she have?",
    "Name three colours.",
    "Write one sentence about a river.",
]
LIMITS = {"float32": (1e-4, 1e-3, 1e-8), "bfloat16": (0.06, 0.4, 5e-3)}
"""By dtype: the mean difference of log-probabilities, the 99th percentile, and the KL divergence."""


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(SMOLLM2)


def conversation(question):
    return [{"role": "user", "content": question}]


def test_it_loads_with_its_own_stop_tokens_and_chat_template(tokenizer):
    decoder = load_decoder(SMOLLM2, "bfloat16")
    assert decoder.config.parameter_count == 134_515_008 and decoder.head is None
    assert tokenizer.vocab_size == decoder.config.vocab_size == 49_152
    assert tokenizer.stop_token_ids == (2, 0)
    text = tokenizer.decode(tokenizer.render(conversation("Hi")), skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("dtype", LIMITS)
def test_engine_and_learner_agree(tokenizer, dtype):
    decoder = load_policy(PolicyConfig(path=str(SMOLLM2), dtype=dtype), 0, tokenizer)
    decoding = Decoding(max_output_tokens=48, stop_token_ids=tokenizer.stop_token_ids)
    prompts = [tokenizer.render(conversation(question)) for question in QUESTIONS]
    engine = InferenceEngine(
        decoder, WeightVersion(0, 0), tokenizer, EngineConfig(max_slots=8, max_seq_len=128, prefill_lengths=(64,))
    )
    try:
        engine.start()
        engine.wait_until_ready(1200.0)
        answers = EngineContext(engine, tokenizer).generate(prompts, 2, decoding, range(len(prompts)))
        greedy = EngineContext(engine, tokenizer).generate(prompts[:1], 1, Decoding(temperature=0.0), [0])[0][0]
    finally:
        engine.stop(30.0)
    assert greedy.text == "The capital of France is Paris." and greedy.finish_reason == "stop"

    learner = Learner(decoder, LearnerConfig(row_length=128, micro_batch_rows=4), 1)
    sampled = [completion for group in answers for completion in group]
    scores = learner.score([example_from_pair(each.prompt_tokens, each.response_tokens) for each in sampled])
    differences = np.concatenate(
        [score[len(each.prompt_tokens) :] - each.response_logprobs for each, score in zip(sampled, scores, strict=True)]
    ).astype(np.float64)
    kl = float(np.mean(np.expm1(differences) - differences))  # of the engine from the learner, by its samples
    sizes = np.abs(differences)
    mean, p99, largest = float(sizes.mean()), float(np.quantile(sizes, 0.99)), float(sizes.max())
    print(f"\n{dtype}: {sizes.size} tokens, mean {mean:.2g}, p99 {p99:.2g}, max {largest:.2g}, KL {kl:.2g}")
    assert sizes.size > 150
    for value, limit in zip((mean, p99, kl), LIMITS[dtype], strict=True):
        assert value <= limit


def test_updates_by_blocks_have_the_same_curve_as_dense(tokenizer):
    """Five updates of packed worked answers, half of them with a negative advantage, once by each."""
    lines = (ROOT / "examples/data/word_problems.jsonl").read_text().splitlines()[:12]
    pairs = [
        example_from_pair(tokenizer.render(conversation(each["question"])), tokenizer.encode(each["answer"]))
        for each in map(json.loads, lines)
    ]
    examples = tuple(
        replace(pair, advantage=pair.advantage * (-1) ** number, rollout_ids=(f"smollm2-0-0/{number}",))
        for number, pair in enumerate(pairs)
    )
    plain = LossConfig(surrogate="reinforce", correction=CorrectionConfig(kind="none"))
    keys, curves = ("train/loss", "train/grad_norm", "train/entropy"), {}
    for attention in ("dense", "blocks"):
        config = LearnerConfig(
            loss=plain, row_length=256, micro_batch_rows=2, attention=attention,
            optimizer=OptimizerConfig(learning_rate=1e-5, warmup_steps=0),
        )  # fmt: skip
        learner = Learner(load_decoder(SMOLLM2), config, 5)
        updates = [learner.update(TrainingBatch("words", step, examples, (), {}), step) for step in range(5)]
        curves[attention] = np.array([[update[key] for key in keys] for update in updates])
    dense, blocks = curves["dense"], curves["blocks"]
    print("\n" + "\n".join(f"{key} {column} differs by {np.abs(column - other).max():.2g} at most"
                           for key, column, other in zip(keys, dense.T, blocks.T, strict=True)))  # fmt: skip
    assert np.ptp(dense[:, 0]) > 0.005  # it learns
    np.testing.assert_allclose(blocks, dense, rtol=1e-3, atol=1e-4)


class Published:
    """The bytes of every version that the learner published: their checksum, and the share of changed elements."""

    def __init__(self):
        self.checksums: list[int] = []
        self.changed: list[float] = []
        self._before: dict[str, np.ndarray] = {}

    def note(self, arrays):
        bits = {name: np.asarray(array).view(np.uint16) for name, array in arrays.items()}
        self.checksums.append(zlib.crc32(b"".join(zlib.crc32(each).to_bytes(4, "big") for each in bits.values())))
        if self._before:
            changed = sum(int(np.count_nonzero(each != self._before[name])) for name, each in bits.items())
            self.changed.append(changed / sum(each.size for each in bits.values()))
        self._before = bits


def recipe(*more):
    """The recipe with so many updates, small, on the small file of word problems."""
    environment = "curriculum.lessons.gsm8k.environment.env_args"
    words = [
        f"steps={UPDATES}", f"model.path={SMOLLM2}", f"{environment}.path={ROOT}/examples/data/word_problems.jsonl",
        "curriculum.lessons.gsm8k.sampling_params={n_generations_per_prompt: 4, max_output_tokens: 48}",
        "curriculum.eval_n_examples=8", "curriculum.eval_frequency=0", "replay.groups_per_batch=2",
        "inference.max_slots=16", "inference.max_seq_len=160", "inference.prefill_lengths=[112]",
        "learner.row_length=160", "learner.micro_batch_rows=2", "overseer.no_progress_s=1800",
        "learner.parity.wait_s=600",
    ]  # fmt: skip
    return penstock.load_config("gsm8k_smollm2", [*words, *more])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Twenty asynchronous updates."""
    run_dir, published = tmp_path_factory.mktemp("runs") / "run", Published()
    original = InProcessBroadcaster.publish
    with pytest.MonkeyPatch.context() as patch:

        def publish(self, version, arrays):
            published.note(arrays)
            original(self, version, arrays)

        patch.setattr(InProcessBroadcaster, "publish", publish)
        began = time.perf_counter()
        summary = penstock.train(recipe(), run_dir, quiet=True)
        seconds = time.perf_counter() - began
    return run_dir, summary, published, seconds


def test_updates_move_what_is_published(trained):
    run_dir, summary, published, seconds = trained
    assert summary.step == UPDATES
    updates = [row for row in read_metrics(run_dir / "metrics.jsonl") if "train/loss" in row]
    assert [row["step"] for row in updates] == list(range(1, UPDATES + 1))
    moving = [row["train/grad_norm"] > 0 for row in updates]
    assert np.mean(moving) >= 0.9
    versions = published.checksums[-UPDATES - 1 :]
    assert np.mean([one != other for one, other in zip(versions, versions[1:], strict=False)]) >= 0.9
    assert any(event["event"] == "parity" for event in read_events(run_dir / "events.jsonl"))
    assert all(row["train/parity_checked"] >= 8 for row in updates) and updates[-1]["train/parity_unchecked"] == 0

    before, after = (results["gsm8k"].reward_mean for results in (summary.untrained, summary.after))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    changed = np.array(published.changed[-UPDATES:])
    rewards = [row["train/reward_mean"] for row in updates]
    kls = [row["train/parity_kl"] for row in updates]

    def median(name):
        return np.median([row[name] for row in updates])

    print(
        f"\n{UPDATES} updates: {seconds:.0f} s in all, {peak:.1f} GiB at most, held-out reward {before:.3f} before and "
        f"{after:.3f} after; of the published elements {changed.min():.2%} to {changed.max():.2%} changed; "
        f"training reward {np.mean(rewards[:5]):.3f} (first five updates), {np.mean(rewards[-5:]):.3f} (last five); "
        f"parity KL {min(kls):.2g} to {max(kls):.2g}; median update {median('time/update'):.1f} s, "
        f"of which the guard {median('time/parity'):.1f}"
    )
    assert 0 <= before <= 1 and 0 <= after <= 1


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """Twenty updates of an adapter of rank 16, the last ten after a resume, under a KL to the adapter off."""
    run_dir = tmp_path_factory.mktemp("adapter") / "run"
    words = [
        "model.lora.rank=16", "learner.optimizer.learning_rate=2e-4", "learner.kl.coefficient=0.001",
        "learner.kl.reference=initial", "overseer.checkpoint_every=10", "overseer.keep_checkpoints=5",
    ]  # fmt: skip
    penstock.train(recipe(*words, f"steps={UPDATES // 2}"), run_dir, quiet=True)
    return run_dir, penstock.train(run_dir=run_dir, resume=True, quiet=True, steps=UPDATES)


def test_an_adapter_is_trained_published_and_saved_alone(adapter):
    run_dir, summary = adapter
    assert summary.step == UPDATES
    events = list(read_events(run_dir / "events.jsonl"))
    assert [event["step"] for event in events if event["event"] == "resume"] == [UPDATES // 2]
    updates = [row for row in read_metrics(run_dir / "metrics.jsonl") if "train/loss" in row]
    assert [row["step"] for row in updates] == list(range(1, UPDATES + 1))
    assert np.mean([row["train/grad_norm"] > 0 for row in updates]) >= 0.9
    kls = [row["train/parity_kl"] for row in updates]
    assert all(row["train/parity_checked"] >= 8 for row in updates) and max(kls) <= LIMITS["bfloat16"][2]
    folder = run_dir / "checkpoints" / f"step-{UPDATES}" / "model"
    decoder, base = load_decoder(folder, "bfloat16"), load_decoder(SMOLLM2, "bfloat16")
    arrays = named_arrays(decoder)
    travelling = sum(array.nbytes for array in trained_arrays(arrays, decoder.config.still).values())
    share = travelling / sum(array.nbytes for array in named_arrays(base).values())
    held_out = [event["reward"]["gsm8k"] for event in events if event["event"] == "evaluation"]
    checked, update, guard = (
        [row[name] for row in updates] for name in ("train/parity_checked", "time/update", "time/parity")
    )
    print(
        f"\n{travelling:,} bytes published for a version, {share:.2%}; parity KL {min(kls):.2g} to {max(kls):.2g} of "
        f"{min(checked):.0f} to {max(checked):.0f} tokens; median update {np.median(update):.1f} s, of which the guard "
        f"{np.median(guard):.1f}; held-out rewards {np.round(held_out, 3)}"
    )
    assert share <= 0.04 and (folder / "adapter_model.safetensors").stat().st_size < 1.01 * travelling + 100_000
    still = {name: digest for name, digest in decoder_digests(arrays).items() if not name.startswith("adapter.")}
    assert still == decoder_digests(named_arrays(base)) and bool(decoder.adapter.query.b.any())


REFERENCE = """
import sys, numpy as np, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
directory, arrays = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()  # an adapter's by peft
tokens = np.load(arrays)["tokens"]
text = AutoTokenizer.from_pretrained(directory).apply_chat_template(
    [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
)
with torch.no_grad():
    logits = model(torch.tensor(tokens, dtype=torch.long)[None]).logits[0].numpy()
ends = GenerationConfig.from_pretrained(directory).eos_token_id
np.savez(arrays, tokens=tokens, logits=logits, rendered=np.array(text), ends=np.array(ends))
"""


@pytest.mark.parametrize("which", ["published", "trained", "adapter", "merged"])
def test_transformers_has_equal_logits(which, tokenizer, tmp_path, request):
    if not TORCH_PYTHON.is_file():
        pytest.skip("torch is missing: make test-smollm2 installs it into .venv-torch")
    directory = SMOLLM2
    if which in ("adapter", "merged"):
        directory = request.getfixturevalue("adapter")[0] / "checkpoints" / f"step-{UPDATES}" / "model"
    if which == "merged":
        directory = export(directory, tmp_path / "merged", ExportConfig())
    if which == "trained":
        directory = request.getfixturevalue("trained")[0] / "checkpoints" / f"step-{UPDATES}" / "model"
        assert json.loads((directory / "config.json").read_text())["initializer_range"] == 0.041666666666666664
        assert json.loads((directory / "generation_config.json").read_text())["temperature"] == 0.7
    tokens = tokenizer.render(conversation(QUESTIONS[1]))
    np.savez(tmp_path / "arrays.npz", tokens=tokens)
    subprocess.run(
        [str(TORCH_PYTHON), "-c", REFERENCE, str(directory), str(tmp_path / "arrays.npz")],
        check=True, timeout=900, env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    theirs = np.load(tmp_path / "arrays.npz")
    decoder = load_decoder(directory)
    rows = jnp.asarray(tokens)[None]
    hidden = decoder.hidden_states(rows, jnp.arange(rows.size)[None], Segments.of(np.ones(rows.shape)))
    ours = np.asarray(decoder.logits(hidden))[0]
    print(f"\n{which}: logits differ by {np.abs(ours - theirs['logits']).max():.2g} at most")
    np.testing.assert_allclose(ours, theirs["logits"], atol=1e-3)
    assert theirs["rendered"].tolist() == tokenizer.render(conversation("Hi")).tolist()
    assert theirs["ends"].tolist() == [2, 0]


def test_the_command_evaluates_the_foreign_directory(tmp_path):
    done = subprocess.run(
        [
            sys.executable, "-m", "penstock", "eval", str(SMOLLM2), "--recipe", "gsm8k_smollm2", "--n", "4", "--json",
            f"curriculum.lessons.gsm8k.environment.env_args.path={ROOT}/examples/data/word_problems.jsonl",
            "curriculum.lessons.gsm8k.sampling_params.max_output_tokens=32", "inference.max_slots=4",
            "inference.max_seq_len=192", "inference.prefill_lengths=[128]", "overseer.no_progress_s=1200",
            "model.dtype=bfloat16",
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert "gsm8k" in json.dumps(report) and "NaN" not in done.stdout


def test_the_foreign_directory_is_served_in_bfloat16():
    engine = EngineConfig(max_slots=4, max_seq_len=128, prefill_lengths=(64,))
    settings = ServeConfig(port=0, model=LoadingConfig(dtype="bfloat16"), ready_timeout_s=1200.0, engine=engine)
    said, stop, ready = [], threading.Event(), threading.Event()

    def announce(line):
        said.append(line)
        if "serving" in line:
            ready.set()

    thread = threading.Thread(target=serve, args=(str(SMOLLM2), settings, announce, stop))
    thread.start()
    try:
        assert ready.wait(1500)
        address = re.search(r"at (http://127.0.0.1:\d+/v1)", said[-1])
        assert address is not None
        asked = {"model": SMOLLM2.name, "messages": conversation(QUESTIONS[0]), "temperature": 0, "max_tokens": 20}
        answer = httpx.post(f"{address[1]}/chat/completions", json=asked, timeout=600).json()
    finally:
        stop.set()
        thread.join(60)
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert answer["choices"][0]["finish_reason"] == "stop"
