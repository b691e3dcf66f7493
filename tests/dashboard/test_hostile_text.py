"""Every name and text in a run may be hostile: nothing of it acts on the terminal, and none of it is markup."""

import json
import re
from dataclasses import replace

import pytest

from penstock import cli
from penstock.dashboard import RolloutsRequest, show_rollouts
from penstock.rundir import EventLog, JsonLinesLog, MetricsLog, RunDirectory, write_records
from penstock.types import Decoding, RolloutMetadata, Turn
from tests.dashboard.sample_run import group

SIGNS = "\x1b[2J\x07\r\u202e[red]x[/y]:smile:"
SHOWN = "\\x1b[2J\\x07\\r\\u202e[red]x[/y]:smile:"
ACTING = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def hostile(word: str) -> str:
    return word + SIGNS


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """One group of two in a run of which every text is hostile."""
    folder = tmp_path_factory.mktemp("runs")
    directory = RunDirectory.create(folder / "run", {"model": {"tokenizer": hostile("tokenizer")}})
    records = []
    for index, record in enumerate(group("g-0-0", [("dog", 0.0), ("cat", 1.0)])):
        made = record.rollout
        made = replace(
            made, rollout_id=f"{hostile('group')}/{index}", lesson_id=hostile("lesson"), env_name=hostile("env"),
            env_example_id=hostile("example"), finish_reason=hostile("finish"),
            metadata=RolloutMetadata(hostile("worker"), 1e300, 0), decoding=Decoding(stop_strings=(hostile("stop"),)),
            turns=tuple(Turn(hostile(t.role), hostile(t.content), t.start, t.stop) for t in made.turns),
            timings={hostile("time"): 1.0},
        )  # fmt: skip
        records.append(replace(record, rollout=made, group_id=hostile("group")))
    write_records(directory.rollouts / "part-a.parquet", records)
    fates = JsonLinesLog(directory.fates_path)
    for rollout_id in (f"{hostile('group')}/0", "gone/0"):
        fates.append({
            "rollout_id": rollout_id, "fate": hostile("fate"), "reason": hostile("reason") + "\udcff", "step": 1,
            "lineage": 0, "time": 1.0,
        })  # fmt: skip
    fates.close()
    for log in (MetricsLog(directory.metrics_path), EventLog(directory.events_path)):
        log.append(1, {hostile("metric"): 1.0}) if isinstance(log, MetricsLog) else log.append(
            hostile("event"), x=SIGNS
        )
        log.close()
    directory.write_status({"state": hostile("status"), "step": hostile("step"), "steps": hostile("steps")})
    return directory.path.rename(folder / hostile("run").replace("/", "|"))  # no run begins under such a name


@pytest.mark.attack
@pytest.mark.parametrize(
    ("words", "names"),
    [
        ({}, ["run", "status", "step", "steps", "group", "lesson", "fate"]),
        ({"step": 7}, ["status", "fate"]),
        ({"lesson": hostile("lesson"), "step": 7}, ["lesson"]),
        ({"show": "group"}, ["group", "lesson", "env", "example", "finish", "worker", "stop", "time", "fate", "reason",
                             "user", "assistant", "Say cat.", "tokenizer"]),
        ({"show": "group", "tokens": True}, ["group", "fate"]),
        ({"sql": "select * exclude (turns) from rollouts"}, ["group", "lesson", "worker"]),
        ({"sql": "select role, content from turns"}, ["user", "cat"]),
        ({"sql": "from metrics"}, ["metric"]),
        ({"sql": "from events"}, ["event"]),
        ({"sql": f"select 1 as \"{hostile('column')}\", {{'{hostile('key')}': 1}} as s"}, ["column"]),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("width", [80, 2000])
def test_it_is_shown_by_its_escapes(run_dir, printed, words, names, width):
    out = printed(lambda console: show_rollouts(RolloutsRequest(run_dir, **words), console), width=width)
    assert not ACTING.search(out)
    if width == 2000:
        plain = out.replace("\\\\", "\\").replace(
            "[|y]", "[/y]"
        )  # quoted once more in JSON; a folder's name has no slash
        assert [name for name in names if name + SHOWN not in plain] == []


@pytest.mark.attack
@pytest.mark.parametrize(
    "words",
    [
        ["--lesson", "dogs"],
        ["--lesson", hostile("x")],
        ["--show", hostile("x")],
        ["--show", "gone/0"],
        ["--show", "group" + SIGNS + "/"],
        ["--sql", f'select "{SIGNS}" from rollouts'],
        ["--sql", "select content::date from turns"],
        ["--sql", f"select error('{SIGNS}')"],
        ["--fate", SIGNS],
        [SIGNS],
    ],
    ids=ascii,
)
@pytest.mark.parametrize("traceback", ["", "1"])
def test_an_error_that_quotes_it_is_one_harmless_line(run_dir, capsys, monkeypatch, words, traceback):
    monkeypatch.setenv("PENSTOCK_TRACEBACK", traceback)
    assert cli.main(["rollouts", str(run_dir), *words]) == 2
    shown = capsys.readouterr()
    assert not ACTING.search(shown.err) and shown.out == ""
    assert traceback or len(shown.err.splitlines()) == 1


@pytest.mark.parametrize("words", [[], ["--show", "group"], ["--sql", "from rollouts"], ["--sql", "from fates"]])
def test_json_is_ascii(run_dir, capsys, words):
    assert cli.main(["rollouts", str(run_dir), *words, "--json"]) == 0
    out = capsys.readouterr().out
    assert out.isascii() and not ACTING.search(out) and all(map(json.loads, out.splitlines()))


def test_markup_in_a_lesson_neither_vanishes_nor_fails(tmp_path, printed):
    directory = RunDirectory.create(tmp_path / "run", {})
    for lesson in ("math[easy]", "math[/x]", "math:cat:"):
        records = [
            replace(r, rollout=replace(r.rollout, lesson_id=lesson)) for r in group(f"{lesson}-0-1", [("cat", 0.0)])
        ]
        write_records(directory.rollouts / f"part-{len(lesson)}.parquet", records)
    out = printed(lambda console: show_rollouts(RolloutsRequest(directory.path), console), width=300)
    assert all(f"{lesson}  " in out and f" {lesson}-0-1 " in out for lesson in ("math[/x]", "math:cat:"))
    assert "--show 'math[" in out or "--show math:cat:-0-1" in out  # as a shell takes it
