"""Compiling a process's programs before they are needed: side by side, told one by one, and kept where that is sound.

XLA compiles outside of Python's lock, so that as many programs compile at once as there are processors. Whoever waits
is told of each that is done: what moves is no standstill, however long the whole takes.

*Compiled programs on disk.* JAX's persistent compilation cache is used on accelerators, where a start takes minutes and
comes down to seconds with it. It is never used on CPUs: with programs that jaxlib 0.10.2 had read back from there,
control policies learned nothing now and then.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from functools import cache
from itertools import count
from pathlib import Path
from queue import PriorityQueue

import jax
from jax.experimental.compilation_cache import compilation_cache

from penstock.types import CompiledProgram

Programs = Mapping[str, Callable[[], object]]
"""By what each is for, in words: compiles it."""


def compile_programs(programs: Programs, urgent: bool = True) -> Iterator[CompiledProgram]:
    """Compiles programs in the order given, as many of this process at once as it has processors.

    Args:
        programs: What to compile.
        urgent: Whether somebody waits already; others' programs that are not come after all that are.

    Yields:
        Each as it is done; whoever asks for no more has those left out that were not begun.
    """
    choose_cache()
    waiting = {name: Future[float]() for name in programs}
    for name, compile_it in programs.items():
        _queue.put((not urgent, next(_numbers), compile_it, waiting[name]))
    names = {future: name for name, future in waiting.items()}
    try:
        for _ in programs:
            _threads().submit(_compile_next)
        for number, done in enumerate(as_completed(names), 1):
            yield CompiledProgram(names[done], number, len(programs), done.result())
    finally:
        wait([future for future in names if not future.cancel()])


_queue: PriorityQueue[tuple[bool, int, Callable[[], object], Future[float]]] = PriorityQueue()
_numbers = count()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(processors_of_process(), "compiling")


def _compile_next() -> None:
    """What is most urgent now, of whoever asked."""
    _, _, compile_it, future = _queue.get()
    if not future.set_running_or_notify_cancel():
        return
    started = time.perf_counter()
    try:
        compile_it()
    except BaseException as error:  # whatever it was, whoever waits must get it
        future.set_exception(error)
    else:
        future.set_result(time.perf_counter() - started)


def arithmetic() -> dict[str, str | int]:
    """What decides, beside packages and programs, how this process rounds.

    A product that more threads share, say, is added up in another order.

    Returns:
        ``platform`` and ``device`` as JAX names them, ``processors`` (XLA's threads), and ``xla_flags``.
    """
    device = jax.devices()[0]
    processors = int(os.environ.get("PJRT_NPROC") or processors_of_process())
    flags = os.environ.get("XLA_FLAGS", "")
    return {"platform": device.platform, "device": device.device_kind, "processors": processors, "xla_flags": flags}


def processors_of_process() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_cache() -> None:
    """Turns JAX's persistent compilation cache off on CPUs; elsewhere it gets a folder of this user, if it has none.

    `JAX_COMPILATION_CACHE_DIR` names another folder, `JAX_ENABLE_COMPILATION_CACHE=false` turns it off.
    """
    folder, enabled = jax.config.values["jax_compilation_cache_dir"], jax.config.values["jax_enable_compilation_cache"]
    if jax.default_backend() == "cpu":
        change = {"jax_enable_compilation_cache": False} if folder and enabled else {}
    else:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        change = {} if folder or not enabled else {"jax_compilation_cache_dir": str(Path(root) / "penstock" / "xla")}
    for name, value in change.items():
        if name.endswith("_dir"):
            Path(str(value)).mkdir(mode=0o700, parents=True, exist_ok=True)  # what lies there is run
        jax.config.update(name, value)
        compilation_cache.reset_cache()  # JAX decides once
