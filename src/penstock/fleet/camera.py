"""Takes the pictures of a filmed episode inside a simulator process; see `penstock.fleet.film_area`.

A simulator that was made with ``render_mode: rgb_array`` draws itself; another is filmed by the first image that it
shows as an observation. Whatever fails here is told in words, ends that film, and never the simulator.
"""

import os
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from penstock.fleet.block import Block
from penstock.fleet.film_area import Mark
from penstock.fleet.simulator_row import Maker, SimulatorRow
from penstock.types import ConfigError

_LEAST_SIDE = 16  # pixels; smaller observations are grids of something else


class Camera:
    """Films one row at a time, as the block's film area asks.

    Args:
        block: With a film area.
        simulators: Its rows.
    """

    def __init__(self, block: Block, simulators: Sequence[SimulatorRow]) -> None:
        assert block.film is not None
        self._block, self._area, self._simulators = block, block.film, simulators
        self._row: int | None = None  # being filmed
        self._taken = False  # in this turn

    def note_end(self, row: int) -> None:
        """The row's episode ended, and the next one has not begun."""
        if row == self._row:
            self._row = None
            self._take(row, Mark.LAST)
            self._area.ask(None)

    def note_begin(self, row: int) -> None:
        """The row's episode has begun."""
        if self._row is None and self._area.asked == row:
            self._row = row
            self._take(row, Mark.FIRST)

    def note_turn(self) -> None:
        """All rows were stepped."""
        if self._area.asked != self._row:
            self._row = None
        if self._row is not None and not self._taken:
            self._take(self._row, Mark.NEXT)
        self._taken = False

    def _take(self, row: int, mark: Mark) -> None:
        self._taken = True
        try:
            picture = self._picture(row, mark)
            if picture is None and mark is not Mark.LAST:
                raise ConfigError("it draws nothing (render_mode: rgb_array), and no observation is an image")
            self._area.put(mark, picture)
        except Exception as error:  # drawing is the simulator's own code, and no reason to end it
            self._row = None
            self._area.fail("".join(traceback.format_exception_only(error)).strip())

    def _picture(self, row: int, mark: Mark) -> Any:
        env = self._simulators[row].env
        if env.render_mode == "rgb_array":
            return env.render()
        leaves = self._block.observations
        if mark is Mark.LAST:
            leaves = self._block.final_observations if self._block.has_final[row] else {}
        return next((leaf[row] for leaf in leaves.values() if _is_image(leaf)), None)


def filmed_maker(make: Maker) -> Maker:
    """Makes simulators that can draw themselves, where they can and `kwargs` do not say otherwise."""
    for name in ("SDL_VIDEODRIVER", "SDL_AUDIODRIVER"):
        os.environ.setdefault(name, "dummy")  # what draws with pygame must find no screen

    def made(id: str, kwargs: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
        if "render_mode" in kwargs:
            return make(id, kwargs)
        try:
            return make(id, {**kwargs, "render_mode": "rgb_array"})
        except ConfigError:  # it takes no such argument; whatever else is wrong is raised again
            return make(id, kwargs)

    return made


def _is_image(leaf: np.ndarray) -> bool:
    """Of an observation leaf [k, …]."""
    return leaf.dtype == np.uint8 and leaf.ndim in (3, 4) and min(leaf.shape[1:3]) >= _LEAST_SIDE
