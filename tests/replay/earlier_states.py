"""Runs that end anywhere, as JSON: the states of their newest checkpoint, what their files say, and what follows."""

from tests.replay.open_buffers import Open, ids

from penstock.batch import RecencyBatchMaker
from penstock.replay import ReplayBufferConfig, StoreConfig
from penstock.replay.history import StoredBatch
from penstock.types import RolloutRecord, WeightVersion

RUNS = {
    "asynchronous": {"groups_per_batch": 3, "staleness_budget": 2, "max_samples": 2, "max_rollout_step_delay": 4},
    "synchronous": {"groups_per_batch": 3, "staleness_budget": 0},
}
"""Configs of paced runs, by name."""
OPEN = {"capacity": 40, "max_samples": 2, "max_rollout_step_delay": 4, "staleness_budget": 1}
WORLD = {"outcome_seed": 1, "ahead": 1, "failing": 0.1, "flat": 0.2, "malformed": 0.1}


def config_of(run):
    return ReplayBufferConfig(**RUNS[run], store=StoreConfig(buffer_size=4), max_filtered_groups_per_batch=10_000)


def disk_of(sim, path, files=None):
    """A store; with what a dead life's files said."""
    disk = sim.MemoryStore(path / "lineages.jsonl")
    if files is not None:
        disk.tickets.rows, disk.fates.rows = list(files["tickets"]), list(files["fates"])
        disk.batches = [StoredBatch(i, WeightVersion(*version), tuple(of)) for i, version, of in files["batches"]]
        for name, group_key, (reward, oldest, newest, time) in files["sealed"]:
            rollout = sim.make_rollout(name, reward=reward, weight_step=oldest, newest_step=newest, timestamp=time)
            disk.sealed[name] = RolloutRecord(rollout, name.rpartition("/")[0], group_key)
    return disk


def files_of(disk):
    """What `disk_of` reads."""

    def facts(rollout):
        stamp = rollout.metadata
        return [rollout.episode_reward, stamp.weight_step, rollout.newest_weight_step, stamp.timestamp]

    return {
        "tickets": [{"ticket_id": row["ticket_id"], "rollouts": row["rollouts"]} for row in disk.tickets.rows],
        "fates": [{k: row[k] for k in ("rollout_id", "fate", "lineage", "step")} for row in disk.fates.rows],
        "batches": [[b.batch_id, [b.version.lineage, b.version.step], list(b.rollout_ids)] for b in disk.batches],
        "sealed": [[name, record.group_key, facts(record.rollout)] for name, record in disk.sealed.items()],
    }


def resume_paced(sim, path, run, made):
    """What the next life makes of it: its books, its own states, and its next updates."""
    disk = disk_of(sim, path, made["files"])
    world = sim.World(schedule_seed=5, **WORLD)
    life = sim.Simulation(config_of(run), world, disk, disk.open_ledger(1), 1, made["states"])
    life.now = made["now"]
    life.buffer.check_ledger()
    followed = {"ledger": life.ledger.snapshot()}
    with life.buffer.boundary():
        followed |= {"issuer": life.issuer.state(), "replay": life.buffer.state()}
    followed["trained"] = [list(update.batch.group_ids) for update in life.run(life.step + 4)]
    return followed | {"ended": life.ledger.snapshot()}


def open_life(sim, path, files=None, states=None, lineage=0):
    maker = RecencyBatchMaker(max_tokens=16, max_samples=2, seed=1)
    return Open(sim, maker, disk_of(sim, path, files), states, lineage, **OPEN)


def resume_open(sim, path, made):
    """What the next life of an open buffer makes of it."""
    life = open_life(sim, path, made["files"], made["states"], 1)
    life.now = made["now"]
    life.buffer.check_ledger()
    followed = {"ledger": life.counts(), "replay": life.buffer.state(), "trained": []}
    for step in range(made["step"], made["step"] + 3):
        followed["trained"].append(ids(life.buffer.sample(2)))
        life.buffer.set_current_step(step + 1)
    return followed | {"ended": life.counts()}
