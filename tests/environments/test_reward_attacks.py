"""Reward functions that misbehave fail their own group, visibly, and give no group the rewards of another."""

import random
import select
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from tests.environments import misbehaving_rewards
from tests.environments.misbehaving_rewards import DEEDS, right_reward
from tests.waiting import wait_until

from penstock.environments.reward_process import RewardPool, RewardProcess
from penstock.types import EnvironmentFailure

FUNCTION = f"{misbehaving_rewards.__file__}:score"
TIMEOUT_S = 20.0

HARMLESS = {"", "fork", "fork_raise", "fork_unseen", "fork_exit", "print", "print_lines", "forge_later"}
"""What a function may do and still be answered: a forked child has no say, and forging later meets a later call."""

SAYS = {
    "junk": "its process wrote b'oops' that is no reply",
    "part": 'its process wrote b\'{"rewards": .* that is no reply',
    "forge": "its process wrote .* that is no reply to this call|after its reply|that is no reply",
    "forge_with_ids": "its process wrote .* that is no reply",
    "nested": r"its process wrote b'\[\[\[.* that is no reply|without an end",
    "endless_line": "its process wrote b'xxxx.* without an end within [0-9,]+ bytes",
    "hang": "took longer than 3 s to score and was stopped: make it faster or raise reward_timeout_s",
    "stop": "took longer than 3 s to score and was stopped",
    "stop_parent": "took longer than 3 s to score and was stopped",
    "detached_hang": "took longer than 3 s to score and was stopped",
    "detached_exit": r"ended its process \(exit code 1\)",
    "daemons_exit": r"ended its process \(exit code 1\)",
    "crash": "ended its process by SIGSEGV",
    "kill_group": "ended its process by SIGKILL",
    "exit": r"ended its process \(exit code 7\)",
    "system_exit": "raised SystemExit: 3",
    "interrupt": r"raised KeyboardInterrupt \(misbehaving_rewards.py:\d+\)$",
    "raise": "raised ValueError: bad answer",
    "raise_much": r"raised ValueError: AAA.* … [0-9,]+ characters … AAA",
    "raise_unprintable": r"raised Unprintable: \(its text cannot be had: TypeError\)",
    "close_all": r"ended its process \(exit code 1\); it last wrote: .*Bad file descriptor",
    "replace_all": r"ended its process \(exit code 1\); it last wrote: .*closed or replaced the descriptor",
    "nan": "returned nan as reward 0: it must return a list of 2 finite numbers",
    "too_many": "returned 3 rewards for 2 completions",
    "nothing": r"returned 'none' \(str\): it must return a list of 2",
}


LONG = {"detached_hang", "stop", "stop_parent"}  # as "hang", with other means


def asking(deed, *texts):
    return {"completions": list(texts), "deed": [deed]}


@pytest.fixture
def pool():
    made = RewardPool(FUNCTION, 1, 3.0, 60.0)
    yield made
    made.close()


def resident_bytes():
    return psutil.Process().memory_info().rss


def wrote_something(process):
    return select.select([process._child.stdout], [], [], 0)[0]


def below():
    return [process for process in psutil.Process().children(recursive=True) if process.status() != "zombie"]


def test_the_table_says_of_every_deed_what_comes_of_it():
    assert {*SAYS} | HARMLESS == {*DEEDS} and not {*SAYS} & HARMLESS


@pytest.mark.attack
@pytest.mark.parametrize(
    "deed", [pytest.param(deed, marks=pytest.mark.slow) if deed in LONG else deed for deed in sorted(SAYS)]
)
def test_a_function_that_misbehaves_fails_its_own_group_and_says_how(pool, deed):
    before = resident_bytes()
    with pytest.raises(EnvironmentFailure, match=SAYS[deed]) as failure:
        pool.score(asking(deed, "a", "bb"))
    assert len(str(failure.value)) < 10_000
    assert resident_bytes() - before < 30e6
    for text in ("ccc", "dddd", "e"):
        assert pool.score(asking("", text, "f")).rewards == [right_reward(text), right_reward("f")]
    pool.close()
    wait_until(lambda: not below())


@pytest.mark.attack
@pytest.mark.parametrize("deed", sorted(HARMLESS - {"forge_later"}))
def test_a_forked_child_has_no_say_and_prints_cost_no_memory(pool, deed):
    before = resident_bytes()
    for texts in (("a", "bb"), ("ccc", "dddd"), ("e", "f")):
        assert pool.score(asking(deed, *texts)).rewards == [right_reward(text) for text in texts]
    assert resident_bytes() - before < 30e6
    pool.close()
    wait_until(lambda: not below())


@pytest.mark.attack
def test_what_comes_between_two_calls_fails_the_second_and_shifts_nothing(pool):
    assert pool.score(asking("forge_later", "a")).rewards == [right_reward("a")]
    process = pool._free.queue[0]
    [worker] = psutil.Process(process._child.pid).children()
    worker.send_signal(signal.SIGUSR1)
    wait_until(lambda: wrote_something(process))
    with pytest.raises(EnvironmentFailure, match="its process wrote .* before it was asked"):
        pool.score(asking("", "b"))
    assert pool.score(asking("", "c")).rewards == [right_reward("c")]


@pytest.mark.attack
def test_the_pool_closes_in_bounded_time_whatever_the_functions_left_behind():
    pool = RewardPool(FUNCTION, 2, TIMEOUT_S, 0.5 + 60.0)
    said = []

    def ask():
        try:
            pool.score(asking("detached_hang", "a"))
        except EnvironmentFailure as failure:
            said.append(str(failure))

    asking_thread = threading.Thread(target=ask)
    asking_thread.start()
    wait_until(lambda: any(process.name() == "sleep" for process in below()))
    pool._timeout_s = pool._start_timeout_s = 0.1  # the limits of calls under way are their own
    pool.close()
    asking_thread.join(TIMEOUT_S)
    assert "ended its process by SIGKILL" in said[0] or "ended its process" in said[0]
    wait_until(lambda: not below())


@pytest.mark.attack
def test_a_gigabyte_without_a_newline_costs_no_memory(tmp_path):
    (tmp_path / "loud.py").write_text(
        "import os\n"
        "def score(completions, **columns):\n"
        "    for _ in range(1000):\n"
        "        os.write(1, b'x' * (1 << 20))\n"
        "    return [1.0] * len(completions)\n"
    )
    process = RewardProcess(f"{tmp_path / 'loud.py'}:score", 60.0)
    before = resident_bytes()
    assert process.score({"completions": ["a"]}, 60.0).rewards == [1.0]
    assert resident_bytes() - before < 30e6
    process.kill()


DESCRIPTORS = """
import os, resource
from penstock.environments.reward_process import RewardProcess
from penstock.types import EnvironmentFailure

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
many = [os.open(os.devnull, os.O_RDONLY)]
while many[-1] < 1100:
    many.append(os.open(os.devnull, os.O_RDONLY))
process = RewardProcess(FUNCTION, 60.0)
print(process.score({"completions": ["a"]}, 20.0).rewards)
process.kill()
resource.setrlimit(resource.RLIMIT_NOFILE, (many[-1] + 2, hard))
try:
    RewardProcess(FUNCTION, 60.0)
except EnvironmentFailure as failure:
    print(failure)
"""


@pytest.mark.attack
def test_a_full_descriptor_table_is_named_and_high_descriptors_work():
    script = DESCRIPTORS.replace("FUNCTION", repr(FUNCTION))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    scored, refused = done.stdout.splitlines()
    assert scored == str([right_reward("a")])
    assert "too many open files: raise `ulimit -n`, or lower reward_processes" in refused


def play(pool, seed, calls, misdeeds):
    """Scores so many groups, some of them badly; returns how many were answered, failed, failed without a cause."""
    chance = random.Random(seed)
    bad = {*chance.sample(range(calls), misdeeds)}
    kinds = sorted(set(DEEDS) - {""})
    answered = failed = innocent = 0
    for number in range(calls):
        texts = [f"{seed}-{number}-{chance.random()}" for _ in range(chance.randint(1, 4))]
        deed = chance.choice(kinds) if number in bad else ""
        try:
            rewards = pool.score(asking(deed, *texts)).rewards
        except EnvironmentFailure:
            failed += 1
            innocent += not deed
            continue
        assert deed not in SAYS, deed
        assert rewards == [right_reward(text) for text in texts], (deed, number)
        answered += 1
    return answered, failed, innocent


@pytest.mark.attack
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_reward_is_misattributed_in_a_hundred_thousand_calls():
    pool = RewardPool(FUNCTION, 4, 1.0, 60.0)
    outcomes, threads = [], []
    for seed in range(4):
        threads.append(threading.Thread(target=lambda seed=seed: outcomes.append(play(pool, seed, 25_000, 600))))
        threads[-1].start()
    for thread in threads:
        thread.join(3500)
    pool.close()
    assert len(outcomes) == 4  # an assertion that fails in a thread brings none
    answered, failed, innocent = (sum(column) for column in zip(*outcomes, strict=True))
    assert answered + failed == 100_000
    assert failed >= 2_000 * len(SAYS) / len(DEEDS)
    assert innocent <= 200  # those that met what an earlier call forged


@pytest.mark.slow
def test_few_calls_with_every_misdeed():
    pool = RewardPool(FUNCTION, 1, 1.0, 60.0)
    began_s = time.monotonic()
    answered, failed, _ = play(pool, 7, 400, 12)
    assert answered + failed == 400 and failed >= 5, time.monotonic() - began_s
    pool.close()
