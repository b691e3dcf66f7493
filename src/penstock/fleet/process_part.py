"""Simulators of one process that act together, through all of the process's lives.

Invariant: arrivals and actions alternate. After an `Arrival` exactly one `act` is taken, and each action is answered by
exactly one later arrival: with what it led to, or, where it was lost with its process, as a fault by the next life. A
life that is ready before the worker has acted on the last arrival is held back until then, since that action is lost.

Not covered: what is said over the socket, and when (`ProcessSlot`).
"""

import numpy as np

from penstock.fleet.arrivals import Arrival, Leaves
from penstock.fleet.block import BlockRows


class ProcessPart:
    """One part of a process.

    Args:
        process: Which process of the worker.
        number: Which part of it.
        slots: int64 [n], the worker's slots that it is.

    Attributes:
        slots: int64 [n].
        lost_actions: Actions that were answered as faults, since they were lost with a life.
        fresh: This life has not arrived yet.
        resting: It waits for actions, or its arrival is held back.
    """

    def __init__(self, process: int, number: int, slots: np.ndarray) -> None:
        self.slots = slots
        self.lost_actions = 0
        self.fresh, self.resting = True, False
        self._process, self._number = process, number
        self._rows: BlockRows | None = None
        self._action_views: tuple[tuple[str, np.ndarray], ...] = ()
        self._carried: BlockRows | None = None  # of a retired life, whose results the next one's first arrival brings
        self._owes = True  # an arrival is next, not an action
        self._has_arrived = False
        self._held: float | None = None  # an arrival that waits for `act`; how long the process worked on it
        self._lost = False  # the next arrival answers lost actions

    def begin_life(self, rows: BlockRows) -> None:
        """Its process is up, and these are its rows."""
        self._rows, self._action_views = rows, tuple(rows.actions.items())
        self.fresh, self.resting, self._held = True, False, None

    def carry(self) -> None:
        """Its process ends in good order: what its rows say is said by the next life."""
        self._carried, self.resting = self._rows, False

    def end_life(self) -> None:
        """Its process is gone."""
        self._rows, self._action_views = None, ()
        self.resting, self._held = False, None

    @property
    def waits_for_answer(self) -> bool:
        """Whether an action was taken, and nothing has answered it."""
        return self._owes and self._has_arrived

    def arrive(self, simulate_s: float) -> Arrival | None:
        """Its rows are the worker's again; None where the arrival is held back until `act`.

        Args:
            simulate_s: How long the process worked on it.
        """
        self.resting = True
        if self.fresh:
            self.fresh = False
            self._settle_lost_actions()
            if not self._owes:
                self._held = simulate_s
                return None
        return self._arrival(simulate_s)

    def act(self, actions: Leaves) -> bool:
        """Takes the actions that answer the last arrival.

        Returns:
            Whether they lie in the block now, for the process to take; otherwise they are lost.

        Raises:
            ValueError: no arrival is open, or an array has a wrong shape.
        """
        if self._owes:
            raise ValueError(
                f"part {self._number} of process {self._process} has no open arrival: it was acted on already"
            )
        for name, view in self._action_views:
            if actions[name].shape != view.shape:
                raise ValueError(f"actions {name!r} have shape {actions[name].shape}: they must have {view.shape}")
        self._owes = True
        if not self.resting or self._held is not None:
            return False  # it is gone, and the next life answers; or has, and is about to be released
        for name, view in self._action_views:
            view[...] = actions[name]
        self.resting = False
        return True

    def released(self) -> Arrival | None:
        """The arrival that was held back until `act`; None: there is none."""
        if self._held is None:
            return None
        simulate_s, self._held = self._held, None
        return self._arrival(simulate_s)

    def _settle_lost_actions(self) -> None:
        assert self._rows is not None
        if self._carried is not None:
            self._rows.take_results(self._carried)
            self._carried = None
        elif self._has_arrived:
            self._rows.mark_lost()
            self._lost = True
        else:
            self._rows.clear_results()

    def _arrival(self, simulate_s: float) -> Arrival:
        rows = self._rows
        assert rows is not None
        rows.acted[:] = self._has_arrived
        self._owes, self._has_arrived = False, True
        if self._lost:
            self.lost_actions += len(self.slots)
            self._lost = False
        return Arrival(self._process, rows.rows, rows.observations, rows.final_observations, simulate_s, self._number)
