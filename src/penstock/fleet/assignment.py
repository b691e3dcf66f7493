"""Which task every simulator process plays: by the tasks' shares, evenly mixed over the workers."""

from penstock.fleet.config import FleetConfig


def assign_tasks(config: FleetConfig, worker_index: int = 0) -> tuple[str, ...]:
    """Tasks of one worker's processes.

    Every task gets one of the fleet's processes, the others go by share (largest remainder first). The sequence mixes
    them evenly, so that any stretch of it, such as one worker's, holds them in about these parts.

    Args:
        config: Tasks, workers, processes.
        worker_index: Which of `config.workers`; one beyond them (after scaling up) takes the same as the one it is
            modulo their number.

    Returns:
        A task name for each process of the worker.
    """
    per_worker = config.processes_per_worker
    counts = _counts({name: task.share for name, task in config.tasks.items()}, config.workers * per_worker)
    places = sorted(
        ((number + 0.5) / count, order, name)
        for order, (name, count) in enumerate(counts.items())
        for number in range(count)
    )
    begin = worker_index % config.workers * per_worker
    return tuple(name for _, _, name in places[begin : begin + per_worker])


def _counts(shares: dict[str, float], processes: int) -> dict[str, int]:
    """One process for each task, the rest by share; they add up to `processes`."""
    counts = dict.fromkeys(shares, 1)
    whole = sum(shares.values())
    for _ in range(processes - len(shares)):
        most_owed = max(shares, key=lambda name: shares[name] / whole * processes - counts[name])
        counts[most_owed] += 1
    return counts
