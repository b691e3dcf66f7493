"""The services' trackers against stand-ins for their packages, which are not installed for the tests."""

import json
import os
import struct
import sys
import types
import zlib

import pytest
from tests.small_disk import fill, small_disk

from penstock.tracking import (
    TensorBoardConfig,
    TensorBoardTracker,
    TrackingConfig,
    WandbConfig,
    WandbTracker,
    make_tracker,
)
from penstock.types import ConfigError

SAMPLE = {
    "rollout_id": "easy-0-3/1", "lesson_id": "easy", "reward": 0.5, "weight_step": 7, "finish_reason": "stop",
    "turns": [{"role": "user", "content": "say cat"}, {"role": "assistant", "content": "a\ncat"}],
}  # fmt: skip


@pytest.fixture
def tensorboard(monkeypatch):
    class Event(dict):
        def SerializeToString(self):
            return json.dumps({key: value for key, value in self.items() if key != "wall_time"}).encode()

    module = types.ModuleType("tensorboardX")
    module.event_file_writer = types.SimpleNamespace(  # type: ignore[attr-defined]
        event_pb2=types.SimpleNamespace(Event=Event)
    )
    module.record_writer = types.SimpleNamespace(masked_crc32c=zlib.crc32)  # type: ignore[attr-defined]
    module.summary = types.SimpleNamespace(  # type: ignore[attr-defined]
        scalar=lambda name, value: (name, value), text=lambda name, text: (name, text)
    )
    monkeypatch.setitem(sys.modules, "tensorboardX", module)


def events_in(directory):
    """Of the one file there: what each record says, by the format of TensorFlow's records."""
    (file,) = directory.iterdir()
    assert "tfevents" in file.name
    content, found = file.read_bytes(), []
    while content:
        size, checksum = struct.unpack("<QI", content[:12])
        assert checksum == zlib.crc32(content[:8])
        record, content = content[12 : 12 + size], content[12 + size :]
        assert struct.unpack("<I", content[:4]) == (zlib.crc32(record),)
        found.append(json.loads(record))
        content = content[4:]
    assert found.pop(0) == {"summary": None, "file_version": "brain.Event:2"}
    return [(*event["summary"], event["step"]) for event in found]


@pytest.fixture
def wandb(monkeypatch):
    calls = []

    class Run:
        def __getattr__(self, name):
            return lambda *arguments, **named: calls.append((name, arguments, named))

    def init(**named):
        calls.append(("init", (), named))
        return Run()

    module = types.ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    module.Settings = dict  # type: ignore[attr-defined]
    module.Table = lambda columns, data: ("table", columns, data)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def test_tensorboard_gets_scalars_and_text(tensorboard, tmp_path):
    tracker = TensorBoardTracker(tmp_path / "tb")
    tracker.log({"train/loss": 1.5, "train/kl": 0.0}, 7)
    tracker.log_samples(7, [SAMPLE])
    tracker.close()
    assert events_in(tmp_path / "tb") == [
        ("train/loss", 1.5, 7),
        ("train/kl", 0.0, 7),
        ("samples/easy/0", "    reward 0.5\n    user: say cat\n    assistant: a\n    cat", 7),
    ]


def test_a_full_disk_leaves_no_half_record_of_tensorboard(tensorboard, tmp_path):
    with small_disk(tmp_path / "disk", "64k") as disk:
        tracker = TensorBoardTracker(disk / "tb")
        tracker.log({"train/loss": 1.5}, 7)
        ballast = fill(disk)
        with pytest.raises(OSError, match="No space left"):
            for _ in range(100):  # what is left of its last page
                tracker.log({f"train/{number}": 0.5 for number in range(100)}, 8)
        ballast.unlink()
        tracker.log({"train/loss": 1.0}, 9)
        tracker.close()
        events = events_in(disk / "tb")
    assert events[0] == ("train/loss", 1.5, 7) and events[-1] == ("train/loss", 1.0, 9)
    assert len(events) % 100 == 2


def test_wandb_never_passes_a_step_that_may_run_backwards(wandb, tmp_path):
    run_dir = tmp_path / "cats-1"
    run_dir.mkdir()
    tracker = WandbTracker(WandbConfig(entity="team"), run_dir, {"steps": 3})
    tracker.log({"train/loss": 1.5}, 7)
    tracker.log({"eval/easy/reward_mean": 0.5}, 5)
    tracker.log_samples(7, [SAMPLE])
    tracker.close()
    (_, _, named), defined, newer, older, table, finish = wandb
    assert named["project"] == "penstock" and named["entity"] == "team" and named["name"] == "cats-1"
    assert named["config"] == {"steps": 3} and named["mode"] == "online" and named["resume"] == "allow"
    assert named["settings"] == {"console": "off", "silent": True}
    assert defined == ("define_metric", ("*",), {"step_metric": "weight_step"})
    assert newer == ("log", ({"train/loss": 1.5, "weight_step": 7},), {})
    assert older == ("log", ({"eval/easy/reward_mean": 0.5, "weight_step": 5},), {})
    assert table[1][0]["samples"][2] == [[7, "easy-0-3/1", "easy", 0.5, "stop", "user: say cat\nassistant: a\ncat"]]
    assert finish[0] == "finish"


def test_wandb_continues_the_same_run_after_a_resume(wandb, tmp_path):
    for _ in range(2):
        WandbTracker(WandbConfig(), tmp_path, {})
    ids = [named["id"] for name, _, named in wandb if name == "init"]
    assert len(ids) == 2 and ids[0] == ids[1] and len(ids[0]) == 12


def test_an_id_that_a_killed_life_left_empty_is_made_anew(wandb, tmp_path):
    (tmp_path / "wandb_id").write_text("")
    WandbTracker(WandbConfig(), tmp_path, {})
    assert wandb[0][2]["id"] == (tmp_path / "wandb_id").read_text().strip() != ""


@pytest.mark.parametrize("given", [None, "0"])
def test_the_end_of_a_run_does_not_wait_for_wandbs_network_for_ever(wandb, tmp_path, monkeypatch, given):
    for name in ("WANDB_FINISH_TIMEOUT", "WANDB_FINISH_TIMEOUT_RAISES"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    if given is not None:
        monkeypatch.setenv("WANDB_FINISH_TIMEOUT", given)
    WandbTracker(WandbConfig(), tmp_path, {})
    assert os.environ["WANDB_FINISH_TIMEOUT"] == (given or "600")
    assert os.environ["WANDB_FINISH_TIMEOUT_RAISES"] == "true"


def test_a_wandb_that_refuses_to_start_is_bad_input(wandb, tmp_path, monkeypatch):
    def refuse(**named):
        raise RuntimeError("api_key not\nconfigured")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    with pytest.raises(ConfigError, match="tracking.wandb could not start: api_key not configured; run `wandb login`"):
        WandbTracker(WandbConfig(), tmp_path, {})


def test_a_place_where_tensorboard_cannot_write_is_bad_input(tensorboard, tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(ConfigError, match=r"tensorboard could not start: .*Not a directory: '.*/x/y'; choose another"):
        TensorBoardConfig(directory=str(tmp_path / "x" / "y")).open(tmp_path, {})


@pytest.mark.parametrize(
    ("service", "module", "section"),
    [
        ("mlflow", "mlflow", {"mlflow": {}}),
        ("tensorboard", "tensorboardX", {"tensorboard": {}}),
        ("trackio", "trackio", {"trackio": {}}),
        ("wandb", "wandb", {"wandb": {}}),
    ],
)
def test_a_missing_package_names_the_extra_to_install(service, module, section, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)  # import of it fails
    with pytest.raises(ConfigError, match=rf"tracking\.{service} needs {module}.*pip install 'penstock\[{service}\]'"):
        make_tracker(TrackingConfig.model_validate(section), tmp_path, {}, lambda name, error: None)


@pytest.mark.parametrize("uri", ["postgresql://me:secret@db/mlflow", "https://me:secret@tracks.example"])
def test_a_password_is_not_kept_in_the_run_directory(uri):
    with pytest.raises(ValueError, match="has a password.*set MLFLOW_TRACKING_URI instead"):
        TrackingConfig.model_validate({"mlflow": {"uri": uri}})
    TrackingConfig.model_validate({"mlflow": {"uri": uri.replace("me:secret@", "")}})


def test_the_configuration_says_which_trackers_are_made(tensorboard, wandb, tmp_path):
    made = make_tracker(TrackingConfig(samples=False), tmp_path, {}, lambda name, error: None)
    made.log_samples(0, [SAMPLE])
    assert list(tmp_path.iterdir()) == []
    assert TrackingConfig(samples=False).labels == []
    config = TrackingConfig(tensorboard=TensorBoardConfig(), wandb=WandbConfig(mode="offline"))
    assert config.labels == ["samples.jsonl", "TensorBoard", "W&B"]
    made = make_tracker(config, tmp_path, {}, lambda name, error: None)
    made.log_samples(3, [SAMPLE])
    made.close()
    assert [step for _, _, step in events_in(tmp_path / "tensorboard")] == [3]
    assert any(name == "init" and named["mode"] == "offline" for name, _, named in wandb)
    assert made.failures == {} and (tmp_path / "samples.jsonl").read_text().count("\n") == 1


def test_conversations_of_evaluations_stand_apart(tensorboard, wandb, tmp_path):
    trackers = [TensorBoardTracker(tmp_path / "tb"), WandbTracker(WandbConfig(), tmp_path, {})]
    for tracker in trackers:
        tracker.log_samples(7, [{**SAMPLE, "mode": "eval"}, {**SAMPLE, "mode": "train"}])
    trackers[0].close()
    assert [name for name, _, _ in events_in(tmp_path / "tb")] == [
        "eval_samples/easy/0",
        "samples/easy/1",
    ]
    tables = wandb[-1][1][0]
    assert {name: len(tables[name][2]) for name in ("samples", "eval_samples")} == {"samples": 1, "eval_samples": 1}
