"""Reward functions in processes of their own."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from penstock.environments.reward_process import RewardPool, RewardProcess
from penstock.types import ConfigError, EnvironmentFailure

SOURCE = """
import asyncio, os, subprocess, sys, time

def length(completions, **columns):
    print("hello from the function")
    return [float(len(text)) for text in completions]

def strict(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]

def graded(completions, responses, *, gold, weight=1.0):
    return [0.0 for _ in completions]

async def slowly(completions, **columns):
    await asyncio.sleep(0.01)
    return [1.0 for _ in completions]

def by_word(completions, **columns):
    word = completions[0]
    if word == "hang":
        sleeper = subprocess.Popen(["sleep", "600"])
        if "marker" in columns:
            with open(columns["marker"][0], "w") as file:
                print(os.getpid(), sleeper.pid, file=file)
        time.sleep(600)
    if word == "exit":
        print("leaving now", file=sys.stderr, flush=True)
        os._exit(7)
    if word == "raise":
        raise ValueError("bad answer")
    if word == "nan":
        return [float("nan")] * len(completions)
    if word == "none":
        return None
    if word == "short":
        return [1.0]
    if word == "object":
        return [object()] * len(completions)
    if word == "metrics":
        for number in range(100):
            columns["log_metric"](f"{number:03d}", number)
            columns["log_metric"]("000", 2)
        columns["log_metric"]("x" * 101, 1.0)
        columns["log_metric"]("text", "1")
        return [None, 1]
    if word == "stdin":
        return [float(len(sys.stdin.read()))] * len(completions)
    if word == "pid":
        return [float(os.getpid())] * len(completions)
    return [0.5] * len(completions)

NOT_A_FUNCTION = 3
"""


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(SOURCE)
    return str(path)


@pytest.fixture
def pool(source):
    made = []

    def make(name="by_word", processes=1, timeout_s=20.0):
        made.append(RewardPool(f"{source}:{name}", processes, timeout_s, 60.0))
        return made[-1]

    yield make
    for each in made:
        each.close()


def completions(*texts):
    return {"prompts": ["p"] * len(texts), "completions": list(texts), "answer": ["ab"] * len(texts)}


def test_functions_sync_async_and_without_spare_arguments(pool):
    assert pool("length").score(completions("a", "bcd")).rewards == [1.0, 3.0]
    assert pool("slowly").score(completions("a", "b")).rewards == [1.0, 1.0]
    assert pool("strict").score(completions("ab", "b")).rewards == [1.0, 0.0]


def test_what_does_not_apply_and_what_a_function_logs(pool):
    scores = pool().score(completions("metrics", "b"))
    assert scores.rewards == [None, 1.0]
    assert len(scores.metrics) == 64 and scores.metrics["063"] == 63.0 and "064" not in scores.metrics
    assert scores.metrics["000"] == pytest.approx(200 / 101)


def test_how_far_training_is(source, tmp_path):
    path = tmp_path / "late.py"
    path.write_text("def f(completions, trainer_state):\n    return [trainer_state.global_step + 0.5]\n")
    process = RewardProcess(f"{path}:f", 60.0)
    try:
        assert process.score({"completions": ["a"], "trainer_state": {"global_step": 7}}, 20.0).rewards == [7.5]
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("raise", r"rewards.py:by_word raised ValueError: bad answer"),
        ("nan", r"rewards.py:by_word returned nan as reward 0: it must return a list of 2 finite numbers"),
        ("none", "by_word returned None: it must return"),
        ("short", "by_word returned 1 rewards for 2 completions"),
        ("object", r"by_word returned <object object.*\(object\) as reward 0"),
    ],
)
def test_what_a_function_does_wrong_is_one_line_and_the_process_lives(pool, word, message):
    scoring = pool()
    (pid,) = scoring.score(completions("pid")).rewards
    with pytest.raises(EnvironmentFailure, match=message) as failure:
        scoring.score(completions(word, word))
    assert "\n" not in str(failure.value)
    assert scoring.score(completions("pid")).rewards == [pid]


def test_a_crash_says_the_exit_code_and_the_last_words_and_the_next_call_works(pool):
    scoring = pool()
    with pytest.raises(EnvironmentFailure, match=r"ended its process \(exit code -?\d+\); it last wrote: leaving now"):
        scoring.score(completions("exit"))
    assert scoring.score(completions("fine")).rewards == [0.5]


def test_a_parameter_that_nobody_gives_is_named_with_those_that_are_given(pool):
    with pytest.raises(EnvironmentFailure) as failure:
        pool("graded").score(completions("fine"))
    assert str(failure.value).endswith(
        "graded asks for responses, gold, which is not given; what is: "
        "answer, completions, log_extra, log_metric, prompts, trainer_state"
    )


@pytest.mark.slow
def test_a_hang_fails_its_own_group_and_takes_its_children_along(pool):
    scoring = pool(processes=2, timeout_s=2.0)
    scoring.score(completions("warm"))
    outcome = []

    def hang():
        try:
            scoring.score(completions("hang"))
        except EnvironmentFailure as failure:
            outcome.append(str(failure))

    hanging = threading.Thread(target=hang)
    hanging.start()
    assert scoring.score(completions("fine")).rewards == [0.5]  # others go on meanwhile
    hanging.join(30)
    (message,) = outcome
    assert "took longer than 2 s to score and was stopped: make it faster or raise reward_timeout_s" in message
    assert scoring.score(completions("fine")).rewards == [0.5]


def test_prints_are_shown_and_standard_input_is_not_the_functions(pool, caplog, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with caplog.at_level(logging.INFO):
        scoring = pool("length")
        assert scoring.score(completions("abc")).rewards == [3.0]
        _wait_until(lambda: "hello from the function" in caplog.text, "what it printed was not shown")
    assert pool().score(completions("stdin")).rewards == [0.0]


def test_a_request_larger_than_the_pipe(pool):
    text = "x" * 300_000
    assert pool("length").score(completions(text, text)).rewards == [300_000.0] * 2


def test_a_function_that_does_not_exist_is_a_config_error(source):
    for name, message in (
        ("lenght", r"has no 'lenght' \(did you mean 'length'\?\)"),
        ("NOT_A_FUNCTION", "is a int: it must be a function"),
    ):
        with pytest.raises(ConfigError, match=message):
            RewardProcess(f"{source}:{name}", 60.0)
    with pytest.raises(ConfigError, match=r"no file .*other\.py"):
        RewardProcess(source.replace("rewards.py", "other.py") + ":f", 60.0)


def test_imports_that_take_too_long_are_a_config_error(tmp_path):
    path = tmp_path / "slow.py"
    path.write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(ConfigError, match="took longer than 1 s to start and was stopped"):
        RewardProcess(f"{path}:f", 1.0)


def test_a_busy_pool_has_a_limit_and_a_closed_one_says_so(pool):
    scoring = pool()
    scoring.close()
    with pytest.raises(EnvironmentFailure, match="its environment is closed"):
        scoring.score(completions("fine"))


def test_a_process_that_was_killed_while_idle_is_replaced(pool):
    scoring = pool()
    (pid,) = scoring.score(completions("pid")).rewards
    os.kill(int(pid), signal.SIGKILL)
    _wait_until(lambda: not scoring._free.queue[0].alive, "its end was not seen")
    assert scoring.score(completions("fine")).rewards == [0.5]


def test_a_hanging_process_does_not_outlive_its_parent(source, tmp_path):
    marker = tmp_path / "marker"
    script = (
        "from penstock.environments.reward_process import RewardProcess\n"
        f"process = RewardProcess({source + ':by_word'!r}, 60.0)\n"
        f"process.score({{'completions': ['hang'], 'marker': [{str(marker)!r}]}}, 600.0)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script])
    _wait_until(lambda: marker.exists() and marker.read_text().endswith("\n"), "the function did not begin")
    parent.kill()
    parent.wait(20)
    for pid in marker.read_text().split():
        _wait_until(lambda pid=pid: not _exists(int(pid)), f"process {pid} outlived the run")


def _wait_until(condition, complaint):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.01)


def _exists(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
