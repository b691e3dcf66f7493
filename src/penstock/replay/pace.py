"""How evenly lessons are served: who was overtaken, and who has not been trained for how long.

Overtaking is bounded by the deadlines, so no lesson starves; these numbers show it, and show a lesson that is slow.
"""

from collections.abc import Sequence

from penstock.replay.outstanding import Outstanding


class PaceMetrics:
    """Counts batch by batch."""

    def __init__(self) -> None:
        self._last_trained: dict[str, int] = {}

    def record(self, step: int, taken: Sequence[Outstanding], left: Sequence[Outstanding]) -> dict[str, float]:
        """Update `step` has its batch.

        Args:
            step: The update.
            taken: Groups that it trains for the first time.
            left: Groups that stay outstanding, in issue order.

        Returns:
            ``replay/overtakes`` (groups of the batch that passed one which is still outstanding), and for every lesson
            that is concerned ``replay/<lesson>/`` ``groups`` (in the batch), ``overtaken`` (most groups that have
            passed one of its groups) and ``starved_updates`` (since it was trained last, while it has groups).
        """
        for entry in left:
            entry.overtaken += sum(other.number > entry.number for other in taken)
        oldest = left[0].number if left else None
        metrics = {"replay/overtakes": float(sum(oldest is not None and entry.number > oldest for entry in taken))}
        trained = {entry.ticket.lesson_id for entry in taken}
        for lesson_id in sorted(trained.union(entry.ticket.lesson_id for entry in left)):
            mine = [entry for entry in (*taken, *left) if entry.ticket.lesson_id == lesson_id]
            if lesson_id in trained:
                self._last_trained[lesson_id] = step
            since = self._last_trained.setdefault(lesson_id, step - 1)
            metrics[f"replay/{lesson_id}/groups"] = float(sum(entry.ticket.lesson_id == lesson_id for entry in taken))
            metrics[f"replay/{lesson_id}/overtaken"] = float(max(entry.overtaken for entry in mine))
            metrics[f"replay/{lesson_id}/starved_updates"] = float(step - since)
        for lesson_id in self._last_trained.keys() - {entry.ticket.lesson_id for entry in left}:
            del self._last_trained[lesson_id]  # a lesson without groups waits for nothing
        return metrics
