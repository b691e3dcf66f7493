"""Queues of groups from which any group may leave: a line by age, and deadlines.

Leaving is lazy: the entry stays until it comes up, or until entries of groups that left outnumber the others and all
of them are swept out. So every operation costs O(log n), amortised, and no queue holds more than about twice what
waits in it.
"""

import heapq
from typing import Any, final

from penstock.batch.holding import HeldGroup

SLACK = 64
"""Entries of groups that left which are kept in any case, so that short queues are not swept all the time."""


@final
class Line:
    """Groups by a key, smallest first. A group stands in one line at most; if it leaves one, it leaves for good."""

    def __init__(self) -> None:
        self._heap: list[tuple[Any, HeldGroup]] = []
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def join(self, group: HeldGroup, key: Any) -> None:
        """A group that stands in no line comes in; keys are unique in a line, and comparable."""
        group.line = self
        heapq.heappush(self._heap, (key, group))
        self._live += 1

    def leave(self, group: HeldGroup) -> None:
        """A group that stands in this line goes."""
        group.line = None
        self._live -= 1
        if len(self._heap) > 2 * self._live + SLACK:
            self._heap = [entry for entry in self._heap if entry[1].line is self]
            heapq.heapify(self._heap)

    def pop(self) -> HeldGroup:
        """Takes the first group out; there must be one."""
        while True:
            _, group = heapq.heappop(self._heap)
            if group.line is self:
                group.line = None
                self._live -= 1
                return group


@final
class Deadlines:
    """Groups by the last update that may use them first."""

    def __init__(self) -> None:
        self._by_step: dict[int, list[HeldGroup]] = {}
        self._steps: list[int] = []
        self._entries = 0
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def set(self, group: HeldGroup, step: int) -> None:
        """Gives a group its deadline; it may come nearer, not move away."""
        if group.deadline_step is not None:
            if step >= group.deadline_step:
                return
            self._live -= 1
        group.deadline_step = step
        if step not in self._by_step:
            self._by_step[step] = []
            heapq.heappush(self._steps, step)
        self._by_step[step].append(group)
        self._live += 1
        self._entries += 1
        self._sweep()

    def clear(self, group: HeldGroup) -> None:
        """A group has no deadline any more; one that never had is ignored."""
        if group.deadline_step is not None:
            group.deadline_step = None
            self._live -= 1
            self._sweep()

    def pop_due(self, step: int) -> list[HeldGroup]:
        """Takes out, oldest first, every group whose deadline is `step` or has passed."""
        due: list[HeldGroup] = []
        while self._steps and self._steps[0] <= step:
            deadline = heapq.heappop(self._steps)
            groups = self._by_step.pop(deadline)
            self._entries -= len(groups)
            for group in groups:
                if group.deadline_step == deadline:
                    group.deadline_step = None
                    due.append(group)
        self._live -= len(due)
        return sorted(due, key=lambda group: group.order)

    def _sweep(self) -> None:
        if self._entries <= 2 * self._live + SLACK:
            return
        left = {step: [g for g in groups if g.deadline_step == step] for step, groups in self._by_step.items()}
        self._by_step = {step: groups for step, groups in left.items() if groups}
        self._steps = sorted(self._by_step)
        self._entries = self._live


@final
class FirstUses:
    """Groups with a deadline: those due first, then the oldest."""

    def __init__(self) -> None:
        self._line = Line()
        self._deadlines = Deadlines()

    def __len__(self) -> int:
        return len(self._line)

    def set_deadline(self, group: HeldGroup, step: int) -> None:
        """A group that stands in no line comes in, or one of these has its deadline brought nearer."""
        if group.line is not self._line:
            self._line.join(group, group.order)
        self._deadlines.set(group, step)

    def leave(self, group: HeldGroup) -> None:
        """A group goes; one that is not here is ignored."""
        if group.line is self._line:
            self._line.leave(group)
            self._deadlines.clear(group)

    def pop_due(self, step: int) -> list[HeldGroup]:
        """Takes out, oldest first, every group whose deadline is `step` or has passed."""
        due = self._deadlines.pop_due(step)
        for group in due:
            self._line.leave(group)
        return due

    def pop(self) -> HeldGroup:
        """Takes the oldest group out; there must be one."""
        group = self._line.pop()
        self._deadlines.clear(group)
        return group
