"""Memory that runs out: components that take more and more of it, and a cluster that kills workers before the machine.

Ray's own monitor ends a worker once the machine has less memory left than a threshold says; which worker, is Ray's
choice. The threshold is set some gigabytes above what is in use when the benchmark begins.
"""

import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

GIB = 1 << 30
MARGIN_BYTES = 5 * GIB
"""Between what is in use at the start and the threshold: other work on the machine takes some."""
MOST_BYTES = 8 * GIB
"""No component takes more."""
MOST_SHARE = 0.95
PIECE_BYTES = GIB // 8
LOOK_S = 0.1


@contextmanager
def watched() -> Iterator[None]:
    """Clusters that this process starts meanwhile watch their memory."""
    memory = psutil.virtual_memory()
    share = min(MOST_SHARE, (memory.total - memory.available + MARGIN_BYTES) / memory.total)
    settings = {"RAY_memory_usage_threshold": f"{share:.4f}", "RAY_memory_monitor_refresh_ms": "250"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def take(folder: Path, component: str) -> None:
    """Has this component's present incarnation take memory until it dies, or has `MOST_BYTES`."""
    (folder / f"{component}.memory").touch()


def give_back(folder: Path, component: str) -> None:
    """Those that are left, or come after it, take none."""
    (folder / f"{component}.memory").unlink(missing_ok=True)


def follow(path: Path) -> None:
    """This process takes memory while there is such a file, from now on."""
    threading.Thread(target=_follow, args=(path,), name="memory", daemon=True).start()


def _follow(path: Path) -> None:
    held: list[mmap.mmap] = []
    while True:
        if not path.exists():
            held.clear()
        elif len(held) * PIECE_BYTES < MOST_BYTES:
            piece = mmap.mmap(-1, PIECE_BYTES)
            for offset in range(0, PIECE_BYTES, mmap.PAGESIZE):
                piece[offset] = 1  # what is not written takes nothing
            held.append(piece)
            continue
        time.sleep(LOOK_S)
