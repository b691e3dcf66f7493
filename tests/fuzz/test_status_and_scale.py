"""Malformed files between a run and `penstock status` and `penstock scale`: by anybody who may write there."""

import io
import json

import pytest
from rich.console import Console
from tests.fuzz.fuzzing import COUNTS, fuzz, json_bytes

from penstock.dashboard import print_status, read_run_status
from penstock.overseer.supervisor.scaling import ScaleRequests, ask_to_scale
from penstock.types import ConfigError, UnreachableError

ID = "0123456789abcdef" * 2
STATUS = {
    "state": "running", "time": 1.5, "pid": 1, "host": "a", "phase": "training", "step": 12, "steps": 50, "lineage": 1,
    "waiting_for": "the learner waits", "bottleneck": "learner idle 41%", "ledger": {"started": 96, "trained": 80},
    "numbers": {"inference/tokens_per_s": 1234.4, "weights/mib_per_s": None}, "engine": {"fleet/live": 3},
    "lessons": {"cats": "active"}, "learner": "update 12", "groups": {"failed": 2, "last_failure": "timed out"},
    "simulators": {"failed": 0, "last_failure": ""}, "account": {},
    "components": {
        "inference-0": {"incarnation": 2, "state": "running", "deaths": 2, "version": [1, 11], "doing": "serving",
                        "pid": 77, "host": "a", "busy_s": 30.0, "idle_s": 10.0, "last_death": "no answer"},
        "rollout-3": {"incarnation": 0, "state": "running", "deaths": 0, "leaving": True, "doing": "group 7"},
    },
}  # fmt: skip


@pytest.mark.attack
@pytest.mark.parametrize("count", COUNTS)
def test_every_status_is_shown(tmp_path, count):
    (tmp_path / "config.yaml").write_text("runtime: ray\n")
    path = tmp_path / "status.json"

    def target(content):
        path.write_bytes(content)
        status = read_run_status(tmp_path, lambda: 3.0, lambda pid: pid == 1)
        file = io.TextIOWrapper(io.BytesIO(), "utf-8")
        print_status(status, Console(file=file, width=120))
        file.flush()
        json.dumps(status.to_json()).encode()

    fuzz(target, lambda rng: json_bytes(STATUS, rng), count, ())


@pytest.mark.parametrize("count", COUNTS)
def test_every_request_to_scale_is_answered(tmp_path, count):
    request, answer = (tmp_path / "requests" / f"scale-{ID}.{kind}" for kind in ("json", "answer.json"))
    taken = []

    def scale(role, number):
        if role != "rollout" or not 1 <= number <= 8:
            raise ConfigError(f"the role {role!r} cannot be scaled to {number}")
        taken.append(number)

    desk = ScaleRequests(tmp_path, scale)

    def target(content):
        before = len(taken)
        request.write_bytes(content)
        desk.serve()
        told = json.loads(answer.read_bytes())
        assert told["accepted"] == (len(taken) > before) and told["message"].isprintable()
        answer.unlink()
        assert list(request.parent.iterdir()) == []

    fuzz(target, lambda rng: json_bytes({"role": "rollout", "count": 4}, rng), count, ())
    assert 0.05 * count < len(taken) < count


@pytest.mark.parametrize("count", COUNTS)
def test_answers_to_scale_are_read_or_refused(tmp_path, count, monkeypatch):
    answer = tmp_path / "requests" / f"scale-{ID}.answer.json"
    answer.parent.mkdir()
    monkeypatch.setattr("uuid.uuid4", lambda: type("Id", (), {"hex": ID}))

    def target(content):
        answer.write_bytes(content)
        assert ask_to_scale(tmp_path, "rollout", 4, 5.0).isprintable()
        assert not answer.exists()

    good = {"accepted": True, "message": "rollout=4: the overseer has begun"}
    assert 0 < fuzz(target, lambda rng: json_bytes(good, rng), count, (ConfigError, UnreachableError)) < count
