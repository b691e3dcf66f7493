"""Open buffers on a virtual clock, and a batch maker that keeps what it is given."""

from dataclasses import replace

from penstock.batch import BatchMaker, example_from_rollout
from penstock.replay import OpenAdmission, ReplayBuffer, ReplayBufferConfig, StoreConfig
from penstock.types import RolloutGroup, Ticket


class Open:
    """An open buffer on a virtual clock; groups are numbered."""

    def __init__(self, sim, makers, store=None, states=None, lineage=0, **config):
        self.sim, self.now, self.made = sim, 1000.0, 0
        self.store = sim.MemoryStore() if store is None else store
        self.admission = OpenAdmission(self.store.open_ledger(lineage), lineage)
        settings = {"store": StoreConfig(buffer_size=1), **config}
        self.config = ReplayBufferConfig(**settings)
        self.buffer = ReplayBuffer(self.config, self.store, makers, self.admission, lambda: self.now)
        if states is not None:
            self.buffer.restore(states)

    def group(self, rewards=(0.0, 1.0), env_name=None, lesson="easy", number=None, **fields):
        number = self.made if number is None else number
        self.made = max(self.made, number + 1)
        ticket = Ticket(f"{lesson}-0-{number}", lesson, number, number, 0, 0)
        group = self.sim.make_group(ticket, rewards, **{"timestamp": self.now, "weight_step": 0, **fields})
        if env_name is None:
            return group
        return RolloutGroup(group.key, tuple(rename(r, env_name) for r in group.rollouts), group.group_id)

    def add(self, *groups):
        self.sim.deliver(self.buffer, *groups)
        self.buffer.check_ledger()

    def counts(self):
        return {k: v for k, v in self.buffer.pool.ledger.snapshot().items() if v}


def rename(rollout, env_name):
    return replace(rollout, env_name=env_name)


def ids(batch):
    return [i for example in batch.examples for i in example.rollout_ids]


class Hoarder(BatchMaker):
    """One's own maker with the three methods alone: it forgets nothing and offers the same again and again."""

    def __init__(self):
        self.rollouts = []

    def add_rollout(self, rollout):
        self.rollouts.append(rollout)

    def create_batch(self, batch_size):
        return [example_from_rollout(rollout, 1.0, 16) for rollout in self.rollouts[:batch_size]] or None

    def get_batch_metadata(self, batch):
        return {"metrics": {"train/examples": len(batch)}}
