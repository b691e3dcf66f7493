"""Colours for numbers per token: dark letters on pale grounds, so they can be read on a dark terminal and a light one.

A log-probability goes from white (the policy was sure) to deep orange (it was surprised), on a fixed scale, so that two
rollouts compare. An advantage goes from orange through white to blue, which colour-blind readers tell apart, on the
range of what is shown.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.color import Color
from rich.style import Style
from rich.text import Text

Rgb = tuple[int, int, int]

_INK: Rgb = (16, 16, 16)
_WHITE: Rgb = (244, 244, 244)
_ORANGE: Rgb = (255, 150, 60)
_BLUE: Rgb = (110, 180, 255)
_SURPRISE: tuple[Rgb, ...] = (_WHITE, (255, 232, 150), (255, 190, 95), (250, 130, 85))
_LOWEST_LOGPROB = math.log(1e-3)


class ColorScale(Protocol):
    """From a token's number to its style."""

    def style(self, value: float) -> Style:
        """How to print a token with this number."""
        ...

    def legend(self) -> Text:
        """What the colours mean."""
        ...


@dataclass(frozen=True, slots=True)
class LogprobScale:
    """Log-probabilities from 0 to those of one in a thousand and below."""

    def style(self, value: float) -> Style:
        """Paler where the token was more probable."""
        return _ground(_along(_SURPRISE, value / _LOWEST_LOGPROB))

    def legend(self) -> Text:
        """Probabilities with their colours."""
        text = Text("probability ")
        for probability, label in ((1.0, "1"), (0.5, "0.5"), (0.1, "0.1"), (0.01, "0.01"), (0.001, "≤0.001")):
            text.append(f" {label} ", self.style(math.log(probability)))
        return text


@dataclass(frozen=True, slots=True)
class AdvantageScale:
    """Advantages from −limit to limit.

    Attributes:
        limit: The largest absolute advantage shown.
    """

    limit: float

    @classmethod
    def over(cls, values: Sequence[float]) -> "AdvantageScale":
        """A scale that reaches the largest of them."""
        return cls(max(map(abs, values), default=0.0) or 1.0)

    def style(self, value: float) -> Style:
        """Blue above zero, orange below."""
        return _ground(_along((_WHITE, _BLUE if value > 0 else _ORANGE), abs(value) / self.limit))

    def legend(self) -> Text:
        """Advantages with their colours."""
        text = Text("advantage ")
        for share in (-1.0, -0.5, 0.0, 0.5, 1.0):
            value = share * self.limit
            text.append(f" {value:+.2f} " if value else " 0 ", self.style(value))
        return text


def _along(colors: Sequence[Rgb], share: float) -> Rgb:
    """The colour at a share of the way along some colours."""
    place = min(max(share, 0.0), 1.0) * (len(colors) - 1)
    index = min(int(place), len(colors) - 2)
    rest = place - index
    mixed = [round(a + (b - a) * rest) for a, b in zip(colors[index], colors[index + 1], strict=True)]
    return mixed[0], mixed[1], mixed[2]


def _ground(color: Rgb) -> Style:
    return Style(color=Color.from_rgb(*_INK), bgcolor=Color.from_rgb(*color))
