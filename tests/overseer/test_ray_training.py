"""Whole runs on a real Ray cluster; each in a driver process of its own, as a user starts them."""

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest
import safetensors.numpy

from penstock.model.language import Decoder, save_decoder
from penstock.model.language.config import InitConfig
from penstock.rundir import read_events, read_metrics, read_status
from penstock.text import Tokenizer
from tests.overseer.test_served_weights import engines_of
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(500)]
PENSTOCK = [sys.executable, "-m", "penstock"]
QUICK = ["runtime=ray", "overseer.heartbeat_s=0.3", "overseer.heartbeat_timeout_s=10"]
LIMIT_S = 360.0


class Driver:
    """A ``penstock train`` in a process of its own."""

    def __init__(self, run_dir: Path, words: list[str]) -> None:
        self.run_dir = run_dir
        self._out = run_dir.with_suffix(".out").open("w")
        self.process = subprocess.Popen(
            [*PENSTOCK, "train", *words, "-q"], stdout=self._out, stderr=subprocess.STDOUT, cwd=run_dir.parent
        )

    def status(self) -> dict[str, Any]:
        return read_status(self.run_dir / "status.json") or {}

    def until(self, reached: Callable[[], bool], what: str) -> None:
        wait_until(lambda: reached() or self.process.poll() is not None, what, LIMIT_S)
        assert self.process.poll() is None, f"ended before {what}: {self.output()}"

    def end(self) -> int:
        return self.process.wait(LIMIT_S)

    def close(self) -> None:
        self._out.close()

    def output(self) -> str:
        return self.run_dir.with_suffix(".out").read_text()


@contextmanager
def driver(run_dir: Path, *words: str) -> Iterator[Driver]:
    started = Driver(run_dir, [*words])
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
            started.process.wait(30)
        started.close()


def updates(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run_dir / "metrics.jsonl") if "train/loss" in row]


def closes(ledger: dict[str, int]) -> bool:
    return ledger["started"] == sum(count for state, count in ledger.items() if state != "started")


def test_cats_is_learned_as_in_one_process_though_the_run_was_stopped_on_the_way(tmp_path: Path):
    """Components that die are the matter of tests/benchmarks/test_chaos.py."""
    run_dir = tmp_path / "run"
    words = ["rollout.workers=3", "inference.servers=2", "replay.groups_per_batch=8", "steps=160"]
    with driver(run_dir, "cats", *QUICK, *words, f"--run-dir={run_dir}") as run:
        run.until(lambda: run.status().get("step", 0) >= 6, "sixth update")
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 130, run.output()
        assert not any(word in run.output() for word in ("raylet", "(pid=", "Traceback"))
    status = read_status(run_dir / "status.json")
    assert status["state"] == "stopped" and status["lineage"] == 0
    assert closes(status["ledger"])
    newest = max(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*"))
    assert newest == status["step"] >= 6

    with driver(run_dir, "--resume", str(run_dir)) as run:
        assert run.end() == 0, run.output()
    status = read_status(run_dir / "status.json")
    assert status["state"] == "finished" and status["step"] == 160 and status["lineage"] == 1
    assert closes(status["ledger"]) and status["ledger"]["trained"] == 160 * 8 * 8
    events = [event for event in read_events(run_dir / "events.jsonl") if event["event"] == "evaluation"]
    evaluations = {event["when"]: event["reward"]["cats"] for event in events}
    assert evaluations["untrained"] < 0.1
    assert evaluations["after"] >= 0.9
    assert {f"rollout-{i}" for i in range(3)} | {"inference-0", "inference-1"} <= status["components"].keys()
    assert all((run_dir / "logs" / f"{name}.jsonl").is_file() for name in status["components"])


def run_on_cluster(
    tmp_path: Path, head: str, then: str, address: str, *words: str, recipe: str = "cats", after: str = ""
) -> Path:
    """A run on a cluster of this machine's own; the head, further nodes, and what follows it as Python source."""
    run_dir = tmp_path / "run"
    script = f"""
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={head})
{then}
from penstock.cli import main
code = main(["train", "{recipe}", "-q", *{[*QUICK, *words]!r}, f"ray.address={address}", "--run-dir={run_dir}"])
{after}
cluster.shutdown()
sys.exit(code)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return run_dir


OWN_CODE = """
from penstock.environments.cats import CatsEnvironment

class OwnAnimals(CatsEnvironment):
    def __init__(self, seen: str) -> None:
        super().__init__()
        with open(seen, "a") as file:
            file.write(f"{__file__}\\n")
"""


def test_two_machines_reached_through_ray_client_share_nothing_but_sockets_and_have_the_users_code(tmp_path: Path):
    """Two Ray nodes; learner and replay on one, engines and workers on the other: weights and rollouts cross.

    At staleness zero the server may leave no version out.
    """
    here = [f"roles.{role}.resources.here=1" for role in ("learner", "replay", "curriculum")]
    there = [f"roles.{role}.resources.there=1" for role in ("inference", "rollout", "evaluator")]
    port, own, seen = free_port(), tmp_path / "own", tmp_path / "seen"
    own.mkdir()
    (own / "own_animals.py").write_text(OWN_CODE)
    environment = "curriculum.lessons.cats.environment"
    run_dir = run_on_cluster(
        tmp_path,
        f'{{"num_cpus": 4, "resources": {{"here": 100}}, "ray_client_server_port": {port}}}',
        f'cluster.add_node(num_cpus=4, resources={{"there": 100}})\nsys.path.insert(0, {str(own)!r})',
        f"ray://127.0.0.1:{port}",
        "steps=6", "async=false", "rollout.workers=2", "weights.transport=arrow_flight", *here, *there,
        f"ray.runtime_env.working_dir={own}", f"{environment}.env_class=own_animals.OwnAnimals",
        f"{environment}.env_args.seen={seen}",
    )  # fmt: skip
    arrays = safetensors.numpy.load_file(run_dir / "checkpoints" / "step-6" / "model" / "model.safetensors")
    size = sum(array.nbytes for array in arrays.values())
    rows = updates(run_dir)
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert all(row["replay/staleness_max"] == 0 for row in rows)
    assert rows[-1]["weights/bytes_served"] >= 6 * size > 0  # versions 0 to 5
    status = read_status(run_dir / "status.json")
    assert status is not None and status["numbers"]["rollout_storage/received_bytes"] > 0
    assert status["state"] == "finished" and closes(status["ledger"])
    driver, *components = sorted(set(seen.read_text().split()), key=lambda path: not path.startswith(str(own)))
    assert driver == str(own / "own_animals.py")
    assert components and all("runtime_resources" in path for path in components), components


NODES_OF_ACTORS = """
import json, ray
from ray._private.state import actors
ray.init(cluster.address, log_to_driver=False)
with open({path!r}, "w") as file:
    json.dump([(one["Name"], one["Address"]["NodeID"]) for one in actors().values()], file)
ray.shutdown()
"""


def test_a_fleet_on_two_machines_shares_nothing_but_sockets_and_learns(tmp_path: Path):
    """Learner, replay and a rollout worker on one node, the evaluator and the other rollout worker on the other one."""
    here = [f"roles.{role}.resources.here=1" for role in ("learner", "replay")]
    there = ["roles.evaluator.resources.there=1", "roles.rollout.resources.simulators=1"]  # each node has room for one
    path, steps = tmp_path / "nodes.json", 60
    run_dir = run_on_cluster(
        tmp_path,
        '{"num_cpus": 4, "resources": {"here": 100, "simulators": 1}}',
        'cluster.add_node(num_cpus=4, resources={"there": 100, "simulators": 1})',
        "{cluster.address}",
        f"steps={steps}", "fleet.workers=2", "fleet.envs_per_worker=16", "weights.transport=arrow_flight",
        "evaluation.episodes=16", "evaluation.simulators=16", *here, *there, recipe="cartpole",
        after=NODES_OF_ACTORS.format(path=str(path)),
    )  # fmt: skip
    nodes = [(name.partition("#")[0], node) for name, node in json.loads(path.read_text())]
    place = dict(nodes)
    assert len(nodes) == len(place) == 5 and place["rollout-0"] != place["rollout-1"]
    assert {place["learner-0"], place["evaluator-0"]} == {place["rollout-0"], place["rollout-1"]}
    arrays = safetensors.numpy.load_file(run_dir / "checkpoints" / f"step-{steps}" / "model" / "model.safetensors")
    size = sum(array.nbytes for array in arrays.values())
    rows = updates(run_dir)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert rows[-1]["weights/bytes_served"] >= rows[-1]["fleet/weight_loads"] * size > 0
    status = read_status(run_dir / "status.json")
    assert status is not None and status["state"] == "finished"
    assert status["numbers"]["replay/received_bytes"] > steps * 32 * 64 * 16  # observations
    assert closes(status["ledger"]) and status["ledger"]["trained"] == steps * 32
    account = status["account"]
    assert closes(account) and account["acting"] == account["buffered"] == account["waiting"] == 0
    assert account["sent"] + account["sent_faults"] == status["ledger"]["started"] * 64
    events = list(read_events(run_dir / "events.jsonl"))
    workers = [event["component"] for event in events if event["event"] == "worker_ended"]
    assert sorted(workers) == ["rollout-0", "rollout-1"]
    assert not any(event["event"] == "component_death" for event in events)
    returns = {event["when"]: event["reward"]["cartpole"] for event in events if event["event"] == "evaluation"}
    assert returns["untrained"] < 60 < 90 < returns["after"], returns


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_beside_a_base_adapters_alone_travel_between_processes(tmp_path: Path):
    """Learner and server read the base from its directory, each for itself; the guard compares what both compute."""
    tokenizer = Tokenizer.load("penstock")
    shape = InitConfig(hidden_size=64, intermediate_size=128).model(tokenizer.vocab_size, "float32")
    save_decoder(Decoder.initialise(shape, jax.random.key(0)), tmp_path / "base", tokenizer)
    run_dir, steps = tmp_path / "run", 4
    words = [
        "async=false", f"steps={steps}", "rollout.workers=1", "inference.servers=1", "weights.transport=arrow_flight",
        f"model={{init: null, path: {tmp_path / 'base'}, tokenizer: penstock, lora: {{rank: 2}}}}",
    ]  # fmt: skip
    with driver(run_dir, "cats", f"--run-dir={run_dir}", *QUICK, *words) as run:
        assert run.end() == 0, run.output()
    folder = run_dir / "checkpoints" / f"step-{steps}" / "model"
    assert not (folder / "model.safetensors").exists()
    adapter = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
    assert any(array.any() for name, array in adapter.items() if "lora_B" in name)
    size = sum(array.nbytes for array in adapter.values())
    rows = updates(run_dir)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert steps * size <= rows[-1]["weights/bytes_served"] < steps * 1.5 * size
    assert steps * 1.5 * size < 4 * shape.parameter_count
    assert all(row["train/parity_checked"] > 0 and row["train/parity_kl"] < 1e-6 for row in rows)
    recorded = (run_dir / "config.yaml").read_bytes()
    with driver(run_dir, "--resume", str(run_dir), f"steps={2 * steps}", "learner.optimizer.name=muon") as run:
        assert run.end() == 2, run.output()
    assert "optimiser state does not fit" in run.output() and (run_dir / "config.yaml").read_bytes() == recorded
    deaths = [event for event in read_events(run_dir / "events.jsonl") if event["event"] == "component_death"]
    assert [event["component"] for event in deaths] == ["learner-0"]


@pytest.mark.slow
def test_staleness_zero_reproduces_itself_to_the_last_bit_with_one_worker_and_one_server(tmp_path: Path):
    alone = ["async=false", "steps=3", "rollout.workers=1", "inference.servers=1", "overseer.checkpoint_every=1"]
    for name in ("first", "second"):
        with driver(tmp_path / name, "cats", "--run-dir", str(tmp_path / name), *QUICK, *alone) as run:
            assert run.end() == 0, run.output()
    first, second = (
        [path.read_bytes() for path in sorted((tmp_path / name / "checkpoints").glob("step-*/model/*.safetensors"))]
        for name in ("first", "second")
    )
    assert first == second and len(set(first)) > 1


def test_a_server_with_a_stale_tensor_is_replaced_and_nothing_of_it_is_trained(tmp_path: Path):
    run_dir = tmp_path / "run"
    words = [*QUICK, "rollout.workers=2", "inference.servers=2", "replay.groups_per_batch=4", "steps=60"]
    code = (
        "import pathlib\nfrom tests.overseer import stale_server\n"
        f"stale_server.train(pathlib.Path({str(run_dir)!r}), *{words!r})"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    events = list(read_events(run_dir / "events.jsonl"))
    (found,) = [event for event in events if event["event"] == "weights_differ"]
    assert found["component"] == "inference-1"
    said = re.match(r"inference-1#0 serves version (\d+) with other weights than .* \(layers.down\)$", found["reason"])
    assert said is not None and int(said[1]) >= 3, found["reason"]
    deaths = [event for event in events if event["event"] == "component_death" and event["component"] == "inference-1"]
    assert len(deaths) == 1 and found["reason"] in deaths[0]["reason"]
    trained = engines_of(run_dir, "trained")
    assert len(trained) == 60 * 4 * 8 and {"inference-1#1"} <= {name for engines, *_ in trained for name in engines}
    assert not [newest for engines, newest, _ in trained if "inference-1#0" in engines and newest >= int(said[1])]
    status = read_status(run_dir / "status.json")
    assert status["state"] == "finished" and status["lineage"] == 0 and closes(status["ledger"])
