"""A small run of the real classes in a process of its own, made to be killed: ``killed_run.py DIRECTORY STEPS``.

Starts or resumes the run, prints the first and then each further step, and ends at STEPS. Generators take
milliseconds; everything else is the production code, files and threads included.
"""

import json
import random
import sys
import threading
import time
from pathlib import Path

import simulation

from penstock.batch import DeadlineBatchMaker
from penstock.replay import ReplayBuffer, ReplayBufferConfig, RolloutStore, StoreConfig, TicketIssuer
from penstock.rundir import RunDirectory, write_atomically
from penstock.types import Stopped

CONFIG = ReplayBufferConfig(
    groups_per_batch=3, staleness_budget=1, store=StoreConfig(buffer_size=4), max_failed_groups_per_batch=10_000
)
CHECKPOINT_EVERY = 3


def newest_checkpoint(directory: RunDirectory) -> dict | None:
    paths = sorted(directory.checkpoints.glob("*.json"), key=lambda path: int(path.stem))
    return json.loads(paths[-1].read_text()) if paths else None


def work(issuer: TicketIssuer, buffer: ReplayBuffer, serving: list[int], number: int) -> None:
    rng = random.Random(time.time_ns() + number)
    try:
        while True:
            for ticket in issuer.acquire(2, 1.0):
                version = serving[0]
                time.sleep(rng.random() * 0.004)
                if rng.random() < 0.1:
                    issuer.fail(ticket, "invalid", "the environment raised")
                    continue
                rewards = [rng.random() for _ in range(simulation.GROUP_SIZES[ticket.lesson_id])]
                group = simulation.make_group(
                    ticket, rewards, weight_step=version, timestamp=time.time(), lineage=issuer.lineage
                )
                simulation.deliver(buffer, group)
    except Stopped:
        pass


def main(path: str, steps: int) -> None:
    directory = RunDirectory(path)
    if directory.config_path.exists():
        directory = RunDirectory.open_existing(path)
    else:
        directory = RunDirectory.create(path, {})
    states = newest_checkpoint(directory)
    store = RolloutStore(directory)
    lineage = store.lineages.newest + 1 if states is not None else 0
    ledger, curriculum = store.open_ledger(lineage), simulation.Curriculum()
    issuer = TicketIssuer(CONFIG, 7, lineage, curriculum, ledger, simulation.GROUP_SIZES.__getitem__)
    maker = DeadlineBatchMaker(max_tokens=16)
    buffer = ReplayBuffer(CONFIG, store, maker, issuer, curriculum_hook=curriculum.update)
    if states is not None:
        curriculum.restore(states["curriculum"])
        issuer.restore(states["issuer"])
        buffer.restore(states["replay"])
    step = issuer.update
    serving = [step]

    def checkpoint() -> None:
        with buffer.boundary():
            states = {"curriculum": curriculum.state(), "issuer": issuer.state(), "replay": buffer.state()}
        write_atomically(directory.checkpoints / f"{step}.json", json.dumps(states))

    if states is None:
        checkpoint()
    print(step, flush=True)
    workers = [
        threading.Thread(target=work, args=(issuer, buffer, serving, number), daemon=True) for number in range(3)
    ]
    for worker in workers:
        worker.start()
    issuer.set_serving_step(step)
    while step < steps:
        buffer.next_batch(step, 30.0)
        buffer.finish_update(step)
        step += 1
        buffer.set_current_step(step)
        buffer.check_ledger()
        if step % CHECKPOINT_EVERY == 0:
            checkpoint()
        serving[0] = step
        issuer.set_serving_step(step)
        print(step, flush=True)
    buffer.close()
    for worker in workers:
        worker.join(10)
    checkpoint()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(sys.argv[1], int(sys.argv[2]))
