"""The runs of `benchmarks.external`, their marks, and the server that it kills; the runs take half an hour."""

import os
import signal
import sys
from pathlib import Path

import pytest
from benchmarks.external import Measured, apart, descendants, judge, overrides, parsed, server_of, through_vllm
from benchmarks.marks import Marks
from tests.waiting import wait_until

from penstock.overseer.config_loading import load_config
from penstock.overseer.launch.process import GuardedProcess

LIMIT_S = 280.0


@pytest.fixture
def given(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    return lambda *words: parsed(["--vllm", "/opt/vllm", "--model", str(tmp_path), *words])


def test_both_engines_have_the_same_run_but_for_who_answers(given):
    asked = given()
    recipe, *words = overrides(asked)
    builtin = load_config(recipe, words)
    through = load_config(recipe, [*words, *through_vllm(asked, "lora")])
    assert through.model_copy(update={"inference": builtin.inference}) == builtin
    assert through.server_command("base", 1)[:6] == [
        "/opt/vllm", "serve", "base", "--gpu-memory-utilization", "0.2", "--enforce-eager",
    ]  # fmt: skip
    assert {"--enable-lora", "--max-num-seqs"} <= {*through.server_command("base", 1)}


def test_a_whole_model_goes_by_directory_and_a_card_is_shared(given, capsys):
    asked = given("--rank", "0", "--weights", "directory", "--vllm-share", "0.2")
    recipe, *words = overrides(asked)
    config = load_config(recipe, [*words, *through_vllm(asked, "directory")])
    assert config.model.lora is None and "--gpu-memory-utilization" in config.server_command("model", 1)
    with pytest.raises(SystemExit):
        given("--rank", "0")
    assert "goes by --weights directory" in capsys.readouterr().err


def test_the_server_itself_is_killed_and_not_who_guards_it(tmp_path):
    program = "import signal; signal.pause()"
    guard = GuardedProcess([sys.executable, "-c", program, "/opt/vllm", "serve"], {}, tmp_path / "out")

    def found() -> bool:  # a child that the guard has forked bears the guard's words until it is the server
        server = server_of(os.getpid(), "/opt/vllm")
        return server is not None and program.encode() in Path(f"/proc/{server}/cmdline").read_bytes().split(b"\0")

    try:
        wait_until(found, "the server", LIMIT_S)
        server = server_of(os.getpid(), "/opt/vllm")
        assert server is not None and server in descendants(os.getpid())
        assert server_of(os.getpid(), "/opt/other") is None
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: not guard.alive, "the guard to notice", LIMIT_S)
    finally:
        guard.end(LIMIT_S)


def test_a_run_through_vllm_is_held_to_its_marks(given):
    asked = given("--updates", "2")
    line = {"train/parity_kl": 1e-9, "replay/unverified": 0.0, "train/reward_mean": 0.5, "train/parity_unchecked": 1.0}
    failed = [{"event": "external_engine_failed", "reason": "the server ended"}]
    good = Measured([line, line], failed, {}, [], 3.0, 1.0)
    for found, missed in (
        (good, 0), (good._replace(updates=[line]), 1), (good._replace(killed_running=None), 1),
        (good._replace(events=[]), 1), (good._replace(faults=["rollouts that ended twice"]), 1),
        (good._replace(updates=[line, line | {"train/parity_kl": 1e-3}]), 1),
        (good._replace(updates=[line, line | {"replay/unverified": 4.0}]), 1),
        (good._replace(updates=[line, line | {"train/parity_unchecked": 2.0}]), 1),
    ):  # fmt: skip
        marks = Marks()
        judge(marks, "vLLM", found, asked)
        assert marks.missed == missed, marks.lines
    marks = Marks()
    whole = line | {"train/parity_unchecked": 0.0}
    judge(marks, "vLLM", good._replace(updates=[whole] * 2, killed_running=None, events=[]), asked, killed=False)
    assert marks.missed == 0, marks.lines


def test_noise_is_how_far_equal_runs_are_apart():
    between, noise = apart([0.2, 0.3, 0.4], [0.1, 0.2, 0.3])
    assert between == pytest.approx(0.1) and noise == pytest.approx(2.776445 * 0.1 * (2 / 3) ** 0.5)
    assert apart([0.2, 0.2], [0.3, 0.3]) == (pytest.approx(0.1), 0.0)


def test_one_run_of_an_engine_says_nothing_of_noise(given, capsys):
    with pytest.raises(SystemExit):
        given("--seeds", "1")
    assert "takes 2 or more" in capsys.readouterr().err
