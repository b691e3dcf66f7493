"""What packages export: every name resolves, twice to the same thing, is documented, and is no stray module."""

import importlib
import inspect
import pkgutil
import types

import pytest

import penstock

PACKAGES = ["penstock"] + sorted(
    module.name for module in pkgutil.walk_packages(penstock.__path__, "penstock.") if module.ispkg
)
EXPORTING = [name for name in PACKAGES if hasattr(importlib.import_module(name), "__all__")]
NAMES = [(package, name) for package in EXPORTING for name in importlib.import_module(package).__all__]


def test_every_stage_exports_something():
    stages = {
        "batch", "curriculum", "dashboard", "environments", "inference", "learner", "overseer", "replay", "rollout",
        "rundir", "text", "tracking", "types", "weights", "model.language",
    }  # fmt: skip
    assert {f"penstock.{stage}" for stage in stages} | {"penstock"} <= set(EXPORTING)


@pytest.mark.parametrize("package", EXPORTING)
def test_names_are_listed_once_and_by_dir(package):
    module = importlib.import_module(package)
    assert len(set(module.__all__)) == len(module.__all__)
    assert set(module.__all__) <= set(dir(module))


@pytest.mark.parametrize("package", EXPORTING)
def test_a_name_that_is_not_exported_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match="no attribute 'nonexistent'"):
        importlib.import_module(package).nonexistent  # noqa: B018


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_each_exported_name_resolves_and_is_documented(package, name):
    module = importlib.import_module(package)
    first, second = getattr(module, name), getattr(module, name)
    # A function exported from a module of its own name is shadowed by that module after its first use.
    assert first is second, f"{package}.{name} is two things: rename the module it comes from"
    assert not isinstance(first, types.ModuleType)
    if inspect.isclass(first) or inspect.isfunction(first):
        assert inspect.getdoc(first), f"{package}.{name} has no docstring"


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_public_members_of_exported_classes_are_documented(package, name):
    exported = getattr(importlib.import_module(package), name)
    if not inspect.isclass(exported) or not exported.__module__.startswith("penstock"):
        return
    for member, value in vars(exported).items():
        is_own = inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)
        if is_own and not member.startswith("_"):
            assert inspect.getdoc(value), f"{package}.{name}.{member} has no docstring"
