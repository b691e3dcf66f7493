"""What is cheap to import stays cheap: configs and the command line load no numerical library."""

import subprocess
import sys
from pathlib import Path

import pytest

import penstock

ROOT = Path(penstock.__file__).parent
HEAVY = {
    "duckdb", "equinox", "jax", "jaxlib", "optax", "orbax", "pandas", "pyarrow", "ray", "safetensors", "scipy",
    "tokenizers", "torch", "transformers", "uvicorn",
}  # fmt: skip
CONFIGS = sorted(
    ".".join(("penstock", *path.relative_to(ROOT).with_suffix("").parts)) for path in ROOT.rglob("config.py")
)


def loaded_by(statements: str) -> set[str]:
    """The top-level packages that a fresh interpreter has loaded after some statements."""
    report = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", f"{statements}\n{report}"], capture_output=True, text=True, timeout=120, check=True
    )
    return set(done.stdout.split())


def test_every_stage_has_its_config():
    assert {"penstock.overseer.config", "penstock.learner.config", "penstock.replay.config"} <= set(CONFIGS)


def test_configs_load_no_numerical_library():
    loaded = loaded_by("\n".join(f"import {name}" for name in CONFIGS))
    assert "pydantic" in loaded, "the probe itself works"
    assert loaded & HEAVY == set()


@pytest.mark.parametrize(
    "module",
    ["penstock", "penstock.types", "penstock.text", "penstock.overseer", "penstock.rundir", "penstock.dashboard"],
)
def test_packages_export_lazily(module):
    assert loaded_by(f"import {module}") & HEAVY == set()


def test_the_client_of_inference_servers_loads_neither_jax_nor_a_server():
    loaded = loaded_by(
        "from penstock.inference import RemoteContext, Server, ServerPool\n"
        "ServerPool('a token').set_servers([Server('inference-0', 0, 'http://127.0.0.1:1')])"
    )
    assert "httpx" in loaded and loaded & (HEAVY | {"starlette"}) == set()


def test_the_command_line_loads_not_even_numpy():
    loaded = loaded_by("import penstock.cli")
    assert loaded & (HEAVY | {"numpy", "pydantic", "yaml"}) == set()


def test_validating_a_recipe_loads_no_numerical_library():
    loaded = loaded_by(
        "from penstock.overseer.config import RunConfig\n"
        "from penstock.overseer.config_loading import build_config, load_recipe\n"
        "build_config(RunConfig, load_recipe('cats'))"
    )
    assert loaded & HEAVY == set()


def test_shapes_are_known_before_jax_is_loaded_which_looks_for_chips_then(tmp_path: Path):
    folder = tmp_path / "step-3" / "model"
    loaded = loaded_by(
        "import json, pathlib, penstock\n"
        "from penstock.overseer.fitting.search import shape_named, shipped_shapes\n"
        f"folder = pathlib.Path({str(folder)!r})\n"
        "folder.mkdir(parents=True)\n"
        "(folder / 'config.json').write_text(shipped_shapes()['Qwen2.5-0.5B'].read_text())\n"
        "config = penstock.load_config('cats')\n"
        "assert shape_named(str(folder.parent), config) == shape_named('0.5b', config)"
    )
    assert loaded & {"jax", "jaxlib"} == set()
