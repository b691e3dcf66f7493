"""Servers of other makes, and what drives them: those of `tests.fakes`, and the real vLLM behind a proxy."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from penstock.inference import EngineConfig
from penstock.model.language import load_decoder, load_policy, named_arrays, save_decoder, with_named_arrays
from penstock.model.language.lora import LoraConfig
from penstock.overseer.component import Settings
from penstock.overseer.config_loading import load_config
from penstock.overseer.language.external import ExternalEngine
from penstock.overseer.supervisor.messages import Identity
from penstock.rundir import RunDirectory, read_metrics
from penstock.text import Tokenizer
from tests.fakes.real_vllm import FLAGS, VLLM, RealVllm
from tests.fakes.sglang_server import FakeSglang
from tests.fakes.vllm_server import FakeVllm, untied

LIMIT_S = 280.0
ROOT = Path(__file__).parents[3]
TOKEN = "a token of this run"
MODEL = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip
"""Heads of 32: vLLM's CPU build computes none that are smaller."""

SHAPES = EngineConfig(max_slots=4, max_seq_len=64, windows=(64,), prefill_rows=2, prefill_lengths=(16,))
SHORT = [
    "replay.groups_per_batch=2", "curriculum.eval_n_examples=2", "learner.row_length=64", "learner.micro_batch_rows=2",
    "curriculum.lessons.cats.sampling_params.n_generations_per_prompt=2", "replay.staleness_budget=1",
]  # fmt: skip
"""Words of a recipe whose updates take an instant."""

RANK = 2
HAS_VLLM = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not os.path.exists(VLLM), reason="PENSTOCK_VLLM names no vllm: make test-vllm installs it"),
]
REAL = pytest.param("real", marks=HAS_VLLM)

of_each = pytest.mark.parametrize("server", ["vllm", "sglang", REAL], indirect=True)
of_vllm = pytest.mark.parametrize("server", ["vllm", REAL], indirect=True)


def configured(*words, kind="vllm", **external):
    given = json.dumps({"urls": ["http://127.0.0.1:1"]} | external)
    return load_config(
        "cats",
        [
            f"model.init={json.dumps(MODEL)}", f"inference.engine={kind}", f"inference.external={given}",
            "inference.max_slots=4", "overseer.backoff_s=0.01", "overseer.max_restarts=2", *words,
        ],
    )  # fmt: skip


@pytest.fixture(scope="session")
def policy():
    config = load_config("cats", [f"model.init={json.dumps(MODEL)}"])
    tokenizer = Tokenizer.load(config.model.tokenizer_path)
    return load_policy(config.model, 0, tokenizer), tokenizer


@pytest.fixture(scope="session")
def checkpoint(policy, tmp_path_factory):
    """What a server was started with: another model of the same shape, of which everything differs."""
    decoder, tokenizer = untied(policy[0]), policy[1]
    folder = tmp_path_factory.mktemp("served") / "model"
    other = {name: np.asarray(array) * 3 + np.float32(0.01) for name, array in named_arrays(decoder).items()}
    save_decoder(with_named_arrays(decoder, other), folder, tokenizer)
    return folder


def adapting(checkpoint):
    """Words of a recipe that trains an adapter."""
    return ["model.init=null", f"model.path={checkpoint}", f"model.lora={{rank: {RANK}}}"]


@pytest.fixture(scope="session")
def lora(checkpoint):
    return adapting(checkpoint)


@pytest.fixture(scope="session")
def adapted(checkpoint):
    """The server's model with an adapter that changes nothing yet."""
    return load_decoder(checkpoint, lora=LoraConfig(rank=RANK), seed=1)


@pytest.fixture(scope="session")
def running(checkpoint, policy, tmp_path_factory):
    """A server of each kind, started when it is needed first."""
    servers = {}

    def of(kind):
        if kind == "real" and kind not in servers:
            external = {"urls": [], "launch": [VLLM, "serve", "{model}", *FLAGS], "weights": "lora"}
            words = [f"inference.max_seq_len={RealVllm.room}", f"learner.row_length={RealVllm.room}"]
            config = configured(*adapting(checkpoint), *words, **external)
            folder = tmp_path_factory.mktemp("real")
            servers[kind] = RealVllm(checkpoint, lambda port: config.server_command(checkpoint, port), folder)
            servers[kind].start()
        elif kind not in servers:
            servers[kind] = {"vllm": FakeVllm, "sglang": FakeSglang}[kind](checkpoint, policy[1], SHAPES)
            servers[kind].start()
        return servers[kind]

    yield of
    for server in servers.values():
        server.stop()


@pytest.fixture
def server(running, request):
    """As it was started, but for its weights."""
    served = running(getattr(request, "param", "vllm"))
    served.as_started()
    yield served
    served.as_started()


@pytest.fixture
def engine_of(tmp_path, policy, request):
    made, kind = [], "vllm"
    if "server" in request.fixturenames:
        kind = request.getfixturevalue("server").kind

    def make(*words, decoder=None, **external):
        config = configured(*words, kind=kind, **external)
        events = []
        engine = ExternalEngine(
            Identity("inference", 0, 0),
            Settings(config, RunDirectory(tmp_path), TOKEN),
            decoder or policy[0],
            policy[1],
            lambda kind, **fields: events.append({"event": kind, **fields}),
        )
        engine.events = events  # type: ignore[attr-defined]
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.stop(LIMIT_S)


def moved(decoder, by):
    return {name: np.asarray(array) + np.float32(by) for name, array in named_arrays(decoder).items()}


def trained(decoder, by):
    arrays = named_arrays(decoder)
    return {name: np.asarray(a) + np.float32(by * name.endswith(".b")) for name, a in arrays.items()}


def failures(engine):
    return [event["reason"] for event in engine.events if event["event"] == "external_engine_failed"]


def sampled(engine, version, codec):
    return engine.canary(version, [codec.encode("Who purrs?"), codec.encode("Who")], 6, LIMIT_S)


def updates_of(run):
    """The lines of a run's updates, so far."""
    path = run / "metrics.jsonl"
    return [line for line in read_metrics(path) if "train/loss" in line] if path.exists() else []
