"""In words, what the next update waits for: the message of a wait that took too long."""

from collections import Counter

from penstock.replay.issuer import TicketIssuer
from penstock.replay.outstanding import Outstanding


def describe_wait(issuer: TicketIssuer, groups_per_batch: int, now: float) -> str:
    """Names the lessons whose groups run, the oldest of them, and what must come first.

    Args:
        issuer: Its condition is held.
        groups_per_batch: What an update needs.
        now: Unix seconds.
    """
    outstanding = issuer.outstanding
    phases = Counter(entry.phase for entry in outstanding)
    running = [entry for entry in outstanding if entry.phase == "running"]
    missing = outstanding.missing(issuer.update)
    parts = [
        f"update {issuer.update} needs {groups_per_batch} groups, {outstanding.trainable} are ready",
        f"running: {_by_lesson(running, now)}",
        f"not yet taken by a worker: {phases['pending'] + phases['returned']}",
        f"being stored: {phases['waiting']}",
        f"must come first: {', '.join(f'{count} due by update {due}' for due, count in missing) or 'nothing'}",
        f"outstanding {len(outstanding)} of at most {issuer.limit}",
        f"serving version {issuer.serving_step}",
    ]
    if issuer.last_failure:
        parts.append(f"failed since the last batch: {issuer.failed_since_batch}, last {issuer.last_failure}")
    return "; ".join(parts)


def _by_lesson(running: list[Outstanding], now: float) -> str:
    if not running:
        return "nothing"
    counts = Counter(entry.ticket.lesson_id for entry in running)
    lessons = ", ".join(f"{lesson} {count}" for lesson, count in sorted(counts.items()))
    oldest = running[0]
    age = now - (oldest.since if oldest.since is not None else now)
    return f"{lessons} (oldest {oldest.ticket.ticket_id}, for {age:.1f} s)"
