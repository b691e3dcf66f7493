"""A server of another make, driven: one suite against those of `tests.fakes` and the real vLLM, given by URL.

Of the real one, faults are its own where they can be had, and else a proxy's (`tests.fakes.real_vllm`); what only it
can show is in test_vllm, what a run launches in test_external_launched.
"""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from benchmarks.chaos.invariants import books, violations

from penstock.inference import RemoteContext, ServerPool
from penstock.inference.external import dialect_of
from penstock.model.language import named_arrays
from penstock.model.language.adapter import base_digest
from penstock.model.language.config import ADAPTER
from penstock.model.language.decoder import decoder_digests
from penstock.model.language.hugging_face import save_adapter
from penstock.overseer.component import Settings
from penstock.overseer.language.external import ExternalEngine
from penstock.overseer.language.generation import generate
from penstock.overseer.language.inference import ExternalInference
from penstock.overseer.language.kind import LanguageKind
from penstock.overseer.language.rollout import servers_of
from penstock.overseer.supervisor.messages import Identity, Membership, Peer
from penstock.overseer.training import train
from penstock.replay import RolloutStore
from penstock.rundir import RunDirectory, read_metrics, read_status
from penstock.types import ConfigError, Decoding, GenerationCall, MismatchError, RunFailed, Stopped, WeightVersion
from penstock.weights import open_broadcaster
from tests.overseer.language.conftest import (
    HAS_VLLM,
    LIMIT_S,
    ROOT,
    SHORT,
    TOKEN,
    configured,
    failures,
    moved,
    of_each,
    of_vllm,
    sampled,
    trained,
    updates_of,
)
from tests.overseer.language.test_inference import Around
from tests.waiting import wait_until


@of_each
def test_a_version_is_loaded_proven_and_announced(engine_of, server, policy):
    engine = engine_of(urls=[server.url])
    assert engine.server is None
    for step in (0, 1):
        arrays = moved(policy[0], 0.1 * step)
        digests = engine.set_weights(WeightVersion(0, step), arrays)
        assert digests == decoder_digests(arrays)
        assert engine.server.version == WeightVersion(0, step) and str(engine.server) == "inference-0#0"
        assert engine.stats()["inference/proven_bytewise"] == server.proven
        answers = sampled(engine, WeightVersion(0, step), policy[1])
        assert [set(answer.weight_steps.tolist()) for answer in answers] == [{step}, {step}]
    assert failures(engine) == []


@of_each
def test_a_reload_that_leaves_a_tensor_old_is_named_and_nothing_is_announced(engine_of, server, policy):
    engine, heard = engine_of("overseer.max_restarts=1", urls=[server.url]), []
    engine.set_weights(WeightVersion(0, 0), moved(policy[0], 0.0))
    engine.on_change = heard.append
    server.stale = ["model.norm.weight"]
    with pytest.raises(RunFailed, match=r"version 1 with other weights.*model.norm.weight"):
        engine.set_weights(WeightVersion(0, 1), moved(policy[0], 0.1))
    assert set(heard) == {None} and engine.server is None
    assert server.paused and server.label == "unproven"  # nothing that was sampled of it is of a version


@of_each
def test_an_update_that_moves_nothing_is_named_though_the_checksums_are_of_another_form(engine_of, server, policy):
    """As of a server that pads or splits what it holds: no checksum is that of the file, and none changes."""
    engine = engine_of("overseer.max_restarts=0", urls=[server.url])
    server.salt = b"in another form"
    engine.set_weights(WeightVersion(0, 0), moved(policy[0], 0.0))
    assert engine.stats()["inference/proven_bytewise"] == 0.0
    server.stale = [""]
    with pytest.raises(RunFailed, match="parameters are not those"):
        engine.set_weights(WeightVersion(0, 1), moved(policy[0], 0.1))


@of_each
def test_a_refusal_says_nothing_about_the_weights_and_is_asked_again(engine_of, server, policy):
    engine, heard = engine_of(urls=[server.url]), []
    engine.set_weights(WeightVersion(0, 0), moved(policy[0], 0.0))
    engine.on_change = lambda served: (heard.append(served), setattr(server, "reload_status", 200))
    server.reload_status = 400  # although it changed them
    engine.set_weights(WeightVersion(0, 1), moved(policy[0], 0.1))
    assert [server and server.version.step for server in heard][0] is None and engine.server.version.step == 1
    (reason,) = failures(engine)
    assert {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}[server.kind] + " answered 400" in reason


@of_vllm
def test_a_directory_that_a_server_does_not_see_is_named_and_the_server_lives(engine_of, server, policy):
    """What it has after that would kill it at the first request: it is asked for none."""
    engine = engine_of("overseer.max_restarts=1", urls=[server.url])
    for step in (0, 1):
        server.unseen = True
        with pytest.raises(
            RunFailed, match=r"failed 2 times .* 500: .*Repo id .*set inference.external.weights_dir to"
        ):
            engine.set_weights(WeightVersion(0, step), moved(policy[0], 0.0))
        server.unseen = False
        engine.set_weights(WeightVersion(0, step), moved(policy[0], 0.1 * step))
        (answer, _) = sampled(engine, WeightVersion(0, step), policy[1])
        assert set(answer.weight_steps.tolist()) == {step}


@of_each
def test_a_server_that_keeps_its_own_label_is_never_announced(engine_of, server, policy):
    engine = engine_of("overseer.max_restarts=0", urls=[server.url])
    server.ignores_label = True
    with pytest.raises(RunFailed, match="calls its weights .* and was told '0-7'"):
        engine.set_weights(WeightVersion(0, 7), moved(policy[0], 0.0))
    assert engine.server is None


@of_each
def test_a_server_that_forgot_its_version_leaves_routing_and_is_given_it_again(engine_of, server, policy, monkeypatch):
    monkeypatch.setattr("penstock.overseer.language.external.WATCH_S", 0.0)
    engine, heard = engine_of(urls=[server.url]), []
    engine.set_weights(WeightVersion(0, 3), moved(policy[0], 0.0))
    engine.watch()
    assert failures(engine) == []
    engine.on_change = heard.append
    server.rename_to("default")
    engine.watch()
    assert [server and server.version.step for server in heard] == [None, None, 3]
    (reason,) = failures(engine)
    assert "called 'default'" in reason


@of_each
def test_a_hung_server_is_named(engine_of, server, policy, monkeypatch):
    monkeypatch.setattr("penstock.overseer.language.external.WATCH_S", 0.0)
    engine = engine_of("overseer.no_progress_s=4", "overseer.max_restarts=0", urls=[server.url])
    engine.set_weights(WeightVersion(0, 0), moved(policy[0], 0.0))
    server.hung = True
    with pytest.raises(RunFailed, match=r"generate does not answer: ReadTimeout"):
        engine.watch()
    assert engine.server is None


def test_a_server_that_is_asked_while_its_engine_stops_is_not_named(engine_of, server, policy, monkeypatch):
    monkeypatch.setattr("penstock.overseer.language.external.WATCH_S", 0.0)
    engine = engine_of(urls=[server.url])
    engine.set_weights(WeightVersion(0, 0), moved(policy[0], 0.0))
    ask = engine._control.serves
    monkeypatch.setattr(engine._control, "serves", lambda: engine.stop(LIMIT_S) or ask())
    with pytest.raises(Stopped):
        engine.watch()
    assert failures(engine) == []


@of_each
def test_a_full_queue_is_no_fault(engine_of, server, policy, monkeypatch):
    monkeypatch.setattr("penstock.overseer.language.external.WATCH_S", 0.0)
    engine = engine_of("overseer.max_restarts=0", urls=[server.url])
    engine.set_weights(WeightVersion(0, 0), moved(policy[0], 0.0))
    server.full = True
    engine.watch()
    assert failures(engine) == [] and engine.server.version == WeightVersion(0, 0)
    assert sampled(engine, WeightVersion(0, 0), policy[1]) == []  # and a canary without an answer is counted


@of_each
def test_a_server_that_is_full_when_a_run_begins_is_asked_again(engine_of, server, policy):
    engine = engine_of("overseer.max_restarts=1000", urls=[server.url])
    server.full = True
    with ThreadPoolExecutor(1) as threads:
        given = threads.submit(engine.set_weights, WeightVersion(0, 0), moved(policy[0], 0.0))
        try:
            wait_until(lambda: given.done() or "the queue of" in "".join(failures(engine)), "a refusal", LIMIT_S)
        finally:
            server.full = False
        given.result(LIMIT_S)
    assert engine.server.version == WeightVersion(0, 0)


@of_each
def test_requests_that_find_a_full_queue_are_asked_again(engine_of, server, policy):
    engine, (decoder, tokenizer) = engine_of(urls=[server.url]), policy
    engine.set_weights(WeightVersion(0, 1), moved(decoder, 0.0))
    pool = ServerPool(None, request_timeout_s=LIMIT_S)
    pool.dialect = dialect_of(engine._run.inference)
    pool.set_servers([engine.server])
    try:
        server.full = True
        with ThreadPoolExecutor(1) as threads:
            prompts, decoding = [tokenizer.encode("Who purrs?")], Decoding(max_output_tokens=4)
            asked = threads.submit(RemoteContext(pool, tokenizer).generate, prompts, 8, decoding, [1])
            try:
                wait_until(lambda: pool.metrics()["inference_client/refusals_total"] > 0, "a refusal", LIMIT_S)
            finally:
                server.full = False
            (answers,) = asked.result(LIMIT_S)
    finally:
        pool.close()
    assert len(answers) == 8 and all(set(answer.weight_steps.tolist()) == {1} for answer in answers)


@of_each
def test_a_server_that_computes_with_another_output_matrix_than_it_loads_is_refused(engine_of, server, policy):
    engine = engine_of(urls=[server.url])
    server.old_head = True
    with pytest.raises(ConfigError, match="computes with another than it loads; give inference.external.launch"):
        engine.set_weights(WeightVersion(0, 0), moved(policy[0], 0.0))


@pytest.mark.parametrize(
    ("server", "fault", "value", "said"),
    [
        ("vllm", "scale_out", False, "--enable-scale-out"),
        ("vllm", "dead", True, "its log says why; its CPU build .*head_dim"),
        ("vllm", "raw", True, "--logprobs-mode processed_logprobs"),
        ("vllm", "name", "another", "--served-model-name policy"),
        ("vllm", "room", 32, "--max-model-len 64"),
        ("vllm", "locked", True, "give the file that holds it as inference.external.api_key_file"),
        ("sglang", "raw", True, "without SGLANG_RETURN_ORIGINAL_LOGPROB"),
        ("sglang", "name", "another", "--served-model-name policy"),
        ("sglang", "room", 32, "--context-length 64"),
        ("sglang", "locked", True, "give the file that holds it as inference.external.api_key_file"),
        ("sglang", "admin", True, "start it without --admin-api-key"),
        ("sglang", "spanless", True, "take SGLang 0.5.23 or later"),
    ],
    indirect=["server"],
)
def test_what_a_server_lacks_is_refused_with_the_flag(engine_of, server, policy, fault, value, said):
    setattr(server, fault, value)
    engine = engine_of(urls=[server.url])
    with pytest.raises(ConfigError, match=said):
        engine.set_weights(WeightVersion(0, 0), moved(policy[0], 0.0))


@of_each
def test_servers_with_fixed_weights_are_generated_with_and_not_trained(server, tmp_path):
    config = configured(kind=server.kind, weights="none")
    server.rename_to("default")
    report = generate(server.url, config, tmp_path / "said.parquet", n=1)
    (lesson,) = report.lessons.values()
    assert lesson.rollouts == 8 and server.counts[server.path] == 1 + 8
    with pytest.raises(ConfigError, match="weights none: these servers' weights stay as they are"):
        LanguageKind.of(config)


@pytest.mark.parametrize(
    ("fault", "value", "said"),
    [
        ("scale_out", False, "start it with --enable-scale-out"),
        ("raw", True, "start it with --logprobs-mode processed_logprobs"),
        ("room", 20, "has room for 20 tokens: start it with --max-model-len 64"),
    ],
)
def test_a_server_with_fixed_weights_is_asked_what_it_lacks_before_it_answers(server, tmp_path, fault, value, said):
    setattr(server, fault, value)
    with pytest.raises(ConfigError, match=said):
        generate(server.url, configured(weights="none"), tmp_path / "said.parquet", n=1)


@of_each
@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_requests_that_run_go_on_with_the_next_version(engine_of, server, policy, kv):
    """Of SGLang, those that stay in its batch would keep it from forgetting its cache: it would say 400."""
    lengths = [f"inference.max_seq_len={server.room}", f"learner.row_length={server.room}"]
    engine = engine_of(*lengths, urls=[server.url], kv=kv)
    engine.set_weights(WeightVersion(0, 0), moved(policy[0], 0.0))
    call = GenerationCall([policy[1].encode("Who")], 1, Decoding(max_output_tokens=server.room), [1])
    (request,) = dialect_of(engine._run.inference).requests(call, policy[1], "policy")
    bound, swapped, answers = request.bound_to(engine.server), threading.Event(), []

    def ask():
        while not swapped.is_set():
            headers = {"content-type": "application/json"}
            answer = httpx.post(server.url + server.path, content=bound.body, headers=headers, timeout=LIMIT_S)
            answers.append(bound.read(answer.content)[0][0])

    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(ask) for _ in range(3)]
        for step in range(1, 120):
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


def test_a_recipe_that_no_server_could_serve_is_refused():
    with pytest.raises(ConfigError, match="weights is lora, and model.lora says nothing"):
        configured(weights="lora")
    with pytest.raises(ConfigError, match="vLLM samples at 0.01"):
        configured("curriculum.lessons.cats.sampling_params.temperature=0.005")


RECORDED = json.loads((ROOT / "tests" / "fakes" / "vllm_answers.json").read_text())


def _form(value, word_by_word=False):
    """Of JSON: keys, types, and the words of what went wrong, but for their numbers."""
    if isinstance(value, dict):
        named = {"of a parameter" if key.startswith("dp0:") else key: each for key, each in value.items()}
        return {key: _form(each, word_by_word or key == "error") for key, each in named.items()}
    if isinstance(value, list):
        return [_form(each, word_by_word) for each in value[:1]]
    if isinstance(value, str):
        return re.sub(r"\d+", "0", value) if word_by_word else "text"
    return value if value is None or isinstance(value, bool) else "number"


@of_vllm
def test_answers_have_the_form_that_was_recorded(server, adapted, policy, checkpoint, tmp_path):
    own = {name: each for name, each in named_arrays(adapted).items() if not name.startswith(ADAPTER)}
    save_adapter(adapted, tmp_path / "adapter", policy[1], base_digest(own))
    sampling = {"n": 1, "max_tokens": 4, "temperature": 1.0, "seed": 1, "logprobs": 0, "ignore_eos": True}
    sampling |= {"stop_token_ids": [], "stop": [], "detokenize": False}
    asked = {"model": "policy", "token_ids": [5, 6, 7], "sampling_params": sampling, "stream": False}
    adapter = {"lora_name": "policy-0-1"}
    loaded = adapter | {"lora_path": str(tmp_path / "adapter")}
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}}
    calls = {
        "version": ("/version", None), "models": ("/v1/models", None), "generate": (server.path, asked),
        "too_long": (server.path, asked | {"token_ids": [1] * 600}),
        "unknown_model": (server.path, asked | {"model": "policy-0-9"}),
        "out_of_vocabulary": (server.path, asked | {"token_ids": [100000]}), "not_json": (server.path, b"{}"),
        "pause": ("/pause?mode=keep&clear_cache=true", {}), "is_paused": ("/is_paused", None),
        "reload_failed": ("/collective_rpc", reload | {"kwargs": {"weights_path": str(tmp_path / "none")}}),
        "reload": ("/collective_rpc", reload), "rename": ("/update_weight_version", {"new_version": "0-17"}),
        "resume": ("/resume", {}), "weight_info": ("/weight_info", None),
        "checksum": ("/weight_checker", {"action": "checksum"}), "is_sleeping": ("/is_sleeping", None),
        "sleep": ("/sleep?level=1&mode=keep", {}), "wake_up": ("/wake_up", {}),
        "bad_adapter_body": ("/v1/load_lora_adapter", {}), "load_adapter": ("/v1/load_lora_adapter", loaded),
        "adapter_twice": ("/v1/load_lora_adapter", loaded), "unload_adapter": ("/v1/unload_lora_adapter", adapter),
        "no_adapter": ("/v1/unload_lora_adapter", adapter), "full": (server.path, asked),
    }  # fmt: skip
    for name, (path, body) in calls.items():
        given = {} if body is None else {"content": body} if isinstance(body, bytes) else {"json": body}
        server.full = name == "full"
        found = httpx.request("GET" if body is None else "POST", server.url + path, timeout=LIMIT_S, **given)
        said = found.json() if "json" in found.headers.get("content-type", "") else found.text
        recorded = RECORDED[name]
        assert (found.status_code, _form(said)) == (recorded["status"], _form(recorded["body"])), name
    assert calls.keys() == RECORDED.keys() - {"stopped", "top_1"}  # which are read in tests/inference


# --- SGLang's own ----------------------------------------------------------------------------------------------------

sglang = pytest.mark.parametrize("server", ["sglang"], indirect=True)


@sglang
def test_an_answer_that_ended_at_a_token_that_nobody_named_is_refused(engine_of, server, policy):
    engine = engine_of("overseer.max_restarts=0", urls=[server.url])
    engine.set_weights(WeightVersion(0, 0), moved(policy[0], 0.0))
    (whole, _), prompts = sampled(engine, WeightVersion(0, 0), policy[1]), [policy[1].encode("Who purrs?")]
    server.ends = {int(whole.response_tokens[0])}
    assert engine.canary(WeightVersion(0, 0), prompts, 6, LIMIT_S) == []


def test_what_sglang_has_no_word_for_is_refused(server):
    for words, said in (
        ({"weights": "lora"}, "set it to directory"), ({"pause": "wait"}, "SGLang knows keep and abort"),
        ({"colocate": True}, "only vLLM is sent to sleep"),
        ({"urls": [], "launch": ["sglang", "{model}"]}, "only vLLM is launched"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            configured(kind="sglang", **words)


# --- adapters --------------------------------------------------------------------------------------------------------


@of_vllm
def test_each_version_is_an_adapter_with_a_name_of_its_own(engine_of, server, adapted, policy, lora):
    engine = engine_of(*lora, decoder=adapted, urls=[server.url], weights="lora")
    answers = []
    for step, by in enumerate((0.0, 0.1, 0.2, 0.3)):
        engine.set_weights(WeightVersion(0, step), trained(adapted, by))
        answers.append(sampled(engine, WeightVersion(0, step), policy[1])[0])
    assert [set(answer.weight_steps.tolist()) for answer in answers] == [{0}, {1}, {2}, {3}]
    assert len({answer.response_logprobs.tobytes() for answer in answers}) == 4
    assert server.adapters == ["policy-0-1", "policy-0-2", "policy-0-3"]  # staleness and two more
    assert "/pause" not in server.counts


@of_vllm
def test_an_adapter_that_is_not_applied_is_named(engine_of, server, adapted, lora):
    engine = engine_of(*lora, "overseer.max_restarts=0", decoder=adapted, urls=[server.url], weights="lora")
    server.ignores_adapter = True
    engine.set_weights(WeightVersion(0, 0), trained(adapted, 0.0))  # it changes nothing: there is nothing to see
    with pytest.raises(RunFailed, match="the adapter is not applied"):
        engine.set_weights(WeightVersion(0, 1), trained(adapted, 0.1))
    assert engine.server is None


# --- a run ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "staleness"),
    [(kind, n) for kind in ("vllm", "sglang") for n in (0, 1)]
    + [pytest.param("real", n, marks=HAS_VLLM) for n in (0, 1)],
    indirect=["server"],
)
def test_a_run_in_one_process_trains_on_what_the_server_sampled(server, tmp_path, staleness):
    words = ["steps=3", f"replay.staleness_budget={staleness}"]
    config = configured(*SHORT, *words, kind=server.kind, urls=[server.url])
    run = tmp_path / "run"
    train(config, run_dir=run, quiet=True)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "train/parity_kl" in line]
    assert len(updates) >= 2  # one version may have left no evidence in time, and is counted
    for line in updates:
        assert line["train/parity_kl"] < 1e-8 and line["train/parity_unchecked"] <= 1
        assert line["inference/proven_bytewise"] == server.proven and line["replay/unverified"] == 0
    assert server.label == "0-3"  # the last version was served, and evaluated
    ledger = json.loads((run / "status.json").read_text())["ledger"]
    assert ledger["trained"] >= 6 and ledger["invalid"] == 0


@of_vllm
def test_a_component_tells_its_server_once_the_version_is_proven(server, policy, tmp_path):
    config = configured("runtime=ray", "weights.fetch_timeout_s=60", urls=[server.url])
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
        assert address["url"] == server.url and address["digests"] and server.label == "0-4"
        learner = Peer(Identity("learner", 0, 0), {"weights": broadcaster.endpoint()})
        ctx.view = Membership(9, 0, (learner, Peer(Identity("replay", 0, 0), {})))
        wait_until(lambda: ctx.digests, "digests", LIMIT_S)
        assert ctx.digests[0] == ("inference-0#0", 0, 4, decoder_digests(arrays))
        (found,) = servers_of(Membership(10, 0, (Peer(ctx.identity, address),)))
        assert found.version == WeightVersion(0, 4)
    finally:
        role.stop(LIMIT_S)
        broadcaster.close()


# --- on the learner's card -------------------------------------------------------------------------------------------


def test_a_server_on_the_learners_card_sleeps_until_woken_or_given_a_version(engine_of, server, policy, monkeypatch):
    monkeypatch.setattr("penstock.overseer.language.external.WATCH_S", 0.0)
    server.sleep_mode = True
    engine = engine_of(urls=[server.url], colocate=True)
    engine.sleep()  # it serves nothing yet
    engine.set_weights(WeightVersion(0, 0), moved(policy[0], 0.0))
    engine.sleep()
    assert server.asleep and engine.server.version == WeightVersion(0, 0)  # requests go there, and wait
    engine.watch()  # nothing is asked of it, and nothing wrong with that
    engine.wake()
    assert not server.asleep and sampled(engine, WeightVersion(0, 0), policy[1])
    engine.sleep()
    engine.set_weights(WeightVersion(0, 1), moved(policy[0], 0.1))
    assert not server.asleep and not server.paused and server.label == "0-1"
    engine.wake()
    assert failures(engine) == [] and engine.stats().keys() >= {"inference/sleep_s", "inference/wake_s"}


def test_a_server_that_nobody_wakes_does_so_by_itself(engine_of, server, policy, monkeypatch):
    monkeypatch.setattr("penstock.overseer.language.external.WATCH_S", 0.0)
    server.sleep_mode = True
    engine = engine_of("overseer.no_progress_s=0.2", urls=[server.url], colocate=True)
    engine.set_weights(WeightVersion(0, 0), moved(policy[0], 0.0))
    engine.sleep()
    wait_until(lambda: engine.watch() or not server.asleep, "the server to wake", LIMIT_S)
    assert sampled(engine, WeightVersion(0, 0), policy[1])


def test_a_server_that_says_that_it_sleeps_and_does_not_is_named(engine_of, server, policy):
    server.sleep_mode = server.sleepless = True
    engine = engine_of("overseer.max_restarts=0", urls=[server.url], colocate=True)
    engine.set_weights(WeightVersion(0, 0), moved(policy[0], 0.0))
    with pytest.raises(RunFailed, match="is_sleeping says False, and it was told to sleep"):
        engine.sleep()


@of_vllm
def test_a_server_that_would_give_no_memory_back_is_refused_with_the_flag(engine_of, server, policy):
    engine = engine_of(urls=[server.url], colocate=True)
    with pytest.raises(ConfigError, match="would sleep without giving memory back: start it with --enable-sleep-mode"):
        engine.set_weights(WeightVersion(0, 0), moved(policy[0], 0.0))


@pytest.mark.slow
def test_a_run_sends_its_server_to_sleep_for_every_update(server, tmp_path):
    server.sleep_mode = True
    config = configured(*SHORT, "steps=3", urls=[server.url], colocate=True)
    run = tmp_path / "run"
    train(config, run_dir=run, quiet=True)
    updates = [line for line in read_metrics(run / "metrics.jsonl") if "train/loss" in line]
    assert len(updates) == 3 and server.counts["/sleep"] == 3 and not server.asleep
    assert all(line["train/parity_kl"] < 1e-8 for line in updates if "train/parity_kl" in line)
    assert updates[-1]["inference/sleep_s"] > 0 and read_status(run / "status.json")["ledger"]["invalid"] == 0


FAULTS = {
    "stale": (["model.norm.weight"], [], r"version 3 with other weights than it was given.*model\.norm\.weight"),
    "reload_status": (400, 200, "answered 400"),
    "ignores_label": (True, False, "and was told '0-3'"),
    "label": ("default", None, "called 'default'"),
    "hung": (True, False, "does not answer: ReadTimeout"),
    "ignores_adapter": (True, False, "the adapter is not applied"),
}
"""What a server of a run is made to do from its second version on, what heals it, and how it is named."""


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@of_each
def test_a_fault_is_named_within_one_version_and_nothing_unversioned_is_trained(
    server, lora, fault, tmp_path, monkeypatch
):
    if fault == "ignores_adapter" and server.kind == "sglang":
        pytest.skip("adapters are vLLM's")
    monkeypatch.setattr("penstock.overseer.language.external.WATCH_S", 0.0)
    announce, leave, announced, named = ExternalEngine._announce, ExternalEngine._leave, [], []
    value, healed, said = FAULTS[fault]

    def announcing(self, version):
        announce(self, version)
        announced.append(version)
        if version == WeightVersion(0, 2) and not named:
            server.rename_to(value) if fault == "label" else setattr(server, fault, value)

    def leaving(self, failure):
        if fault != "label":
            setattr(server, fault, healed)
        leave(self, failure)  # nobody is named of whom a run that ends lets go in the middle of a request
        named.append((str(failure), [version for version in announced if version is not None]))

    monkeypatch.setattr(ExternalEngine, "_announce", announcing)
    monkeypatch.setattr(ExternalEngine, "_leave", leaving)
    weights, words = ("lora", lora) if fault == "ignores_adapter" else ("directory", [])
    budget = int(fault != "label")  # at 0 no version comes before this one's answers were read
    words = [*words, "steps=5", "overseer.no_progress_s=40", f"replay.staleness_budget={budget}"]
    config = configured(*SHORT, *words, kind=server.kind, urls=[server.url], weights=weights)
    run = tmp_path / "run"
    train(config, run_dir=run, quiet=True)
    assert len(named) == 1, named
    reason, until_then = named[0]
    assert re.search(said, reason) and until_then[-1] == WeightVersion(0, 2)
    assert {*announced} == {None, *(WeightVersion(0, step) for step in range(6))}
    directory, status = RunDirectory(run), read_status(run / "status.json")
    assert books(RolloutStore(directory).history()).closed and violations(directory) == []
    assert status["step"] == 5 and status["ledger"]["trained"] >= 5 * 4 and status["ledger"]["invalid"] == 0
    for line in updates_of(run):
        assert line["replay/unverified"] == 0 and line.get("train/parity_kl", 0.0) < 1e-8


@pytest.mark.slow
@of_vllm
def test_a_tensor_that_no_checksum_sees_and_that_stays_old_is_named_by_the_learner(server, tmp_path, monkeypatch):
    """Within two versions: one comparison alone ends a run where it is beyond `hard_kl_limit`, and two of a smaller."""
    announce, server.blind = ExternalEngine._announce, True  # as the real one is

    def announcing(self, version):
        announce(self, version)
        server.stale = ["mlp.down_proj.weight"] if version == WeightVersion(0, 2) else server.stale

    monkeypatch.setattr(ExternalEngine, "_announce", announcing)
    quick = ["learner.optimizer.learning_rate=0.03", "learner.optimizer.warmup_steps=1", "learner.parity.wait_s=60"]
    config = configured(*SHORT, *quick, "steps=9", kind=server.kind, urls=[server.url])
    with pytest.raises(MismatchError, match=r"version [34]: inference-0 and the learner disagree"):
        train(config, run_dir=tmp_path / "run", quiet=True)
    assert server.label in ("0-3", "0-4", "0-5")  # whatever was published meanwhile
    assert len(updates_of(tmp_path / "run")) <= 4
