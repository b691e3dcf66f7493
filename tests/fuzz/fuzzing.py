"""Feeds malformed inputs to a reader and watches it: which errors, how long each, how much memory.

An input is a function of its number alone, so a failure names one that can be made again.
"""

import gc
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 10.0
"""No single input may take longer, on a machine with other work."""
GROWTH_BYTES = 64 << 20
"""What a process may keep of all inputs after the first ones."""
PEAK_BYTES = 512 << 20
"""What it may need at once for any of them: sizes are looked at before memory is taken."""

FEW, MANY = 100, 100_000
COUNTS = [FEW, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(4 * 3600)])]
"""How many inputs: in the default tests, and in `make fuzz`."""

_STATUS = Path("/proc/self/status")
_EDGES = (
    b"\x00" * 4, b"\xff" * 4, b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80", b"\x01\x00\x00\x00", b"\x00" * 8,
    b"\xff" * 8, b"\xff" * 7 + b"\x7f", b"\x00\x00\x00\x00\x01\x00\x00\x00", b"\n", b"{", b"[", b'"', b"\\ud800",
)  # fmt: skip
ODD: tuple[Callable[[], Any], ...] = (
    lambda: None, lambda: True, lambda: False, lambda: 0, lambda: -1, lambda: 2**31, lambda: -(2**31) - 1,
    lambda: 2**63, lambda: 2**64, lambda: 10**400, lambda: 0.5, lambda: -0.0, lambda: 1e-320, lambda: 1e308,
    lambda: float("nan"), lambda: float("inf"), lambda: "", lambda: "\x00", lambda: "\ud800", lambda: "é😀\u202e",
    lambda: "a" * 5000, lambda: "1e3", lambda: "../../../etc/passwd", lambda: "/etc/passwd", lambda: [], lambda: {},
    lambda: [[]], lambda: [None], lambda: [0] * 1000, lambda: ["x", 1], lambda: {"": 0}, lambda: {"\ud800": 1},
    lambda: {"a": {"b": [1, {"c": None}]}}, lambda: nested(300), lambda: nested(3000),
)  # fmt: skip


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def fuzz(
    target: Callable[[Any], object],
    make: Callable[[random.Random], Any],
    count: int,
    refusals: type[Exception] | tuple[type[Exception], ...],
) -> int:
    """Gives `count` inputs to `target`; returns how many it refused.

    Args:
        target: May raise nothing but `refusals`.
        make: An input from a random generator.
        count: How many inputs.
        refusals: The errors that say what is wrong with an input.
    """
    refused, warm_up = 0, min(count // 3, 2000)
    resident = 0
    for number in range(count):
        if number == warm_up:
            resident = _settled_bytes()
        given = make(random.Random(number))
        started = time.monotonic()
        try:
            target(given)
        except refusals:
            refused += 1
        except BaseException as error:  # a timeout of the test too: whatever ended it must name the input
            error.add_note(_named(number, given))
            raise
        took_s = time.monotonic() - started
        assert took_s < LIMIT_S, f"took {took_s:.1f} s: {_named(number, given)}"
    _check_memory(resident)
    return refused


def _named(number: int, given: Any) -> str:
    return f"input {number}: {given!r:.2000}" if isinstance(given, str | bytes) else f"input {number}"


def _settled_bytes() -> int:
    """Resident memory now; from here on the peak is counted anew."""
    gc.collect()
    if not _STATUS.exists():
        return 0
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _check_memory(resident: int) -> None:
    if not _STATUS.exists():
        return
    gc.collect()
    grown, peak = _status_bytes("VmRSS") - resident, _status_bytes("VmHWM") - resident
    assert grown < GROWTH_BYTES, f"memory grew by {grown >> 20} MiB"
    assert peak < PEAK_BYTES, f"one input took {peak >> 20} MiB at once"


def _status_bytes(key: str) -> int:
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def damaged(content: bytes, rng: random.Random) -> bytes:
    """`content` with one to four changes: flipped bits, edge numbers, cuts, repeats, insertions."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        length = rng.choice((1, 2, 8, 64, 1000))
        match rng.randrange(7):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(data):
                data[at] = rng.randrange(256)
            case 2:
                edge = rng.choice(_EDGES)
                data[at : at + len(edge)] = edge
            case 3:
                del data[at : at + length]
            case 4:
                data[at:at] = data[at : at + length]
            case 5:
                data[at:at] = rng.randbytes(length)
            case _:
                del data[at:]
    return bytes(data)


def altered(value: Any, rng: random.Random) -> Any:
    """Plain data with one node taken away, repeated or put in place of by something odd."""
    if rng.random() < 0.15 or not isinstance(value, dict | list) or not value:
        return rng.choice(ODD)()
    copy = dict(value) if isinstance(value, dict) else list(value)
    key = rng.choice(list(copy)) if isinstance(copy, dict) else rng.randrange(len(copy))
    match rng.randrange(6):
        case 0:
            del copy[key]
        case 1 if isinstance(copy, dict):
            copy[rng.choice(("", "step", "\ud800", "x" * 300, "constructor"))] = rng.choice(ODD)()
        case 2 if isinstance(copy, list):
            copy.extend([copy[key]] * rng.choice((1, 2, 500)))
        case _:
            copy[key] = altered(copy[key], rng)
    return copy


def json_bytes(value: Any, rng: random.Random) -> bytes:
    """`value` altered, as JSON; one in three then damaged as bytes too."""
    for _ in range(rng.randint(0, 2)):
        value = altered(value, rng)
    try:
        content = json.dumps(value).encode()
    except RecursionError:
        content = b"[" * 100_000
    return damaged(content, rng) if rng.random() < 0.34 else content
