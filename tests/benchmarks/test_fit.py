"""What `penstock fit` foretells beside what happens, and the marks of its tables."""

from types import SimpleNamespace

import pytest
from benchmarks.fit import CLOSE, SHAPES, Peaks, calibrated, judge, peaks_of
from benchmarks.marks import Marks

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


@pytest.mark.parametrize(("temporaries", "missed"), [({4096: 1e9, 16384: 4.3e9}, 0), ({4096: 1e9, 16384: 5.1e9}, 2)])
def test_temporaries_that_grow_faster_than_rows_miss_their_mark(temporaries: dict[int, float], missed: int):
    marks = Marks()
    judge(marks, "0.5b full", "h100:1", temporaries, SimpleNamespace(fits=True))
    assert marks.missed == missed and len(marks.lines) == 2
