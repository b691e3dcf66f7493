"""Compiling a process's programs before they are needed: side by side, told one by one, and kept where that is sound.

XLA compiles outside of Python's lock, so that as many programs compile at once as there are processors. Whoever waits
is told of each that is done: what moves is no standstill, however long the whole takes.

*Compiled programs on disk.* They are kept in JAX's persistent compilation cache, with which a start on an accelerator
comes down from minutes to seconds, and one on a CPU by a third.
"""

import hashlib
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from functools import cache, partial
from itertools import count
from pathlib import Path
from queue import PriorityQueue
from typing import final

import jax
import jaxlib
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from penstock.types import CompiledProgram

_WORTH_KEEPING_S = 0.05
"""A program that compiles sooner is not kept."""
Programs = Mapping[str, Callable[[], object]]
"""By what each is for, in words: compiles it."""


def compile_programs(
    programs: Programs, urgent: bool = True, begun: "LazyPrograms | None" = None
) -> Iterator[CompiledProgram]:
    """Compiles programs in the order given, as many of this process at once as it has processors.

    Args:
        programs: What to compile.
        urgent: Whether somebody waits already; others' programs that are not come after all that are.
        begun: Has those of the same names compiled already, or begun: they are the same programs.

    Yields:
        Each as it is done; whoever asks for no more has those left out that were not begun.
    """
    choose_cache()
    tasks = {name: _Task(compile_it) for name, compile_it in programs.items()}
    if begun is not None:
        tasks |= begun.tasks_of(tasks)
    names = {task.future: name for name, task in tasks.items()}
    try:
        _submit(tasks.values(), urgent)
        for number, done in enumerate(as_completed(names), 1):
            yield CompiledProgram(names[done], number, len(programs), done.result())
    finally:
        wait([future for future in names if not future.cancel()])


@final
class LazyPrograms:
    """Programs that are compiled when they are needed first, or before, when somebody asks for them.

    Args:
        programs: All that there are.
        on_done: Called with each that is compiled, or its error, in the thread that compiled it; must not raise.
        begun: As of `compile_programs`.
    """

    def __init__(
        self,
        programs: Programs,
        on_done: Callable[[CompiledProgram | BaseException], None],
        begun: "LazyPrograms | None" = None,
    ) -> None:
        choose_cache()
        shared = {} if begun is None else begun.tasks_of(programs)
        self._tasks = {name: _Task(compile_it) for name, compile_it in programs.items()} | shared
        self._on_done = on_done
        self._asked: set[str] = set(shared)
        self._replaced_s: dict[str, float] = {}
        self._done = count(1)
        for name, task in self._tasks.items():
            task.future.add_done_callback(partial(self._tell, name))

    def __len__(self) -> int:
        """All that there are."""
        return len(self._tasks)

    def need(self, *names: str) -> None:
        """Returns when they are compiled: at once, where they are; in this thread too, where nobody has begun.

        Raises:
            KeyError: there is none of that name.
            Exception: what its compilation raised.
        """
        missing = [name for name in names if not self._tasks[name].future.done()]
        self.compile(missing[1:], urgent=True)
        self._asked.update(missing)
        for name in missing:
            self._tasks[name].run()
        for name in names:
            self._tasks[name].future.result()

    def compiled_s(self, name: str) -> float | None:
        """Seconds that it took to compile that one; None where it is not compiled, or could not be."""
        future = self._tasks[name].future
        return future.result() if future.done() and not future.cancelled() and future.exception() is None else None

    def at_hand(self, best: str, others: Iterable[str]) -> str:
        """The best, where it is compiled; else the first other that is, so that nothing waits; else the best."""
        return next((name for name in (best, *others) if self.compiled_s(name) is not None), best)

    def note_replaced(self, best: str, ran: str, seconds: float) -> None:
        """Another one ran in place of the best.

        Once that has taken as long as compiling does, the best is compiled beside what goes on: so no more is lost to
        not having it than to compiling what is hardly needed.
        """
        before, limit = self._replaced_s.get(best, 0.0), self.compiled_s(ran) or 0.0
        self._replaced_s[best] = before + seconds
        if before < limit <= before + seconds:
            self.compile([best])

    def compile(self, names: Iterable[str] | None = None, urgent: bool = False) -> None:
        """Has those (all by default) compiled that are not begun yet; does not wait."""
        chosen = list(self._tasks if names is None else names)
        self._asked.update(chosen)
        _submit([self._tasks[name] for name in chosen], urgent)

    def tasks_of(self, names: Iterable[str]) -> "dict[str, _Task]":
        """Those of them that there are."""
        return {name: self._tasks[name] for name in names if name in self._tasks}

    def drop(self) -> None:
        """Leaves out what was not begun."""
        for task in self._tasks.values():
            task.future.cancel()

    def forgo(self) -> None:
        """Has none begun any more before it is needed."""
        for task in self._tasks.values():
            task.wanted = False
        self._asked = {name for name in self._asked if self._begun(name)}

    def _begun(self, name: str) -> bool:
        future = self._tasks[name].future
        return future.running() or future.done()

    def _tell(self, name: str, future: Future[float]) -> None:
        if not future.cancelled():
            error = future.exception()
            asked = len(self._asked)
            self._on_done(error or CompiledProgram(name, next(self._done), asked, future.result()))


@final
class _Task:
    """A program to compile, once, by whoever comes first.

    Attributes:
        future: Seconds that it took.
        wanted: Whether somebody asks for it still, or none has yet.
    """

    def __init__(self, compile_it: Callable[[], object]) -> None:
        self.future = Future[float]()
        self.wanted = True
        self._compile_it = compile_it
        self._claim = threading.Lock()  # never released

    def run(self) -> None:
        """Compiles it, unless somebody does or has."""
        if not self._claim.acquire(blocking=False) or not self.future.set_running_or_notify_cancel():
            return
        started = time.perf_counter()
        try:
            self._compile_it()
        except BaseException as error:  # whatever it was, whoever waits must get it
            self.future.set_exception(error)
        else:
            self.future.set_result(time.perf_counter() - started)


_queue: PriorityQueue[tuple[bool, int, _Task]] = PriorityQueue()
_numbers = count()


def _submit(tasks: Iterable[_Task], urgent: bool) -> None:
    for task in tasks:
        task.wanted = True
        _queue.put((not urgent, next(_numbers), task))
        _threads().submit(_compile_next)


def _compile_next() -> None:
    """What is most urgent now, of whoever asks still."""
    task = _queue.get()[-1]
    if task.wanted:
        task.run()


def light_compilation(platform: str, dtype: str, newer_fusions: bool = False) -> dict[str, bool | int] | None:
    """Options of `jax.jit` with which XLA takes up to half as long for a float32 program on CPUs; None elsewhere.

    What they leave out, LLVM's later passes and fusions of XLA's newer kind, wins nothing there (one update of 6 and of
    135 million parameters takes 0.96 to 1.04 times as long, a decode step 1.00), but a fifth of a bfloat16 update.
    In as many parts as there are processors, instead of XLA's 32, it takes a little less of them to compile.

    Args:
        platform: As JAX names it.
        dtype: Of the model.
        newer_fusions: Keeps these, as any JAX from 0.11 does: they take longer to compile in a model's scan over its
            layers, and less elsewhere.
    """
    if platform != "cpu" or dtype != "float32":
        return None
    light = {"xla_backend_optimization_level": 1, "xla_cpu_parallel_codegen_split_count": processors_of_process()}
    settable = jax.__version_info__ < (0, 11)  # from there on XLA has no others, and refuses the option
    return {**light, "xla_cpu_use_fusion_emitters": False} if settable and not newer_fusions else light


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(processors_of_process(), "compiling")


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
    """Has JAX keep compiled programs in a folder of this user's: ``$XDG_CACHE_HOME/penstock/xla``, or in ``~/.cache``.

    `JAX_COMPILATION_CACHE_DIR` names another folder, `JAX_ENABLE_COMPILATION_CACHE=false` keeps none; nor is any kept
    where the folder cannot be written. On CPUs each kind of processor and number of threads has a folder within, since
    XLA compiles for them, and machines may share a home.
    """
    config = jax.config.values
    if not config["jax_enable_compilation_cache"]:
        return
    given, on_cpu = config["jax_compilation_cache_dir"], jax.default_backend() == "cpu"
    if given and (not on_cpu or "://" in given or Path(given).name == _processor()):
        return
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(given) if given else Path(root) / "penstock" / "xla"
    if on_cpu:
        folder /= _processor()
    change: dict[str, str | float] = {"jax_compilation_cache_dir": str(folder)}
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        change["jax_persistent_cache_min_compile_time_secs"] = _WORTH_KEEPING_S
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # what lies there is run
        keeps = not on_cpu or _reads_back(folder)
    except OSError:  # a run needs no cache; `penstock doctor` says that none is kept
        keeps = False
    for name, value in (change if keeps else {"jax_enable_compilation_cache": False}).items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX decides once


@cache
def _processor() -> str:
    """A name for what XLA compiles for on this machine's CPU: its kind and features, and threads."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").partition("\n\n")[0].splitlines()
        kind = [line for line in lines if line.startswith(("vendor_id", "cpu family", "model", "flags", "Features"))]
    except FileNotFoundError:  # not Linux
        kind = [platform.machine(), platform.processor()]
    threads = [str(processors_of_process()), os.environ.get("PJRT_NPROC", "")]
    return f"cpu-{hashlib.sha256('|'.join([*kind, *threads]).encode()).hexdigest()[:12]}"


def _reads_back(folder: Path) -> bool:
    """Whether this jaxlib takes a program again that it compiled for this processor: of some kinds it refuses its own.

    Asked once, since XLA prints what it refuses.

    Raises:
        OSError: the answer cannot be noted in the folder.
    """
    noted = folder / f"jaxlib-{jaxlib.__version__}"
    if not noted.exists():
        program = jax.jit(lambda x: x * x + 1).lower(jax.ShapeDtypeStruct((8,), "float32")).compile()
        try:
            serialize_executable.deserialize_and_load(*serialize_executable.serialize(program))
            answer = "takes its programs again"
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            answer = f"refuses its programs: {error}"
        noted.write_text(f"{answer}\n", "utf-8")
    return noted.read_text("utf-8").startswith("takes")
