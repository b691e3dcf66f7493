"""Test-wide set-up: array shapes and dtypes are checked at every call of the mathematical packages."""

import gc
import signal
import sys

import hypothesis
import jaxtyping
import pytest
from jaxtyping import install_import_hook

import tests.typecheck

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # shells start so what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("untimed", deadline=None)  # how long one takes is the machine's matter
hypothesis.settings.load_profile("untimed")

jaxtyping.jaxtyped = tests.typecheck.jaxtyped  # which the hook's code calls
_HOOK = install_import_hook(
    ["penstock.batch", "penstock.model", "penstock.learner", "penstock.inference"], "tests.typecheck.checked"
)


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: no collection of garbage need look at it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    """Folders of files that a test imported are searched by no other test."""
    before = [*sys.path]
    try:
        return (yield)
    finally:
        sys.path[:] = before


def pytest_unconfigure() -> None:
    """Libraries count at exit what was not freed."""
    gc.unfreeze()
