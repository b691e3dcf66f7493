"""A synthetic simulator whose next reset raises when a file says so; the file then says when that was."""

import time
from pathlib import Path
from typing import Any

import numpy as np

from penstock.environments.simulators.synthetic import SyntheticError, SyntheticSimulator

RAISE = "raise"


class UnluckySimulator(SyntheticSimulator):
    """`trigger` is a file; where it holds ``raise`` a reset replaces that by the monotonic time, and raises."""

    def __init__(self, trigger: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._trigger = Path(trigger)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Begins an episode, or raises."""
        if self._trigger.exists() and self._trigger.read_text() == RAISE:
            self._trigger.write_text(str(time.monotonic()))
            raise SyntheticError("this reset was told to fail")
        return super().reset(seed=seed, options=options)
