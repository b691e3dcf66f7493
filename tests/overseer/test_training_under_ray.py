"""What is refused before a run in many processes begins."""

from pathlib import Path
from typing import Any

import pytest

from penstock.overseer.config import RunConfig
from penstock.overseer.config_loading import load_config
from penstock.overseer.language.kind import LanguageKind
from penstock.overseer.run import Run
from penstock.overseer.training import RunRequest, create_run, run_token
from penstock.types import ConfigError

HOSTS = {"inference.host": "0.0.0.0", "weights.host": "127.0.0.1"}


class Begun(Exception):
    """The run was to be made: nothing was refused."""


@pytest.fixture(autouse=True)
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(*_: object) -> None:
        raise Begun

    monkeypatch.setattr(Run, "__init__", begin)


def begin(config: RunConfig, run_dir: Path) -> None:
    RunRequest(LanguageKind.of(config), config, run_dir, False, "cats", True).run()


def overrides(transport: str, hosts: dict[str, str]) -> list[str]:
    return ["runtime=ray", f"weights.transport={transport}", *(f"{key}={host}" for key, host in hosts.items())]


@pytest.mark.parametrize(
    ("transport", "hosts", "words"),
    [
        ("shared_memory", {}, "weights.transport is shared_memory, which no other machine can reach.* has 3"),
        ("arrow_flight", HOSTS, "weights.host is 127.0.0.1, which no other machine can reach, and the cluster has 3"),
        ("checkpoint", {"inference.host": "::1"}, "inference.host is ::1, which no other machine can reach"),
    ],
)  # fmt: skip
def test_what_only_one_machine_reaches_is_refused_where_there_are_several(
    tmp_path: Path, launchers: list[Any], monkeypatch: pytest.MonkeyPatch, transport: str, hosts: Any, words: str
):
    from penstock.overseer.ray import RayLauncher

    closed: list[float] = []
    monkeypatch.setattr(RayLauncher, "machines", 3)
    monkeypatch.setattr(RayLauncher, "close", lambda self, timeout_s: closed.append(timeout_s))
    config = load_config("cats", overrides(transport, hosts))
    with pytest.raises(ConfigError, match=words):
        begin(config, tmp_path / "run")
    assert closed == [config.overseer.stop_timeout_s] and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("machines", "transport", "hosts"),
    [(1, "shared_memory", HOSTS), (1, "arrow_flight", HOSTS), (3, "checkpoint", HOSTS),
     (3, "arrow_flight", {"inference.host": "0.0.0.0", "weights.host": "0.0.0.0"})],
)  # fmt: skip
def test_what_all_machines_reach_is_not(
    tmp_path: Path, launchers: list[Any], monkeypatch: pytest.MonkeyPatch, machines: int, transport: str, hosts: Any
):
    from penstock.overseer.ray import RayLauncher

    monkeypatch.setattr(RayLauncher, "machines", machines)
    with pytest.raises(Begun):
        begin(load_config("cats", overrides(transport, hosts)), tmp_path / "run")


@pytest.mark.parametrize("resume", [False, True])
def test_what_the_cluster_has_no_room_for_is_refused_before_anything_is_written(
    tmp_path: Path, launchers: list[Any], monkeypatch: pytest.MonkeyPatch, resume: bool
):
    from penstock.overseer.ray import RayLauncher

    closed: list[float] = []

    def refuse(self: Any, newcomers: list[Any], others: list[Any]) -> None:
        raise ConfigError(
            f"no room for {', '.join(f'{identity} with {role.num_cpus:g}' for identity, role in newcomers)}"
        )

    monkeypatch.setattr(RayLauncher, "check_room", refuse)
    monkeypatch.setattr(RayLauncher, "close", lambda self, timeout_s: closed.append(timeout_s))
    config = load_config("cats", ["runtime=ray", "roles.learner.num_cpus=64", "rollout.workers=2"])
    directory = create_run(load_config("cats"), tmp_path / "run", "cats") if resume else None
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="learner-0.* with 64.*rollout-1"):
        RunRequest(LanguageKind.of(config), config, tmp_path / "run", resume, "cats", True).run()
    assert closed == [config.overseer.stop_timeout_s] and sorted(tmp_path.rglob("*")) == before
    assert directory is None or directory.read_config()["runtime"] == "local"


def test_the_token_is_the_environments_or_a_new_secret(launchers: list[Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PENSTOCK_TOKEN", raising=False)
    made = {run_token(), run_token()}
    assert len(made) == 2 and {len(token) for token in made} == {64}
    monkeypatch.setenv("PENSTOCK_TOKEN", "sixteen letters!")
    assert run_token() == "sixteen letters!"


def test_a_token_that_could_be_guessed_is_refused_before_anything_is_written(
    tmp_path: Path, launchers: list[Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PENSTOCK_TOKEN", "guess")
    with pytest.raises(ConfigError, match="PENSTOCK_TOKEN has 5 characters, and .* at least 16") as raised:
        begin(load_config("cats", ["runtime=ray"]), tmp_path / "run")
    assert "guess" not in str(raised.value) and not (tmp_path / "run").exists() and not launchers
