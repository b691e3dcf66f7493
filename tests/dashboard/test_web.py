import json
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import duckdb
import httpx
import numpy as np
import pytest
from starlette.testclient import TestClient

from penstock.dashboard import DashboardSettings, serve_dashboard
from penstock.dashboard.index import RunIndex
from penstock.dashboard.observation import REST, ObservedRun, ObservedRuns
from penstock.dashboard.pages import MARKS, RUN_PAGES, runs_page
from penstock.dashboard.web import CONTENT_SECURITY_POLICY, KeptPages, Queries, create_dashboard, static_files
from penstock.rundir import (
    EventLog,
    KeptReplay,
    MetricsLog,
    RescoredRollout,
    read_examples,
    read_records,
    write_replay,
    write_rescored,
)
from penstock.rundir.replayed_updates import replays_path
from penstock.rundir.rescored_rows import rescored_path
from penstock.types import ConfigError, RunDirectoryError
from tests.dashboard.sample_run import HOSTILE, write_run
from tests.object_stores import s3_server, s3_url  # noqa: F401  (fixtures)
from tests.waiting import wait_until

TOKEN = "a-secret-of-more-than-8"


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name in ("mine", "other"):
        directory = write_run(folder / name)
        metrics = MetricsLog(directory.metrics_path)
        for step in (1, 2):
            metrics.append(
                step, {"train/loss": step / 4, "train/reward_mean": step / 2, "inference/tokens_total": 50 * step}
            )
        metrics.close()
        events = EventLog(directory.events_path)
        events.append("start", step=0, pid=1, lineage=0)
        events.append("component_death", step=1, component="rollout-0", reason="<script>alert(1)</script>\x1b[2J")
        for step, moment in ((0, -9.0), (1, 0.5), (2, 1003.5), (3, 9000.0)):
            events.append("weights_served", component="inference-0", incarnation=0, version=[0, step], time=moment)
        events.close()
    (folder / "no run").mkdir()
    return folder


@pytest.fixture(scope="module")
def runs(parent):
    made = ObservedRuns(parent)
    for run in made.all():
        run.catch_up()
    yield made
    made.__exit__(None, None, None)


@pytest.fixture
def client(runs):
    return TestClient(create_dashboard(runs, DashboardSettings()), base_url="http://127.0.0.1")


def get(client, path, **words):
    answer = client.get(path, params=words)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_all_runs_of_a_folder_are_listed_and_other_folders_are_not(client):
    listed = get(client, "/api/runs")["runs"]
    assert [run["name"] for run in listed] == ["mine", "other"]
    assert listed[0]["step"] == 2 and listed[0]["steps"] == 10 and listed[0]["kind"] == "language"
    assert listed[0]["score"] == 1.0 and listed[0]["held_out"] == {}  # status.json says neither
    assert [run["troubles"] for run in listed] == [1, 1]
    assert listed[0]["generated"] == 100 and listed[0]["spark"] == [0.5, 1.0] and listed[0]["problem"] == ""


def test_a_run_says_what_it_is_at_and_marks_events(client):
    page = get(client, "/api/runs/mine")
    assert page["metrics"] == ["inference/tokens_total", "train/loss", "train/reward_mean"]
    assert [mark[:2] for mark in page["marks"]] == [["start", 0], [MARKS["component_death"], 1]]
    assert page["events"][-1]["reason"] == "<script>alert(1)</script>\\x1b[2J"


def test_what_a_resumed_run_cost_is_summed_over_its_lives_and_counts_no_time_between(tmp_path):
    directory = write_run(tmp_path / "twice")
    events = [(100.0, "start"), (110.0, "end"), (900.0, "resume"), (900.5, "start"), (905.5, "end")]
    lines = [json.dumps({"time": moment, "event": kind}) + "\n" for moment, kind in events]
    directory.events_path.write_text("".join(lines))
    rows = [(1, 105.0, 50.0), (2, 109.0, 80.0), (2, 904.0, 25.0)]
    lines = [json.dumps({"step": step, "time": moment, "inference/tokens_total": n}) + "\n" for step, moment, n in rows]
    directory.metrics_path.write_text("".join(lines))
    runs = ObservedRuns(tmp_path)
    runs.find("twice").catch_up()
    listed = runs_page(runs)["runs"][0]
    assert listed["generated"] == 80 + 25 and listed["busy_s"] == pytest.approx(10 + 5)


def test_what_ended_a_run_is_the_goal_that_its_last_life_reached(tmp_path):
    directory = write_run(tmp_path / "early")
    directory.status_path.write_text(json.dumps({"state": "finished", "step": 2, "steps": 10, "time": time.time()}))
    runs = ObservedRuns(tmp_path)

    def told(*kinds):
        events = EventLog(directory.events_path)
        for kind in kinds:
            events.append(kind, step=2, reason="every lesson has graduated" if kind == "goal_reached" else "")
        events.close()
        runs.find("early").catch_up()
        return runs_page(runs)["runs"][0]["ended_by"]

    assert told("start", "goal_reached", "end") == "every lesson has graduated"
    assert told("start", "end") == "end"  # a resume that went on to its last step


def test_curves_by_name_and_range(client):
    curves = get(client, "/api/runs/mine/curves", names="train/loss,none", points=10)["curves"]
    assert curves["train/loss"]["step"] == [1, 2] and curves["train/loss"]["mean"] == [0.25, 0.5]
    assert curves["none"]["step"] == []
    assert get(client, "/api/runs/mine/curves", names="train/loss", **{"from": 2})["curves"]["train/loss"]["step"] == [
        2
    ]
    assert client.get("/api/runs/mine/curves", params={"points": "many"}).json() == {
        "error": "points is 'many': it must be a whole number"
    }


def test_reward_has_an_interval_over_groups(client):
    reward = get(client, "/api/runs/mine/reward")
    assert reward["block"] == 1 and reward["held_out"] == []
    first, second = reward["trained"]
    assert first == [1, 0.625, None, None]  # one group alone says nothing of the spread
    # Two groups of means 0.5 and 0.25: 0.375 ± 12.7062 · 0.176777 / √2.
    assert second[:2] == [2, 0.375] and second[2] == pytest.approx(0.375 - 1.58828, abs=1e-4)


def test_the_ledger_counts_every_rollout_once_with_reasons(client):
    page = get(client, "/api/runs/mine/ledger")
    counts = {}
    for flow in page["flows"]:
        counts[flow["lesson"], flow["state"]] = counts.get((flow["lesson"], flow["state"]), 0) + flow["rollouts"]
    assert counts == {
        ("cats", "trained"): 6, ("cats", "waiting"): 4, ("cats", "stale_step"): 2, ("cats", "aborted"): 2,
        ("tools", "trained"): 2,
    }  # fmt: skip
    assert {(r["state"], r["reason"], r["rollouts"]) for r in page["reasons"]} == {
        ("stale_step", "weight step … is too old", 2), ("aborted", "the update waited too long", 2),
    }  # fmt: skip
    assert page["ages"] == [{"age": 0, "rollouts": 6}, {"age": 1, "rollouts": 2}]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ({}, ["cats-0-2", "cats-0-10", "tools-0-0", "cats-0-1", "cats-0-3", "cats-0-0", "cats-0-5"]),
        ({"state": "trained"}, ["tools-0-0", "cats-0-1", "cats-0-0"]),
        ({"state": "waiting", "lesson": "cats"}, ["cats-0-2", "cats-0-10"]),
        ({"from_step": "2", "to_step": "2"}, ["tools-0-0", "cats-0-1", "cats-0-3"]),
        ({"max_reward": "-0.1"}, ["tools-0-0"]),
        ({"min_staleness": "2"}, ["cats-0-3"]),
        ({"search": "CATS-0-1"}, ["cats-0-10", "cats-0-1"]),
        ({"finish": "not stored"}, ["cats-0-5"]),
        ({"order": "reward_low", "state": "trained"}, ["tools-0-0", "cats-0-1", "cats-0-0"]),
        ({"of": "eval"}, []),
    ],
)
def test_groups_are_filtered_by_their_rollouts(client, words, found):
    page = get(client, "/api/runs/mine/groups", **words)
    assert [group["group_id"] for group in page["groups"] if group["group_id"] != "cats-0-4"] == found


def test_a_list_comes_in_pieces_with_its_total(client):
    page = get(client, "/api/runs/mine/groups", offset=2, limit=2, state="trained")
    assert page["total"] == 3 and page["rollouts"] == 8 and [g["group_id"] for g in page["groups"]] == ["cats-0-0"]
    assert page["groups"][0]["rewards"] == [0.0, 0.5, 1.0, 1.0] and page["groups"][0]["states"] == ["trained"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ({"min_reward": "x"}, "min_reward is 'x': it must be a number"),
        ({"order": "drop table"}, "order is 'drop table': it must be one of newest"),
        ({"of": "both"}, "of is 'both': it must be one of train, eval, all"),
        ({"min_reward": "nan"}, "min_reward is 'nan': it must be a number below 1e15"),
    ],
)
def test_a_filter_without_meaning_is_refused_in_one_line(client, words, error):
    answer = client.get("/api/runs/mine/groups", params=words)
    assert answer.status_code == 400 and answer.json()["error"].startswith(error)


@pytest.mark.attack
def test_a_filter_is_a_value_never_sql(client):
    assert get(client, "/api/runs/mine/groups", lesson="x' OR true --")["groups"] == []


def test_a_group_token_by_token(client):
    page = get(client, "/api/runs/mine/group", id="tools-0-0")
    first = page["members"][0]
    assert [turn["role"] for turn in first["turns"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert first["advantage"] is None and first["uses"] == [[1, 0, 1.5]]  # of a row that two share
    said = first["turns"][2]["pieces"]
    assert "".join(piece[0] for piece in said) == "<calc>2*3</calc><|im_end|>"
    assert said[0][1] == pytest.approx(-0.01, abs=0.2) and said[0][2] == 1.5 and said[0][3] == 1
    assert all(len(piece) == 1 for piece in first["turns"][3]["pieces"])  # what a tool said was not sampled
    assert page["neighbours"] == [None, None]  # it is the only one of its lesson
    assert get(client, "/api/runs/mine/group", id="cats-0-1")["neighbours"] == ["cats-0-3", "cats-0-10"]


def test_ratios_and_entropies_are_those_that_were_computed_of_its_update(client, runs, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = runs.find("mine").directory
    page = get(client, "/api/runs/mine/group", id="cats-0-1")
    command = f"penstock why {directory.path} --step 2"
    assert page["explained"] == {"newest": [], "missing": True, "commands": [command]}
    assert all(len(piece) in (1, 5) for turn in page["members"][0]["turns"] for piece in turn["pieces"])
    example = read_examples(directory.batches / "batch_1_1.parquet")[1]  # of cats-0-1/1
    numbers = np.full((3, len(example.tokens) - 1), np.nan, np.float32)  # as if its end had been cut off
    sampled = example.loss_mask[:-1]
    behaviour = read_records(directory.rollouts / "part-b.parquet")[1].rollout.response_logprobs[: sampled.sum()]
    numbers[:, sampled] = [behaviour + 0.5, np.full(sampled.sum(), 1.25), behaviour - 0.25]
    assert get(client, "/api/runs/mine/update", step=2)["moved"] == []
    did = (("moved", 0.75), ("along", 0.5), ("staleness", 1.0), ("drift", -0.25), ("surprise", 2.0))
    others = [RescoredRollout("cats-0-1/0", 7, *numbers, (("moved", 0.8),)), RescoredRollout("gone-0-1/0", 7, *numbers)]
    write_rescored(directory, "batch_1_1", [RescoredRollout("cats-0-1/1", 7, *numbers, did), *others])
    most, moved = get(client, "/api/runs/mine/update", step=2)["moved"]
    assert most["rollout_id"] == "cats-0-1/0" and moved == dict(did) | {
        "rollout_id": "cats-0-1/1", "group_id": "cats-0-1", "lesson": "cats", "reward": 1.0, "advantage": 1.0,
        "tokens": 2,
    }  # fmt: skip
    write_rescored(directory, "batch_1_1", [RescoredRollout("cats-0-1/1", 7, *numbers)])
    page = get(client, "/api/runs/mine/group", id="cats-0-1")
    assert page["explained"] == {"newest": [7], "missing": True, "commands": [command]}  # its neighbour has none
    pieces = page["members"][1]["turns"][1]["pieces"]
    assert pieces[0][5:] == pytest.approx([0.5, -0.25, 1.25]) and pieces[-1][5:] == [None] * 3
    rescored_path(directory, "batch_1_1").write_bytes(b"half")
    page = get(client, "/api/runs/mine/group", id="cats-0-1")
    assert "tokens have no ratio" in page["note"] and len(page["members"][1]["turns"][1]["pieces"][0]) == 5
    assert "explained" not in get(client, "/api/runs/mine/group", id="cats-0-5")  # never stored


@pytest.mark.attack
def test_what_a_model_wrote_is_shown_by_its_escapes(client):
    page = get(client, "/api/runs/mine/group", id="cats-0-2")
    said = "".join(piece[0] for piece in page["members"][0]["turns"][1]["pieces"])
    assert "\\x1b[2J" in said and "\\u202e" in said and "\x1b" not in json.dumps(page, ensure_ascii=False)
    assert HOSTILE.endswith("end") and "\nend" in said


def test_a_group_that_was_never_stored_says_so(client):
    page = get(client, "/api/runs/mine/group", id="cats-0-5")
    assert page["note"].startswith("not stored") and page["members"][0]["reason"] == "the update waited too long"


def test_a_timeline_has_updates_and_bars(client):
    page = get(client, "/api/runs/mine/timeline")
    assert {bar["group_id"] for bar in page["bars"]} >= {"cats-0-0", "cats-0-5"}
    assert [step for step, _ in page["updates"]] == [1, 2]
    bar = next(bar for bar in page["bars"] if bar["group_id"] == "cats-0-1")
    assert bar["finished"] == 1001.0
    assert page["served"] == {"inference-0": [[1, 0.5], [2, 1003.5]]} and not page["simulators"]  # of its stretch


def test_a_timeline_says_of_each_rollout_how_its_seconds_were_spent(client):
    bars = {bar["group_id"]: bar for bar in get(client, "/api/runs/mine/timeline")["bars"]}
    (position, time, *seconds, ended, reward), other = bars["tools-0-0"]["lives"]
    assert (position, time, ended, reward) == (0, 1002.0, 1.0, 1.0)
    assert seconds == pytest.approx(
        [0.25, 0.02, 0.05, 0.1, 0.03, 0.01]
    )  # whole, waiting, prefill, decode, tools, reward
    of_turns = [0, 0.02, 0.03, 0.06, 0.03] + [0.01, 0, 0.02, 0.04, 0]  # rest before, waiting, prefill, decode, tools
    assert bars["tools-0-0"]["turns"] == [pytest.approx(of_turns), None]
    assert other[2:8] == [0.25, None, None, None, None, None] and bars["tools-0-0"]["fates"] == ["trained"] * 2
    assert len(bars["cats-0-0"]["lives"]) == 4


def test_an_update_shows_what_it_trained_and_what_would_explain_it(client):
    page = get(client, "/api/runs/mine/update", step=2)
    assert {group["group_id"] for group in page["groups"]} == {"cats-0-1", "tools-0-0"}
    assert page["numbers"]["train/loss"] == [0.5, None, None] and page["dropped"] == [
        {"state": "stale_step", "rollouts": 2}
    ]
    assert "why" in page["commands"][0] and page["commands"][0].endswith("--step 2")


def test_an_update_shows_what_replays_of_it_found(client, runs, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert get(client, "/api/runs/mine/update", step=2)["replays"] == []
    directory = runs.find("mine").directory
    stored = {"train/advantage_max": 1.5, "train/loss": 0.5, "train/kl": None}
    made = {**stored, "train/kl": 0.25}
    same = KeptReplay(1000.0, "step-1", stored, made, ("train/kl",), True, notes=("jax was 0.1",))
    changes = ("learner.loss.preset=grpo",)
    changed = replace(same, time=2000.0, recomputed={**stored, "train/loss": 0.75}, different=("train/loss",),
                      weights_equal=None, changes=changes, dropped=("cats-0-1/1",))  # fmt: skip
    write_replay(directory, "batch_1_1", same)
    write_replay(directory, "batch_1_1", changed)
    newest, oldest = get(client, "/api/runs/mine/update", step=2)["replays"]
    assert newest["as"] == "learner.loss.preset=grpo, without cats-0-1/1" and newest["time"] == 2000.0
    assert newest["words"] == "Made again from step-1 and changed: 1 of 3 numbers are others."
    assert newest["numbers"][0] == ["train/loss", 0.5, 0.75, True] and not newest["equal"]
    assert oldest["as"] == "as it was" and not oldest["equal"]
    assert oldest["words"] == (
        "Made again from step-1: 2 of 3 numbers equal bit for bit; parameters and optimiser state are those of its "
        "checkpoint, bit for bit. Not as the run had it: jax was 0.1."
    )
    assert [row[0] for row in oldest["numbers"]] == ["train/loss", "train/kl", "train/advantage_max"]
    write_replay(directory, "batch_1_1", replace(same, time=3000.0, different=(), weights_equal=False))
    words = get(client, "/api/runs/mine/update", step=2)["replays"][0]["words"]
    assert "3 of 3 numbers equal bit for bit; parameters or optimiser state are not those of its checkpoint" in words
    replays_path(directory, "batch_1_1").write_text("half")
    assert get(client, "/api/runs/mine/update", step=2)["replays"] == []
    assert get(client, "/api/runs/mine/update", step=1)["replays"] == []


def test_lessons_and_fleet_of_a_run_without_either(client):
    assert [row["lesson"] for row in get(client, "/api/runs/mine/lessons")["lessons"]] == ["cats", "tools"]
    assert get(client, "/api/runs/mine/fleet")["simulators"] == []


@pytest.mark.attack
def test_a_query_is_answered_and_what_writes_is_refused(client, tmp_path):
    answer = client.post(
        "/api/runs/mine/sql", json={"sql": "select state, count(*) n from rollouts group by 1 order by 1"}
    )
    assert answer.json() == {
        "columns": ["state", "n"], "rows": [["stale_step", 2], ["trained", 8], ["training", 2], ["waiting", 2]],
        "more": False,
    }  # fmt: skip
    out = tmp_path / "out.csv"
    for sql, word in (
        (f"copy (select 1) to '{out}'", "it must be one statement that reads"),
        ("select * from read_csv('/etc/passwd')", "cannot be answered"),
        ("select 1; select 2", "it must be one statement"),
        ("", "sql must be a query"),
    ):
        refused = client.post("/api/runs/mine/sql", json={"sql": sql})
        assert refused.status_code == 400 and word in refused.json()["error"], refused.text
    assert not out.exists()
    assert client.post("/api/runs/mine/sql", content=b"sql=select 1").status_code == 415
    for body in (b"{sql", b"\xff", b"[" * 100_000):
        broken = client.post("/api/runs/mine/sql", content=body, headers={"content-type": "application/json"})
        assert broken.status_code == 400 and broken.json()["error"].startswith("the body must be JSON: ")


@pytest.mark.attack
def test_a_query_without_end_is_ended(runs, monkeypatch):
    monkeypatch.setattr("penstock.dashboard.web.SQL_S", 0.3)
    with pytest.raises(ConfigError, match="was ended before it had its answer"):
        Queries().answer(
            runs.find("mine"),
            "select count(*) from range(9999) a, range(9999) b, range(9999) c where a.range + b.range + c.range < 0",
        )


@pytest.mark.attack
def test_a_query_that_takes_too_much_memory_is_refused(runs):
    with pytest.raises(ConfigError, match="needs more memory"):
        Queries().answer(runs.find("mine"), "select list(range) from range(500000000)")


@pytest.mark.attack
@pytest.mark.parametrize(
    "path",
    ["/api/runs/none", "/api/runs/..%2F..%2Fetc", "/api/runs/no%20run", "/static/..%2fweb.py", "/static/none.js",
     "/etc/passwd", "/api/runs/mine/film?name=..%2Fconfig.yaml"],
)  # fmt: skip
def test_nothing_that_is_asked_for_becomes_a_path(client, path):
    assert client.get(path).status_code in (400, 404)


def test_every_answer_carries_the_policy_and_the_page_has_no_code_of_its_own(client):
    for path in ("/", "/api/runs", "/static/app.js", "/api/runs/none"):
        headers = client.get(path).headers
        assert headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        assert headers["x-content-type-options"] == "nosniff"
    page = client.get("/").text
    assert (
        re.findall(r"<script(?![^>]*src=)", page) == []
        and "style=" not in page
        and " on" not in page.split("<body>")[1]
    )


def test_the_page_names_every_module_so_that_none_waits_for_another(client):
    head = client.get("/").text
    named = re.findall(r'<(?:link rel="modulepreload" href|script type="module" src)="static/(\w+\.js)"', head)
    assert sorted(named) == sorted(name for name in static_files() if name.endswith(".js"))


def test_what_ships_is_what_its_hashes_say_and_nothing_sets_markup():
    import hashlib

    files = static_files()
    for digest, name in re.findall(r"^([0-9a-f]{64})  (\S+)$", files["README.txt"].decode(), re.MULTILINE):
        assert hashlib.sha256(files[name]).hexdigest() == digest
    ours = {name: text.decode() for name, text in files.items() if name.endswith(".js") and name != "uplot.js"}
    assert len(ours) == 7
    for name, text in ours.items():
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacent",
            "document.write",
            "eval(",
            "new Function",
            "http:",
            "https:",
        ):
            assert word not in text.replace("http://www.w3.org/2000/svg", ""), f"{name} has {word}"


@pytest.mark.attack
def test_other_names_for_this_machine_are_not_answered(client):
    assert client.get("/api/runs", headers={"host": "evil.example"}).status_code == 421


class TestToken:
    @pytest.fixture
    def client(self, runs):
        return TestClient(
            create_dashboard(runs, DashboardSettings(token=TOKEN)), base_url="http://a.host", follow_redirects=False
        )

    def test_without_it_nothing_is_answered(self, client):
        for path in ("/", "/api/runs", "/static/app.js", "/?token=wrong-one-indeed"):
            answer = client.get(path)
            assert answer.status_code == 401 and "token" in answer.text
        assert client.get("/health").text == "ok"

    def test_it_is_shown_once_and_does_not_stay_in_the_address(self, client):
        answer = client.get("/", params={"token": TOKEN})
        assert answer.status_code == 303 and answer.headers["location"] == "/"
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie and TOKEN not in cookie
        assert client.get("/api/runs").status_code == 200
        client.cookies.clear()
        assert client.get("/api/runs").status_code == 401

    def test_programs_show_it_as_everywhere(self, client):
        assert client.get("/api/runs", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
        assert client.get("/api/runs", headers={"authorization": f"Bearer {TOKEN}x"}).status_code == 401

    def test_over_tls_the_cookie_goes_over_tls_only(self, runs, tmp_path):
        settings = DashboardSettings(token=TOKEN, tls_cert=tmp_path / "c", tls_key=tmp_path / "k")
        client = TestClient(create_dashboard(runs, settings), follow_redirects=False)
        assert "Secure" in client.get("/", params={"token": TOKEN}).headers["set-cookie"]


def test_other_machines_need_a_token_of_some_length():
    with pytest.raises(ConfigError, match="--host 0.0.0.0 can be reached from other machines: set a token"):
        DashboardSettings(host="0.0.0.0")
    with pytest.raises(ConfigError, match="the token has 5 characters"):
        DashboardSettings(token="short")
    assert TOKEN not in repr(DashboardSettings(token=TOKEN))


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(RunDirectoryError, match="is no run directory and holds none"):
        ObservedRuns(tmp_path)
    with pytest.raises(RunDirectoryError, match=r"s3://bucket/run is a URL: .* lie in its directory on a disk"):
        ObservedRuns(Path("s3://bucket/run"))


def test_of_a_run_whose_rollouts_lie_in_a_store_all_is_shown(tmp_path, s3_url):  # noqa: F811
    import fsspec

    directory = write_run(tmp_path / "mine")
    here = ObservedRuns(directory.path).find("mine")
    here.catch_up()
    pages = {"ledger": {}, "reward": {}, "group": {"id": "cats-0-1"}}
    from_disk = {page: RUN_PAGES[page](here, words) for page, words in pages.items()}
    for folder in (directory.rollouts, directory.batches):
        for path in folder.iterdir():
            with fsspec.open(f"{s3_url}/{folder.name}/{path.name}", "wb") as file:
                file.write(path.read_bytes())  # pyright: ignore[reportAttributeAccessIssue]
            path.unlink()
    directory.write_config({**directory.read_config(), "replay": {"store": {"url": s3_url}}})
    there = ObservedRuns(directory.path).find("mine")
    there.catch_up()
    assert there.problem == "" and there.index.rows("SELECT count(part) AS n FROM rollouts") == [{"n": 14}]
    assert {page: RUN_PAGES[page](there, words) for page, words in pages.items()} == from_disk
    for run in (here, there):
        run.close()


def test_a_run_whose_index_fails_has_a_problem_and_the_others_are_read(tmp_path, monkeypatch):
    for name in ("a", "b"):
        write_run(tmp_path / name)
    original = RunIndex.read_on

    def read_on(self):
        if self._directory.path.name == "a":
            raise duckdb.OutOfMemoryException("Out of Memory Error:\n no room")
        return original(self)

    monkeypatch.setattr(RunIndex, "read_on", read_on)
    with ObservedRuns(tmp_path) as runs:
        a, b = runs.all()
        wait_until(lambda: a.problem and b.progress == "")
        assert a.problem == "Out of Memory Error: no room" and b.problem == ""
        client = TestClient(create_dashboard(runs, DashboardSettings()), base_url="http://127.0.0.1")
        assert get(client, "/api/runs")["runs"][0]["problem"] == a.problem
        monkeypatch.setattr(RunIndex, "rows", lambda *_: raised())
        answer = client.get("/api/runs/b/ledger")
        assert answer.status_code == 500 and answer.json()["error"] == "the index could not answer: full"


def raised():
    raise duckdb.OutOfMemoryException("full")


def test_it_serves_a_live_run_and_tells_its_news(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = write_run(tmp_path / "live")
    told: list[str] = []
    stop, ready = threading.Event(), threading.Event()

    def announce(line):
        told.append(line)
        ready.set()

    thread = threading.Thread(
        target=serve_dashboard, args=(tmp_path / "live", DashboardSettings(port=0), announce, stop)
    )
    thread.start()
    try:
        assert ready.wait(20)
        url = told[0].partition(" at ")[2].partition(";")[0]
        with httpx.stream("GET", f"{url}/api/runs/live/stream", timeout=280) as stream:
            lines = (line for line in stream.iter_lines() if line.startswith("data: "))
            first = json.loads(next(lines)[6:])
            metrics = MetricsLog(directory.metrics_path)
            metrics.append(3, {"train/loss": 9.0})
            metrics.close()
            while (news := json.loads(next(lines)[6:]))["progress"] or news["version"] <= first["version"]:
                pass
        curves = httpx.get(f"{url}/api/runs/live/curves", params={"names": "train/loss"}).json()["curves"]
        assert curves["train/loss"]["mean"] == [9.0]
        assert [path.suffix for path in (tmp_path / "cache" / "penstock").iterdir() if path.suffix == ".duckdb"]
        with httpx.stream("GET", f"{url}/api/runs/live/stream", timeout=280) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            directory.path.rename(tmp_path / "moved")
            assert not any(line.startswith("data: ") for line in lines)  # it ends, as an answer does
    finally:
        stop.set()
        thread.join(20)
    assert not thread.is_alive()


class Costly:
    """A page that counts how often it is made, and takes so long of the processor."""

    def __init__(self, monkeypatch, seconds):
        self.made, self.now, self._spent = 0, 100.0, 0.0
        monkeypatch.setattr("penstock.dashboard.web.time.thread_time", lambda: self._spent)
        for name in ("reward", "fleet"):
            monkeypatch.setitem(RUN_PAGES, name, lambda run, words: self._make(seconds))
        self.kept = KeptPages(lambda: self.now)

    def _make(self, seconds):
        self.made, self._spent = self.made + 1, self._spent + seconds
        return {"made": self.made}


def test_a_page_is_made_once_until_there_is_news(runs, monkeypatch):
    costly, run = Costly(monkeypatch, 0.2), runs.find("mine")
    dead = run.status().state
    assert dead == "dead" and run.progress == ""
    assert [costly.kept.answer(run, "reward", {}) for _ in range(3)] == [{"made": 1}] * 3
    assert costly.kept.answer(run, "reward", {"of": "eval"}) == {"made": 2}  # another question
    assert costly.kept.answer(runs.find("other"), "reward", {}) == {"made": 3}
    monkeypatch.setattr(run, "version", run.version + 1)
    assert costly.kept.answer(run, "reward", {}) == {"made": 4}  # of a dead run at once
    assert [costly.kept.answer(run, "fleet", {})["made"] for _ in range(2)] == [5, 6]  # never kept


def test_a_costly_page_of_a_run_that_goes_on_is_made_seldom(runs, monkeypatch):
    costly, run = Costly(monkeypatch, 0.1), runs.find("mine")
    living = run.status()
    monkeypatch.setattr(ObservedRun, "status", lambda self: replace(living, state="running", why=""))
    answer = lambda: costly.kept.answer(run, "reward", {})["made"]  # noqa: E731
    assert answer() == 1
    monkeypatch.setattr(run, "version", run.version + 1)
    costly.now += 0.1 * REST - 0.01
    assert answer() == 1
    assert costly.kept.renewals(run) == 0
    costly.now += 0.02
    assert [costly.kept.renewals(run), costly.kept.renewals(run)] == [1, 1]
    assert answer() == 2
    monkeypatch.setattr(run, "progress", "reading rollouts")  # of half a run nothing is kept
    monkeypatch.setattr(run, "version", run.version + 1)
    costly.now += 60
    assert [answer(), answer()] == [3, 4]


def test_it_starts_without_jax(parent):
    code = (
        "import sys, penstock.dashboard.web, penstock.dashboard.bundle\n"
        "found = {'jax', 'equinox', 'optax', 'ray', 'torch', 'transformers'} & set(sys.modules)\n"
        "sys.exit(str(found) if found else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
