import os
import stat
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from tests.waiting import wait_until

from penstock.model import programs
from penstock.model.programs import LazyPrograms, choose_cache, compile_programs, light_compilation

WAIT_S = 280.0
CACHE_KEYS = (
    "jax_compilation_cache_dir", "jax_enable_compilation_cache", "jax_persistent_cache_min_compile_time_secs"
)  # fmt: skip
KEPT = """
import jax, jax.numpy as jnp
from penstock.model import programs
programs._WORTH_KEEPING_S = 0.0
programs.choose_cache()
heard = []
jax.monitoring.register_event_listener(lambda event, **_: heard.append(event) if "cache_hits" in event else None)
weights = jnp.linspace(-1, 1, 4096).reshape(64, 64)
heard.clear()
step = jax.jit(lambda w, x: (w - 0.1 * jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)), donate_argnums=0)
program = step.lower(weights, weights).compile()
print(heard)
inputs = weights + 1
for _ in range(20):
    weights = program(weights, inputs)
print(jax.device_get(weights).tobytes().hex())
"""


@pytest.fixture(autouse=True)
def cache_settings():
    before = {key: jax.config.values[key] for key in CACHE_KEYS}
    yield
    for key, value in before.items():
        jax.config.update(key, value)
    programs.compilation_cache.reset_cache()


@pytest.fixture
def kept_in(tmp_path, monkeypatch) -> Path:
    """The user's folder of caches; nothing is configured otherwise."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", None)
    return tmp_path


@pytest.fixture
def processors(monkeypatch):
    """Sets how many there are; threads are made anew."""

    def be(count: int) -> None:
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(count)), raising=False)
        programs._threads.cache_clear()

    yield be
    monkeypatch.undo()
    programs._threads.cache_clear()


def test_each_program_is_told_when_it_is_compiled():
    gates = {name: threading.Event() for name in ("first", "second")}
    told = compile_programs({name: lambda gate=gate: gate.wait(WAIT_S) for name, gate in gates.items()})
    gates["first"].set()
    first = next(told)
    assert (first.name, first.number, first.of) == ("first", 1, 2) and first.seconds < WAIT_S
    gates["second"].set()
    assert [(program.name, program.number) for program in told] == [("second", 2)]
    assert list(compile_programs({})) == []


def test_as_many_are_compiled_at_once_as_there_are_processors(processors):
    processors(3)
    together = threading.Barrier(3)
    assert len(list(compile_programs(dict.fromkeys("abc", lambda: together.wait(WAIT_S))))) == 3


def test_what_is_not_urgent_comes_after_all_that_is_whoever_asked_first(processors):
    processors(1)
    begun, may_go_on, order = threading.Event(), threading.Event(), []

    def first() -> None:
        begun.set()
        may_go_on.wait(WAIT_S)

    def told(names: str, urgent: bool) -> threading.Thread:
        compiles = {name: lambda name=name: order.append(name) for name in names}
        if not urgent:
            compiles = {"first": first, **compiles}
        thread = threading.Thread(target=lambda: list(compile_programs(compiles, urgent)))
        thread.start()
        return thread

    later = told("xy", urgent=False)
    assert begun.wait(WAIT_S)
    sooner = told("ab", urgent=True)
    wait_until(lambda: programs._queue.qsize() == 4, "all are in the queue")
    may_go_on.set()
    for thread in (later, sooner):
        thread.join(WAIT_S)
    assert order == ["a", "b", "x", "y"]


def test_what_is_not_asked_for_is_not_begun_and_a_failure_is_raised(processors):
    processors(1)
    compiled, may_go_on = [], threading.Event()

    def second():
        compiled.append("second")
        may_go_on.wait(WAIT_S)

    told = compile_programs({"first": lambda: None, "second": second, "third": lambda: compiled.append("third")})
    assert next(told).name == "first"
    threading.Timer(0.05, may_go_on.set).start()
    told.close()
    assert "third" not in compiled
    with pytest.raises(ZeroDivisionError):
        list(compile_programs({"broken": lambda: 1 // 0}))


def test_what_is_given_up_waits_until_it_is_needed(processors):
    processors(1)
    begun, may_go_on, order = threading.Event(), threading.Event(), []

    def first() -> None:
        begun.set()
        may_go_on.wait(WAIT_S)

    made = {name: lambda name=name: order.append(name) for name in "abc"}
    lazy = LazyPrograms({"first": first, **made}, lambda told: None)
    lazy.compile()
    assert begun.wait(WAIT_S)
    lazy.forgo()
    may_go_on.set()
    lazy.need("b")  # in this thread
    assert [told.name for told in compile_programs({"last": lambda: None}, urgent=False)] == ["last"]
    assert order == ["b"] and lazy.compiled_s("first") is not None
    lazy.compile(["c"])
    wait_until(lambda: lazy.compiled_s("c") is not None, "c", WAIT_S)
    assert order == ["b", "c"]


def test_what_is_begun_is_not_compiled_again():
    compiled = list[str]()
    begun = LazyPrograms({"shared": lambda: compiled.append("ahead")}, lambda told: None)
    begun.compile()
    programs = {name: lambda name=name: compiled.append(name) for name in ("shared", "own")}
    assert sorted(told.name for told in compile_programs(programs, begun=begun)) == ["own", "shared"]
    assert sorted(compiled) == ["ahead", "own"]


def test_the_first_that_is_compiled_is_at_hand_and_the_best_comes_once_others_took_as_long_as_it_would(monkeypatch):
    compiled, now = list[str](), iter([0.0, 4.0, 4.0, 9.0])  # each begins and ends: 4 and 5 s
    monkeypatch.setattr(programs, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    lazy = LazyPrograms({name: lambda name=name: compiled.append(name) for name in "abc"}, lambda told: None)
    assert lazy.at_hand("a", ["b", "c"]) == "a" and lazy.compiled_s("a") is None
    lazy.need("c")
    assert lazy.at_hand("a", ["b", "c"]) == "c" and lazy.compiled_s("c") == 4.0
    for seconds, asked in ((1.5, False), (2.0, False), (0.5, True), (9.0, True)):
        lazy.note_replaced("a", "c", seconds)
        assert ("a" in lazy._asked) == asked
    wait_until(lambda: lazy.compiled_s("a") is not None, "a", WAIT_S)
    assert lazy.at_hand("a", ["b", "c"]) == "a" and compiled == ["c", "a"]


def test_a_program_that_could_not_be_compiled_is_not_at_hand():
    lazy = LazyPrograms({"a": lambda: 1 // 0, "b": lambda: None}, lambda told: None)
    for name in "ab":
        with suppress(ZeroDivisionError):
            lazy.need(name)
    assert lazy.at_hand("a", ["b"]) == "b"


@pytest.mark.parametrize(
    ("jax_version", "older"), [((0, 10, 2), {"xla_cpu_use_fusion_emitters": False}), ((0, 11, 2), {})]
)
def test_a_program_is_compiled_lightly_in_float32_on_a_cpu_alone(monkeypatch, jax_version, older):
    monkeypatch.setattr(jax, "__version_info__", jax_version)
    light = {
        "xla_backend_optimization_level": 1,
        "xla_cpu_parallel_codegen_split_count": programs.processors_of_process(),
    }
    assert light_compilation("cpu", "float32") == light | older
    assert light_compilation("cpu", "float32", newer_fusions=True) == light
    assert light_compilation("cpu", "bfloat16") is light_compilation("gpu", "float32") is None


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("given", [None, "elsewhere"])
def test_compiled_programs_are_kept_where_only_the_user_can_write(kept_in, monkeypatch, backend, given):
    folder = kept_in / (given or "penstock/xla")
    jax.config.update("jax_compilation_cache_dir", given and str(folder))
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    choose_cache()
    chosen = Path(jax.config.values["jax_compilation_cache_dir"])
    if backend == "gpu":
        assert chosen == folder
    else:
        assert chosen.parent == folder and chosen.name.startswith("cpu-")
    assert (given and backend == "gpu") or stat.S_IMODE(chosen.stat().st_mode) == 0o700
    choose_cache()
    assert Path(jax.config.values["jax_compilation_cache_dir"]) == chosen


@pytest.mark.parametrize("backend", ["cpu", "tpu"])
def test_a_folder_elsewhere_than_in_a_file_system_is_taken_as_it_is(kept_in, monkeypatch, backend):
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/programs")
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    choose_cache()
    assert jax.config.values["jax_compilation_cache_dir"] == "gs://bucket/programs"


def test_each_kind_of_processor_and_number_of_threads_has_a_folder_of_its_own(monkeypatch, processors):
    names = set[str]()
    for count, threads in ((2, ""), (3, ""), (3, "1")):
        processors(count)
        monkeypatch.setenv("PJRT_NPROC", threads)
        names.add(programs._processor.__wrapped__())
    assert len(names) == 3


def test_nothing_is_kept_where_that_was_turned_off(kept_in):
    jax.config.update("jax_enable_compilation_cache", False)
    choose_cache()
    assert list(kept_in.iterdir()) == []


def test_nothing_is_kept_where_the_folder_cannot_be_written(kept_in):
    (kept_in / "penstock").write_text("no folder")
    choose_cache()
    assert not jax.config.values["jax_enable_compilation_cache"]


def test_a_processor_whose_programs_xla_refuses_keeps_none_and_is_asked_once(kept_in, monkeypatch):
    asked = []

    def refuse(*_: object) -> None:
        asked.append(1)
        raise jax.errors.JaxRuntimeError("INTERNAL: Target machine feature +prefer-no-gather is not supported")

    monkeypatch.setattr(programs.serialize_executable, "deserialize_and_load", refuse)
    for _ in range(2):
        jax.config.update("jax_enable_compilation_cache", True)
        choose_cache()
        assert not jax.config.values["jax_enable_compilation_cache"]
    assert asked == [1] and "prefer-no-gather" in next(kept_in.glob("penstock/xla/cpu-*/jaxlib-*")).read_text()


def test_another_process_takes_what_one_has_compiled_and_computes_the_same(tmp_path):
    def run() -> str:
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "JAX_ENABLE_COMPILATION_CACHE": "true"}
        done = subprocess.run(
            [sys.executable, "-c", KEPT], env=environment, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0 and done.stderr == "", done.stderr
        return done.stdout

    (compiled, result), (taken, again) = run().splitlines(), run().splitlines()
    assert (compiled, taken, result) == ("[]", "['/jax/compilation_cache/cache_hits']", again)
