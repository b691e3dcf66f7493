"""Test-wide set-up: array shapes and dtypes are checked at every call of the mathematical packages."""

from jaxtyping import install_import_hook

import tests.typecheck  # noqa: F401  (the hook below names it)

_HOOK = install_import_hook(
    ["penstock.batch", "penstock.model", "penstock.learner", "penstock.inference"], "tests.typecheck.checked"
)
