"""Components as Ray actors on this machine: one cluster for the whole module."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.overseer.config import RayConfig, RoleConfig
from penstock.overseer.launch.process import Process
from penstock.overseer.supervisor.messages import Identity, Membership, Peer
from penstock.rundir import read_events
from penstock.types import (
    CheckpointError,
    ConfigError,
    PenstockError,
    SupersededError,
    SupersededVersionError,
    UnreachableError,
)
from tests.overseer import plain_component
from tests.overseer.ray_waiting import running
from tests.waiting import wait_until

pytestmark = pytest.mark.ray
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def launcher(run_dir):
    from penstock.overseer.ray import RayLauncher

    before = signal.getsignal(signal.SIGTERM)
    config = RayConfig(num_cpus=2, runtime_env={"env_vars": {"OF_THE_RUN": "1", "OF_BOTH": "run"}})
    launcher = RayLauncher(config, "test", run_dir)
    assert signal.getsignal(signal.SIGTERM) is before, "how this process ends is not Ray's to say"
    yield launcher
    launcher.close(30)
    launcher.close(30)


def view(number: int, *identities: Identity) -> Membership:
    return Membership(number, 0, tuple(Peer(identity, {}) for identity in identities))


class Names:
    """Identities that no other test of the module uses."""

    def __init__(self) -> None:
        self.used = 0

    def __call__(self, role: str = "rollout") -> Identity:
        self.used += 1
        return Identity(role, self.used, 0)


NAMES = Names()


@pytest.fixture
def spawned(launcher):
    """Starts components, and ends them after the test."""
    handles: list[Any] = []

    def spawn(
        identity: Identity | None = None,
        seen: Membership | None = None,
        roles: RoleConfig | None = None,
        **settings: Any,
    ) -> Any:
        handle = launcher.spawn(
            identity or NAMES(), plain_component.make, settings, roles or RoleConfig(), seen or Membership()
        )
        handles.append(handle)
        return handle

    yield spawn
    for handle in handles:
        handle.kill(20)


@pytest.fixture(scope="module")
def steady(launcher):
    """A component that no test harms."""
    handle = launcher.spawn(NAMES("replay"), plain_component.make, {}, RoleConfig(), Membership())
    running(handle)
    return handle


# --- calls and heartbeats --------------------------------------------------------------------------------------------


def test_a_component_runs_in_a_process_of_its_own(steady):
    report = running(steady)
    assert report.identity == steady.identity
    assert report.condition.state == "running"
    assert report.pid == report.condition.address["pid"] == steady.place.process.pid != os.getpid()


def test_calls_are_answered_and_errors_arrive_by_their_type(steady):
    assert steady.call("add", 2, 3, timeout_s=10) == 5
    content = os.urandom(300_000)
    assert steady.call("echo", content, timeout_s=10) == content
    with pytest.raises(CheckpointError, match="^no such checkpoint$"):
        steady.call("fail", "checkpoint", timeout_s=10)
    with pytest.raises(SupersededVersionError) as caught:
        steady.call("fail", "version", timeout_s=10)
    assert caught.value.newest == (1, 5)
    with pytest.raises(PenstockError, match="KeyError: 'unheard'"):
        steady.call("fail", "unheard", timeout_s=10)


def test_an_answer_that_takes_too_long_is_not_waited_for(steady):
    began = time.monotonic()
    with pytest.raises(UnreachableError, match="did not answer sleep within 0.2 s"):
        steady.call("sleep", 3, timeout_s=0.2)
    assert time.monotonic() - began < 2


def test_heartbeats_do_not_queue_behind_waiting_calls(spawned):
    import ray

    handle = spawned()
    running(handle)
    waits = [handle._actor.call.remote(None, "wait_in_loop", ()) for _ in range(2000)]
    assert handle.beat(Membership(), 0).result(30).condition.state == "running"
    handle.call("open", timeout_s=30)
    assert {answer.value for answer in ray.get(waits, timeout=90)} == {"opened"}


def test_a_view_is_made_an_object_of_ray_once_however_many_are_told(launcher, spawned, monkeypatch):
    import ray

    put, seen = [], view(7, Identity("replay", 1, 0))
    original = ray.put
    monkeypatch.setattr(ray, "put", lambda value: put.append(value) or original(value))
    handles = [spawned(), spawned()]
    for handle in handles:
        running(handle, seen)
        handle.beat(None, 0).result(10)
    assert put == [seen]
    assert launcher.carried(None) is None
    assert ray.get(launcher.carried(seen), timeout=10) == seen


def test_messages_are_repeated_until_they_are_acknowledged(spawned):
    handle = spawned()
    running(handle)
    handle.call("report", 4, timeout_s=10)
    for _ in range(2):
        event, metrics = handle.beat(Membership(), 0).result(10).messages
        assert (event.number, event.name, event.fields) == (1, "noted", {"what": "something"})
        assert (metrics.number, metrics.step, metrics.fields) == (2, 4, {"plain/number": 2.5})
    assert [message.number for message in handle.beat(Membership(), 1).result(10).messages] == [2]


def test_a_component_that_cannot_be_made_says_why(spawned):
    condition = running(spawned(fails=True)).condition
    assert (condition.state, condition.error) == ("failed", "nothing to start from")


# --- incarnations ----------------------------------------------------------------------------------------------------


@pytest.mark.attack
def test_a_late_call_of_a_replaced_incarnation_is_refused_and_calls_reach_the_living(spawned):
    replay, old = NAMES("replay"), NAMES()
    new = Identity(old.role, old.index, 1)
    first = view(1, replay, old)
    keeper, worker = spawned(replay, first), spawned(old, first)
    running(keeper), running(worker)
    assert worker.call("ask", replay.name, "add", (1, 2), 10.0, timeout_s=20) == 3
    keeper.beat(view(2, replay, new), 0).result(10)  # the old one is not told: it was thought dead and is not
    with pytest.raises(SupersededError, match=f"{old} was given up"):
        worker.call("ask", replay.name, "add", (1, 2), 10.0, timeout_s=20)

    successor = spawned(Identity(replay.role, replay.index, 1), view(3, Identity(replay.role, replay.index, 1), new))
    running(successor)
    asking = spawned(new, view(3, successor.identity, new))
    running(asking)
    assert asking.call("ask", replay.name, "where", (), 10.0, timeout_s=20)[1] == f"{replay.name}#1"


def test_one_that_died_is_unreachable_for_its_peers(spawned):
    replay, name = NAMES("replay"), NAMES()
    seen = view(1, replay, name)
    keeper, worker = spawned(replay, seen), spawned(name, seen)
    os.kill(running(keeper).pid, signal.SIGKILL)
    running(worker)
    with pytest.raises(UnreachableError, match=str(replay)):
        worker.call("ask", replay.name, "sleep", (5,), 10.0, timeout_s=20)
    with pytest.raises(UnreachableError, match="no-such-0 is not running at present"):
        worker.call("ask", "no-such-0", "where", (), 10.0, timeout_s=20)


# --- death -----------------------------------------------------------------------------------------------------------


@pytest.mark.attack
def test_a_killed_process_is_noticed_at_once_and_the_next_incarnation_runs(spawned, run_dir):
    name = NAMES()
    handle = spawned(name)
    pid = running(handle).pid
    waiting = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
    waiting.start()
    began = time.monotonic()
    killed = r"it was killed or crashed \(SIGKILL, out of memory, SIGSEGV\)"
    with pytest.raises(UnreachableError, match=f"^{name} cannot be reached: {killed}$"):
        handle.call("sleep", 20, timeout_s=30)
    assert time.monotonic() - began < 5
    with pytest.raises(UnreachableError, match=f"^{killed}$"):
        handle.beat(Membership(), 0).result(10)
    noise = [json.loads(line)["message"] for line in (run_dir / "logs" / "ray.jsonl").read_text().splitlines()]
    assert any(line.startswith(f"{name}: ActorDiedError") and "Worker exit type" in line for line in noise)
    handle.kill(10)  # of a dead one returns
    assert running(spawned(Identity(name.role, name.index, 1))).pid != pid


@pytest.mark.attack
def test_a_stopped_process_answers_nothing_and_is_killed_within_the_limit(spawned):
    handle = spawned()
    running(handle)
    process = handle.place.process
    os.kill(process.pid, signal.SIGSTOP)
    beat = handle.beat(Membership(), 0)
    with pytest.raises(UnreachableError, match="within 0.3 s"):
        handle.call("add", 1, 1, timeout_s=0.3)
    assert not beat.done()
    began = time.monotonic()
    handle.kill(10)
    assert not process.alive
    assert time.monotonic() - began < 5
    with pytest.raises(UnreachableError):
        beat.result(10)


def test_one_that_is_killed_before_it_runs_never_makes_its_component(spawned, run_dir):
    handle = spawned(NAMES("inference"))
    handle.kill(30)
    with pytest.raises(UnreachableError):
        handle.beat(Membership(), 0).result(10)
    assert handle.place is None or not handle.place.process.alive
    assert "runs" not in (run_dir / "logs" / f"{handle.identity.name}.jsonl").read_text() if handle.place else True


def test_a_process_that_cannot_be_shown_dead_is_told(spawned, monkeypatch):
    handle = spawned()
    running(handle)
    monkeypatch.setattr(Process, "end", lambda self, timeout_s: False)
    with pytest.raises(UnreachableError, match="is not known to be gone after 0.1 s"):
        handle.kill(0.1)


def test_termination_is_a_notice_to_drain(spawned):
    handle = spawned()
    os.kill(running(handle).pid, signal.SIGTERM)
    wait_until(lambda: running(handle).condition.state == "drained", "the component drains")
    assert [(m.name, m.fields["reason"]) for m in running(handle).messages] == [("drain_notice", "SIGTERM")]
    assert handle.call("add", 1, 1, timeout_s=10) == 2, "what it began can be finished"


# --- where, and with what --------------------------------------------------------------------------------------------


def test_what_can_never_be_placed_is_refused_with_its_numbers(launcher):
    with pytest.raises(ConfigError, match=r"roles.learner.num_gpus is 4, but no machine of the cluster has more than"):
        launcher.spawn(NAMES("learner"), plain_component.make, {}, RoleConfig(num_gpus=4), Membership())
    with pytest.raises(
        ConfigError, match=r"roles.learner.num_cpus is 3, but no machine of the cluster has more than 2"
    ):
        launcher.spawn(NAMES("learner"), plain_component.make, {}, RoleConfig(num_cpus=3), Membership())


def test_reservations_add_up_and_end_with_the_component(launcher, spawned):
    first = spawned(roles=RoleConfig(num_cpus=1.5))
    running(first)
    with pytest.raises(ConfigError, match="of the cluster's 2 the run's other components reserve 1.5: .* has no room"):
        launcher.spawn(NAMES(), plain_component.make, {}, RoleConfig(num_cpus=1), Membership())
    quarter = RoleConfig(num_cpus=0.25)
    two = [(Identity("rollout", index, 0), quarter) for index in (901, 902)]
    launcher.check_room(two, [])
    with pytest.raises(ConfigError, match=r"the run's other components reserve 2: rollout-902 has no room"):
        launcher.check_room(two, [quarter])
    first.kill(10)
    running(spawned(roles=RoleConfig(num_cpus=1)))


def test_a_later_incarnation_waits_for_room(launcher, spawned):
    handle = spawned(Identity("rollout", 900, 1), roles=RoleConfig(resources={"of_a_machine_that_died": 1}))
    assert not handle.beat(Membership(), 0).done()
    handle.kill(20)


def test_environment_variables_of_the_run_and_of_the_role(spawned):
    handle = spawned(roles=RoleConfig(env={"OF_BOTH": "role", "JAX_PLATFORMS": "cpu"}))
    running(handle)
    names = ["OF_THE_RUN", "OF_BOTH", "JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"]
    assert [handle.call("environment", name, timeout_s=10) for name in names] == ["1", "role", "cpu", ""]
    at_its_start = Path(f"/proc/{handle.place.process.pid}/environ").read_bytes().split(b"\0")
    assert b"JAX_PLATFORMS=cpu" in at_its_start and b"OF_BOTH=role" in at_its_start
    shown = spawned(roles=RoleConfig(env={"CUDA_VISIBLE_DEVICES": "3"}))
    running(shown)
    assert shown.call("environment", "CUDA_VISIBLE_DEVICES", timeout_s=10) == "3"


def test_logs_are_files_of_the_run(spawned, run_dir):
    handle = spawned()
    running(handle)
    handle.call("speak", "hello", timeout_s=10)
    logged = read_events(run_dir / "logs" / f"{handle.identity.name}.jsonl")
    assert [(line["level"], line["message"]) for line in logged if line["logger"] == "plain"] == [
        ("WARNING", "logged hello")
    ]
    printed = (run_dir / "logs" / f"{handle.identity.name}.out").read_text().splitlines()
    assert sorted(printed) == ["complained hello", "printed hello", "written hello"]


@pytest.mark.attack
def test_the_servers_of_a_cluster_started_here_listen_on_the_loopback_address_alone(steady):
    raylet = int(Path(f"/proc/{steady.place.process.pid}/stat").read_text().rpartition(")")[2].split()[1])
    descendants = {raylet, steady.place.process.pid}
    listening = [
        line.split()[1]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and line.split()[9] in sockets_of(descendants)
    ]
    assert listening
    assert [address for address in listening if not address.partition(":")[0].endswith("0100007F")] == []


def sockets_of(pids: set[int]) -> set[str]:
    found = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(descriptor)
            except OSError:
                continue
            if target.startswith("socket:["):
                found.add(target[8:-1])
    return found


# --- drivers in processes of their own -------------------------------------------------------------------------------


def driver(directory: Path) -> "subprocess.Popen[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.overseer.ray_driver", str(directory)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY,
        env={**environment, "HOME": str(directory)}, start_new_session=True,
    )  # fmt: skip


def began(pid: int) -> Process:
    from penstock.overseer.launch import process as processes

    return Process(pid, processes._began(pid))


@pytest.mark.attack
def test_a_driver_that_is_killed_leaves_no_actors_not_even_stopped_ones(tmp_path):
    with driver(tmp_path) as process:
        assert process.stdout is not None
        first, second = (began(int(pid)) for pid in process.stdout.readline().split())
        assert first.alive and second.alive
        os.kill(first.pid, signal.SIGSTOP)
        process.kill()
        wait_until(lambda: not (first.alive or second.alive), "the actors are gone")


@pytest.mark.attack
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_the_terminal_is_quiet_and_ends_no_component_and_nothing_is_written_at_home(tmp_path, number):
    with driver(tmp_path) as process:
        assert process.stdout is not None
        pids = process.stdout.readline()
        os.killpg(process.pid, number)  # it reaches all of a terminal; the overseer alone decides
        printed, complained = process.communicate("ask\nkill\nend\n", timeout=120)
    assert (printed, complained, process.returncode) == ("running running\nnoticed\nended\n", "", 0)
    assert not any(began(int(pid)).alive for pid in pids.split())
    assert {path.name for path in tmp_path.iterdir()} == {"logs"}
    names = {"ray.jsonl"} | {f"rollout-{index}.{kind}" for index in range(2) for kind in ("jsonl", "out")}
    assert {path.name for path in (tmp_path / "logs").iterdir()} == names
    noise = [json.loads(line)["message"] for line in (tmp_path / "logs" / "ray.jsonl").read_text().splitlines()]
    assert any("worker died or was killed" in message for message in noise), "kept, where it may be looked for"
