"""Test-wide set-up: array shapes and dtypes are checked at every call of the mathematical packages."""

from jaxtyping import install_import_hook

_HOOK = install_import_hook(
    ["penstock.batch", "penstock.model", "penstock.learner", "penstock.inference"], "beartype.beartype"
)
