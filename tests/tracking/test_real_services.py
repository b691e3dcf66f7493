"""The services' trackers against the packages themselves, without a network; ``make test-trackers`` installs them."""

import json
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from tests.small_disk import fill, small_disk

from penstock.tracking import TensorBoardTracker, TrackingConfig, make_tracker

SAMPLE = {
    "mode": "train", "rollout_id": "easy-0-3/1", "lesson_id": "easy", "env_name": "cats", "env_example_id": "4",
    "reward": 0.5, "weight_step": 7, "response_tokens": 2, "finish_reason": "stop",
    "turns": [{"role": "user", "content": "say cat"}, {"role": "assistant", "content": "a <b>\ncat"}],
}  # fmt: skip
SETTINGS = {"steps": 3, "learner": {"optimizer": {"learning_rate": 0.1}}, "names": ["a", "b"]}

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the packages' own doing
    pytest.mark.slow,  # their imports take seconds each
]


@pytest.fixture(autouse=True)
def at_home(tmp_path, monkeypatch):
    """Whatever a package keeps for its user lies in the test's folder, and nothing leads to a network."""
    for name in ("HOME", "HF_HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    for name in ("MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "home").mkdir()


def needs(module):
    return pytest.importorskip(module, reason="needs the tracker's package: make test-trackers")


def tracked(run_dir, service, settings=None, lives=1):
    """What a run of so many lives logs: an evaluation of an older version after a newer update, in each of them."""
    run_dir.mkdir(exist_ok=True)
    for life in range(lives):
        failures = []
        config = TrackingConfig.model_validate({"samples": False, service: settings or {}})
        tracker = make_tracker(config, run_dir, SETTINGS, lambda name, error: failures.append(error))  # noqa: B023
        tracker.log({"train/loss": 1.5 + life, "weights/lag/rollout-0": 1.0}, 7 + life)
        tracker.log({"eval/easy/reward_mean": 0.25}, 5)
        tracker.log_samples(7, [SAMPLE, {**SAMPLE, "mode": "eval", "rollout_id": "easy-e-0/0"}])
        tracker.close()
        assert failures == [] and tracker.failures == {}


def test_mlflow_has_metrics_settings_and_conversations(tmp_path, monkeypatch, capfd):
    mlflow = needs("mlflow")
    monkeypatch.chdir(tmp_path)
    tracked(tmp_path / "cats-1", "mlflow", lives=2)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'cats-1' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("penstock")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == (tmp_path / "cats-1" / "mlflow_run_id").read_text().strip()
    assert run.info.run_name == "cats-1" and run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(each.step, each.value) for each in history] == [(7, 1.5), (8, 2.5)]
    assert client.get_metric_history(run.info.run_id, "eval/easy/reward_mean")[0].step == 5
    assert run.data.params == {"steps": "3", "learner.optimizer.learning_rate": "0.1", "names": "['a', 'b']"}
    kept = tmp_path / "cats-1" / "mlflow_artifacts" / run.info.run_id / "artifacts"
    sample = json.loads((kept / "samples" / "step-7" / "easy-0-3_1.json").read_text())
    assert sample == {"step": 7, **SAMPLE}
    assert (kept / "eval_samples" / "step-7" / "easy-e-0_0.json").is_file()
    assert json.loads((kept / "config.json").read_text()) == SETTINGS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cats-1", "home"], "nothing beside the run"
    assert capfd.readouterr().out == ""


def test_several_runs_share_a_store_of_mlflow(tmp_path):
    mlflow = needs("mlflow")
    uri = f"sqlite:///{tmp_path / 'all.db'}"
    for name in ("cats-1", "cats-2"):
        tracked(tmp_path / name, "mlflow", {"uri": uri, "experiment": "cats"})
    client = mlflow.MlflowClient(tracking_uri=uri)
    runs = client.search_runs([client.get_experiment_by_name("cats").experiment_id])
    assert {run.info.run_name for run in runs} == {"cats-1", "cats-2"}
    assert not (tmp_path / "cats-1" / "mlflow.db").exists()


def test_mlflow_gets_names_that_it_would_refuse(tmp_path):
    mlflow = needs("mlflow")
    (tmp_path / "cats-1").mkdir()
    failures = []
    config = TrackingConfig.model_validate({"samples": False, "mlflow": {}})
    tracker = make_tracker(config, tmp_path / "cats-1", {}, lambda name, error: failures.append(error))
    tracker.log({"rollout/a#b/reward_mean": 0.5, "train/loss": float("nan")}, 1)
    tracker.close()
    assert failures == []
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'cats-1' / 'mlflow.db'}")
    run_id = (tmp_path / "cats-1" / "mlflow_run_id").read_text().strip()
    assert client.get_metric_history(run_id, "rollout/a_b/reward_mean")[0].value == 0.5


def test_a_store_of_mlflow_that_cannot_be_opened_is_bad_input(tmp_path):
    needs("mlflow")
    from penstock.types import ConfigError

    with pytest.raises(ConfigError, match="tracking.mlflow could not start: .*; correct tracking.mlflow.uri"):
        tracked(tmp_path / "cats-1", "mlflow", {"uri": "nosuch://x"})


def test_a_server_of_mlflow_that_is_down_is_told_before_long(tmp_path):
    needs("mlflow")
    from penstock.types import ConfigError

    began = time.monotonic()
    with pytest.raises(ConfigError, match="tracking.mlflow could not start: .*; correct tracking.mlflow.uri"):
        tracked(tmp_path / "cats-1", "mlflow", {"uri": "http://127.0.0.1:9"})  # the discard port: nobody listens
    assert time.monotonic() - began < 60


def in_a_process(program, run_dir):
    """What it printed: some packages finish their files, and speak up, only when a process ends."""
    command = [sys.executable, "-c", program, str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


TRACKED = """
import json, sys
from pathlib import Path
from tests.tracking.test_real_services import tracked
"""
TRACKIO = """
tracked(Path(sys.argv[1]), "trackio", lives=2)
from trackio.sqlite_storage import SQLiteStorage as stored
(name,) = stored.get_runs("penstock")
print(json.dumps({
    "name": name, "config": stored.get_run_config("penstock", name), "logs": stored.get_logs("penstock", name),
    "traces": stored.get_traces("penstock", name),
}))
"""


def test_trackio_has_metrics_settings_and_conversations(tmp_path, monkeypatch):
    needs("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    (line,) = in_a_process(TRACKED + TRACKIO, tmp_path / "cats-1").splitlines()  # nothing else is printed
    found = json.loads(line)
    assert found["name"] == "cats-1" and found["config"]["learner"] == SETTINGS["learner"]
    losses = [(row["step"], row["train/loss"]) for row in found["logs"] if "train/loss" in row]
    assert losses == [(7, 1.5), (8, 2.5)], "two lives, one run"
    assert {row["step"] for row in found["logs"] if "eval/easy/reward_mean" in row} == {5}
    traces = found["traces"]
    assert {trace["key"] for trace in traces} == {"samples", "eval_samples"}
    trace = next(trace for trace in traces if trace["key"] == "samples")
    assert trace["messages"] == SAMPLE["turns"] and trace["metadata"]["reward"] == 0.5 and trace["step"] == 7


def test_tensorboard_on_a_full_disk_holds_nobody_up(tmp_path):
    needs("tensorboardX")
    accumulators = needs("tensorboard.backend.event_processing.event_accumulator")
    with small_disk(tmp_path / "disk", "256k") as disk:
        tracker = TensorBoardTracker(disk / "tb")
        tracker.log({"a": 1.0}, 0)
        ballast = fill(disk)
        for step in range(1, 30):
            with suppress(OSError):
                tracker.log({f"a/{number}": 1.0 for number in range(60)}, step)
        ballast.unlink()
        tracker.log({"b": 2.0}, 30)
        tracker.close()
        (event,) = accumulators.EventAccumulator(str(disk / "tb")).Reload().Scalars("b")
        assert (event.step, event.value) == (30, 2.0)


def test_tensorboard_reads_what_was_written(tmp_path):
    needs("tensorboardX")
    accumulators = needs("tensorboard.backend.event_processing.event_accumulator")
    tracked(tmp_path / "cats-1", "tensorboard")
    events = accumulators.EventAccumulator(str(tmp_path / "cats-1" / "tensorboard"))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("train/loss")] == [(7, 1.5)]
    assert [(each.step, each.value) for each in events.Scalars("eval/easy/reward_mean")] == [(5, 0.25)]
    (text,) = events.Tensors("samples/easy/0/text_summary")
    assert text.step == 7 and b"    user: say cat\n    assistant: a <b>\n    cat" in text.tensor_proto.string_val[0]
    assert events.Tensors("eval_samples/easy/1/text_summary")


def wandb_records(file):
    """The records of an offline run: a header of 7 bytes, then LevelDB's log format in blocks of 32 KiB."""
    content, position, record = file.read_bytes(), 7, b""
    while position + 7 <= len(content):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        length, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


def test_wandb_writes_a_run_that_can_be_uploaded_later(tmp_path):
    needs("wandb")
    in_a_process(TRACKED + 'tracked(Path(sys.argv[1]), "wandb", {"mode": "offline"})', tmp_path / "cats-1")
    from wandb.proto.wandb_internal_pb2 import Record

    kept = (tmp_path / "cats-1" / "wandb_id").read_text().strip()
    history, tables, settings = [], {}, []
    for file in sorted((tmp_path / "cats-1" / "wandb").glob("offline-run-*/*.wandb")):
        for record in map(Record.FromString, wandb_records(file)):
            if record.WhichOneof("record_type") == "run":
                assert record.run.run_id == kept and record.run.display_name == "cats-1"
                settings.append({item.key: item.value_json for item in record.run.config.update})
            elif record.WhichOneof("record_type") == "history":
                items = record.history.item
                row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
                history.append(row)
                tables |= {name.removesuffix("/nrows"): count for name, count in row.items() if "/nrows" in name}
    assert len(settings) == 1 and settings[0]["steps"] == "3"
    assert [(row["weight_step"], row["train/loss"]) for row in history if "train/loss" in row] == [(7, 1.5)]
    assert [row["weight_step"] for row in history if "eval/easy/reward_mean" in row] == [5]
    assert tables == {"samples": 1, "eval_samples": 1}
