"""What `penstock fit` foretells beside what happens, and the marks of its tables."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import benchmarks.fit
import pytest
from benchmarks.fit import CLOSE, SHAPES, Asked, Line, Lines, Peaks, calibrated, judge, main, peaks_of
from benchmarks.marks import Marks

import penstock.overseer
from penstock.overseer.estimate import model_shape


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SHAPES)
def test_what_is_foretold_is_within_a_tenth_of_what_is_measured(name: str):
    peaks = peaks_of(name)
    assert peaks.share <= CLOSE, peaks
    assert peaks.with_heap > 0.95 * peaks.measured


def test_the_shares_that_differ_count_both_ways():
    assert Peaks(90, 100, 100).share == pytest.approx(0.1) and Peaks(125, 100, 100).share == pytest.approx(0.25)


def test_every_shape_is_a_run_and_one_trains_an_adapter_beside_a_base():
    models = {name: model_shape(calibrated(name).model) for name in SHAPES}
    assert len(models) >= 5 and {model.dtype for model in models.values()} == {"float32", "bfloat16"}
    adapted = [model for model in models.values() if model.lora is not None]
    assert [model.lora.rank for model in adapted] == [16]


def line(temporaries=1e9, fits=True, cache=2e10) -> Line:
    return Line(
        ("yes" if fits else "no", "9 GiB"), "" if fits else "take fewer slots", fits, int(temporaries), int(cache)
    )


@pytest.mark.parametrize(("temporaries", "missed"), [({4096: 1e9, 16384: 4.3e9}, 0), ({4096: 1e9, 16384: 5.1e9}, 2)])
def test_temporaries_that_grow_faster_than_rows_miss_their_mark(temporaries: dict[int, Any], missed: int):
    marks = Marks()
    judge(marks, "0.5b full", "h100:1", temporaries, line(list(temporaries.values())[-1]))
    assert marks.missed == missed and len(marks.lines) == 2


@pytest.mark.parametrize(
    ("name", "found", "missed"),
    [
        ("1.5b full", line(), 0), ("1.5b full", line(fits=False), 1),
        ("7b lora", line(), 0), ("7b lora", line(cache=1.9e10), 1),
    ],
)  # fmt: skip
def test_large_models_must_fit_one_h100_with_their_cache(name: str, found: Line, missed: int):
    marks = Marks()
    judge(marks, name, "h100:1", {16384: 10**9}, found)
    assert (marks.missed, len(marks.lines)) == (missed, 1)
    judge(marks, name, "v5e:1", {16384: 10**9}, found)
    assert len(marks.lines) == 1


def test_a_line_is_made_of_a_report_and_counts_the_cache_that_there_is_room_for():
    gradient = SimpleNamespace(temporaries_bytes=7)
    report = SimpleNamespace(
        fits=True, slots=(16, 64), room_slots=4, slot_bytes=100, remedy=None, cells=lambda: ("yes",),
        program=lambda name: {"gradient": gradient}[name],
    )  # fmt: skip
    assert Line.of(report) == Line(("yes",), "", True, 7, 2000)  # type: ignore[arg-type]
    report.fits, report.remedy = False, "fewer"
    assert Line.of(report) == Line(("yes",), "fewer", False, 7, 0)  # type: ignore[arg-type]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What `penstock fit` was asked for: its compilers' part, at a gigabyte for 4,096 tokens."""
    asked: list[tuple] = []

    def fit(config, target, models, rows, lora):
        asked.append((target, *models, *rows, lora))
        return line(rows[0] / 4096 * 1e9, fits=rows[0] < 65536)

    monkeypatch.setattr(penstock.overseer, "fit", fit)
    monkeypatch.setattr(benchmarks.fit.Line, "of", lambda report: report)
    return asked


TABLE = ["--target", "h100:1", "--models", "0.5b", "--trained", "full", "--rows", "4096", "16384"]


def test_a_table_has_a_line_for_each_run_and_its_exit_code_says_whether_all_marks_were_reached(compiled, capsys):
    assert main(TABLE) == 0
    said = capsys.readouterr().out.splitlines()
    assert [row.split()[:4] for row in said[1:3]] == [
        ["0.5b", "full", "4,096", "yes"],
        ["0.5b", "full", "16,384", "yes"],
    ]
    assert len(said) == 5 and all(mark.endswith("reached") for mark in said[3:])
    assert main([*TABLE, "65536", "--trained", "full", "lora"]) == 0
    assert "65,536  " in capsys.readouterr().out and compiled[-1] == ("h100:1", "0.5b", 65536, 16)


def test_a_mark_that_is_missed_is_the_exit_code(compiled, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(benchmarks.fit, "LINEAR", 3.9)
    assert main(TABLE) == 1 and "MISSED" in capsys.readouterr().out


def test_a_table_that_was_cut_off_goes_on_and_other_changes_are_other_lines(compiled, tmp_path: Path, capsys):
    file = tmp_path / "fit.jsonl"
    assert main([*TABLE[:-1], "--results", str(file)]) == 0 and len(compiled) == 1
    assert main([*TABLE, "--results", str(file)]) == 0
    assert [asked[2] for asked in compiled] == [4096, 16384] and len(file.read_text().splitlines()) == 2
    whole = capsys.readouterr().out.splitlines()[-5:]
    assert main([*TABLE, "--results", str(file)]) == 0 and len(compiled) == 2
    assert capsys.readouterr().out.splitlines() == whole
    assert Lines([], file).line(Asked("h100:1", "0.5b", "full", 4096)) == line(1e9)
    assert main([*TABLE[:-1], "--results", str(file), "--set", "learner.remat=products"]) == 0 and len(compiled) == 3
