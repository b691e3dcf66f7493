"""Files and log lines that cannot be read any more: put aside and told; the run resumes, and its books close."""

import json
import random
from contextlib import contextmanager

import pyarrow.parquet as pq
import pytest

from penstock.batch import RecencyBatchMaker
from penstock.replay import OpenAdmission, ReplayBuffer, ReplayBufferConfig, RolloutStore, StoreConfig
from penstock.replay.repair import repair_logs
from penstock.rundir import RunDirectory, read_json_lines, table_from_records, write_parquet
from penstock.rundir.storage import LocalStorage
from penstock.types import DuplicateGroupError, RolloutRecord, RunDirectoryError

WORLD = {"slots": 6, "failing": 0.05, "flat": 0.1}


def damage_middle(path):
    """Overwrites half of a file."""
    content = bytearray(path.read_bytes())
    quarter = len(content) // 4
    content[quarter : 3 * quarter] = bytes(2 * quarter)
    path.write_bytes(bytes(content))


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 0xFF
    path.write_bytes(bytes(content))


class Life:
    """One life of a paced run over real files, on a virtual clock."""

    def __init__(self, sim, directory, states=None, on_damage=None, **config):
        settings = ReplayBufferConfig(
            groups_per_batch=3,
            straggler_timeout_s=5.0,
            max_rollout_timestamp_delay=-1,
            **{"store": StoreConfig(buffer_size=4), **config},
        )
        self.store = RolloutStore(directory, settings.store, on_damage=on_damage)
        lineage = 0 if states is None else self.store.lineages.newest + 1
        ledger = self.store.open_ledger(lineage)
        self.run = sim.Simulation(settings, sim.World(**WORLD), self.store, ledger, lineage, states, checkpoint_every=1)
        self.ledger = ledger

    def states(self):
        with self.run.buffer.boundary():
            return {
                "curriculum": self.run.curriculum.state(),
                "issuer": self.run.issuer.state(),
                "replay": self.run.buffer.state(),
            }

    def die(self):
        """Without a word."""
        for log in self.store._logs:
            log.close()


@pytest.fixture
def directory(tmp_path):
    return RunDirectory.create(tmp_path / "run", {})


@pytest.mark.attack
def test_every_flipped_byte_of_a_rollout_is_noticed(sim, tmp_path):
    """Pages have checksums: damaged tokens are never trained."""
    records = [RolloutRecord(sim.make_rollout(f"easy-0-0/{i}", reward=0.5), "easy-0-0") for i in range(3)]
    store = RolloutStore(tmp_path)
    path = tmp_path / "rollouts" / "part-x.parquet"
    write_parquet(path, table_from_records(records))
    sound, size = path.read_bytes(), path.stat().st_size
    footer = int.from_bytes(sound[-8:-4], "little") + 8
    expected = [record.rollout.response_tokens.tolist() for record in store.read_records()]
    for position in range(4, size - footer, 7):
        path.write_bytes(sound)
        flip(path, position)
        try:
            found = [record.rollout.response_tokens.tolist() for record in store.read_records()]
        except (RunDirectoryError, OSError):
            continue
        assert found == expected, position  # a byte that is not looked at


@pytest.mark.attack
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.attack
def test_a_resume_goes_on_without_damaged_parts_batches_and_log_lines(sim, directory, seed):
    rng = random.Random(seed)
    life = Life(sim, directory)
    life.run.run(3)
    states = life.states()
    life.run.run(6)
    life.die()
    victims = []
    for folder in (directory.rollouts, directory.batches):
        files = sorted(folder.glob("*.parquet"))
        for path in rng.sample(files, min(2, len(files))):
            victims.append(path.name)
            rng.choice([damage_middle, lambda p: p.write_bytes(b""), lambda p: flip(p, p.stat().st_size // 3)])(path)
    for log in (directory.tickets_path, directory.fates_path):
        lines = log.read_bytes().splitlines(keepends=True)
        lines[len(lines) // 2] = b"\x00\xff garbage\n"
        log.write_bytes(b"".join(lines))
    told = []
    again = Life(sim, directory, states, on_damage=lambda place, reason: told.append((place, reason)))
    again.run.run(9)
    again.run.buffer.check_ledger()
    names = {place.rpartition("/")[2] for place, _ in told}
    assert {"tickets.jsonl", "fates.jsonl"} <= {name.rpartition("-")[0] for name in names}
    assert names & set(victims)
    assert all((directory.path / "damaged").rglob(name) for name in names)
    assert [row["lineage"] for row in read_json_lines(directory.lineages_path)] == [1]
    again.die()


@pytest.mark.attack
def test_what_a_damaged_part_held_is_rolled_back_and_its_tickets_come_again(sim, directory):
    life = Life(sim, directory, store=StoreConfig(buffer_size=1))
    life.run.run(2)
    states = life.states()
    outstanding = {name for name, *_ in states["issuer"]["outstanding"]}
    sealed = {record.group_id: stem for stem, record in _by_part(life.store)}
    lost = sorted(outstanding & sealed.keys())
    assert lost  # or this shows nothing
    life.die()
    for stem in {sealed[group_id] for group_id in lost}:
        damage_middle(directory.rollouts / f"{stem}.parquet")
    told = []
    again = Life(sim, directory, states, on_damage=lambda *what: told.append(what))
    assert len(told) == len({sealed[group_id] for group_id in lost})
    fates = {row["rollout_id"]: (row["fate"], row["reason"]) for row in read_json_lines(directory.fates_path)}
    for group_id in lost:
        assert fates[f"{group_id}/0"] == ("rolled_back", "the file that held it could not be read any more")
    again.run.run(5)
    admitted = {(ticket.lesson_id, ticket.index) for ticket in again.run.admitted.values()}
    assert {sim.lesson_and_index(group_id) for group_id in lost} <= admitted
    again.die()


def test_tokens_that_are_damaged_where_the_ids_are_not(sim, directory):
    """It shows only when the groups are read that come back, and then the plan is made anew."""
    life = Life(sim, directory, store=StoreConfig(buffer_size=1))
    life.run.run(2)
    states = life.states()
    outstanding = {name for name, *_ in states["issuer"]["outstanding"]}
    stems = {stem: record.group_id for stem, record in _by_part(life.store) if record.group_id in outstanding}
    assert stems  # or this shows nothing
    life.die()
    for stem in stems:
        path = directory.rollouts / f"{stem}.parquet"
        with pq.ParquetFile(path) as file:
            row_group = file.metadata.row_group(0)
            columns = [row_group.column(i) for i in range(row_group.num_columns)]
        tokens = next(c for c in columns if c.path_in_schema.startswith("response_tokens"))
        flip(path, tokens.data_page_offset + tokens.total_compressed_size - 2)
    told = []
    again = Life(sim, directory, states, on_damage=lambda *what: told.append(what))
    assert len(told) == len(stems)
    fates = {row["rollout_id"]: row["fate"] for row in read_json_lines(directory.fates_path)}
    assert {fates[f"{group_id}/0"] for group_id in stems.values()} == {"rolled_back"}
    again.run.run(5)
    again.run.buffer.check_ledger()
    again.die()


def _by_part(store):
    for name in store._inventory.names("rollouts"):
        for record in store.read_records():
            if record.group_id in _groups(store, name):
                yield name.rpartition("/")[2].removesuffix(".parquet"), record


def _groups(store, name):
    from penstock.replay.history import groups_of_part
    from penstock.rundir.live_files import opened_part

    with opened_part(store._storage, name) as file:
        return groups_of_part(file)


def test_without_a_listener_damage_is_an_error_as_ever(sim, directory):
    life = Life(sim, directory)
    life.run.run(2)
    states = life.states()
    life.die()
    damage_middle(sorted(directory.rollouts.glob("*.parquet"))[0])
    with pytest.raises(RunDirectoryError, match="cannot be read"):
        Life(sim, directory, states)
    assert not (directory.path / "damaged").exists()


@pytest.mark.parametrize("refusal", [PermissionError(13, "Permission denied"), OSError(24, "Too many open files")])
def test_a_file_that_may_not_be_read_is_not_damaged_and_stays(sim, directory, monkeypatch, refusal):
    life = Life(sim, directory)
    life.run.run(2)
    states = life.states()
    life.die()

    @contextmanager
    def refused(storage, name):
        raise refusal
        yield

    monkeypatch.setattr(LocalStorage, "opened", refused)
    with pytest.raises((RunDirectoryError, OSError), match=refusal.strerror):
        Life(sim, directory, states, on_damage=lambda *what: pytest.fail(str(what)))
    assert not (directory.path / "damaged").exists()


def test_an_open_buffer_takes_no_group_again_that_was_lost_with_a_file(sim, tmp_path):
    config = ReplayBufferConfig(store=StoreConfig(buffer_size=1))

    def life(states=None, lineage=0, told=None):
        store = RolloutStore(tmp_path, config.store, on_damage=None if told is None else lambda *w: told.append(w))
        admission = OpenAdmission(store.open_ledger(lineage), lineage)
        buffer = ReplayBuffer(config, store, RecencyBatchMaker(max_tokens=16, seed=0), admission, lambda: 1000.0)
        if states is not None:
            buffer.restore(states)
        return buffer, store, admission

    buffer, store, _ = life()
    groups = [sim.make_group(sim.Ticket(f"easy-0-{i}", "easy", i, i, 0, 0), [0.0, 1.0], timestamp=1e3) for i in (0, 1)]
    for group in groups:
        sim.deliver(buffer, group)
    with buffer.boundary():
        states = buffer.state()
    buffer.close()
    store.close()
    damage_middle(sorted((tmp_path / "rollouts").glob("*.parquet"))[0])
    told = []
    buffer, store, admission = life(states, 1, told)
    assert len(told) == 1 and admission.ledger.snapshot()["rolled_back"] == 2
    assert admission.ledger.snapshot()["waiting"] == 2
    with pytest.raises(DuplicateGroupError):
        sim.deliver(buffer, groups[0])  # a storage that outlived the crash delivers again
    buffer.check_ledger()
    buffer.close()
    store.close()


# --- logs -----------------------------------------------------------------------------------------------------------


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.attack
def test_a_log_keeps_its_sound_lines_and_the_original_is_kept_whole(directory):
    ticket = {"ticket_id": "cats-0-0", "rollouts": 3, "lineage": 0}
    fate = {"rollout_id": "cats-0-0/0", "fate": "trained", "lineage": 0, "step": 1}
    broken = [json.dumps(ticket), '{"ticket_id": 3}', "garbage", "[1]", json.dumps(ticket | {"rollouts": -1})]
    directory.tickets_path.write_text("\n".join([*broken, json.dumps(ticket | {"ticket_id": "cats-0-1"})]) + "\n")
    directory.fates_path.write_bytes(json.dumps(fate).encode() + b"\n\xff\xfe\n" + json.dumps(fate).encode()[:20])
    directory.events_path.write_bytes(b"another writer has this\n")
    original = directory.tickets_path.read_bytes()
    told = []
    repair_logs(directory, lambda place, reason: told.append((place, reason)))
    assert lines_of(directory.tickets_path) == [ticket, ticket | {"ticket_id": "cats-0-1"}]
    assert lines_of(directory.fates_path) == [fate]
    assert directory.events_path.read_bytes() == b"another writer has this\n"
    assert [reason for _, reason in told] == [
        "line 2, 3, 4, 5 of tickets.jsonl cannot be read; the others were kept",
        "line 2 of fates.jsonl cannot be read; the others were kept",
    ]
    with open(told[0][0], "rb") as file:
        assert file.read() == original
    repair_logs(directory, lambda *what: told.append(what))
    assert len(told) == 2


@pytest.mark.attack
def test_a_lost_life_continues_the_one_before_it_where_its_first_ticket_was_admitted(directory):
    beyond = {"lineage": 4, "parent": 3, "step": 2**63}
    forks = [{"lineage": 1, "parent": 0, "step": 3}, None, {"lineage": 3, "parent": 2, "step": 9}, beyond]
    directory.lineages_path.write_text("".join((json.dumps(f) if f else "gone") + "\n" for f in forks))
    tickets = [(1, 3), (2, 6), (2, 7), (3, 9)]
    rows = [{"ticket_id": f"cats-{i}-{k}", "rollouts": 1, "lineage": i, "admitted_step": s} for k, (i, s) in
            enumerate(tickets)]  # fmt: skip
    directory.tickets_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    repair_logs(directory, lambda place, reason: None)
    found = [(row["lineage"], row["parent"], row["step"]) for row in lines_of(directory.lineages_path)]
    assert found == [(1, 0, 3), (2, 1, 6), (3, 2, 9), (4, 3, -1)]
    assert RolloutStore(directory).lineages.newest == 4
