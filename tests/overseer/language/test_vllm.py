"""What only the real vLLM shows, launched by a run; what it has in common with the fakes is in test_external.

`make test-vllm` installs its CPU build and names its executable in PENSTOCK_VLLM.
"""

import json
import socket
from contextlib import closing

import httpx
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks.chaos.invariants import books, violations

from penstock.inference.external import key_of
from penstock.inference.server_control import control_of
from penstock.learner import Learner
from penstock.learner.parity import differences_of, example_of
from penstock.model.language import load_decoder, load_policy, named_arrays, save_decoder, with_named_arrays
from penstock.model.language.lora import LoraConfig
from penstock.overseer.component import Settings
from penstock.overseer.config_loading import load_config
from penstock.overseer.language.external import ExternalEngine
from penstock.overseer.launch.process import GuardedProcess
from penstock.overseer.supervisor.messages import Identity
from penstock.overseer.training import train
from penstock.replay import RolloutStore
from penstock.rundir import RunDirectory, read_events, read_status
from penstock.text import Tokenizer
from penstock.types import ConfigError, WeightVersion
from tests.fakes.real_vllm import ENVIRONMENT, VLLM
from tests.overseer.language.conftest import HAS_VLLM, updates_of
from tests.waiting import wait_until

pytestmark = HAS_VLLM
LIMIT_S = 600.0
MODEL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip
"""Heads of 32: its CPU build computes none that are smaller."""


@pytest.fixture
def engine_of(tmp_path, monkeypatch):
    made = []
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", ENVIRONMENT["VLLM_CPU_KVCACHE_SPACE"])

    def make(decoder, tokenizer, *words, **external):
        external = {"launch": [VLLM, "serve", "{model}", "--enforce-eager"]} | external
        config = load_config("cats", ["inference.engine=vllm", f"inference.external={json.dumps(external)}", *words])
        events = []
        engine = ExternalEngine(
            Identity("inference", 0, 0),
            Settings(config, RunDirectory(tmp_path), "a token of this run"),
            decoder,
            tokenizer,
            lambda kind, **fields: events.append({"event": kind, **fields}),
        )
        made.append(engine)
        return engine, config, events

    yield make
    for engine in made:
        engine.stop(60.0)


def apart(config, decoder, answers, step):
    """Largest difference between the learner's and the server's log-probabilities."""
    learner = Learner(decoder, config.learner, 1, 0)
    examples = [example_of(answer, 1.0) for answer in answers]
    differences = differences_of(examples, learner.score(examples), step)
    assert len(differences) == sum(len(answer.response_tokens) for answer in answers)
    return float(np.abs(differences).max())


def test_versions_by_directory_are_what_the_learner_scores(engine_of):
    config = load_config("cats", [f"model.init={json.dumps(MODEL)}"])
    tokenizer = Tokenizer.load(config.model.tokenizer_path)
    decoder = load_policy(config.model, 0, tokenizer)
    engine, config, events = engine_of(decoder, tokenizer, f"model.init={json.dumps(MODEL)}")
    prompts = [tokenizer.encode("Who purrs?"), tokenizer.encode("Who")]
    for step in range(3):
        arrays = {name: np.asarray(each) * (1 + step) for name, each in named_arrays(decoder).items()}
        engine.set_weights(WeightVersion(0, step), arrays)
        answers = engine.canary(WeightVersion(0, step), prompts, 16, LIMIT_S)
        assert [set(answer.weight_steps.tolist()) for answer in answers] == [{step}, {step}]
        device = {name: jnp.asarray(each) for name, each in arrays.items()}
        assert apart(config, with_named_arrays(decoder, device), answers, step) < 1e-4
    assert [event["event"] for event in events] == ["external_engine"]  # no failure, and no second start


def test_adapters_by_name_are_what_the_learner_scores(engine_of, tmp_path):
    config = load_config("cats", [f"model.init={json.dumps(MODEL)}"])
    tokenizer = Tokenizer.load(config.model.tokenizer_path)
    base = tmp_path / "base"
    save_decoder(load_policy(config.model, 0, tokenizer), base, tokenizer)
    decoder = load_decoder(base, lora=LoraConfig(rank=8), seed=1)
    words = ["model.init=null", f"model.path={base}", "model.lora={rank: 8}"]
    engine, config, events = engine_of(decoder, tokenizer, *words, weights="lora")
    prompts = [tokenizer.encode("Who purrs?"), tokenizer.encode("Who")]
    for step in range(3):
        arrays = {
            name: np.asarray(each) + np.float32(0.05 * step * name.endswith(".b"))
            for name, each in named_arrays(decoder).items()
        }
        engine.set_weights(WeightVersion(0, step), arrays)
        answers = engine.canary(WeightVersion(0, step), prompts, 16, LIMIT_S)
        device = {name: jnp.asarray(each) for name, each in arrays.items()}
        assert apart(config, with_named_arrays(decoder, device), answers, step) < 1e-4
    assert [event["event"] for event in events] == ["external_engine"]


@pytest.mark.parametrize("staleness", [0, 4])
def test_a_run_knows_parity_and_digests_at_every_update(tmp_path, monkeypatch, staleness):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", ENVIRONMENT["VLLM_CPU_KVCACHE_SPACE"])
    steps, external = 8, {"launch": [VLLM, "serve", "{model}", "--enforce-eager"]}
    config = load_config(
        "cats",
        [
            f"model.init={json.dumps(MODEL)}", "inference.engine=vllm", f"inference.external={json.dumps(external)}",
            f"steps={steps}", f"replay.staleness_budget={staleness}", "replay.groups_per_batch=2",
            "curriculum.lessons.cats.sampling_params.n_generations_per_prompt=4", "curriculum.eval_n_examples=2",
            "inference.max_slots=8", "learner.parity.wait_s=60",
        ],
    )  # fmt: skip
    run = tmp_path / "run"
    train(config, run_dir=run, quiet=True)
    updates = updates_of(run)
    assert len(updates) == steps
    for line in updates:
        assert line["train/parity_kl"] < 1e-8 and line["train/parity_unchecked"] == 0
        assert line["replay/unverified"] == 0 and line["replay/staleness_max"] <= staleness
    directory = RunDirectory(run)
    assert books(RolloutStore(directory).history()).closed and violations(directory) == []
    ledger = read_status(run / "status.json")["ledger"]
    assert ledger["trained"] == steps * 8 and ledger["invalid"] == 0
    assert not [event for event in read_events(run / "events.jsonl") if event["event"] == "external_engine_failed"]


def test_a_model_that_it_cannot_compute_is_refused_with_the_reason(engine_of):
    small = MODEL | {"num_attention_heads": 4}
    config = load_config("cats", [f"model.init={json.dumps(small)}"])
    tokenizer = Tokenizer.load(config.model.tokenizer_path)
    decoder = load_policy(config.model, 0, tokenizer)
    engine, _, _ = engine_of(decoder, tokenizer, f"model.init={json.dumps(small)}")
    arrays = {name: np.asarray(each) for name, each in named_arrays(decoder).items()}
    with pytest.raises(ConfigError, match="no heads that are smaller than 32"):
        engine.set_weights(WeightVersion(0, 0), arrays)


def test_a_build_that_cannot_sleep_is_refused_with_its_own_words(engine_of):
    """A card's does; what the routes do there is `tests.fakes.vllm_server`'s guess until one was seen."""
    config = load_config("cats", [f"model.init={json.dumps(MODEL)}"])
    tokenizer = Tokenizer.load(config.model.tokenizer_path)
    decoder = load_policy(config.model, 0, tokenizer)
    words = [f"model.init={json.dumps(MODEL)}", "overseer.max_restarts=0"]
    engine, _, _ = engine_of(decoder, tokenizer, *words, colocate=True)
    arrays = {name: np.asarray(each) for name, each in named_arrays(decoder).items()}
    with pytest.raises(ConfigError, match="external.launch: .*Sleep mode is not supported on current platform"):
        engine.set_weights(WeightVersion(0, 0), arrays)


@pytest.fixture
def bare(tmp_path):
    """Starts servers as a user might, by their flags and environment alone; gives their URLs."""
    started = []

    def start(*flags, **environment):
        with closing(socket.create_server(("127.0.0.1", 0))) as listener:
            port = listener.getsockname()[1]
        words = [VLLM, "serve", str(tmp_path / "model"), "--enforce-eager", "--port", str(port), *flags]
        process = GuardedProcess(words, {"VLLM_CPU_KVCACHE_SPACE": "1"} | environment, tmp_path / f"{port}.out")
        started.append(process)
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: not process.alive or _healthy(url), "vllm serve", LIMIT_S)
        assert process.alive, process.last_words()
        return url

    yield start
    for process in started:
        process.end(60.0)


def _healthy(url):
    try:
        return httpx.get(f"{url}/health", timeout=5.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def test_what_a_server_lacks_is_refused_with_the_flag(bare, tmp_path):
    """Of three servers: one started with nothing, one that gives tokens, and one whose numbers are right, too."""
    config = load_config("cats", [f"model.init={json.dumps(MODEL)}"])
    tokenizer = Tokenizer.load(config.model.tokenizer_path)
    decoder = load_policy(config.model, 0, tokenizer)
    base, key = tmp_path / "model", tmp_path / "key"
    save_decoder(decoder, base, tokenizer)
    key.write_text("a key")

    def refused(said, url, *words, **external):
        given = {"urls": [url], "model": str(base)} | external
        asked = ["inference.engine=vllm", f"inference.external={json.dumps(given)}", f"model.init={json.dumps(MODEL)}"]
        inference = load_config("cats", [*asked, *words]).inference
        control = control_of(url, key_of(inference.external, ""), inference, LIMIT_S)
        try:
            with pytest.raises(ConfigError, match=said):
                control.check()
        finally:
            control.close()

    lora = ["model.init=null", f"model.path={base}", "model.lora={rank: 8}"]
    short = ("--max-model-len", "64")
    nothing = bare("--max-model-len", "32", VLLM_API_KEY="a key")
    refused("give the file that holds it as inference.external.api_key_file", nothing)
    refused("start it with --served-model-name policy", nothing, model="policy", api_key_file=str(key))
    refused("start it with --max-model-len 64", nothing, api_key_file=str(key))
    few = "inference.max_seq_len=32"
    refused("--enable-scale-out", nothing, few, "learner.row_length=64", api_key_file=str(key))
    refused("--logprobs-mode processed_logprobs", bare("--enable-scale-out", *short))
    numbers = bare("--enable-scale-out", "--logprobs-mode", "processed_logprobs", *short)
    refused("VLLM_SERVER_DEV_MODE=1", numbers)
    refused("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 .* --enable-lora", numbers, *lora, weights="lora")
