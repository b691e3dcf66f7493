import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dashboard.conversation import AdvantageScale, LogprobScale


def ground(style) -> tuple[int, int, int]:
    return tuple(style.bgcolor.triplet)


def luminance(color) -> float:
    """Relative luminance, as WCAG 2 defines it."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_sure_tokens_are_pale_and_surprising_ones_deep():
    scale = LogprobScale()
    assert ground(scale.style(0.0)) == (244, 244, 244)
    assert ground(scale.style(math.log(1e-3))) == ground(scale.style(-100.0)) == (250, 130, 85)
    blues = [ground(scale.style(-value))[2] for value in (0.0, 1.0, 2.0, 4.0, 6.9)]
    assert blues == sorted(blues, reverse=True) and len(set(blues)) == 5


def test_advantages_diverge_from_zero():
    scale = AdvantageScale.over([-0.5, 2.0])
    assert scale.limit == 2.0
    assert ground(scale.style(2.0)) == (110, 180, 255) and ground(scale.style(-2.0)) == (255, 150, 60)
    assert ground(scale.style(0.0)) == (244, 244, 244)
    assert AdvantageScale.over([0.0, 0.0]).limit == AdvantageScale.over([]).limit == 1.0


@pytest.mark.parametrize("scale", [LogprobScale(), AdvantageScale(1.0)])
@given(value=st.floats(-10, 10))
def test_letters_stand_out_on_every_ground(scale, value):
    style = scale.style(value)
    paper, ink = luminance(ground(style)), luminance(tuple(style.color.triplet))
    assert (paper + 0.05) / (ink + 0.05) > 7  # WCAG AAA, whatever the terminal's own colours are


def test_legends_name_the_numbers():
    assert LogprobScale().legend().plain == "probability  1  0.5  0.1  0.01  ≤0.001 "
    assert AdvantageScale(0.5).legend().plain == "advantage  -0.50  -0.25  0  +0.25  +0.50 "
