"""A small run of the real classes, made to be killed: ``killed_run.py`` forks a life for every line it reads.

A line is ``[directory, steps, variant]`` as JSON. A life starts or resumes the run in that directory, says ``ready``
with its ledger, prints each further step, and ends at STEPS; before it comes ``life PID``, after it ``exit CODE``.
Forking keeps half a second of imports out of every life; the parent does nothing but import and fork, so a life
begins as a fresh process would. Generators take milliseconds; all else is production code, files and threads included.
"""

import json
import logging
import os
import random
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import pandas  # noqa: F401  (Arrow would import it in every life)
import simulation
from tests.fragments_made import a_batch, make_fragment

from penstock.batch import DeadlineBatchMaker, FragmentBatchMaker, RecencyBatchMaker
from penstock.replay import (
    FRAGMENTS,
    LANGUAGE,
    FileRolloutStorage,
    FragmentReplayConfig,
    OpenAdmission,
    PacedReplayBuffer,
    ReplayBuffer,
    ReplayBufferConfig,
    RolloutReceiver,
    RolloutStore,
    StoreConfig,
    TicketIssuer,
    TicketRules,
)
from penstock.rundir import RunDirectory, write_atomically
from penstock.types import RolloutBatch, RolloutSink, Stopped, Ticket

logging.getLogger("penstock.replay").setLevel(logging.ERROR)  # fates.jsonl says what leaves untrained
FILES = {"buffer_size": 4, "compact_parts": 4, "compact_rollouts": 32, "compact_after_s": 0}
PACED = {"groups_per_batch": 3, "staleness_budget": 1, "max_failed_groups_per_batch": 10_000}
OPEN = {"groups_per_batch": 3, "staleness_budget": 1, "max_rollout_step_delay": 2, "capacity": 40, "max_samples": 3}
FLEET = {"fragments_per_batch": 3, "max_staleness": 2, "max_samples": 2, "max_waiting": 6, "capacity": 40}
VARIANTS = {
    "plain": ReplayBufferConfig(**PACED, store=StoreConfig(**FILES)),
    "reuse": ReplayBufferConfig(**PACED, max_samples=2, store=StoreConfig(**FILES)),
    "spool": ReplayBufferConfig(**PACED, store=StoreConfig(**FILES)),
    "expiring": ReplayBufferConfig(**PACED, store=StoreConfig(**FILES, max_bytes=300_000)),
    "open": ReplayBufferConfig(**OPEN, store=StoreConfig(**FILES)),
    "fragments": FragmentReplayConfig(**FLEET, store=StoreConfig(**FILES)).buffer_config(),
}
"""`spool`: rollouts pass through files on their way to the buffer; `open`: nothing is paced; nor are `fragments` of
simulators."""

CHECKPOINT_EVERY = 3


def say(*words: object) -> None:
    """Prints a line in one write, which a kill leaves whole or undone (unbuffered, `print` would take several)."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def newest_checkpoint(directory: RunDirectory) -> dict | None:
    paths = sorted(directory.checkpoints.glob("*.json"), key=lambda path: int(path.stem))
    return json.loads(paths[-1].read_text()) if paths else None


@dataclass
class Life:
    """One process's part of a run.

    Attributes:
        directory: Of the run.
        variant: Name of its configuration.
        step: The version that the learner holds; generators use `serving`.
    """

    directory: RunDirectory
    variant: str
    step: int = 0
    serving: int = 0
    threads: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.config = VARIANTS[self.variant]
        states = newest_checkpoint(self.directory)
        experience = FRAGMENTS if self.variant == "fragments" else LANGUAGE
        self.store = store = RolloutStore(self.directory, self.config.store, experience=experience)
        self.lineage = store.lineages.newest + 1 if states is not None else 0
        ledger, self.curriculum = store.open_ledger(self.lineage), simulation.Curriculum()
        if self.variant in ("open", "fragments"):
            self.issuer, self.admission = None, OpenAdmission(ledger, self.lineage)
            maker = RecencyBatchMaker(unit="group", max_samples=self.config.max_samples, max_tokens=16)
            if self.variant == "fragments":
                maker = FragmentBatchMaker(max_samples=self.config.max_samples)
        else:
            rules = TicketRules(7, self.curriculum, simulation.GROUP_SIZES.__getitem__)
            self.issuer = TicketIssuer(self.config, rules, self.lineage, ledger)
            self.admission = self.issuer
            maker = DeadlineBatchMaker(max_samples=self.config.max_samples, max_tokens=16)
        front = ReplayBuffer if self.issuer is None else PacedReplayBuffer
        self.buffer = front(self.config, store, maker, self.admission)
        self.buffer.pool.on_group = self.curriculum.update
        if states is not None:
            self._restore(states)
        self.buffer.check_ledger()
        self.step = self.serving = self.admission.update
        if states is None:
            self.checkpoint()
        say("ready", json.dumps({"step": self.step, **ledger.snapshot()}))

    def _restore(self, states: dict) -> None:
        self.curriculum.restore(states["curriculum"])
        if self.issuer is not None:
            self.issuer.restore(states["issuer"])
        self.buffer.restore(states["replay"])

    def checkpoint(self) -> None:
        with self.buffer.boundary():
            states = {"curriculum": self.curriculum.state(), "replay": self.buffer.state()}
            if self.issuer is not None:
                states["issuer"] = self.issuer.state()
        write_atomically(self.directory.checkpoints / f"{self.step}.json", json.dumps(states))
        self.buffer.checkpoint_saved()

    def run(self, steps: int) -> None:
        """Trains to that version."""
        self._start_workers()
        self.serve()
        while self.step < steps:
            self.buffer.next_batch(self.step, 30.0)
            self.buffer.finish_update(self.step)
            self.step += 1
            self.buffer.set_current_step(self.step)
            self.buffer.check_ledger()
            if self.step % CHECKPOINT_EVERY == 0:
                self.checkpoint()
            self.serve()
            say(self.step)
        self.buffer.close()
        for thread in self.threads:
            thread.join(10)
        self.checkpoint()
        self.store.close()

    def serve(self) -> None:
        self.serving = self.step
        if self.issuer is not None:
            self.issuer.set_serving_step(self.step)

    def _start_workers(self) -> None:
        sinks: list[RolloutSink] = [self.buffer] * 3
        if self.variant == "spool":
            spool = FileRolloutStorage(self.directory.path / "spool")
            sinks = [spool.writer(f"worker-{number}") for number in range(3)]
            receiver = RolloutReceiver(spool, self.buffer)
            self.threads.append(threading.Thread(target=receiver.run, daemon=True))
        for number, sink in enumerate(sinks):
            self.threads.append(threading.Thread(target=self._work, args=(sink, number), daemon=True))
        for thread in self.threads:
            thread.start()

    def _work(self, sink: RolloutSink, number: int) -> None:
        rng = random.Random(time.time_ns() + number)
        made = 0
        try:
            while True:
                for ticket in self._tickets(number, made):
                    made += 1
                    self._generate(ticket, sink, rng)
        except Stopped:
            pass

    def _tickets(self, number: int, made: int) -> list[Ticket]:
        if self.issuer is not None:
            return self.issuer.acquire(2, 1.0)
        lesson_id = sorted(simulation.GROUP_SIZES)[made % 2]
        ticket = Ticket(f"{lesson_id}-{self.lineage}-{3 * made + number}", lesson_id, made, made, 0, self.serving)
        if number == 0:  # the others leave it to the buffer to count what arrives
            size = 1 if self.variant == "fragments" else simulation.GROUP_SIZES[lesson_id]
            self.admission.start(ticket.ticket_id, lesson_id, size)
        return [ticket]

    def _generate(self, ticket: Ticket, sink: RolloutSink, rng: random.Random) -> None:
        version = self.serving
        time.sleep(rng.random() * 0.004)
        if self.issuer is not None and rng.random() < 0.1:
            self.issuer.fail(ticket, "invalid", "the environment raised")
            return
        if self.variant == "fragments":
            fields = {"timestamp": time.time(), "lineage": self.lineage, "task": ticket.lesson_id}
            sink.add_batches([a_batch(make_fragment(ticket.ticket_id, weight_steps=version, **fields))])
            return
        rewards = [rng.random() for _ in range(simulation.GROUP_SIZES[ticket.lesson_id])]
        group = simulation.make_group(ticket, rewards, weight_step=version, timestamp=time.time(), lineage=self.lineage)
        sink.add_batches([RolloutBatch.of((group,))])


def live(path: str, steps: int, variant: str) -> int:
    """One life in this process; its exit status."""
    try:
        directory = RunDirectory(path)
        directory = RunDirectory.open_existing(path) if directory.config_path.exists() else _create(path, variant)
        Life(directory, variant).run(steps)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _create(path: str, variant: str) -> RunDirectory:
    kind = {"fleet": {}} if variant == "fragments" else {}
    return RunDirectory.create(path, {**kind, "replay": VARIANTS[variant].model_dump(mode="json")})


def main() -> None:
    for line in sys.stdin:
        path, steps, variant = json.loads(line)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of other threads, which are idle: from Python 3.12 on
            pid = os.fork()
        if pid == 0:
            say("life", os.getpid())
            os._exit(live(path, steps, variant))
        _, status = os.waitpid(pid, 0)
        say("exit", os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
