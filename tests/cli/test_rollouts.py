"""`penstock rollouts`: its words reach the dashboard, and bad ones are one line."""

import json
from collections.abc import Callable

import pytest
from tests.dashboard.sample_run import write_run

from penstock import cli


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """A sample run, ``mine`` in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return write_run(tmp_path / "mine").path


@pytest.fixture
def answer(run_dir, capsys) -> Callable[..., str]:
    """What the command prints where all is well."""

    def ask(*words: str) -> str:
        assert cli.main(["rollouts", "mine", *words]) == 0
        shown = capsys.readouterr()
        assert shown.err == ""
        return shown.out

    return ask


@pytest.mark.slow
def test_the_table_of_groups_from_a_process_of_its_own(penstock_process, run_dir):
    table = penstock_process("rollouts", "mine", COLUMNS="80")
    assert table.returncode == 0 and table.stderr == ""
    assert [line.split()[1] for line in table.stdout.splitlines()[2:8]] == [
        "cats-0-2", "cats-0-10", "cats-0-3", "tools-0-0", "cats-0-1", "cats-0-0",
    ]  # fmt: skip


def test_filters_of_the_table(answer):
    shown = answer("--step", "1", "--lesson", "cats", "--fate", "trained", "--limit", "5", "--json")
    assert [json.loads(line)["group_id"] for line in shown.splitlines()] == ["cats-0-1"]
    shown = answer("--step", "0", "--json")
    assert [json.loads(line)["group_id"] for line in shown.splitlines()] == ["cats-0-0"]
    assert "5 older groups are not shown" in answer("--limit", "1")


def test_a_conversation(answer):
    assert "<calc>2*3</calc><|im_end|>" in answer("--show", "tools-0-0/0")
    assert answer("--show", "cats-0-0/0", "--color", "advantage").startswith("advantage ")
    shown = answer("--show", "cats-0-0/0", "--tokens")
    assert "position" in shown and "-0.8000" in shown
    members = [json.loads(line) for line in answer("--show", "cats-0-0", "--json").splitlines()]
    assert [member["rollout_id"] for member in members] == [f"cats-0-0/{index}" for index in range(4)]


def test_a_query(answer):
    assert json.loads(answer("--sql", "select count(*) as n from turns", "--json")) == {"n": 32}
    assert answer("--sql", "select count(*) as n from turns").split() == ["n", "32"]


def test_data_sets(answer, tmp_path):
    shown = answer("--export", "jsonl", "--select", "pairs", "--min-margin", "1", "--out", "pairs.jsonl")
    assert shown == "4 examples of 14 rollouts in pairs.jsonl\n"
    assert len((tmp_path / "pairs.jsonl").read_text().splitlines()) == 4
    words = ["--select", "best", "--min-reward", "0.8", "--lesson", "cats", "--step", "0", "--out", "best"]
    assert answer("--export", "hf", *words) == "1 examples of 4 rollouts in best\n"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["nowhere"], "nowhere: there is no such directory"),
        (["."], ". is not a run directory"),
        (["mine", "--show", "dogs"], "there is no rollout or group with this id"),
        (["mine", "--show", "cats"], "5 ids begin so"),
        (["mine", "--show", "x", "--sql", "y"], "--show and --sql do not go together"),
        (["mine", "--sql", "select nonsense from rollouts"], "the query cannot be answered"),
        (["mine", "--sql", "select 'infinity'::timestamp as t"], "column 't' holds a timestamp[us]"),
        (["mine", "--sql", "select '\udcff'"], "is not Unicode text"),
        (["mine", "--show", "\udcff"], "cannot encode str as UTF-8"),
        (["mine", "--sql", "drop view rollouts"], "the query is DROP"),
        (["mine", "--export", "hf", "--out", "mine"], "--out mine exists already"),
        (["mine", "--export", "jsonl", "--out", "line\nbreak"], "holds characters that cannot be printed"),
        (["mine", "--export", "jsonl", "--out", "mine/config.yaml/out"], "cannot be written: "),
        (["mine", "--lesson", "dogs"], "--lesson is 'dogs'"),
        (["mine", "--limit", "0"], "'--limit'"),
        ([], "Missing argument"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(run_dir, capsys, monkeypatch, words, part):
    monkeypatch.delenv("PENSTOCK_TRACEBACK", raising=False)
    assert cli.main(["rollouts", *words]) == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert line.startswith("penstock: ") and part in line and shown.out == ""


def test_a_run_of_a_newer_penstock_is_refused(run_dir, capsys):
    import pyarrow as pa
    import pyarrow.parquet as pq

    newer = pa.table({"rollout_id": ["x"]}).replace_schema_metadata({b"penstock.schema_version": b"9"})
    pq.write_table(newer, run_dir / "rollouts" / "part-n.parquet")
    assert cli.main(["rollouts", "mine"]) == 2
    assert "has schema version 9, this Penstock reads up to 1" in capsys.readouterr().err


def test_an_empty_status_hides_nothing(answer, run_dir):
    (run_dir / "status.json").write_bytes(b"")
    assert "unknown state" in answer() and "trained" in answer()
