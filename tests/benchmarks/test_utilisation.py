"""What an update uses of a device, run here on the CPU at a tiny shape; what is printed of a card that is not here."""

import json
import subprocess
import sys
from pathlib import Path

import benchmarks.utilisation
import pytest
from benchmarks.marks import Marks
from benchmarks.utilisation import AIMS, KINDS, Case, Ran, main, print_foretold, print_run, read_back, utilise

from penstock.overseer.fitting.chips import CHIPS

TINY = {
    "model_type": "qwen2", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
CASE = Case("0.5b", 4096, 2**17)
PHASES = {"prefill": 0.01, "decode": 5.0, "gradient": 0.9, "optimiser": 0.1, "hand-over": 0.01}
PARTS = {"attention": 0.2, "products of layers": 0.4, "head": 0.25, "optimiser": 0.1}


def ran(kind: str = "NVIDIA H100 80GB HBM3", flops: float = 0.35 * 989e12) -> Ran:
    """Of an update that takes a second."""
    return Ran(kind, "bfloat16", 2**34, flops, 2**17, 1.0, PHASES, PARTS)


@pytest.mark.timeout(600)
def test_a_tiny_model_is_run_here_and_compared_with_what_is_foretold(tmp_path: Path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    words = ["--models", str(tmp_path), "--rows", "64", "--tokens", "512", "--set", "model.dtype=float32"]
    assert main(words) == 0
    said = capsys.readouterr().out
    head, update, costs, foretold, memory, *phases, whole, end = said.split("\n")[:-1]
    assert "float32, rows of 64, on cpu, at most" in head and foretold.endswith("rows of 64: foretold and measured")
    # 3 · (2 · 512 tokens · 73,728 of matrices + 8 · 4 · 2 layers · 64 · 64 · 32 + 2 · 512 · 64 · 256 loss tokens)
    assert "3.02e+08 FLOPs needed; MFU" in update and "(this machine)" in update
    named = dict(cell.rsplit(" ", 3)[0:2] for cell in costs.replace("; then", ",").split(": ")[1].split(", "))
    assert named.keys() == {*PARTS, "all else"} and all(float(named[name]) > 0 for name in PARTS)
    assert [phase.split()[0] for phase in phases] == list(PHASES) and memory.split()[0] == "memory"
    assert all(float(phase.split()[3]) > 0 for phase in phases) and whole.startswith("  a step") and end == ""


def test_utilisation_is_of_the_makers_rate_and_has_its_mark_on_a_card(capsys):
    marks = Marks()
    print_run(CASE, ran(), "h100:1", marks)
    said = capsys.readouterr().out
    assert "MFU 35.0% of 989 TFLOP/s (NVIDIA H100 80GB HBM3)" in said and "131,072 tokens/s" in said
    assert marks.missed == 0 and len(marks.lines) == 1
    print_run(CASE, ran(flops=0.29 * 989e12), "h100:1", marks)
    assert marks.missed == 1
    print_run(CASE._replace(model="7b"), ran(flops=1.0), "h100:1", marks)
    assert (marks.missed, len(marks.lines)) == (1, 2)


def test_the_three_largest_costs_come_first_and_what_is_left_is_named(capsys):
    print_run(CASE, ran(), "h100:1", Marks())
    costs = capsys.readouterr().out.splitlines()[-1]
    largest = "products of layers 0.4 s (40%), head 0.25 s (25%), attention 0.2 s (20%)"
    assert costs == f"  costs: {largest}; then optimiser 0.1 s (10%), all else 0.05 s (5%)"


def test_of_a_device_without_a_known_rate_seconds_are_printed_and_no_share(capsys):
    marks = Marks()
    print_run(CASE, ran("NVIDIA L4"), None, marks)
    print_foretold(CASE, ran("NVIDIA L4"), None)
    said = capsys.readouterr().out
    assert "update 1 s" in said and "MFU not known" in said and "no target is NVIDIA L4" in said and marks.lines == []


def test_what_is_foretold_stands_beside_what_was_measured_and_a_missing_compiler_is_said(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    print_foretold(CASE, ran(), "h100:1")
    assert "not known: --target is 'h100:1', and its compiler is not installed" in capsys.readouterr().out


def test_a_case_that_fails_is_said_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, capsys):
    def run_apart(case: Case, alone: bool) -> Ran:
        if case.length == 16384:
            raise subprocess.CalledProcessError(1, "it")
        return ran("NVIDIA L4")

    monkeypatch.setattr(benchmarks.utilisation, "run_apart", run_apart)
    assert utilise([CASE._replace(length=16384), CASE], None) == 1
    said = capsys.readouterr().out
    assert "0.5b, rows of 16,384: failed" in said and "0.5b, bfloat16, rows of 4,096, on NVIDIA L4" in said


def test_what_was_measured_elsewhere_is_printed_and_runs_nothing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(benchmarks.utilisation, "run_apart", lambda *case: ran("NVIDIA L4"))
    changed = CASE._replace(changes=("learner.remat=products",))
    assert utilise([CASE, changed], None, keep=tmp_path, foretell=False) == 0
    measured = capsys.readouterr().out
    known = read_back(tmp_path)
    assert known == {CASE: ran("NVIDIA L4"), changed: ran("NVIDIA L4")}
    monkeypatch.setattr(benchmarks.utilisation, "run_apart", lambda *case: pytest.fail("it ran"))
    assert utilise([CASE, changed], None, known, foretell=False) == 0
    assert capsys.readouterr().out == measured


def test_of_an_update_alone_the_learners_memory_and_phases_are_foretold(tmp_path: Path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    kept = tmp_path / "kept"
    words = ["--models", str(tmp_path), "--rows", "64", "--tokens", "512", "--set", "model.dtype=float32"]
    assert main([*words, "--update-only", "--keep", str(kept)]) == 0
    capsys.readouterr()
    assert main(["--measured", str(kept)]) == 0
    _, memory, gradient, optimiser, both, _ = capsys.readouterr().out.split("foretold and measured")[1].split("\n")[:-1]
    assert memory.endswith("not counted by a CPU")
    phases = [line.split() for line in (gradient, optimiser, both)]
    assert [words[0] for words in phases] == ["gradient", "optimiser", "both"]
    for each in (1, 3):
        assert float(phases[2][each]) == pytest.approx(sum(float(words[each]) for words in phases[:2]), rel=1e-3)
    ((case, known),) = read_back(kept).items()
    print_foretold(case, known._replace(peak_bytes=2**20), "cpu")
    alone = capsys.readouterr().out.splitlines()[1].split()
    print_foretold(case, known._replace(peak_bytes=2**20, phases=PHASES), "cpu")
    whole = capsys.readouterr().out.splitlines()[1].split()
    assert alone[0] == whole[0] == "memory" and alone[2] == whole[2] == "MiB"
    assert float(alone[1]) < float(whole[1])


def test_every_case_that_has_a_mark_is_a_run_and_every_target_a_chip():
    for model, length in AIMS:
        case = Case(model, length, 2**17)
        assert Case.read(json.dumps(case)) == case
        config = case.config
        rows = config.learner.micro_batch_rows
        assert rows * length == 2**14 and config.inference.max_slots * length == 2**17
        assert config.inference.padded_length(length // 2) == length // 2
    assert {target.removesuffix(":1") for target in KINDS.values()} == {*CHIPS, "cpu"}


def test_whoever_compares_has_not_loaded_jax_which_must_be_told_first_where_it_compiles_for_a_chip():
    lines = [
        "import sys",
        "from benchmarks.utilisation import Case, parse",
        "parse([]), Case('0.5b', 4096, 2**17).config",
        "print('jax' in sys.modules)",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr
