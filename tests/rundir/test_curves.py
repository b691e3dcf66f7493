import json

import numpy as np
import pytest

from penstock.rundir import curves as module
from penstock.rundir.curves import Curves
from penstock.types import RunDirectoryError


def written(path, rows, end="\n"):
    with path.open("a") as file:
        file.write("\n".join(json.dumps(row) for row in rows) + end)


def row(step, **values):
    return {"step": step, "time": 100.0 + step, **values}


def read(curves):
    while curves.read_on():
        pass


def test_a_resume_supersedes_rows_of_its_own_step_and_beyond_metric_by_metric(tmp_path):
    path = tmp_path / "metrics.jsonl"
    written(path, [row(1, loss=1.0, held=5.0), row(2, loss=2.0), row(3, loss=3.0)])
    curves = Curves(path)
    read(curves)
    written(path, [row(2, loss=20.0), row(3, loss=None), row(4, loss=40.0)])
    read(curves)
    steps, values, times = curves.series("loss")
    assert steps.tolist() == [1, 2, 4] and values.tolist() == [1.0, 20.0, 40.0] and times.tolist() == [101, 102, 104]
    assert curves.series("held")[1].tolist() == [5.0]
    assert curves.names == ["held", "loss"] and curves.last("loss") == 40.0 and curves.last("none") is None


def test_what_a_counter_came_to_is_summed_over_lives(tmp_path):
    path = tmp_path / "metrics.jsonl"
    written(path, [row(1, count=10.0), row(2, count=30.0), row(3, other=1.0)])
    curves = Curves(path)
    read(curves)
    lives = [{"step": step, "time": 200.0 + step, "count": number} for step, number in ((2, 5.0), (3, 40.0))]
    written(path, lives)
    read(curves)
    assert curves.counted("count", [100.0, 150.0]) == 30.0 + 40.0  # what was generated for superseded rows, too
    assert curves.counted("count", []) == 40.0 and curves.counted("none", [100.0]) is None


def test_rows_within_one_block_supersede_each_other_too(tmp_path):
    path = tmp_path / "metrics.jsonl"
    written(path, [row(step, loss=float(step)) for step in (1, 2, 3, 4, 2, 3)])
    curves = Curves(path)
    read(curves)
    assert curves.series("loss")[0].tolist() == [1, 2, 3]


def test_blocks_of_bytes_and_half_a_line_give_the_same_as_one_look(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    written(path, [row(step, loss=float(step)) for step in range(500)], end='\n{"step": 500, "ti')
    whole = Curves(path)
    read(whole)
    monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    pieces = Curves(path)
    read(pieces)
    assert whole.series("loss")[0].tolist() == pieces.series("loss")[0].tolist() == list(range(500))
    with path.open("a") as file:
        file.write('me": 1.0, "loss": 7.5}\n')
    read(pieces)
    assert pieces.last("loss") == 7.5


def test_a_picture_keeps_peaks_in_blocks_of_a_power_of_two(tmp_path):
    path = tmp_path / "metrics.jsonl"
    written(path, [row(step, loss=1000.0 if step == 37 else float(step % 2)) for step in range(64)])
    curves = Curves(path)
    read(curves)
    picture = curves.picture("loss", 16)
    assert picture["block"] == 4 and picture["step"] == list(range(3, 64, 4))
    assert max(picture["high"]) == 1000.0 and picture["low"][0] == 0.0
    assert picture["mean"][0] == 0.5 and picture["mean"][9] == pytest.approx((0 + 1000 + 0 + 1) / 4)
    assert curves.picture("loss", 100, first=36, last=38) == {
        "block": 1, "step": [36, 37, 38], "time": [136.0, 137.0, 138.0], "mean": [0.0, 1000.0, 0.0],
    }  # fmt: skip
    assert curves.picture("none", 10)["step"] == []


def test_moments_of_today_keep_their_hundredths(tmp_path):
    path = tmp_path / "metrics.jsonl"
    written(path, [{"step": step, "time": 1795517752.25 + 3600 * step, "loss": 1e-14} for step in range(3)])
    curves = Curves(path)
    read(curves)
    _, values, times = curves.series("loss")
    assert times.tolist() == [1795517752.25, 1795521352.25, 1795524952.25] and values[0] == pytest.approx(1e-14)


def test_a_file_that_became_shorter_is_read_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    written(path, [row(step, loss=1.0) for step in range(9)])
    curves = Curves(path)
    read(curves)
    path.write_text("")
    written(path, [row(0, loss=3.0)])
    read(curves)
    assert curves.series("loss")[1].tolist() == [3.0]


def test_a_broken_line_is_named_by_its_number_in_the_file(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    written(path, [row(step, loss=1.0) for step in range(5)])
    with path.open("a") as file:
        file.write("{broken\n")
    monkeypatch.setattr(module, "BLOCK_BYTES", 40)
    with pytest.raises(RunDirectoryError, match="line 6 is not JSON"):
        read(Curves(path))


def test_numbers_that_are_none_and_texts_make_no_curve(tmp_path):
    path = tmp_path / "metrics.jsonl"
    written(path, [row(1, loss=None, name="x"), row(2, loss=2.0, name="y")])
    curves = Curves(path)
    read(curves)
    assert curves.names == ["loss"] and np.array_equal(curves.series("loss")[0], [2])
