"""Test-wide set-up: array shapes and dtypes are checked at every call of the mathematical packages."""

import os
import signal
from pathlib import Path

from jaxtyping import install_import_hook

import tests.typecheck  # noqa: F401  (the hook below names it)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # shells start so what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")  # many tests, and processes, compile alike

_HOOK = install_import_hook(
    ["penstock.batch", "penstock.model", "penstock.learner", "penstock.inference"], "tests.typecheck.checked"
)
