"""The arithmetic of the dashboard's benchmark; what it measures needs a quiet machine."""

import math

import pytest
from benchmarks.dashboard import lost_percent, main


def test_what_an_open_page_costs_is_the_mean_of_paired_ratios_of_seconds():
    # ln(4/3.96) = 1.0050%, ln(2/2) = 0, ln(5/4.95) = 1.0050%: mean 0.6700, deviation 0.5802, t(2) = 4.30265.
    mean, half = lost_percent([(3.96, 4.0), (2.0, 2.0), (4.95, 5.0)])
    assert mean == pytest.approx(100 * 2 * math.log(4 / 3.96) / 3)
    assert half == pytest.approx(4.30265 * 0.58025 / math.sqrt(3), rel=1e-4)


def test_one_round_has_no_interval(capsys):
    with pytest.raises(SystemExit):
        main(["--pace", "--rounds", "1"])
    assert "--rounds 1: an interval needs two at least" in capsys.readouterr().err
