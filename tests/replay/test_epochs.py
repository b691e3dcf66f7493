"""Each problem is trained once per epoch, whatever fails, crashes, is resumed, or finishes first.

The real issuer, buffer, recovery and batch makers; looked at is what was generated, not what its ticket said.
"""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.batch import BatchMakerConfig
from penstock.replay import ProblemRules, ReplayBufferConfig, StoreConfig
from penstock.replay.draws import permuted
from penstock.types import fold

QUIET = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SIZES = {"easy": 11, "hard": 4}


def rules(retries=3, sizes=SIZES, digest="first"):
    return {lesson: ProblemRules(size, digest, "shuffle", retries) for lesson, size in sizes.items()}


def config_of(s, **changes):
    fields = dict(
        groups_per_batch=3,
        staleness_budget=s,
        max_failed_groups_per_batch=10_000,
        max_filtered_groups_per_batch=10_000,
        straggler_timeout_s=1e6,
        store=StoreConfig(buffer_size=2),
    )
    return ReplayBufferConfig(**fields | changes)


@st.composite
def worlds(draw):
    return dict(
        outcome_seed=draw(st.integers(0, 10_000)),
        slots=draw(st.integers(1, 12)),
        failing=draw(st.sampled_from([0.0, 0.1, 0.5])),
        flat=draw(st.sampled_from([0.0, 0.3])),
        malformed=draw(st.sampled_from([0.0, 0.15])),
        hanging=draw(st.sampled_from([0.0, 0.1])),
        slow=draw(st.sampled_from([0.0, 0.5])),
        ahead=draw(st.integers(0, 2)),
    )


class Books:
    """What a run's files and its newest life say about places; a place is (lesson, epoch, position)."""

    def __init__(self, disk, life, sizes=SIZES):
        history, state = disk.history(), life.issuer.state()
        uses = history.uses(lambda version: disk.lineages.survives(version, life.issuer.lineage), life.step)
        self.trained = Counter[tuple[str, int, int]]()
        self.problems = Counter[tuple[str, int, int]]()
        for group_id in {rollout_id.rpartition("/")[0] for rollout_id in uses}:
            place = self._place(history, group_id)
            record = disk.sealed[f"{group_id}/0"] if f"{group_id}/0" in disk.sealed else disk.sealed[f"{group_id}/1"]
            asked = int(record.group_key.removeprefix("words:"))
            lesson, epoch, position = place
            assert asked == permuted(position, sizes[lesson], fold(7, "epoch", lesson, epoch))
            self.trained[place] += 1
            self.problems[lesson, epoch, asked] += 1
        filtered = {i.rpartition("/")[0] for i, fate in history.fates.items() if fate.fate == "filtered"}
        self.filtered = {self._place(history, group_id) for group_id in filtered} - self.trained.keys()
        rows = [(row[1], *row[5:]) for row in state["outstanding"]] + [(row[0], *row[2:]) for row in state["unplaced"]]
        self.open = set(map(tuple, rows))
        assert len(self.open) == len(rows)
        self.done, self.untrained = set(), 0
        for lesson, epochs in state["problems"].items():
            again = {(lesson, *place) for place in epochs["again"]}
            assert not again & self.open
            drawn = {(lesson, e, p) for e in range(epochs["epoch"]) for p in range(sizes[lesson])}
            drawn |= {(lesson, epochs["epoch"], p) for p in range(epochs["position"])}
            assert self.open - drawn == {place for place in self.open if place[0] != lesson}
            self.done |= drawn - again - self.open
            self.untrained += epochs["untrained"]

    @staticmethod
    def _place(history, group_id):
        return (group_id.rsplit("-", 2)[0], *history.places[group_id])

    def check(self):
        assert set(self.trained.values()) <= {1} and set(self.problems.values()) <= {1}
        assert self.trained.keys() <= self.done
        assert len(self.done - self.trained.keys() - self.filtered) <= self.untrained


@settings(QUIET, max_examples=10)
@given(worlds(), st.integers(0, 10_000), st.integers(0, 3), st.booleans(), st.integers(0, 3), st.sampled_from([1, 2]))
def test_every_problem_is_trained_or_filtered_once_per_epoch_or_counted(
    sim, tmp_path_factory, world, schedule, s, filtering, retries, samples
):
    disk = sim.MemoryStore(tmp_path_factory.mktemp("run") / "lineages.jsonl")
    maker = BatchMakerConfig(filter_zero_variance=filtering)
    config = config_of(s, batch_maker=maker, max_samples=samples, straggler_timeout_s=50)
    life = sim.Simulation(
        config, sim.World(schedule_seed=schedule, **world), disk, disk.open_ledger(), problems=rules(retries)
    )
    life.run(16)
    books = Books(disk, life)
    books.check()
    assert len(books.done) == len(books.trained) + len(books.filtered) + books.untrained
    numbers = life.buffer.metrics()
    assert numbers["data/untrained"] == books.untrained
    assert numbers["data/epoch"] == pytest.approx((len(books.done | books.open) + to_draw_again(life)) / 15)
    assert sum(books.trained.values()) + len(books.filtered) > 15 or books.untrained > 0


def to_draw_again(life):
    return sum(len(epochs["again"]) for epochs in life.issuer.state()["problems"].values())


def live_and_crash(sim, disk, config, world, lives, every, oldest=False):
    """Lives that end anywhere, each resumed from the newest or the oldest checkpoint; the books fit after each."""
    states, checkpoints = None, {}

    def begin(schedule):
        lineage = 0 if states is None else disk.lineages.newest + 1
        made = sim.World(schedule_seed=schedule, **world | {"hanging": 0.0})
        return sim.Simulation(config, made, disk, disk.open_ledger(lineage), lineage, states, every, rules())

    for events, schedule in lives:
        life = begin(schedule)
        with pytest.raises(AssertionError, match="no end after"):
            life.run(10_000, most_events=events)
        checkpoints |= life.checkpoints
        if not checkpoints:
            return
        states = checkpoints[(min if oldest else max)(checkpoints)]
        Books(disk, life).check()
    last = begin(0)
    last.run(last.step + 8)
    Books(disk, last).check()


@pytest.mark.slow
@settings(QUIET, max_examples=60)
@given(
    world=worlds(),
    s=st.integers(0, 3),
    samples=st.sampled_from([1, 2]),
    lives=st.lists(st.tuples(st.integers(1, 250), st.integers(0, 1000)), min_size=1, max_size=4),
    filtering=st.booleans(),
    every=st.integers(1, 3),
    oldest=st.booleans(),
    maker=st.sampled_from(["deadline", "recency", "grpo"]),
)
def test_it_stays_so_over_crashes_at_any_point_and_resumes_from_any_checkpoint(
    sim, tmp_path_factory, world, s, samples, lives, filtering, every, oldest, maker
):
    config = config_of(s, max_samples=samples, batch_maker=BatchMakerConfig(name=maker, filter_zero_variance=filtering))
    disk = sim.MemoryStore(tmp_path_factory.mktemp("run") / "lineages.jsonl")
    live_and_crash(sim, disk, config, world, lives, every, oldest)


@pytest.mark.parametrize("seed", range(4))
def test_it_stays_so_over_three_crashes(sim, tmp_path, seed):
    world = dict(outcome_seed=seed, failing=0.4, malformed=0.1, slow=0.5, ahead=1)
    disk = sim.MemoryStore(tmp_path / "lineages.jsonl")
    live_and_crash(sim, disk, config_of(seed % 3 + 1), world, [(150, 1), (60, 2), (90, 3)], every=2)
    assert disk.lineages.newest == 3


@settings(QUIET, max_examples=10)
@given(worlds(), worlds(), st.integers(0, 1000), st.integers(0, 1000))
def test_at_staleness_zero_the_places_depend_on_tickets_alone(sim, world, other, schedule, other_schedule):
    config = config_of(0)
    same = {key: world[key] for key in ("outcome_seed", "failing", "flat", "malformed")} | {"hanging": 0.0}
    runs = []
    for made, seed in ((world | same, schedule), (other | same, other_schedule)):
        life = sim.Simulation(config, sim.World(schedule_seed=seed, **made), problems=rules())
        runs.append([(t.lesson_id, t.epoch, t.position, t.index) for t in trained_tickets(life.run(8), life)])
    assert runs[0] == runs[1] and len(runs[0]) == 24


def trained_tickets(updates, life):
    return [life.admitted[group_id] for update in updates for group_id in update.batch.group_ids]


@pytest.mark.parametrize("fate", ["invalid", "aborted"])
def test_a_ticket_that_is_given_back_brings_its_problem_back_first(sim, fate):
    life = sim.Simulation(config_of(1), sim.World(slots=0), problems=rules())
    tickets = life.issuer.acquire(6, 0)
    failed = tickets[2]
    life.issuer.fail(failed, fate, "because")
    again = []
    while not again:
        for ticket in life.issuer.acquire(1, 0):
            if ticket.lesson_id == failed.lesson_id:
                again.append(ticket)
            else:
                life.issuer.fail(ticket, fate, "because")
    assert (again[0].epoch, again[0].position, again[0].problem) == (failed.epoch, failed.position, failed.problem)
    assert again[0].index > failed.index and again[0].seed != failed.seed


def states_of(life):
    with life.buffer.boundary():
        return {"curriculum": life.curriculum.state(), "issuer": life.issuer.state(), "replay": life.buffer.state()}


def rewards(sim, ticket):
    return [0.0, 1.0, 0.5][: sim.GROUP_SIZES[ticket.lesson_id]]


@pytest.mark.parametrize(("fate", "limits"), [("evicted", {"capacity": 1}), ("stale_time", {})])
def test_what_waited_and_was_dropped_is_drawn_again(sim, fate, limits):
    config = config_of(2, max_rollout_timestamp_delay=100.0, **limits)
    life = sim.Simulation(config, sim.World(slots=0), problems=rules())
    [ticket] = life.issuer.acquire(1, 0)
    sim.deliver(life.buffer, sim.make_group(ticket, rewards(sim, ticket), timestamp=life.now))
    if fate == "stale_time":
        life.now += 101
        life.buffer.set_current_step(0)
    assert life.ledger.snapshot()[fate] == sim.GROUP_SIZES[ticket.lesson_id]
    assert life.issuer.state()["problems"][ticket.lesson_id]["again"] == [[0, 0]]


def test_what_has_no_signal_is_done_with_in_its_epoch(sim):
    config = config_of(2, batch_maker=BatchMakerConfig(filter_zero_variance=True))
    life = sim.Simulation(config, sim.World(slots=0), problems=rules())
    [ticket] = life.issuer.acquire(1, 0)
    flat = [0.5] * sim.GROUP_SIZES[ticket.lesson_id]
    sim.deliver(life.buffer, sim.make_group(ticket, flat, timestamp=life.now))
    epochs = life.issuer.state()["problems"][ticket.lesson_id]
    assert epochs["again"] == epochs["failures"] == [] and epochs["position"] == 1
    assert len(life.issuer.outstanding) == 0


def test_changed_data_begin_an_epoch_and_what_was_generated_of_the_old_is_rolled_back(sim, tmp_path):
    disk = sim.MemoryStore(tmp_path / "lineages.jsonl")
    dead = sim.Simulation(config_of(1), sim.World(slots=0), disk, disk.open_ledger(), problems=rules())
    tickets = dead.issuer.acquire(6, 0)
    sim.deliver(dead.buffer, sim.make_group(tickets[0], rewards(sim, tickets[0]), timestamp=dead.now))
    states = states_of(dead)
    changed = rules(sizes={"easy": 3, "hard": 4}, digest="second")
    world = sim.World(slots=0)
    resumed = sim.Simulation(config_of(1), world, disk, disk.open_ledger(1), 1, states, problems=changed)
    assert resumed.issuer.data_changes == {
        "easy": "11 problems are now 3: epoch 1 begins",
        "hard": "the 4 problems are others than before: epoch 1 begins",
    }
    assert resumed.ledger.snapshot()["rolled_back"] == sim.GROUP_SIZES[tickets[0].lesson_id]
    again = resumed.issuer.acquire(6, 0)
    assert [(t.lesson_id, t.index) for t in again] == [(t.lesson_id, t.index) for t in tickets]
    places = {(t.lesson_id, t.epoch, t.position) for t in again}
    assert len(places) == 6 and min(epoch for _, epoch, _ in places) == 1
    assert all(t.problem < changed[t.lesson_id].size for t in again)
    resumed.buffer.check_ledger()


def test_a_group_of_a_dead_life_is_claimed_for_its_own_problem_only(sim, tmp_path):
    """After the resume another group fails first, so the index of a sealed group stands for a problem drawn again."""
    only_easy = {"easy": ProblemRules(11, "first")}
    disk = sim.MemoryStore(tmp_path / "lineages.jsonl")

    def begin(lineage, states=None):
        life = sim.Simulation(
            config_of(3, groups_per_batch=2),
            sim.World(slots=0),
            disk,
            disk.open_ledger(lineage),
            lineage,
            states,
            problems=only_easy,
        )
        life.curriculum.sample_lesson = lambda seed: "easy"
        return life

    dead = begin(0)
    [first] = dead.issuer.acquire(1, 0)
    states = states_of(dead)
    [late] = dead.issuer.acquire(1, 0)
    assert late.position == first.position + 1
    sim.deliver(dead.buffer, sim.make_group(late, [0.0, 1.0], timestamp=dead.now))
    dead.buffer.flush()

    resumed = begin(1, states)
    [running] = resumed.issuer.acquire(1, 0)
    assert running.position == first.position
    resumed.issuer.fail(running, "invalid", "because")
    [again] = resumed.issuer.acquire(1, 0)  # of the sealed group's index, for the problem that failed
    assert (again.index, again.position) == (late.index, first.position)
    assert resumed.ledger.snapshot()["rolled_back"] == 2
    [following] = resumed.issuer.acquire(1, 0)
    assert (following.position, following.problem) == (late.position, late.problem)
    resumed.buffer.check_ledger()
