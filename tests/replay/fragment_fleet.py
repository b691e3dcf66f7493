"""A buffer of fragments in a run directory, driven by hand."""

from tests.fragments_made import a_batch, make_fragment
from tests.replay.open_buffers import ids

from penstock.batch import FragmentBatchMaker
from penstock.replay import (
    FRAGMENTS,
    FragmentReplayConfig,
    OpenAdmission,
    ReplayBuffer,
    RolloutStore,
    SampledBatches,
)
from penstock.rundir import RunDirectory, read_json_lines

STORE = {"buffer_size": 1, "compact_parts": 0}


class Fleet:
    """A buffer of fragments in a run directory, on a virtual clock; fragments are numbered."""

    def __init__(self, path, states=None, store=None, begun_anew=0, **config):
        self.now, self.made = 1000.0, 0
        self.directory = RunDirectory(path) if path.exists() else RunDirectory.create(path, {})
        self.config = FragmentReplayConfig(**{"fragments_per_batch": 2, "store": {**STORE, **(store or {})}, **config})
        self.store = RolloutStore(self.directory, self.config.store, lambda: self.now, FRAGMENTS)
        lineage = begun_anew if states is None else self.store.lineages.newest + 1
        self.admission = OpenAdmission(self.store.open_ledger(lineage), lineage)
        maker = FragmentBatchMaker(self.config.order, self.config.max_samples)
        self.buffer = ReplayBuffer(self.config.buffer_config(), self.store, maker, self.admission, lambda: self.now)
        if states is not None:
            self.buffer.restore(states)
        elif begun_anew:
            self.buffer.begin_anew()
        self.source = SampledBatches(self.buffer, self.config.fragments_per_batch)

    def fragment(self, **fields):
        self.made += 1
        return make_fragment(f"cart-w0-{self.admission.lineage}-{self.made - 1}", **{"timestamp": self.now, **fields})

    def add(self, *fragments):
        self.buffer.add_batches([a_batch(*fragments)])
        self.buffer.check_ledger()

    def update(self, step):
        batch = self.source.next_batch(step, 5.0)
        self.source.finish_update(step)
        self.source.set_current_step(step + 1)
        self.buffer.check_ledger()
        return ids(batch)

    def counts(self):
        return {k: v for k, v in self.buffer.pool.ledger.snapshot().items() if v}

    def reasons(self):
        return [row["reason"] for row in read_json_lines(self.directory.fates_path)]

    def save(self):
        with self.buffer.boundary():
            return self.buffer.state()

    def end(self):
        self.buffer.flush()  # another thread may be at it
        self.buffer.close()
        self.store.close()
