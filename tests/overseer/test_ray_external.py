"""Runs on a real Ray cluster whose servers are of another make: given by URL, and launched by their components."""

import json
import sys
from pathlib import Path

import pytest
from benchmarks.chaos.invariants import books, violations

from penstock.model.language import load_policy, save_decoder
from penstock.overseer.config_loading import load_config
from penstock.replay import RolloutStore
from penstock.rundir import RunDirectory, read_events, read_status
from penstock.text import Tokenizer
from tests.fakes.vllm_server import FakeVllm
from tests.overseer.language.conftest import MODEL, SHAPES
from tests.overseer.test_ray_training import QUICK, driver, updates

pytestmark = [pytest.mark.ray, pytest.mark.timeout(500)]
STEPS = 3
WORDS = [
    f"model.init={json.dumps(MODEL)}", "inference.engine=vllm", "inference.max_slots=4", f"steps={STEPS}",
    "replay.groups_per_batch=2", "curriculum.eval_n_examples=2", "learner.row_length=64", "learner.micro_batch_rows=2",
    "curriculum.lessons.cats.sampling_params.n_generations_per_prompt=2", "overseer.heartbeat_timeout_s=60",
]  # fmt: skip


def trained(run_dir: Path, servers: int, **external: object) -> list[dict[str, object]]:
    """The events of a run that ended well."""
    words = [*WORDS, f"inference.servers={servers}", f"inference.external={json.dumps(external)}"]
    with driver(run_dir, "cats", *QUICK, *words, f"--run-dir={run_dir}") as run:
        assert run.end() == 0, run.output()
    status = read_status(run_dir / "status.json")
    assert status["state"] == "finished" and status["step"] == STEPS and status["ledger"]["invalid"] == 0
    assert books(RolloutStore(RunDirectory(run_dir)).history()).closed and violations(RunDirectory(run_dir)) == []
    for line in updates(run_dir):
        assert line["replay/unverified"] == 0 and line.get("train/parity_kl", 0.0) < 1e-8
        assert line["inference/proven_bytewise"] == 1.0
    events = list(read_events(run_dir / "events.jsonl"))
    return [event for event in events if event["event"] == "external_engine"]


def test_two_servers_given_by_url_answer_a_run(tmp_path: Path):
    config = load_config("cats", WORDS[:1])
    tokenizer = Tokenizer.load(config.model.tokenizer_path)
    save_decoder(load_policy(config.model, 1, tokenizer), tmp_path / "model", tokenizer)
    servers = [FakeVllm(tmp_path / "model", tokenizer, SHAPES) for _ in range(2)]
    urls = [server.start() for server in servers]
    try:
        found = trained(tmp_path / "run", 2, urls=urls)
    finally:
        for server in servers:
            server.stop()
    assert {event["url"] for event in found} == set(urls)
    assert {server.label for server in servers} == {f"0-{STEPS}"}
    assert all(server.counts["/inference/v1/generate"] > STEPS for server in servers)


def test_a_component_launches_its_server_and_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    command = [sys.executable, "-m", "tests.fakes.vllm_server", "serve", "{model}"]
    event = trained(tmp_path / "run", 1, launch=command)[-1]
    assert "127.0.0.1" in str(event["url"])
    port = str(event["url"]).rpartition(":")[2].encode()
    commands = [_command(process).split(b"\0") for process in Path("/proc").glob("[0-9]*")]
    assert not [words for words in commands if b"tests.fakes.vllm_server" in words and port in words]


def test_a_server_that_cannot_do_what_a_run_needs_ends_it_at_once(tmp_path: Path):
    """Though its component works already when it is asked, which is with the first weights."""
    config = load_config("cats", WORDS[:1])
    tokenizer = Tokenizer.load(config.model.tokenizer_path)
    save_decoder(load_policy(config.model, 1, tokenizer), tmp_path / "model", tokenizer)
    server = FakeVllm(tmp_path / "model", tokenizer, SHAPES)
    server.scale_out = False
    try:
        external = json.dumps({"urls": [server.start()]})
        words = [*QUICK, *WORDS, f"inference.external={external}", f"--run-dir={tmp_path / 'run'}"]
        with driver(tmp_path / "run", "cats", *words) as run:
            assert run.end() == 2 and "start it with --enable-scale-out" in run.output()
    finally:
        server.stop()
    deaths = [each for each in read_events(tmp_path / "run" / "events.jsonl") if each["event"] == "component_death"]
    assert [death["component"] for death in deaths] == ["inference-0"]


def _command(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:  # it ended meanwhile
        return b""
