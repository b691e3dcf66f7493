"""A server of another make, driven against those of `tests.fakes`, in this process or launched."""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from benchmarks.chaos.invariants import books, violations

from penstock.inference import EngineConfig, RemoteContext, ServerPool
from penstock.inference.external import VllmDialect, dialect_of
from penstock.model.language import load_decoder, load_policy, named_arrays, save_decoder, with_named_arrays
from penstock.model.language.decoder import decoder_digests
from penstock.model.language.lora import LoraConfig
from penstock.overseer.component import Settings
from penstock.overseer.config_loading import load_config
from penstock.overseer.language.external import ExternalEngine
from penstock.overseer.language.generation import generate
from penstock.overseer.language.inference import ExternalInference
from penstock.overseer.language.kind import LanguageKind
from penstock.overseer.language.rollout import servers_of
from penstock.overseer.supervisor.messages import Identity, Membership, Peer
from penstock.overseer.training import train
from penstock.replay import RolloutStore
from penstock.rundir import RunDirectory, read_events, read_metrics, read_status
from penstock.text import Tokenizer
from penstock.types import ConfigError, Decoding, GenerationCall, RunFailed, WeightVersion
from penstock.weights import open_broadcaster
from tests.fakes.sglang_server import FakeSglang
from tests.fakes.vllm_server import FakeVllm
from tests.overseer.language.test_inference import Around
from tests.waiting import wait_until

LIMIT_S = 60.0
ROOT = Path(__file__).parents[3]
TOKEN = "a token of this run"
MODEL = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip
SHAPES = EngineConfig(max_slots=4, max_seq_len=64, windows=(64,), prefill_rows=2, prefill_lengths=(16,))


both = pytest.mark.parametrize("fake", ["vllm", "sglang"], indirect=True)


def configured(*words, kind="vllm", **external):
    given = json.dumps({"urls": ["http://127.0.0.1:1"]} | external)
    return load_config(
        "cats",
        [
            f"model.init={json.dumps(MODEL)}", f"inference.engine={kind}", f"inference.external={given}",
            "inference.max_slots=4", "overseer.backoff_s=0.01", "overseer.max_restarts=2", *words,
        ],
    )  # fmt: skip


@pytest.fixture(scope="module")
def policy():
    config = load_config("cats", [f"model.init={json.dumps(MODEL)}"])
    tokenizer = Tokenizer.load(config.model.tokenizer_path)
    return load_policy(config.model, 0, tokenizer), tokenizer


@pytest.fixture(scope="module")
def checkpoint(policy, tmp_path_factory):
    """What the server was started with: another model of the same shape, of which everything differs."""
    decoder, tokenizer = policy
    folder = tmp_path_factory.mktemp("served") / "model"
    other = {name: np.asarray(array) * 3 + np.float32(0.01) for name, array in named_arrays(decoder).items()}
    save_decoder(with_named_arrays(decoder, other), folder, tokenizer)
    return folder


@pytest.fixture(scope="module")
def running(checkpoint, policy):
    """A server of each kind, started when it is needed first."""
    servers = {}

    def of(kind):
        if kind not in servers:
            servers[kind] = {"vllm": FakeVllm, "sglang": FakeSglang}[kind](checkpoint, policy[1], SHAPES)
            servers[kind].start()
        return servers[kind]

    yield of
    for server in servers.values():
        server.stop()


@pytest.fixture
def fake(running, request):
    """As it was started, but for its weights."""
    server = running(getattr(request, "param", "vllm"))
    server.as_started()
    yield server
    server.as_started()


@pytest.fixture
def engine_of(tmp_path, policy, request):
    made, kind = [], "vllm"
    if "fake" in request.fixturenames:
        kind = request.getfixturevalue("fake").kind

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


def failures(engine):
    return [event["reason"] for event in engine.events if event["event"] == "external_engine_failed"]


def sampled(engine, version, codec):
    return engine.canary(version, [codec.encode("Who purrs?"), codec.encode("Who")], 6, LIMIT_S)


@both
def test_a_version_is_loaded_proven_and_announced(engine_of, fake, policy):
    engine = engine_of(urls=[fake.server.url])
    assert engine.server is None
    for step in (0, 1):
        arrays = moved(policy[0], 0.1 * step)
        digests = engine.set_weights(WeightVersion(0, step), arrays)
        assert digests == decoder_digests(arrays)
        assert engine.server.version == WeightVersion(0, step) and str(engine.server) == "inference-0#0"
        assert engine.stats()["inference/proven_bytewise"] == 1.0
        answers = sampled(engine, WeightVersion(0, step), policy[1])
        assert [set(answer.weight_steps.tolist()) for answer in answers] == [{step}, {step}]
    assert failures(engine) == []


@both
def test_a_reload_that_leaves_a_tensor_old_is_named_and_nothing_is_announced(engine_of, fake, policy):
    engine, heard = engine_of("overseer.max_restarts=1", urls=[fake.server.url]), []
    engine.set_weights(WeightVersion(0, 0), moved(policy[0], 0.0))
    engine.on_change = heard.append
    fake.stale = ["mlp.down_proj.weight"]
    with pytest.raises(RunFailed, match=r"version 1 with other weights.*model.layers.0.mlp.down_proj.weight"):
        engine.set_weights(WeightVersion(0, 1), moved(policy[0], 0.1))
    assert set(heard) == {None} and engine.server is None
    assert fake.engine.paused and fake.label == "unproven"  # nothing that was sampled of it is of a version


@both
def test_an_update_that_moves_nothing_is_named_though_the_checksums_are_of_another_form(engine_of, fake, policy):
    """As of a server that pads or splits what it holds: no checksum is that of the file, and none changes."""
    engine = engine_of("overseer.max_restarts=0", urls=[fake.server.url])
    fake.salt = b"in another form"
    engine.set_weights(WeightVersion(0, 0), moved(policy[0], 0.0))
    assert engine.stats()["inference/proven_bytewise"] == 0.0
    fake.stale = [""]
    with pytest.raises(RunFailed, match="parameters are not those"):
        engine.set_weights(WeightVersion(0, 1), moved(policy[0], 0.1))


@both
def test_a_refusal_says_nothing_about_the_weights_and_is_asked_again(engine_of, fake, policy):
    engine, heard = engine_of(urls=[fake.server.url]), []
    engine.set_weights(WeightVersion(0, 0), moved(policy[0], 0.0))
    engine.on_change = lambda server: (heard.append(server), setattr(fake, "reload_status", 200))
    fake.reload_status = 400  # although it changed them
    engine.set_weights(WeightVersion(0, 1), moved(policy[0], 0.1))
    assert [server and server.version.step for server in heard][0] is None and engine.server.version.step == 1
    (reason,) = failures(engine)
    assert {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}[fake.kind] + " answered 400" in reason


@both
def test_a_server_that_keeps_its_own_label_is_never_announced(engine_of, fake, policy):
    engine = engine_of("overseer.max_restarts=0", urls=[fake.server.url])
    fake.ignores_label = True
    with pytest.raises(RunFailed, match="calls its weights .* and was told '0-7'"):
        engine.set_weights(WeightVersion(0, 7), moved(policy[0], 0.0))
    assert engine.server is None


@both
def test_a_server_that_forgot_its_version_leaves_routing_and_is_given_it_again(engine_of, fake, policy, monkeypatch):
    monkeypatch.setattr("penstock.overseer.language.external.WATCH_S", 0.0)
    engine, heard = engine_of(urls=[fake.server.url]), []
    engine.set_weights(WeightVersion(0, 3), moved(policy[0], 0.0))
    engine.watch()
    assert failures(engine) == []
    engine.on_change = heard.append
    fake.rename_to("default")
    engine.watch()
    assert [server and server.version.step for server in heard] == [None, None, 3]
    (reason,) = failures(engine)
    assert "called 'default'" in reason


@both
def test_a_hung_server_is_named(engine_of, fake, policy, monkeypatch):
    monkeypatch.setattr("penstock.overseer.language.external.WATCH_S", 0.0)
    engine = engine_of("overseer.no_progress_s=0.4", "overseer.max_restarts=0", urls=[fake.server.url])
    engine.set_weights(WeightVersion(0, 0), moved(policy[0], 0.0))
    fake.hung = True
    with pytest.raises(RunFailed, match=r"generate does not answer: ReadTimeout"):
        engine.watch()
    assert engine.server is None


@both
def test_a_full_queue_is_no_fault(engine_of, fake, policy, monkeypatch):
    monkeypatch.setattr("penstock.overseer.language.external.WATCH_S", 0.0)
    engine = engine_of("overseer.max_restarts=0", urls=[fake.server.url])
    engine.set_weights(WeightVersion(0, 0), moved(policy[0], 0.0))
    fake.full = True
    engine.watch()
    assert failures(engine) == [] and engine.server.version == WeightVersion(0, 0)
    assert sampled(engine, WeightVersion(0, 0), policy[1]) == []  # and a canary without an answer is counted


@both
def test_a_server_that_computes_with_another_output_matrix_than_it_loads_is_refused(engine_of, fake, policy):
    engine = engine_of(urls=[fake.server.url])
    fake.old_head = True
    with pytest.raises(ConfigError, match="computes with another than it loads; give inference.external.launch"):
        engine.set_weights(WeightVersion(0, 0), moved(policy[0], 0.0))


@pytest.mark.parametrize(
    ("fake", "fault", "value", "said"),
    [
        ("vllm", "scale_out", False, "--enable-scale-out"),
        ("vllm", "dead", True, "its log says why; its CPU build .*head_dim"),
        ("vllm", "raw", True, "--logprobs-mode processed_logprobs"),
        ("vllm", "name", "another", "--served-model-name policy"),
        ("vllm", "room", 32, "--max-model-len 64"),
        ("vllm", "locked", True, "give the file that holds it as external.api_key_file"),
        ("sglang", "raw", True, "without SGLANG_RETURN_ORIGINAL_LOGPROB"),
        ("sglang", "name", "another", "--served-model-name policy"),
        ("sglang", "room", 32, "--context-length 64"),
        ("sglang", "locked", True, "give the file that holds it as external.api_key_file"),
        ("sglang", "admin", True, "start it without --admin-api-key"),
        ("sglang", "spanless", True, "take SGLang 0.5.23 or later"),
    ],
    indirect=["fake"],
)
def test_what_a_server_lacks_is_refused_with_the_flag(engine_of, fake, policy, fault, value, said):
    setattr(fake, fault, value)
    engine = engine_of(urls=[fake.server.url])
    with pytest.raises(ConfigError, match=said):
        engine.set_weights(WeightVersion(0, 0), moved(policy[0], 0.0))


def test_the_command_has_what_a_run_needs():
    config = configured(urls=[], launch=["vllm", "serve", "{model}", "--enforce-eager"])
    assert config.server_command("/weights/policy-0-3", 8000) == [
        "vllm", "serve", "/weights/policy-0-3", "--enforce-eager", "--host", "127.0.0.1", "--port", "8000",
        "--served-model-name", "policy", "--enable-scale-out", "--logprobs-mode", "processed_logprobs",
        "--generation-config", "vllm", "--dtype", "float32", "--max-model-len", "64", "--max-num-seqs", "4",
    ]  # fmt: skip


@both
def test_servers_with_fixed_weights_are_generated_with_and_not_trained(fake, tmp_path):
    config = configured(kind=fake.kind, weights="none")
    fake.rename_to("default")
    report = generate(fake.server.url, config, tmp_path / "said.parquet", n=1)
    (lesson,) = report.lessons.values()
    assert lesson.rollouts == 8 and fake.counts[fake.path] == 8
    with pytest.raises(ConfigError, match="weights none: these servers' weights stay as they are"):
        LanguageKind.of(config)


def test_a_recipe_that_no_server_could_serve_is_refused():
    with pytest.raises(ConfigError, match="weights is lora, and model.lora says nothing"):
        configured(weights="lora")
    with pytest.raises(ConfigError, match="vLLM samples at 0.01"):
        configured("curriculum.lessons.cats.sampling_params.temperature=0.005")


# --- SGLang's own ----------------------------------------------------------------------------------------------------

sglang = pytest.mark.parametrize("fake", ["sglang"], indirect=True)


@sglang
@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_requests_that_run_go_on_with_the_next_version(engine_of, fake, policy, kv):
    """Those that stay in its batch would keep it from forgetting its cache: it would say 400, and have the weights."""
    engine = engine_of("inference.max_seq_len=64", urls=[fake.server.url], kv=kv)
    engine.set_weights(WeightVersion(0, 0), moved(policy[0], 0.0))
    call = GenerationCall([policy[1].encode("Who")], 1, Decoding(max_output_tokens=48), [1])
    (request,) = dialect_of(engine._run.inference).requests(call, policy[1], "policy", None, None)
    bound, swapped, answers = request.bound_to(engine.server), threading.Event(), []

    def ask():
        while not swapped.is_set():
            answer = httpx.post(fake.server.url + fake.path, content=bound.body, timeout=LIMIT_S)
            answers.append(bound.read(answer.content)[0][0])

    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(ask) for _ in range(3)]
        for step in range(1, 40):
            engine.set_weights(WeightVersion(0, step), moved(policy[0], 0.01 * step))
            if failures(engine) or any(len(set(answer.weight_steps.tolist())) > 1 for answer in answers):
                break
        swapped.set()
        for each in asked:
            each.result(LIMIT_S)
    across = [answer for answer in answers if len(set(answer.weight_steps.tolist())) > 1]
    assert failures(engine) == [] and across
    for answer in across:  # with a kept cache, the version that it was sent under counts, too
        assert answer.oldest_weight_step == (0 if kv == "keep" else answer.weight_steps[0])


@sglang
def test_an_answer_that_ended_at_a_token_that_nobody_named_is_refused(engine_of, fake, policy):
    engine = engine_of("overseer.max_restarts=0", urls=[fake.server.url])
    engine.set_weights(WeightVersion(0, 0), moved(policy[0], 0.0))
    (whole, _), prompts = sampled(engine, WeightVersion(0, 0), policy[1]), [policy[1].encode("Who purrs?")]
    fake.ends = {int(whole.response_tokens[0])}
    assert engine.canary(WeightVersion(0, 0), prompts, 6, LIMIT_S) == []


def test_what_sglang_has_no_word_for_is_refused(fake):
    for words, said in (
        ({"weights": "lora"}, "set it to directory"), ({"pause": "wait"}, "SGLang knows keep and abort"),
        ({"colocate": True}, "only vLLM is sent to sleep"),
        ({"urls": [], "launch": ["sglang", "{model}"]}, "only vLLM is launched"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            configured(kind="sglang", **words)


# --- adapters --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lora(checkpoint):
    return ["model.init=null", f"model.path={checkpoint}", "model.lora={rank: 2}"]


@pytest.fixture(scope="module")
def adapted(policy, checkpoint):
    """The server's model with an adapter that changes nothing yet."""
    return load_decoder(checkpoint, lora=LoraConfig(rank=2), seed=1)


def trained(decoder, by):
    arrays = named_arrays(decoder)
    return {name: np.asarray(a) + np.float32(by * name.endswith(".b")) for name, a in arrays.items()}


def test_each_version_is_an_adapter_with_a_name_of_its_own(engine_of, fake, adapted, policy, lora):
    words = [*lora, "replay.staleness_budget=1"]
    engine = engine_of(*words, decoder=adapted, urls=[fake.server.url], weights="lora")
    answers = []
    for step, by in enumerate((0.0, 0.1, 0.2, 0.3)):
        engine.set_weights(WeightVersion(0, step), trained(adapted, by))
        answers.append(sampled(engine, WeightVersion(0, step), policy[1])[0])
    assert [set(answer.weight_steps.tolist()) for answer in answers] == [{0}, {1}, {2}, {3}]
    assert len({answer.response_logprobs.tobytes() for answer in answers}) == 4
    assert fake.adapters == ["policy-0-1", "policy-0-2", "policy-0-3"]  # staleness and two more
    assert "/pause" not in fake.counts


def test_an_adapter_that_is_not_applied_is_named(engine_of, fake, adapted, lora):
    engine = engine_of(*lora, "overseer.max_restarts=0", decoder=adapted, urls=[fake.server.url], weights="lora")
    fake.ignores_adapter = True
    engine.set_weights(WeightVersion(0, 0), trained(adapted, 0.0))  # it changes nothing: there is nothing to see
    with pytest.raises(RunFailed, match="the adapter is not applied"):
        engine.set_weights(WeightVersion(0, 1), trained(adapted, 0.1))
    assert engine.server is None


# --- a run ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fake", "staleness"), [("vllm", 0), ("vllm", 1), ("sglang", 0), ("sglang", 1)], indirect=["fake"]
)
def test_a_run_in_one_process_trains_on_what_the_server_sampled(fake, tmp_path, staleness):
    config = configured(
        "steps=3", "replay.groups_per_batch=2", "curriculum.eval_n_examples=2", "learner.row_length=64",
        "learner.micro_batch_rows=2", "curriculum.lessons.cats.sampling_params.n_generations_per_prompt=2",
        f"replay.staleness_budget={staleness}", kind=fake.kind, urls=[fake.server.url],
    )  # fmt: skip
    run = tmp_path / "run"
    train(config, run_dir=run, quiet=True)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "train/parity_kl" in line]
    assert len(updates) >= 2  # one version may have left no evidence in time, and is counted
    for line in updates:
        assert line["train/parity_kl"] < 1e-8 and line["train/parity_unchecked"] <= 1
        assert line["inference/proven_bytewise"] == 1.0 and line["replay/unverified"] == 0
    assert fake.label == "0-3"  # the last version was served, and evaluated
    ledger = json.loads((run / "status.json").read_text())["ledger"]
    assert ledger["trained"] >= 6 and ledger["invalid"] == 0


def test_a_component_tells_its_server_once_the_version_is_proven(fake, policy, tmp_path):
    config = configured("runtime=ray", "weights.fetch_timeout_s=60", urls=[fake.server.url])
    ctx = Around()
    role = ExternalInference(ctx, Settings(config, RunDirectory(tmp_path), TOKEN))
    broadcaster = open_broadcaster(config.weights, "job", TOKEN, str(tmp_path))
    try:
        arrays = moved(policy[0], 0.1)
        broadcaster.publish(WeightVersion(0, 4), arrays)
        ctx.follow(role, broadcaster)
        role.start()
        wait_until(lambda: role.condition().address.get("step") == 4, "a version", LIMIT_S)
        address = role.condition().address
        assert address["url"] == fake.server.url and address["digests"] and fake.label == "0-4"
        learner = Peer(Identity("learner", 0, 0), {"weights": broadcaster.endpoint()})
        ctx.view = Membership(9, 0, (learner, Peer(Identity("replay", 0, 0), {})))
        wait_until(lambda: ctx.digests, "digests", LIMIT_S)
        assert ctx.digests[0] == ("inference-0#0", 0, 4, decoder_digests(arrays))
        (server,) = servers_of(Membership(10, 0, (Peer(ctx.identity, address),)))
        assert server.version == WeightVersion(0, 4)
    finally:
        role.stop(LIMIT_S)
        broadcaster.close()


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["directory", "lora"])
def test_a_server_killed_in_a_request_is_started_anew_and_the_run_keeps_its_books(tmp_path, monkeypatch, lora, weights):
    """Killed by itself, with requests that it has begun to answer and others that wait for it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("FAKE_VLLM", json.dumps({"dies_at": 30, "died": str(tmp_path / "died")}))
    config = configured(
        "steps=6", "replay.groups_per_batch=2", "curriculum.eval_n_examples=2", "learner.row_length=64",
        "learner.micro_batch_rows=2", "curriculum.lessons.cats.sampling_params.n_generations_per_prompt=4",
        "replay.staleness_budget=1", *(lora if weights == "lora" else []),
        urls=[], launch=[sys.executable, "-m", "tests.fakes.vllm_server", "serve", "{model}"], weights=weights,
    )  # fmt: skip
    run = tmp_path / "run"
    train(config, run_dir=run, quiet=True)
    events = list(read_events(run / "events.jsonl"))
    assert (tmp_path / "died").exists()
    assert len([event for event in events if event["event"] == "external_engine"]) == 2
    (reason,) = [event["reason"] for event in events if event["event"] == "external_engine_failed"]
    assert "the server ended" in reason or "does not answer" in reason
    directory, status = RunDirectory(run), read_status(run / "status.json")
    assert status["step"] == 6 and books(RolloutStore(directory).history()).closed
    assert violations(directory) == []  # nothing was trained that no version of the run had sampled
    assert status["ledger"]["trained"] >= 6 * 2 * 4 and status["ledger"]["invalid"] == 0
    updates = [line for line in read_metrics(run / "metrics.jsonl") if "train/loss" in line]
    assert all(line["replay/unverified"] == 0 for line in updates)
    assert max(line.get("train/parity_kl", 0.0) for line in updates) < 1e-8


# --- launched --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_launched_server_that_dies_in_a_request_is_started_anew(engine_of, policy, tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.overseer.language.external.WATCH_S", 0.0)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-m", "tests.fakes.vllm_server", "serve", "{model}"]
    engine = engine_of(urls=[], launch=command)
    engine.set_weights(WeightVersion(0, 0), moved(policy[0], 0.0))
    pool = ServerPool(TOKEN, request_timeout_s=300)
    pool.dialect = VllmDialect(engine._config, 64)
    try:
        engine.on_change = lambda server: pool.set_servers([] if server is None else [server])
        engine.on_change(engine.server)
        before = engine.server.url
        engine._process.end(LIMIT_S)
        with ThreadPoolExecutor(1) as threads:
            context = RemoteContext(pool, policy[1])
            prompt = policy[1].encode("Who purrs?")
            asked = threads.submit(context.generate, [prompt], 2, Decoding(max_output_tokens=4), [1])
            engine.watch()
            ((one, other),) = asked.result(300)
    finally:
        pool.close()
    assert engine.server.url != before and len(failures(engine)) == 1
    assert {*one.weight_steps.tolist(), *other.weight_steps.tolist()} == {0}


@pytest.mark.slow
def test_a_launched_server_with_another_output_matrix_is_started_anew_for_each_version(engine_of, policy, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("FAKE_VLLM", json.dumps({"old_head": True}))
    command = [sys.executable, "-m", "tests.fakes.vllm_server", "serve", "{model}"]
    engine = engine_of(urls=[], launch=command)
    answers = []
    for step in (0, 1):
        engine.set_weights(WeightVersion(0, step), moved(policy[0], 0.1 * step))
        answers += sampled(engine, WeightVersion(0, step), policy[1])
    assert [event["event"] for event in engine.events].count("external_engine_relaunches") == 1
    assert [event["event"] for event in engine.events].count("external_engine") == 3  # tried, and each version
    assert failures(engine) == [] and len({answer.response_logprobs.tobytes() for answer in answers}) == 4


def test_a_command_that_ends_at_its_start_says_why(engine_of, policy):
    engine = engine_of(
        "overseer.max_restarts=0", urls=[], launch=["sh", "-c", "echo no such flag >&2; exit 3", "{model}"]
    )
    with pytest.raises(RunFailed, match=r"ended at its start .*: no such flag"):
        engine.set_weights(WeightVersion(0, 0), moved(policy[0], 0.0))


# --- on the learner's card -------------------------------------------------------------------------------------------


def test_a_server_on_the_learners_card_sleeps_until_woken_or_given_a_version(engine_of, fake, policy, monkeypatch):
    monkeypatch.setattr("penstock.overseer.language.external.WATCH_S", 0.0)
    fake.sleep_mode = True
    engine = engine_of(urls=[fake.server.url], colocate=True)
    engine.sleep()  # it serves nothing yet
    engine.set_weights(WeightVersion(0, 0), moved(policy[0], 0.0))
    engine.sleep()
    assert fake.asleep and engine.server.version == WeightVersion(0, 0)  # requests go there, and wait
    engine.watch()  # nothing is asked of it, and nothing wrong with that
    engine.wake()
    assert not fake.asleep and sampled(engine, WeightVersion(0, 0), policy[1])
    engine.sleep()
    engine.set_weights(WeightVersion(0, 1), moved(policy[0], 0.1))
    assert not fake.asleep and not fake.engine.paused and fake.label == "0-1"
    engine.wake()
    assert failures(engine) == [] and engine.stats().keys() >= {"inference/sleep_s", "inference/wake_s"}


def test_a_server_that_nobody_wakes_does_so_by_itself(engine_of, fake, policy, monkeypatch):
    monkeypatch.setattr("penstock.overseer.language.external.WATCH_S", 0.0)
    fake.sleep_mode = True
    engine = engine_of("overseer.no_progress_s=0.2", urls=[fake.server.url], colocate=True)
    engine.set_weights(WeightVersion(0, 0), moved(policy[0], 0.0))
    engine.sleep()
    wait_until(lambda: engine.watch() or not fake.asleep, "the server to wake", LIMIT_S)
    assert sampled(engine, WeightVersion(0, 0), policy[1])


def test_a_server_that_says_that_it_sleeps_and_does_not_is_named(engine_of, fake, policy):
    fake.sleep_mode = fake.sleepless = True
    engine = engine_of("overseer.max_restarts=0", urls=[fake.server.url], colocate=True)
    engine.set_weights(WeightVersion(0, 0), moved(policy[0], 0.0))
    with pytest.raises(RunFailed, match="is_sleeping says False, and it was told to sleep"):
        engine.sleep()


def test_a_server_that_would_give_no_memory_back_is_refused_with_the_flag(engine_of, fake, policy):
    engine = engine_of(urls=[fake.server.url], colocate=True)
    with pytest.raises(ConfigError, match="would sleep without giving memory back: start it with --enable-sleep-mode"):
        engine.set_weights(WeightVersion(0, 0), moved(policy[0], 0.0))


def test_a_server_on_the_learners_card_is_started_with_the_flag_and_keeps_no_cache():
    launch = ["vllm", "serve", "{model}"]
    assert "--enable-sleep-mode" in configured(urls=[], launch=launch, colocate=True).server_command("model", 1)
    assert "--enable-sleep-mode" not in configured(urls=[], launch=launch).server_command("model", 1)
    with pytest.raises(ConfigError, match="kv is keep, and colocate is set"):
        configured(colocate=True, kv="keep")
    with pytest.raises(ConfigError, match="colocate"):
        configured(colocate=True, weights="none")


@pytest.mark.slow
def test_a_run_sends_its_server_to_sleep_for_every_update(fake, tmp_path):
    fake.sleep_mode = True
    config = configured(
        "steps=3", "replay.groups_per_batch=2", "curriculum.eval_n_examples=2", "learner.row_length=64",
        "learner.micro_batch_rows=2", "curriculum.lessons.cats.sampling_params.n_generations_per_prompt=2",
        urls=[fake.server.url], colocate=True,
    )  # fmt: skip
    run = tmp_path / "run"
    train(config, run_dir=run, quiet=True)
    updates = [line for line in read_metrics(run / "metrics.jsonl") if "train/loss" in line]
    assert len(updates) == 3 and fake.counts["/sleep"] == 3 and not fake.asleep
    assert all(line["train/parity_kl"] < 1e-8 for line in updates if "train/parity_kl" in line)
    assert updates[-1]["inference/sleep_s"] > 0 and read_status(run / "status.json")["ledger"]["invalid"] == 0
