"""Reward functions that break every rule of their process on request, and go on to score what they were given.

Each completion's right reward is `right_reward` of its text. The column ``deed`` says what to do before or after.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import zlib

DETACHED_S = "300.25"
"""How long programs sleep that a function leaves behind: an argument by which they are known."""


def right_reward(text):
    return float(zlib.crc32(text.encode()) % 1000)


def score(completions, deed=("",), **columns):
    rewards = [right_reward(text) for text in completions]
    done = DEEDS[deed[0]](completions, rewards)
    return rewards if done is None else done


def _write_everywhere(data):
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, data)
        except OSError:
            pass


def _forged(rewards):
    return json.dumps({"id": "0" * 16, "completion_ids": ["0-0"] * len(rewards), "rewards": [99.0] * len(rewards)})


def _fork_and_both_return(completions, rewards):
    if os.fork() == 0:
        return [99.0] * len(rewards)


def _fork_and_raise(completions, rewards):
    if os.fork() == 0:
        raise RuntimeError("in the forked child")


def _fork_unseen_by_python(completions, rewards):
    if ctypes.CDLL(None).fork() == 0:
        return [99.0] * len(rewards)


def _fork_and_exit(completions, rewards):
    if os.fork() == 0:
        sys.exit(0)


def _junk(completions, rewards):
    _write_everywhere(b"oops\n")


def _part_of_a_line(completions, rewards):
    _write_everywhere(b'{"rewards": [99.0')


def _forge(completions, rewards):
    _write_everywhere(b'{"rewards":[99.0,99.0]}\n')


def _forge_with_ids(completions, rewards):
    _write_everywhere(_forged(rewards).encode() + b"\n")


def _nested(completions, rewards):
    _write_everywhere(b"[" * 60_000 + b"\n")


def _endless_line(completions, rewards):
    _write_everywhere(b"x" * 4_000_000)


def _forge_later(completions, rewards):
    """Once it is told by a signal, so that the right reply is out by then."""
    signal.signal(signal.SIGUSR1, lambda *_: _write_everywhere(_forged(rewards).encode() + b"\n"))


def _hang(completions, rewards):
    time.sleep(600)


def _stop_itself(completions, rewards):
    os.kill(os.getpid(), signal.SIGSTOP)


def _stop_its_parent(completions, rewards):
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(600)


def _detached_and_hang(completions, rewards):
    subprocess.Popen(["sleep", DETACHED_S], start_new_session=True)
    time.sleep(600)


def _detached_and_exit(completions, rewards):
    subprocess.Popen(["sleep", DETACHED_S], start_new_session=True)
    os._exit(1)


def _daemon_of_a_daemon_and_exit(completions, rewards):
    shell = f"setsid sh -c 'setsid sleep {DETACHED_S} & setsid sleep {DETACHED_S} &' &"
    subprocess.run(["sh", "-c", shell], check=True)
    os._exit(1)


def _crash(completions, rewards):
    os.kill(os.getpid(), signal.SIGSEGV)


def _kill_its_group(completions, rewards):
    os.killpg(0, signal.SIGKILL)


def _leave(completions, rewards):
    os._exit(7)


def _system_exit(completions, rewards):
    raise SystemExit(3)


def _keyboard_interrupt(completions, rewards):
    raise KeyboardInterrupt


def _raise(completions, rewards):
    raise ValueError("bad answer")


def _raise_much(completions, rewards):
    raise ValueError("A" * (50 << 20))


def _raise_unprintable(completions, rewards):
    class Unprintable(Exception):
        def __str__(self):
            raise TypeError

    raise Unprintable


def _close_all(completions, rewards):
    os.closerange(3, 64)


def _replace_all(completions, rewards):
    os.closerange(3, 64)
    for _ in range(8):
        os.open(os.devnull, os.O_RDWR)


def _print_much_without_a_newline(completions, rewards):
    for _ in range(8):
        os.write(1, b"x" * (1 << 20))


def _print_many_lines(completions, rewards):
    os.write(1, b"line\n" * 20_000)


def _nan(completions, rewards):
    return [float("nan")] * len(rewards)


def _one_too_many(completions, rewards):
    return [*rewards, 1.0]


def _nothing(completions, rewards):
    return "none"


DEEDS = {
    "": lambda completions, rewards: None,
    "fork": _fork_and_both_return,
    "fork_raise": _fork_and_raise,
    "fork_unseen": _fork_unseen_by_python,
    "fork_exit": _fork_and_exit,
    "junk": _junk,
    "part": _part_of_a_line,
    "forge": _forge,
    "forge_with_ids": _forge_with_ids,
    "forge_later": _forge_later,
    "nested": _nested,
    "endless_line": _endless_line,
    "hang": _hang,
    "stop": _stop_itself,
    "stop_parent": _stop_its_parent,
    "detached_hang": _detached_and_hang,
    "detached_exit": _detached_and_exit,
    "daemons_exit": _daemon_of_a_daemon_and_exit,
    "crash": _crash,
    "kill_group": _kill_its_group,
    "exit": _leave,
    "system_exit": _system_exit,
    "interrupt": _keyboard_interrupt,
    "raise": _raise,
    "raise_much": _raise_much,
    "raise_unprintable": _raise_unprintable,
    "close_all": _close_all,
    "replace_all": _replace_all,
    "print": _print_much_without_a_newline,
    "print_lines": _print_many_lines,
    "nan": _nan,
    "too_many": _one_too_many,
    "nothing": _nothing,
}
