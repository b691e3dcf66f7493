"""The rules that any run's files keep: a good run breaks none, and each kind of damage is named for what it is."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from benchmarks.chaos.invariants import violations

from penstock.rundir import RunDirectory

pytestmark = pytest.mark.attack
SCRIPT = Path(__file__).parents[1] / "replay" / "killed_run.py"
STEPS = 9
"""The second life of the run began at six."""


def make_run(path: Path, variant: str) -> Path:
    """Two lives of a small run of the real classes."""
    for steps in (6, STEPS):
        subprocess.run(
            [sys.executable, str(SCRIPT)], input=json.dumps([str(path), steps, variant]) + "\n", text=True,
            capture_output=True, timeout=120, check=True, env={"PYTHONPATH": str(SCRIPT.parents[2]), "PATH": ""},
        )  # fmt: skip
    return path


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("sound") / "run", "plain")


@pytest.fixture
def run(sound, tmp_path):
    return RunDirectory(shutil.copytree(sound, tmp_path / "run"))


def broken(run: RunDirectory, **more) -> list[str]:
    """The rules that are broken, without their examples."""
    return [line.partition(":")[0] for line in violations(run, step=STEPS, **more)]


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def batch_of(run: RunDirectory, step: int) -> Path:
    """The surviving one: of the newest life."""
    found = [path for path in run.batches.glob("*.parquet") if pq.read_table(path)["step"][0].as_py() == step]
    return max(found, key=lambda path: pq.read_table(path)["lineage"][0].as_py())


def trained(run: RunDirectory, step: int = 0) -> str:
    return pq.read_table(batch_of(run, step))["rollout_ids"][0].as_py()[0]


def rewrite(path: Path, column: str, change) -> None:
    """Changes one column of a file, value by value."""
    table = pq.read_table(path)
    index = table.schema.get_field_index(column)
    values = pa.array([change(value) for value in table[column].to_pylist()], table.schema.field(index).type)
    pq.write_table(table.set_column(index, table.schema.field(index), values), path)


def part_with(run: RunDirectory, rollout_id: str) -> Path:
    return next(p for p in run.rollouts.glob("*.parquet") if rollout_id in pq.read_table(p)["rollout_id"].to_pylist())


# --- runs as they should be ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_of_two_lives_breaks_no_rule(run):
    assert violations(run, step=STEPS) == []


@pytest.mark.slow
@pytest.mark.parametrize("variant", [pytest.param("reuse", marks=pytest.mark.slow), "fragments"])
def test_nor_does_one_whose_rollouts_may_be_trained_twice_with_tickets_or_of_simulators(tmp_path, variant):
    assert violations(RunDirectory(make_run(tmp_path / "run", variant)), step=STEPS) == []


# --- damage ----------------------------------------------------------------------------------------------------------


def test_a_second_row_of_a_rollout_is_named(run):
    part = sorted(run.rollouts.glob("*.parquet"))[0]
    shutil.copy(part, part.with_name("part-99999999.parquet"))
    assert broken(run) == ["rollouts that have two rows"]


def test_an_update_without_its_batch_is_named(run):
    batch_of(run, 4).unlink()
    assert broken(run) == ["updates without a batch"]
    assert violations(run, step=STEPS) == ["updates without a batch: 1 (4)"]
    assert violations(run, step=4) == [], "what lies beyond the horizon may be undone"


def test_a_second_batch_of_an_update_is_named_and_so_is_the_second_use_of_its_rollouts(run):
    shutil.copy(batch_of(run, 7), run.batches / "batch_again_1.parquet")
    assert broken(run) == ["updates with two batches", "rollouts trained too often"]


def test_a_rollout_in_two_batches_is_named(run):
    ids = pq.read_table(batch_of(run, 0))["rollout_ids"].to_pylist()
    rewrite(batch_of(run, 8), "rollout_ids", lambda value: ids[0])
    assert "rollouts trained too often" in broken(run)


def test_a_trained_rollout_whose_row_is_gone_is_named_unless_its_file_was_damaged_on_purpose(run):
    part = part_with(run, trained(run))
    lost = pq.read_table(part)["rollout_id"].to_pylist()
    part.unlink()
    assert broken(run) == ["trained rollouts without a row"]
    assert broken(run, damaged=lost) == []


def test_a_trained_rollout_without_its_fate_is_named(run):
    target = trained(run)
    write(run.fates_path, [row for row in rows(run.fates_path) if row["rollout_id"] != target])
    assert violations(run, step=STEPS) == [f"trained rollouts without the fate: 1 ({target})"]


def test_weights_of_a_dead_life_or_of_the_future_are_named(run):
    part = part_with(run, trained(run, 8))
    rewrite(part, "newest_weight_step", lambda value: value + 3)
    assert broken(run) == ["rollouts trained on weights of a dead lineage or of later ones"]
    rewrite(part, "newest_weight_step", lambda value: value - 3)
    rewrite(part, "lineage", lambda value: 0)  # at step seven, and the second life began at six
    assert broken(run) == ["rollouts trained on weights of a dead lineage or of later ones"]


def test_the_fate_of_a_rollout_that_no_batch_trained_is_named(run):
    ids = pq.read_table(batch_of(run, 0))["rollout_ids"].to_pylist()[0]
    rewrite(batch_of(run, 0), "rollout_ids", lambda value: [i for i in value if i != ids[0]])
    assert violations(run, step=STEPS) == [f"rollouts of the fate that no batch has: 1 ({ids[0]})"]


def test_a_second_end_of_a_rollout_is_named_unless_it_waited_between_or_a_resume_took_it_back(run):
    lines = rows(run.fates_path)
    last = next(row for row in lines if row["rollout_id"] == trained(run))
    write(run.fates_path, [*lines, last | {"fate": "stale_step"}, last])
    assert broken(run) == ["rollouts that ended twice"]
    write(run.fates_path, [*lines, last | {"fate": "waiting"}, last])
    assert broken(run) == []
    write(run.fates_path, [last | {"fate": "stale_step"}, *lines])
    assert broken(run) == ["rollouts that ended twice"]
    undone = {"rollout_id": last["rollout_id"], "fate": "rolled_back", "step": 6, "lineage": 1}
    write(run.fates_path, [*lines, undone])
    assert broken(run) == ["trained rollouts without the fate"], "it stood, so the resume must not take it back"


def test_a_ticket_that_was_handed_out_twice_is_named(run):
    lines = rows(run.tickets_path)
    write(run.tickets_path, [*lines, lines[0]])
    assert violations(run, step=STEPS) == [f"tickets that were handed out twice: 1 ({lines[0]['ticket_id']})"]


def test_rollouts_that_nobody_started_and_states_that_nobody_knows_are_named(run):
    lines = rows(run.tickets_path)
    gone = next(row for row in lines if f"{row['ticket_id']}/0" == trained(run).rpartition("/")[0] + "/0")
    write(run.tickets_path, [row for row in lines if row is not gone])
    assert broken(run) == ["rollouts that nobody started"]
    write(run.tickets_path, lines)
    first, *others = rows(run.fates_path)
    write(run.fates_path, [first | {"fate": "mislaid"}, *others])
    assert "rollouts of no known state" in broken(run)


def test_one_group_trained_under_two_tickets_is_named(run):
    group = trained(run, 0).rpartition("/")[0]
    lesson, _, index = group.rsplit("-", 2)
    other = trained(run, 8).rpartition("/")[0]

    def renamed(text: str) -> str:
        return text.replace(f"{other}/", f"{lesson}-7-{index}/")

    for part in run.rollouts.glob("*.parquet"):
        rewrite(part, "rollout_id", renamed)
    rewrite(batch_of(run, 8), "rollout_ids", lambda ids: [renamed(i) for i in ids])
    run.fates_path.write_text(run.fates_path.read_text().replace(f"{other}/", f"{lesson}-7-{index}/"))
    run.tickets_path.write_text(run.tickets_path.read_text().replace(f'"{other}"', f'"{lesson}-7-{index}"'))
    assert violations(run, step=STEPS) == [f"lessons' groups that two tickets trained: 1 ({lesson} {index})"]
