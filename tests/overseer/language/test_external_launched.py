"""A server of another make that a run launches: that of `tests.fakes` and the real vLLM, and how they end."""

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest
from benchmarks.chaos.invariants import books, violations
from benchmarks.external import kill_answering

from penstock.inference import RemoteContext, ServerPool
from penstock.inference.external import VllmDialect
from penstock.overseer.training import train
from penstock.replay import RolloutStore
from penstock.rundir import RunDirectory, read_events, read_status
from penstock.types import ConfigError, Decoding, WeightVersion
from tests.fakes.real_vllm import ENVIRONMENT, FLAGS, VLLM
from tests.overseer.language.conftest import (
    LIMIT_S,
    REAL,
    ROOT,
    SHORT,
    TOKEN,
    configured,
    failures,
    moved,
    sampled,
    updates_of,
)

FAKE = [sys.executable, "-m", "tests.fakes.vllm_server", "serve", "{model}"]
START_S = 300.0


@pytest.fixture
def launch(request, monkeypatch):
    """The words that start a server."""
    if getattr(request, "param", "vllm") == "real":
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", ENVIRONMENT["VLLM_CPU_KVCACHE_SPACE"])
        return [VLLM, "serve", "{model}", *FLAGS]
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return FAKE


of_both = pytest.mark.parametrize("launch", ["vllm", REAL], indirect=True)


def test_the_command_has_what_a_run_needs():
    config = configured(urls=[], launch=["vllm", "serve", "{model}", "--enforce-eager"])
    assert config.server_command("/weights/policy-0-3", 8000) == [
        "vllm", "serve", "/weights/policy-0-3", "--enforce-eager", "--host", "127.0.0.1", "--port", "8000",
        "--served-model-name", "policy", "--enable-scale-out", "--logprobs-mode", "processed_logprobs",
        "--generation-config", "vllm", "--dtype", "float32", "--max-model-len", "64", "--max-num-seqs", "4",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-model-len", "4096"], "adds --max-model-len itself: leave it out, and set inference.max_seq_len"),
        (["--max_num_seqs=64"], "has --max_num_seqs=64, .* itself: leave it out, and set inference.max_slots"),
        (["--port", "8000"], "adds --port itself: leave it out$"),
    ],
)
def test_a_flag_that_a_run_says_itself_is_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        configured(urls=[], launch=["vllm", "serve", "{model}", *words])


@pytest.mark.parametrize(("rank", "most"), [(1, "1"), (2, "8"), (16, "16"), (24, "32")])
def test_an_adapters_rank_is_given_as_one_that_vllm_takes(lora, rank, most):
    config = configured(*lora, f"model.lora={{rank: {rank}}}", urls=[], launch=FAKE, weights="lora")
    assert config.server_command("base", 1)[-5:] == ["--enable-lora", "--max-loras", "3", "--max-lora-rank", most]


def test_a_server_on_the_learners_card_is_started_with_the_flag_and_keeps_no_cache():
    launch = ["vllm", "serve", "{model}"]
    assert "--enable-sleep-mode" in configured(urls=[], launch=launch, colocate=True).server_command("model", 1)
    assert "--enable-sleep-mode" not in configured(urls=[], launch=launch).server_command("model", 1)
    with pytest.raises(ConfigError, match="kv is keep, and colocate is set"):
        configured(colocate=True, kv="keep")
    with pytest.raises(ConfigError, match="colocate"):
        configured(colocate=True, weights="none")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sh", "-c", "echo no such flag >&2; exit 3"], r"launch: the server ended at its start .*: no such flag"),
        (["sh", "-c", "exit 3"], r"ended at its start .*: nothing \(its exit status is 3\)"),
        (["sh", "-c", "echo still loading; sleep 99"], r"not answer within .*start_timeout_s = 0.5 .*: still loading"),
        (["/no/vllm"], "inference.external.launch cannot be started: there is no program '/no/vllm'"),
    ],
)
def test_a_command_that_never_answered_is_not_tried_again_and_says_why(engine_of, policy, words, said):
    engine = engine_of(urls=[], launch=[*words, "{model}"], start_timeout_s=0.5)
    with pytest.raises(ConfigError, match=said):
        engine.set_weights(WeightVersion(0, 0), moved(policy[0], 0.0))
    assert len(failures(engine)) <= 1


@pytest.mark.slow
@of_both
def test_a_launched_server_that_ends_is_started_anew_and_its_requests_wait(engine_of, policy, launch, monkeypatch):
    monkeypatch.setattr("penstock.overseer.language.external.WATCH_S", 0.0)
    engine = engine_of(urls=[], launch=launch)
    engine.set_weights(WeightVersion(0, 0), moved(policy[0], 0.0))
    pool = ServerPool(TOKEN, request_timeout_s=START_S)
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
            ((one, other),) = asked.result(START_S)
    finally:
        pool.close()
    assert engine.server.url != before and len(failures(engine)) == 1
    assert {*one.weight_steps.tolist(), *other.weight_steps.tolist()} == {0}


@pytest.mark.slow
def test_a_launched_server_with_another_output_matrix_is_started_anew_for_each_version(
    engine_of, policy, launch, monkeypatch
):
    monkeypatch.setenv("FAKE_VLLM", json.dumps({"old_head": True}))
    engine = engine_of(urls=[], launch=launch)
    answers = []
    for step in (0, 1):
        engine.set_weights(WeightVersion(0, step), moved(policy[0], 0.1 * step))
        answers += sampled(engine, WeightVersion(0, step), policy[1])
    assert [event["event"] for event in engine.events].count("external_engine_relaunches") == 1
    assert [event["event"] for event in engine.events].count("external_engine") == 3  # tried, and each version
    assert failures(engine) == [] and len({answer.response_logprobs.tobytes() for answer in answers}) == 4


@contextmanager
def killed_while_it_answers(run: Path) -> Iterator[Future[float | None]]:
    """Kills the server of a run in this process once, after its first update; gives how many requests it had."""
    ended = Event()

    def kill() -> float | None:
        while not ended.wait(0.005):
            if updates_of(run) and (running := kill_answering(os.getpid(), run)):
                return running
        return None

    with ThreadPoolExecutor(1) as threads:
        try:
            yield threads.submit(kill)
        finally:
            ended.set()


@contextmanager
def dying_in_a_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Future[float | None]]:
    """The fake kills itself, with a request that it has begun to answer and others that wait for it."""
    died: Future[float | None] = Future()
    monkeypatch.setenv("FAKE_VLLM", json.dumps({"dies_at": 30, "died": str(folder / "died")}))
    yield died
    died.set_result(1.0 if (folder / "died").exists() else None)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["directory", "lora"])
@of_both
def test_a_server_killed_in_a_request_is_started_anew_and_the_run_keeps_its_books(
    tmp_path, monkeypatch, lora, weights, launch
):
    """Killed with SIGKILL, while it answers."""
    steps, sampling = 24, "curriculum.lessons.cats.sampling_params"
    config = configured(
        *SHORT, f"steps={steps}", f"{sampling}.n_generations_per_prompt=4", f"{sampling}.max_output_tokens=40",
        *(lora if weights == "lora" else []), urls=[], launch=launch, weights=weights,
    )  # fmt: skip
    run = tmp_path / "run"
    dying = dying_in_a_request(tmp_path, monkeypatch) if launch is FAKE else killed_while_it_answers(run)
    with dying as killed:
        train(config, run_dir=run, quiet=True)
    assert killed.result(LIMIT_S)
    events = list(read_events(run / "events.jsonl"))
    assert len([event for event in events if event["event"] == "external_engine"]) == 2
    (reason,) = [event["reason"] for event in events if event["event"] == "external_engine_failed"]
    assert "the server ended" in reason or "does not answer" in reason
    directory, status = RunDirectory(run), read_status(run / "status.json")
    assert status["step"] == steps and books(RolloutStore(directory).history()).closed
    assert violations(directory) == []  # nothing was trained that no version of the run had sampled
    assert status["ledger"]["trained"] >= steps * 2 * 4 and status["ledger"]["invalid"] == 0
    assert all(line["replay/unverified"] == 0 for line in updates_of(run))
    assert max(line.get("train/parity_kl", 0.0) for line in updates_of(run)) < 1e-8
