"""The virtual-clock simulation as a fixture, and small runs of the real classes."""

import importlib.util
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.replay.fragment_fleet import Fleet
from tests.replay.open_buffers import Open
from tests.replay.storage_kinds import KINDS, FileKind, MemoryKind

from penstock.batch import RecencyBatchMaker
from penstock.replay.store import Sealer


def _load(name: str):
    spec = importlib.util.spec_from_file_location(f"replay_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def no_thread_outlives_its_test():
    """Stops the threads of buffers that a test leaves open: hundreds of them would slow all tests after it."""
    made, initialise = [], Sealer.__init__

    def counted(self, *args):
        initialise(self, *args)
        made.append(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Sealer, "__init__", counted)
        yield
    for sealer in made:
        sealer.stop()


@pytest.fixture(scope="session")
def sim():
    """The module `simulation.py`."""
    return _load("simulation")


@pytest.fixture(scope="session")
def wire():
    """The module `wire.py`."""
    return _load("wire")


@pytest.fixture
def loop(wire):
    """An event loop in a thread of its own."""
    running = wire.Loop()
    yield running
    running.close()


@pytest.fixture(scope="session")
def served():
    """The module `served.py`."""
    return _load("served")


@pytest.fixture
def serve(sim, served):
    """Makes started services; they are stopped at the end."""
    made = []

    def make(*args, **fields):
        made.append(served.serve(sim, *args, **fields))
        return made[-1]

    yield make
    for each in made:
        assert each.service.stop(10)


@pytest.fixture
def open_buffer(sim):
    """Makes open buffers; by default with a `RecencyBatchMaker`."""

    def make(makers=None, **config):
        return Open(sim, RecencyBatchMaker(max_tokens=16, seed=0) if makers is None else makers, **config)

    return make


@pytest.fixture(params=KINDS)
def kind(request, tmp_path) -> MemoryKind:
    """Each kind of rollout storage in turn."""
    return KINDS[request.param](tmp_path)


@pytest.fixture
def files(tmp_path) -> FileKind:
    """The file kind of rollout storage."""
    return FileKind(tmp_path)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads."""
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.fixture
def fleet(tmp_path):
    """Makes buffers of fragments; they are ended at the end."""
    made = []

    def make(name="run", **arguments):
        made.append(Fleet(tmp_path / name, **arguments))
        return made[-1]

    yield make
    for each in made:
        each.end()
