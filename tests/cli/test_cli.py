import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from penstock import cli
from penstock.model.language import Decoder, InitConfig, save_decoder
from penstock.overseer.config_loading import load_config
from penstock.rundir import RunDirectory
from penstock.text import Tokenizer
from penstock.types import (
    CheckpointError,
    ConfigError,
    MismatchError,
    RunFailed,
    SchemaVersionError,
    Stopped,
    UnreachableError,
)

DOCS = Path(__file__).parents[2] / "docs"
VERBS = [
    "train", "eval", "generate", "serve", "export", "rollouts", "dashboard", "plot", "status", "scale", "replay", "why",
    "fit", "recipes", "config", "doctor", "fleet", "curriculum", "env",
]  # fmt: skip


def test_help_lists_what_exists(penstock_process):
    done = penstock_process("--help")
    assert done.returncode == 0 and done.stderr == ""
    after = done.stdout.partition("Commands:")[2]
    assert [line.split()[0] for line in after.splitlines() if line.startswith("  ")][:-1] == VERBS


def test_without_a_command_there_is_help(penstock_process):
    assert penstock_process().stdout == penstock_process("--help").stdout


@pytest.mark.parametrize("verb", VERBS)
def test_each_command_has_help_with_an_example(verb, capsys):
    assert cli.main([verb, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"Usage: penstock {verb}" in shown and f"Example: penstock {verb}" in shown
    assert "[[" not in shown  # what may be left out stands in brackets once


@pytest.mark.parametrize("verb", VERBS)
def test_each_command_and_what_it_takes_is_on_a_page(verb, capsys):
    for page in (DOCS.parent / "README.md", DOCS / "cli.md"):
        assert f"| `penstock {verb}" in page.read_text("utf-8"), page.name
    words = {"fleet": [verb, "autotune"], "curriculum": [verb, "simulate"], "env": [verb, "new"]}.get(verb, [verb])
    assert cli.main([*words, "--help"]) == 0
    options = set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)) - {"--help"}
    pages = "".join(page.read_text("utf-8") for page in DOCS.glob("*.md"))
    assert [option for option in sorted(options) if not re.search(rf"{option}(?![a-z-])", pages)] == []


def test_python_dash_m_is_the_same():
    words = [sys.executable, "-m", "penstock", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stdout) == (0, "penstock 0.1.0\n")


def test_recipes_lists_each_with_its_first_comment(penstock):
    done = penstock("recipes")
    assert done.returncode == 0
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in done.stdout.splitlines()}
    assert lines["cats"].startswith("A random tiny Llama learns") and "arithmetic" in lines


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("steps is 0"), 2, "penstock: steps is 0"),
        (CheckpointError("no\nmodel   here"), 2, "penstock: no model here"),
        (SchemaVersionError("too new"), 2, "penstock: too new"),
        (RunFailed("32 groups failed"), 1, "penstock: the run failed: 32 groups failed"),
        (UnreachableError("nobody answers"), 1, "penstock: nobody answers"),
        (MismatchError("they differ"), 1, "penstock: the run failed: they differ"),
        (ZeroDivisionError("by zero"), 1, "penstock: unexpected ZeroDivisionError: by zero (PENSTOCK_TRACEBACK=1"),
        (
            MemoryError("10.9 TiB"),
            1,
            "penstock: not enough memory: 10.9 TiB: lower what takes it, such as inference.max_",
        ),
        (MemoryError(), 1, "penstock: not enough memory: nothing more could be allocated: lower what takes it"),
        (ValueError("array is too big; `arr.size"), 1, "penstock: not enough memory: array is too big; `arr.size"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), 1, "penstock: not enough memory: RESOURCE_EXHAUSTED: Out"),
        (PermissionError(13, "Permission denied", "a/b"), 1, "penstock: a/b: Permission denied (PENSTOCK_TRACEBACK=1"),
        (Stopped("the engine"), 130, "penstock: stopped: the engine"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_codes(error, code, line, monkeypatch, capsys):
    def fail(**named):
        raise error

    monkeypatch.delenv("PENSTOCK_TRACEBACK", raising=False)
    monkeypatch.setattr(cli, "_app", fail)
    assert cli.main([]) == code
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith(line) and shown.err.count("\n") == (1 if line else 0)


def test_notes_of_an_error_are_part_of_its_line(monkeypatch, capsys):
    error = RunFailed("no progress")
    error.add_note("the story is in runs/x/events.jsonl")
    error.add_note("-----\nFor simplicity, JAX has removed its internal frames from the traceback.")

    def fail(**named):
        raise error

    monkeypatch.setattr(cli, "_app", fail)
    assert cli.main([]) == 1
    assert capsys.readouterr().err == "penstock: the run failed: no progress; the story is in runs/x/events.jsonl\n"


def test_a_dry_run_prints_a_recipe_with_the_memory_and_the_components(penstock, tmp_path):
    done = penstock("train", "cats", "steps=7", "learner.optimizer.learning_rate=2e-4", "--dry-run")
    assert done.returncode == 0 and done.stderr == ""
    assert "\nsteps: 7\n" in done.stdout and "learning_rate: 0.0002" in done.stdout
    for part in ("KV cache", "optimiser state", "total", "rollout worker", "replay buffer"):
        assert f"#   {part}" in done.stdout
    (tmp_path / "mine.yaml").write_text(done.stdout)
    assert penstock("train", "mine.yaml", "--dry-run").stdout == done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


@pytest.mark.slow
def test_doctor_finds_this_installation_sound(penstock_process):
    done = penstock_process("doctor")
    assert done.returncode == 0, done.stdout
    for check in ("python", "packages", "devices", "memory", "disk", "matrix product", "parity"):
        assert f" {check} " in done.stdout
    assert "0 failed" in done.stdout


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        ("eval foreign --recipe cats", "float32"),
        ("eval foreign --recipe cats model.dtype=bfloat16", "bfloat16"),
        ("eval mine/checkpoints/step-1", "bfloat16"),  # as the run's own config says
        ("eval mine/checkpoints/step-1 model.dtype=float32", "float32"),
        ("serve foreign", "float32"),
        ("serve foreign model.dtype=bfloat16", "bfloat16"),
        ("serve mine/checkpoints/step-1 model.dtype=bfloat16", "bfloat16"),
        ("doctor mine/checkpoints/step-1 model.dtype=bfloat16", "bfloat16"),
    ],
)
def test_every_command_takes_the_dtype_by_the_same_key(tmp_path, monkeypatch, capsys, words, dtype):
    def engine(decoder, *_):
        assert {str(array.dtype) for array in jax.tree.leaves(decoder)} == {decoder.config.dtype}
        raise ConfigError(f"the engine would compute in {decoder.config.dtype}")  # enough: the command ends here

    for module in ("overseer.doctor_probes", "inference.serving", "inference"):  # the last is read by the others
        monkeypatch.setattr(f"penstock.{module}.InferenceEngine", engine)
    monkeypatch.chdir(tmp_path)
    tokenizer = Tokenizer.load("penstock")
    shape = InitConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=1).model(tokenizer.vocab_size, "float32")
    run = RunDirectory.create(tmp_path / "mine", load_config("cats", ["model.dtype=bfloat16"]).dump())
    for folder in (tmp_path / "foreign", run.checkpoints / "step-1" / "model"):
        save_decoder(Decoder.initialise(shape, jax.random.key(0)), folder, tokenizer)
    assert cli.main(words.split()) == 2
    assert capsys.readouterr().err == f"penstock: the engine would compute in {dtype}\n"


def test_config_says_what_a_key_means(penstock):
    done = penstock("config", "learner.optimizer.learning_rate", "cats")
    assert done.returncode == 0 and done.stderr == ""
    for word in ("number ≥ 0", "default  1e-05", "here     0.001", "Peak; 0 trains nothing (a control)."):
        assert word in done.stdout, word
    section = penstock("config", "learner.loss").stdout
    assert "preset" in section and "clip_epsilon_high" in section and "language runs" in section
    sections = penstock("config").stdout
    assert "curriculum" in sections and "fleet" in sections and "penstock serve" in sections


def test_config_refuses_an_unknown_key_with_what_was_meant(penstock):
    done = penstock("config", "num_generations", "cats")
    said = "unknown key num_generations: did you mean curriculum.lessons.*.sampling_params.n_generations_per_prompt?"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"penstock: {said}\n")


def test_the_old_key_of_serve_is_answered_with_the_new_one(penstock):
    done = penstock("serve", "nowhere", "dtype=bfloat16")
    assert done.returncode == 2 and done.stderr == "penstock: unknown key dtype: did you mean model.dtype?\n"
