"""Components on a Ray cluster of two machines, both of which are this one."""

import os
import signal
import socket
import time

import pytest

from penstock.overseer.config import RayConfig, RoleConfig
from penstock.overseer.supervisor.messages import Identity, Membership, Peer
from penstock.types import ConfigError, UnreachableError
from tests.overseer import plain_component
from tests.overseer.ray_waiting import running
from tests.waiting import wait_until

pytestmark = pytest.mark.ray
FAR = RoleConfig(resources={"far": 0.1})
NEAR = RoleConfig(resources={"near": 0.1})


@pytest.fixture(scope="module")
def cluster():
    import ray
    from ray.cluster_utils import Cluster

    assert not ray.is_initialized(), "another test left Ray running"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {"near": 1}})
    cluster.add_node(num_cpus=1, resources={"far": 1})
    cluster.wait_for_nodes(timeout=280)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def launcher(cluster, tmp_path_factory):
    from penstock.overseer.ray import RayLauncher

    launcher = RayLauncher(RayConfig(address=cluster.address), "cluster", tmp_path_factory.mktemp("run"))
    yield launcher
    launcher.close(30)


def spawn(launcher, identity, roles, *others):
    peers = tuple(Peer(peer, {}) for peer in (identity, *others))
    return launcher.spawn(identity, plain_component.make, {}, roles, Membership(1, 0, peers))


def test_components_of_two_machines_call_each_other(launcher):
    near, far = Identity("replay", 0, 0), Identity("rollout", 0, 0)
    keeper, worker = spawn(launcher, near, NEAR, far), spawn(launcher, far, FAR, near)
    running(keeper), running(worker)
    assert keeper.place.node_id != worker.place.node_id
    assert worker.call("ask", "replay-0", "where", (), 20.0, timeout_s=30)[1] == "replay-0#0"
    content = os.urandom(2_000_000)
    assert worker.call("ask", "replay-0", "echo", (content,), 20.0, timeout_s=30) == content
    keeper.kill(30), worker.kill(30)


def test_a_stopped_process_of_another_machine_is_killed_there(launcher):
    handle = spawn(launcher, Identity("rollout", 1, 0), FAR)
    running(handle)
    process = handle.place.process
    assert handle.place.node_id != launcher._node_id
    os.kill(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    handle.kill(30)
    assert not process.alive
    assert time.monotonic() - began < 15


def test_spread_uses_both_machines(launcher):
    handles = [
        spawn(launcher, Identity("inference", index, 0), RoleConfig(num_cpus=0.1, spread=True)) for index in range(4)
    ]
    for handle in handles:
        running(handle)
    assert len({handle.place.node_id for handle in handles}) == 2
    for handle in handles:
        handle.kill(30)


def test_what_only_both_machines_together_have_is_refused(launcher):
    both = RoleConfig(resources={"near": 1, "far": 1})
    with pytest.raises(ConfigError, match="roles.learner asks for 1 near, 1 far, and no single machine"):
        spawn(launcher, Identity("learner", 0, 0), both)


@pytest.mark.parametrize("error", [ConnectionError("refused"), ModuleNotFoundError("No module named 'grpc'")])
def test_a_cluster_that_cannot_be_joined_is_told(tmp_path, monkeypatch, error):
    import ray

    from penstock.overseer.ray import RayLauncher

    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"ray.address {address}: {type(error).__name__}: {error}"):
            RayLauncher(RayConfig(address=address), "nowhere", tmp_path)


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_where_nobody_listens_ray_is_not_asked(tmp_path, monkeypatch, scheme):
    import ray

    from penstock.overseer.ray import RayLauncher

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray would try for minutes"))
    with pytest.raises(ConfigError, match=f"join the cluster at ray.address {scheme}127.0.0.1:9: Connection.*refused"):
        RayLauncher(RayConfig(address=f"{scheme}127.0.0.1:9"), "nowhere", tmp_path)


@pytest.mark.parametrize(
    ("given", "words"),
    [({"address": "127.0.0.1:9"}, "ray.address is 127.0.0.1:9, and this process is connected to Ray already, .* at "),
     ({"address": "ray://127.0.0.1:9"}, "ray.address is ray://127.0.0.1:9, and this process is connected"),
     ({"num_cpus": 3}, "ray.num_cpus is given, and this process is connected to Ray already"),
     ({"runtime_env": {"env_vars": {"A": "secret"}}}, "ray.runtime_env is given, and .* call ray.shutdown before")],
)  # fmt: skip
def test_what_the_programs_own_connection_cannot_give_is_refused(launcher, tmp_path, given, words):
    from penstock.overseer.ray import RayLauncher

    with pytest.raises(ConfigError, match=words) as raised:
        RayLauncher(RayConfig(**given), "another", tmp_path)
    assert "secret" not in str(raised.value)


def test_the_programs_own_connection_is_taken_and_kept(cluster, launcher, tmp_path):
    import ray

    from penstock.overseer.ray import RayLauncher

    for address in (None, "auto", cluster.address):
        another = RayLauncher(RayConfig(address=address), "another", tmp_path)
        assert another.machines == launcher.machines
        another.close(30)
    assert ray.is_initialized()


@pytest.mark.attack
def test_a_machine_that_dies_takes_its_component_along_which_starts_elsewhere(cluster, launcher):
    node = cluster.add_node(num_cpus=1, resources={"doomed": 1, "far": 1})
    cluster.wait_for_nodes(timeout=280)
    name = Identity("rollout", 2, 0)
    handle = spawn(launcher, name, RoleConfig(resources={"doomed": 1}))
    running(handle)
    process = handle.place.process
    os.kill(process.pid, signal.SIGSTOP)
    cluster.remove_node(node, allow_graceful=False)
    wait_until(lambda: not process.alive, "what ran on the machine is gone", 30)
    with pytest.raises(UnreachableError):
        handle.beat(Membership(), 0).result(60)
    handle.kill(60)
    successor = spawn(launcher, Identity("rollout", 2, 1), FAR)
    running(successor)
    successor.kill(30)
