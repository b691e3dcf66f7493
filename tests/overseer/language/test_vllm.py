"""The real vLLM: `make test-vllm` installs its CPU build and names its executable in PENSTOCK_VLLM."""

import json
import os
import re
import signal

import httpx
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks.chaos.invariants import books, violations
from benchmarks.external import server_of

from penstock.inference import RemoteContext, ServerPool
from penstock.inference.external import dialect_of
from penstock.inference.server_control import VllmControl
from penstock.learner import Learner
from penstock.learner.parity import differences_of, example_of
from penstock.model.language import load_decoder, load_policy, named_arrays, save_decoder, with_named_arrays
from penstock.model.language.lora import LoraConfig
from penstock.overseer.component import Settings
from penstock.overseer.config_loading import load_config
from penstock.overseer.language.external import ExternalEngine
from penstock.overseer.supervisor.messages import Identity
from penstock.overseer.training import train
from penstock.replay import RolloutStore
from penstock.rundir import RunDirectory, read_events, read_metrics, read_status
from penstock.text import Tokenizer
from penstock.types import ConfigError, Decoding, MismatchError, RunFailed, WeightVersion

VLLM = os.environ.get("PENSTOCK_VLLM", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.path.exists(VLLM), reason="PENSTOCK_VLLM names no vllm: make test-vllm installs it"),
]
LIMIT_S = 600.0
MODEL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip
"""Heads of 32: its CPU build computes none that are smaller."""


@pytest.fixture
def engine_of(tmp_path, monkeypatch):
    made = []
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")

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


def raising(failure):
    raise failure


def test_adapters_by_name_are_what_the_learner_scores(engine_of, tmp_path, monkeypatch):
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
    load, nothing = VllmControl.load_adapter, engine._wanted.directory.with_name("policy-0-0")
    assert nothing.is_dir()
    monkeypatch.setattr(VllmControl, "load_adapter", lambda self, version, directory: load(self, version, nothing))
    monkeypatch.setattr(engine, "_leave", raising)
    with pytest.raises(MismatchError, match="the adapter is not applied"):
        engine.set_weights(WeightVersion(0, 3), arrays)


@pytest.mark.parametrize("staleness", [0, 4])
def test_a_run_knows_parity_and_digests_at_every_update(tmp_path, monkeypatch, staleness):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
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
    updates = [line for line in read_metrics(run / "metrics.jsonl") if "train/loss" in line]
    assert len(updates) == steps
    for line in updates:
        assert line["train/parity_kl"] < 1e-8 and line["train/parity_unchecked"] == 0
        assert line["replay/unverified"] == 0 and line["replay/staleness_max"] <= staleness
    directory = RunDirectory(run)
    assert books(RolloutStore(directory).history()).closed and violations(directory) == []
    ledger = read_status(run / "status.json")["ledger"]
    assert ledger["trained"] == steps * 8 and ledger["invalid"] == 0
    assert not [event for event in read_events(run / "events.jsonl") if event["event"] == "external_engine_failed"]


def test_faults_are_named_and_healed(engine_of, monkeypatch):
    """Of one server after the other: an unknown label, a hang, a death, an update that moves nothing; a full queue."""
    monkeypatch.setattr("penstock.overseer.language.external.WATCH_S", 0.0)
    config = load_config("cats", [f"model.init={json.dumps(MODEL)}"])
    tokenizer = Tokenizer.load(config.model.tokenizer_path)
    decoder = load_policy(config.model, 0, tokenizer)
    words = [f"model.init={json.dumps(MODEL)}", "overseer.no_progress_s=40", "inference.max_slots=2"]
    launch = [VLLM, "serve", "{model}", "--enforce-eager", "--max-num-queued-reqs", "4"]
    engine, config, events = engine_of(decoder, tokenizer, *words, launch=launch)
    arrays = [{n: np.asarray(each) * (1 + step) for n, each in named_arrays(decoder).items()} for step in range(2)]
    engine.set_weights(WeightVersion(0, 0), arrays[0])

    def named():
        return [event["reason"] for event in events if event["event"] == "external_engine_failed"]

    key = {"authorization": "Bearer a token of this run"}
    renamed = {"new_version": "default"}
    httpx.post(f"{engine.server.url}/update_weight_version", json=renamed, headers=key).raise_for_status()
    engine.watch()
    assert len(named()) == 1 and "called 'default'" in named()[0]
    ended = "the server ended|does not answer: .*reset"  # the second if it was killed while it was asked
    for number, said in ((signal.SIGSTOP, "does not answer: ReadTimeout"), (signal.SIGKILL, ended)):
        before = len(named())
        os.kill(server_of(os.getpid(), VLLM), number)
        while len(named()) == before:  # the process is gone a moment after it was told
            engine.watch()
        assert re.search(said, named()[before])
    load, old = VllmControl.load, engine._wanted.directory
    monkeypatch.setattr(VllmControl, "load", lambda self, directory: load(self, old))
    with monkeypatch.context() as once:
        once.setattr(engine, "_leave", raising)
        with pytest.raises(MismatchError, match="version 1 with other weights than it was given"):
            engine.set_weights(WeightVersion(0, 1), arrays[1])
    monkeypatch.setattr(VllmControl, "load", load)
    engine.set_weights(WeightVersion(0, 1), arrays[1])

    pool = ServerPool("a token of this run", request_timeout_s=LIMIT_S)
    pool.dialect = dialect_of(config.inference)
    try:
        pool.set_servers([engine.server])
        asked = RemoteContext(pool, tokenizer)
        (answers,) = asked.generate([tokenizer.encode("Who purrs?")], 32, Decoding(max_output_tokens=16), [1])
        refused = pool.metrics()["inference_client/refusals_total"]
    finally:
        pool.close()
    assert len(answers) == 32 and {*answers[-1].weight_steps.tolist()} == {1} and refused


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
    with pytest.raises(RunFailed, match="Sleep mode is not supported on current platform"):
        engine.set_weights(WeightVersion(0, 0), arrays)
