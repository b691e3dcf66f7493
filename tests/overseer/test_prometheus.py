"""What Prometheus scrapes from the overseer, and that the board of docs/grafana.json asks for nothing else."""

import json
import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.overseer import FleetRunConfig, train
from penstock.overseer.config_loading import build_config
from penstock.overseer.progress import Progress
from penstock.overseer.prometheus import PrometheusEndpoint
from penstock.overseer.training import open_log
from penstock.rundir import RunDirectory
from penstock.tracking import PrometheusConfig
from penstock.types import ConfigError
from tests.overseer.conftest import tiny

BOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
STATUS = {
    "step": 7, "steps": 40, "lineage": 1, "runtime": "ray",
    "components": {
        "rollout-1": {"state": "running", "incarnation": 2, "deaths": 2},
        "replay-0": {"state": "running", "incarnation": 0},
    },
    "ledger": {"started": 20, "in_flight": 3, "waiting": 1, "trained": 15, "stale_step": 1},
    "numbers": {
        "inference/tokens_per_s": 300.0, "inference/tokens_total": 9000.0, "replay/ledger/waiting": 1.0,
        "inference_client/outstanding_tokens/inference-0": 12.0,
    },
    "training": {"units_per_s": 250.5},
}  # fmt: skip


@pytest.fixture
def no_token(monkeypatch):
    monkeypatch.delenv("PENSTOCK_TOKEN", raising=False)


@pytest.fixture
def endpoint(no_token):
    made = PrometheusEndpoint(PrometheusConfig(port=0), "cats-1")
    yield made
    made.close()


def samples_of(text):
    families = list(text_string_to_metric_families(text))
    kinds = {family.name: family.type for family in families}
    found = {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}
    return kinds, found


def test_numbers_have_their_names_kinds_and_labels(endpoint):
    endpoint.log({"train/loss": 1.5, "rollout/cats/reward_mean": 0.25, "time/idle/learner": 0.5}, 6)
    endpoint.log({'eval/a"b\\c/reward_mean': 0.75, "weights/lag": 2.0, "weights/lag/rollout-1": 2.0}, 5)
    endpoint.log({"train/loss": 1.25, "replay/ledger/trained": 3.0, "env/cats/rewards/length/mean": 0.125}, 7)
    endpoint.note_status(STATUS)
    answer = httpx.get(endpoint.url)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=")
    kinds, found = samples_of(answer.text)
    assert found[("penstock_train_loss",)] == 1.25, "the newest"
    assert found[("penstock_rollout_reward_mean", ("lesson", "cats"))] == 0.25
    assert found[("penstock_eval_reward_mean", ("lesson", 'a"b\\c'))] == 0.75
    assert found[("penstock_env_rewards_length_mean", ("lesson", "cats"))] == 0.125
    assert found[("penstock_time_idle", ("role", "learner"))] == 0.5
    assert found[("penstock_weights_lag", ("component", "rollout-1"))] == 2.0
    assert found[("penstock_rollouts_total", ("fate", "trained"))] == 15.0
    assert found[("penstock_rollouts_now", ("state", "in_flight"))] == 3.0
    assert found[("penstock_inference_client_outstanding_tokens", ("component", "inference-0"))] == 12.0
    assert found[("penstock_component_deaths_total", ("component", "rollout-1"))] == 2.0
    assert found[("penstock_component_state", ("component", "replay-0"), ("state", "running"))] == 1.0
    assert found[("penstock_step",)] == 7.0 and found[("penstock_steps",)] == 40.0
    assert found[("penstock_training_units_per_s",)] == 250.5
    assert found[("penstock_inference_tokens_total",)] == 9000.0
    assert found[("penstock_run_info", ("run", "cats-1"), ("runtime", "ray"))] == 1.0
    assert found[("penstock_last_update_time_seconds",)] > 1.7e9
    assert {kinds[name] for name in ("penstock_rollouts_now", "penstock_step")} == {"gauge"}
    assert (
        kinds["penstock_rollouts"]
        == kinds["penstock_component_deaths"]
        == kinds["penstock_inference_tokens"]
        == "counter"
    )
    assert not any(("lesson", "ledger") in key for key in found), "the ledger is there once"


def test_a_rollout_has_one_fate_in_the_counters(endpoint):
    endpoint.note_status(STATUS)
    _, found = samples_of(httpx.get(endpoint.url).text)
    of = {key[1][1]: value for key, value in found.items() if key[0].startswith("penstock_rollouts")}
    assert of.pop("started") == sum(of.values()) == 20


def test_other_machines_need_a_token(no_token, monkeypatch):
    with pytest.raises(ConfigError, match=r"tracking\.prometheus\.host is 0\.0\.0\.0.*set PENSTOCK_TOKEN"):
        PrometheusEndpoint(PrometheusConfig(host="0.0.0.0", port=0), "cats-1")
    monkeypatch.setenv("PENSTOCK_TOKEN", "a-token-of-some-length")
    endpoint = PrometheusEndpoint(PrometheusConfig(port=0), "cats-1")
    try:
        assert httpx.get(endpoint.url).status_code == 401
        assert httpx.get(endpoint.url, headers={"Authorization": "Bearer a-token-of-some-lengtH"}).status_code == 401
        shown = {"Authorization": "Bearer a-token-of-some-length"}
        assert "penstock_run_info" in httpx.get(endpoint.url, headers=shown).text
        assert httpx.get(endpoint.url.replace("/metrics", "/health")).status_code == 200
    finally:
        endpoint.close()


@pytest.mark.attack
def test_a_web_page_under_a_name_of_its_own_reads_no_metrics(endpoint):
    answer = httpx.get(endpoint.url, headers={"Host": "evil.example"})
    assert answer.status_code == 421 and "penstock_run_info" not in answer.text


def test_a_port_that_is_taken_is_refused_and_leaves_no_run_behind(endpoint, run_dir):
    port = int(endpoint.url.split(":")[2].partition("/")[0])
    taken = tiny({"tracking": {"prometheus": {"port": port}}})
    directory = RunDirectory.create(run_dir, taken.dump())
    with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1 port {port}: .*; set tracking\.prometheus"):
        open_log(taken, directory, Progress("cats", 2, 2), resumed=[])
    assert run_dir.exists(), "it was there"
    with pytest.raises(ConfigError):
        open_log(taken, directory, Progress("cats", 2, 2), resumed=None)
    assert not run_dir.exists()


@pytest.fixture
def last_words(monkeypatch):
    """What each endpoint would have answered at its end."""
    said = []
    close = PrometheusEndpoint.close

    def told(endpoint):
        said.append(httpx.get(endpoint.url).text)
        close(endpoint)

    monkeypatch.setattr(PrometheusEndpoint, "close", told)
    return said


@pytest.mark.slow
def test_the_board_asks_for_what_runs_export(no_token, last_words, tmp_path):
    tracking = {"tracking": {"prometheus": {"port": 0}}}
    train(tiny({"steps": 2, **tracking}), tmp_path / "cats", quiet=True)
    pole = {
        "steps": 2, "model": {"hidden_sizes": [8]}, "fleet": {"tasks": {"pole": {"id": "CartPole-v1"}}}, **tracking,
    }  # fmt: skip
    train(build_config(FleetRunConfig, pole), tmp_path / "pole", quiet=True)
    language, control = (samples_of(text)[1] for text in last_words)
    exported = {name for found in (language, control) for name, *_ in found}
    board = json.loads(BOARD.read_text("utf-8"))
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"\bpenstock_\w+", target["expr"])
    }
    assert len(asked) >= 20 and asked - exported == set()
    assert "penstock_step" in board["templating"]["list"][1]["query"] and "penstock_step" in exported
    shown = re.findall(r"\{\{(\w+)\}\}", BOARD.read_text("utf-8"))
    labels = {label for found in (language, control) for _, *labels in found for label, _ in labels}
    assert set(shown) - labels == set()
    for found, steps in ((language, 2.0), (control, 2.0)):
        assert found[("penstock_step",)] == steps
        ledger = {key[1][1]: value for key, value in found.items() if key[0].startswith("penstock_rollouts")}
        assert ledger.pop("started") == sum(ledger.values()) > 0
    assert found[("penstock_run_info", ("run", "pole"), ("runtime", "local"))] == 1.0
    events = (tmp_path / "cats" / "events.jsonl").read_text("utf-8")
    assert '"event": "prometheus"' in events and "/metrics" in events
