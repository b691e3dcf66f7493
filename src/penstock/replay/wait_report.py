"""In words, what the next update waits for: the message of a wait that took too long."""

from collections import Counter

from penstock.replay.config import ReplayBufferConfig
from penstock.replay.issuer import TicketIssuer
from penstock.replay.outstanding import Outstanding
from penstock.replay.stock import Stock


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


def describe_stock(stock: Stock, unsealed: int, config: ReplayBufferConfig) -> str:
    """What an open buffer has; its condition is held.

    Args:
        stock: What waits.
        unsealed: Groups that are in no file yet.
        config: The buffer's.
    """
    parts = [
        f"an open buffer with {stock.waiting.rollouts} fresh rollouts, of which {stock.unused} were in no batch yet",
        f"an update needs {config.groups_per_batch}",
        f"in no file yet: {unsealed} groups",
        f"the learner is at version {stock.current}",
    ]
    return "; ".join(parts)


def _by_lesson(running: list[Outstanding], now: float) -> str:
    if not running:
        return "nothing"
    counts = Counter(entry.ticket.lesson_id for entry in running)
    lessons = ", ".join(f"{lesson} {count}" for lesson, count in sorted(counts.items()))
    oldest = running[0]
    age = now - (oldest.since if oldest.since is not None else now)
    return f"{lessons} (oldest {oldest.ticket.ticket_id}, for {age:.1f} s)"
