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
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from penstock.types import CompiledProgram

Programs = Mapping[str, Callable[[], object]]
"""By what each is for, in words: compiles it."""


def compile_programs(programs: Programs) -> Iterator[CompiledProgram]:
    """Compiles programs in the order given, as many at once as this process has processors.

    Yields:
        Each as it is done; whoever asks for no more has those left out that were not begun.
    """
    choose_cache()
    workers = min(len(programs), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    pool = ThreadPoolExecutor(max(1, workers), "compiling")
    try:
        running = [pool.submit(_timed, name, compile_it) for name, compile_it in programs.items()]
        for number, done in enumerate(as_completed(running), 1):
            name, seconds = done.result()
            yield CompiledProgram(name, number, len(programs), seconds)
    finally:
        pool.shutdown(cancel_futures=True)


def _timed(name: str, compile_it: Callable[[], object]) -> tuple[str, float]:
    started = time.perf_counter()
    compile_it()
    return name, time.perf_counter() - started


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
