"""What the next ticket is for: a lesson, its index, and a problem, each problem of a lesson once per epoch.

A *place* is an epoch and a position in it; a permutation keyed by run seed, lesson and epoch says which problem stands
there, and takes no memory. A place that was drawn is *open* until its group ends: trained or filtered, it is finished;
otherwise it is drawn again, before anything new of its lesson, and after the last retry it stays untrained and is
counted. Of what is neither finished nor in a ticket only the places to be drawn again are kept: the next position says
the rest.

Retries go by their places, never by the order in which groups failed: at staleness zero nothing depends on that.
Lessons whose problems have no number (`order: iid`) have no epochs: their tickets' seeds select the problems. Not
thread-safe: the ticket issuer's lock guards it. Not covered: when a ticket may be drawn, and what becomes of it.
"""

import hashlib
import heapq
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from penstock.replay.ledger import TicketKey
from penstock.types import CheckpointError, LessonChooser, Ticket, fold

logger = logging.getLogger(__name__)

Place = tuple[int, int]
"""Epoch and position, both from 0."""

_ROUNDS = 6


def permuted(position: int, size: int, seed: int) -> int:
    """Where a permutation of 0 … size − 1 takes a position: a Feistel network with cycle walking.

    The network permutes the numbers of 2h bits, ``(l, r) → (r, l xor F(r))`` with a keyed hash F, where 4^h is the
    least power of four that is not below `size`; a number beyond `size` is put in again until it is below, after less
    than 4 passes on average. Runs resume in the middle of an epoch, so it must never change.

    Args:
        position: In [0, size).
        size: At least 1.
        seed: The key, as `fold` makes it.

    Returns:
        A number in [0, size), another one for each position.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask, key, number = (1 << half) - 1, seed.to_bytes(8, "little"), position
    while True:
        left, right = number >> half, number & mask
        for turn in range(_ROUNDS):
            keyed = hashlib.blake2b(right.to_bytes(8, "little"), digest_size=8, key=key, salt=bytes([turn]))
            left, right = right, left ^ (int.from_bytes(keyed.digest(), "little") & mask)
        number = left << half | right
        if number < size:
            return number


@dataclass(frozen=True, slots=True)
class ProblemRules:
    """How the problems of one lesson are gone through.

    Attributes:
        size: How many training problems there are.
        digest: Of all of them, in their order.
        order: `shuffle`: another one in each epoch; `sequential`: as they are numbered.
        retries: So often a problem whose group failed is drawn again in its epoch.
    """

    size: int
    digest: str
    order: Literal["shuffle", "sequential"] = "shuffle"
    retries: int = 3


class LessonEpochs:
    """One lesson's epochs.

    Args:
        rules: Its problems, and the order they are drawn in.
        seed: The run's; with `lesson_id` and epoch the key of an order.
        lesson_id: Names the lesson in errors, too.

    Attributes:
        rules: The ones it was made with.
        epoch: The present one: the next fresh place lies in it.
        position: Of the next fresh place.
        untrained: How many places had their last retry.
    """

    def __init__(self, rules: ProblemRules, seed: int, lesson_id: str) -> None:
        self.rules = rules
        self.epoch = self.position = self.untrained = 0
        self._key = seed, lesson_id
        self._failures: dict[Place, int] = {}
        self._again: list[Place] = []

    def draw(self) -> Place:
        """The next place; those to be drawn again come first."""
        if self._again:
            return heapq.heappop(self._again)
        if self.position == self.rules.size:
            self.epoch, self.position = self.epoch + 1, 0
        place = self.epoch, self.position
        self.position += 1
        return place

    def problem(self, place: Place) -> int:
        """The number of the problem that stands there, from 0."""
        epoch, position = place
        if self.rules.order == "sequential":
            return position
        seed, lesson_id = self._key
        return permuted(position, self.rules.size, fold(seed, "epoch", lesson_id, epoch))

    def finish(self, place: Place) -> None:
        """Its group was trained, or had no signal."""
        self._failures.pop(place, None)

    def fail(self, place: Place) -> bool:
        """Its group ended otherwise; returns whether it is drawn again."""
        failures = self._failures.pop(place, 0) + 1
        if failures > self.rules.retries:
            self.untrained += 1
            return False
        self._failures[place] = failures
        heapq.heappush(self._again, place)
        return True

    def state(self) -> dict[str, Any]:
        """For a checkpoint: plain values. Open places are in the tickets."""
        return {
            "digest": self.rules.digest,
            "size": self.rules.size,
            "order": self.rules.order,
            "epoch": self.epoch,
            "position": self.position,
            "untrained": self.untrained,
            "failures": [[*place, count] for place, count in sorted(self._failures.items())],
            "again": [list(place) for place in sorted(self._again)],
        }

    def restore(self, state: Mapping[str, Any]) -> str | None:
        """Takes `state` back.

        Returns:
            What was changed since, in words: then the next epoch begins, and no place of before is of any use. None
            where the epoch goes on.

        Raises:
            CheckpointError: it is no such state.
        """
        try:
            epoch, position, untrained = int(state["epoch"]), int(state["position"]), int(state["untrained"])
            was = str(state["digest"]), int(state["size"]), str(state["order"])
            failures = {(int(e), int(p)): int(count) for e, p, count in state["failures"]}
            again = [(int(e), int(p)) for e, p in state["again"]]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the epochs of lesson {self._key[1]!r} do not fit: {error!r}") from error
        self.untrained = untrained
        changed = self._changed_since(*was)
        if changed is None:
            self.epoch, self.position, self._failures, self._again = epoch, position, failures, again
        else:
            self.epoch, self.position, self._failures, self._again = epoch + (position > 0), 0, {}, []
        return changed

    def _changed_since(self, digest: str, size: int, order: str) -> str | None:
        rules = self.rules
        if size != rules.size:
            return f"{size} problems are now {rules.size}"
        if digest != rules.digest:
            return f"the {size} problems are others than before"
        return None if order == rules.order else f"order {order!r} is now {rules.order!r}"


def ticket_id(lesson_id: str, lineage: int, index: int) -> str:
    """``<lesson>-<lineage>-<index>``."""
    return f"{lesson_id}-{lineage}-{index}"


def parse_ticket_id(name: str) -> tuple[str, int, int]:
    """(lesson, lineage, index) of a ticket id.

    Raises:
        CheckpointError: it is not one.
    """
    parts = name.rsplit("-", 2)
    if len(parts) != 3 or not (parts[1].isdecimal() and parts[2].isdecimal()):
        raise CheckpointError(f"{name!r} is not a ticket id: it must be <lesson>-<lineage>-<index>")
    return parts[0], int(parts[1]), int(parts[2])


@dataclass(frozen=True, slots=True)
class Draw:
    """What a ticket is for: the `index`-th of its lesson, and the place of its problem; None where it has none."""

    lesson_id: str
    index: int
    place: Place | None = None

    @property
    def key(self) -> TicketKey:
        """Names it in every lineage."""
        return self.lesson_id, self.index

    @property
    def row(self) -> list[str | int]:
        """As a checkpoint has it."""
        return [self.lesson_id, self.index, *(self.place or ())]


def place_of(ticket: Ticket) -> Place | None:
    """Where its problem stands; None where the problem has no place."""
    return None if ticket.epoch is None or ticket.position is None else (ticket.epoch, ticket.position)


class TicketSampler:
    """Draws tickets in a sequence that the checkpoint can continue. It alone knows how far each lesson's epoch is.

    Args:
        run_seed: Every seed derives from it.
        lineage: Part of each id.
        chooser: Draws lessons.
        problems: By lesson; of one without them the seeds select the problems.

    Attributes:
        last_lesson: Of the newest draw; None before the first of this process.
        data_changes: By lesson, what `restore` found changed, so that another epoch begins.
    """

    def __init__(
        self, run_seed: int, lineage: int, chooser: LessonChooser, problems: Mapping[str, ProblemRules] | None = None
    ) -> None:
        self._run_seed = run_seed
        self._lineage = lineage
        self._chooser = chooser
        self.last_lesson: str | None = None
        self.data_changes: dict[str, str] = {}
        self._draws = 0
        self._next_index: dict[str, int] = {}
        self._epochs = {name: LessonEpochs(rules, run_seed, name) for name, rules in (problems or {}).items()}
        self._has_epochs = True

    def draw(self) -> Draw:
        """The lesson, index and problem of the next ticket."""
        lesson_id = self._chooser.sample_lesson(fold(self._run_seed, "lesson", self._draws))
        self._draws += 1
        self.last_lesson = lesson_id
        index = self._next_index.get(lesson_id, 0)
        self._next_index[lesson_id] = index + 1
        epochs = self._epochs.get(lesson_id)
        return Draw(lesson_id, index, None if epochs is None else epochs.draw())

    def redraw(self, lesson_id: str, index: int, *place: int) -> Draw:
        """A draw of the checkpoint after `restore`: the same, but for the problem where the data were changed."""
        epochs = self._epochs.get(lesson_id)
        if not place or epochs is None:
            return Draw(lesson_id, index)
        epoch, position = place
        return Draw(lesson_id, index, epochs.draw() if lesson_id in self.data_changes else (epoch, position))

    def ticket(self, draw: Draw, admitted_step: int, deadline_step: int) -> Ticket:
        """The ticket for one group, in this lineage."""
        epoch, position = draw.place or (None, None)
        return Ticket(
            ticket_id=ticket_id(draw.lesson_id, self._lineage, draw.index),
            lesson_id=draw.lesson_id,
            index=draw.index,
            seed=fold(self._run_seed, draw.lesson_id, draw.index),
            deadline_step=deadline_step,
            admitted_step=admitted_step,
            epoch=epoch,
            position=position,
            problem=None if draw.place is None else self._epochs[draw.lesson_id].problem(draw.place),
        )

    def finish(self, ticket: Ticket) -> None:
        """Its group was trained, or had no signal: the problem is done with in its epoch."""
        if (place := place_of(ticket)) is not None:
            self._epochs[ticket.lesson_id].finish(place)

    def fail(self, ticket: Ticket, reason: str) -> None:
        """Its group ended otherwise: the problem is drawn again in its epoch, or had its last retry."""
        if (place := place_of(ticket)) is not None and not self._epochs[ticket.lesson_id].fail(place):
            logger.warning("lesson %r: problem %d stays untrained in epoch %d, after its last retry: %s",
                           ticket.lesson_id, ticket.problem, ticket.epoch, " ".join(reason.split()))  # fmt: skip

    def metrics(self) -> dict[str, float]:
        """``data/…``: how often the problems were drawn, in epochs, and how many are untrained; none without epochs."""
        found = {f"data/{name}/epoch": e.epoch + e.position / e.rules.size for name, e in self._epochs.items()}
        if not found:
            return {}
        size = sum(e.rules.size for e in self._epochs.values())
        drawn = sum(e.epoch * e.rules.size + e.position for e in self._epochs.values())
        untrained = sum(e.untrained for e in self._epochs.values())
        return {**(found if len(found) > 1 else {}), "data/epoch": drawn / size, "data/untrained": float(untrained)}

    def was_drawn(self, lesson_id: str, index: int) -> bool:
        """Whether that group's ticket has been drawn already."""
        return index < self._next_index.get(lesson_id, 0)

    def state(self) -> dict[str, Any]:
        """The counters and epochs, JSON-serialisable."""
        counters = {"draws": self._draws, "next_index": dict(self._next_index)}
        if not self._has_epochs:
            return counters
        return {**counters, "problems": {name: epochs.state() for name, epochs in self._epochs.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes `state` back. One without epochs is of a run that had none, and gets none."""
        self._draws = int(state["draws"])
        self._next_index = {str(lesson): int(index) for lesson, index in state["next_index"].items()}
        self._has_epochs = "problems" in state
        if not self._has_epochs and self._epochs:
            logger.warning("the checkpoint is older than epochs: every group's problem is drawn anew, as until then")
            self._epochs = {}
        for lesson_id, epochs in self._epochs.items():
            saved = state["problems"].get(lesson_id)
            changed = None if saved is None else epochs.restore(saved)
            if changed is not None:
                logger.warning("lesson %r: %s: epoch %d begins", lesson_id, changed, epochs.epoch)
                self.data_changes[lesson_id] = f"{changed}: epoch {epochs.epoch} begins"
