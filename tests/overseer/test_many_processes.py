"""What is refused before a run in many processes begins."""

from pathlib import Path
from typing import Any

import pytest

from penstock.overseer.config import RunConfig
from penstock.overseer.config_loading import load_config
from penstock.overseer.terminal import Progress
from penstock.types import ConfigError

HOSTS = {"inference.host": "0.0.0.0", "weights.host": "127.0.0.1"}


class Begun(Exception):
    """The conductor was to be made: nothing was refused."""


def begin(config: RunConfig, run_dir: Path, hosts: dict[str, str]) -> None:
    from penstock.overseer.many_processes import run_under_ray

    def make_conductor(*_: object) -> Any:
        raise Begun

    run_under_ray(config, run_dir, False, "cats", True, hosts, Progress("test", 1, 1), make_conductor)


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
    config = load_config("cats", ["runtime=ray", f"weights.transport={transport}"])
    with pytest.raises(ConfigError, match=words):
        begin(config, tmp_path / "run", hosts)
    assert closed == [config.overseer.stop_timeout_s] and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("machines", "transport", "hosts"),
    [(1, "shared_memory", HOSTS), (1, "arrow_flight", HOSTS), (3, "checkpoint", HOSTS),
     (3, "arrow_flight", {"weights.host": "0.0.0.0"})],
)  # fmt: skip
def test_what_all_machines_reach_is_not(
    tmp_path: Path, launchers: list[Any], monkeypatch: pytest.MonkeyPatch, machines: int, transport: str, hosts: Any
):
    from penstock.overseer.ray import RayLauncher

    monkeypatch.setattr(RayLauncher, "machines", machines)
    with pytest.raises(Begun):
        begin(load_config("cats", ["runtime=ray", f"weights.transport={transport}"]), tmp_path / "run", hosts)
