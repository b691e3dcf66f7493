"""A whole run whose chat template rewrites history: several samples to a rollout, from the engine to the files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from penstock.dashboard.lookup import find_rollouts
from penstock.overseer import train
from penstock.overseer.language.kind import LanguageKind
from penstock.overseer.rerun.replay import replay_updates
from penstock.overseer.rerun.why import explain_update
from penstock.rundir import RunViews, read_examples, read_metrics, read_status
from penstock.types import ConfigError
from tests.overseer.conftest import merged, tiny
from tests.overseer.test_run import running
from tests.text.test_chat_templates import directory  # noqa: F401  (a fixture)


@pytest.mark.slow
def test_a_run_trains_what_each_context_showed_and_its_files_say_so(run_dir, directory):  # noqa: F811
    lesson = {
        "environment": {"env_class": "tests.overseer.environments.TalkingEnvironment"},
        "sampling_params": {
            "n_generations_per_prompt": 3, "max_output_tokens": 150, "stop_tokens": list("abcdefghijklmnop"),
        },
    }  # fmt: skip
    config = tiny(
        {
            "model": {"tokenizer": str(directory("forgetful"))},
            "curriculum": {"lessons": {"cats": lesson}, "eval_frequency": 0, "micro_eval_frequency": 0},
            "inference": {"max_seq_len": 256},
            "replay": {"staleness_budget": 0},
            "learner": {"row_length": 256},
        }
    )
    assert train(config, run_dir, quiet=True).complete
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if "train/parity_kl" in row]
    assert len(rows) == 3 and all(row["train/parity_kl"] < 1e-8 and row["train/parity_checked"] > 50 for row in rows)
    assert all(abs(row["train/ratio_mean"] - 1) < 1e-4 for row in rows), "the log-probabilities are of those contexts"
    told = [row["env/cats/samples"] for row in read_metrics(run_dir / "metrics.jsonl") if "env/cats/samples" in row]
    assert told and min(told) > 1.5
    ledger = read_status(run_dir / "status.json")["ledger"]
    assert ledger["trained"] == 3 * 3 * 3 and ledger["invalid"] == 0

    stored = [
        row for part in sorted((run_dir / "rollouts").glob("*.parquet")) for row in pq.read_table(part).to_pylist()
    ]
    several = [row for row in stored if len(row["sample_starts"]) > 1]
    assert len(several) > 10 and {len(row["sample_starts"]) for row in several} <= {2, 3}
    examples = [example for path in sorted((run_dir / "batches").glob("*.parquet")) for example in read_examples(path)]
    by_id = {example.rollout_ids[0]: example for example in examples}
    for row in several:
        example = by_id[row["rollout_id"]]
        assert (np.flatnonzero(example.position_ids == 0)).tolist() == row["sample_starts"]
        assert example.segment_ids.max() == len(row["sample_starts"])
        assert example.loss_mask.sum() == sum(row["response_mask"])

    replayed = replay_updates(run_dir, 2)
    assert all(update.equal for update in replayed.updates), replayed
    explained = explain_update(run_dir, 2)
    assert {rollout.influence.rollout_id for rollout in explained.rollouts} <= by_id.keys()
    with RunViews(run_dir) as views:
        (shown,) = find_rollouts(views, several[0]["rollout_id"])
    assert json.loads(json.dumps(shown.to_json()))["sample_starts"] == several[0]["sample_starts"]
    assert shown.advantages is not None and shown.advantages[shown.record.rollout.response_mask].any()


AGENTS = {
    "environment": {
        "env_class": "penstock.environments.AgentEnvironment",
        "env_args": {"agent": "tests.environments.agents_of_tests.sampler", "name": "agents"},
    },
    "sampling_params": {"n_generations_per_prompt": 3, "max_output_tokens": 40},
}


def of_agents(tokenizer: str, problems: Path, **changes: Any) -> dict[str, Any]:
    lesson = merged(AGENTS, {"environment": {"env_args": {"path": str(problems)}}})
    problems.write_text("".join(f'{{"prompt": "Say {n}.", "answer": "{n}"}}\n' for n in range(40)))
    shared = {
        "model": {"tokenizer": tokenizer},
        "curriculum": {"lessons": {"cats": lesson}, "micro_eval_frequency": 0},
        "inference": {"max_seq_len": 512, "endpoint": True},
        "learner": {"row_length": 512},
    }
    return merged(shared, changes)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0, 1])
def test_a_run_trains_through_the_official_clients_requests(run_dir, tmp_path, directory, budget):  # noqa: F811
    """The agent asks for temperature 0; what is trained are samples of the lesson's."""
    changes = of_agents(str(directory("qwen2.5")), tmp_path / "p.jsonl", replay={"staleness_budget": budget})
    summary = train(tiny(changes), run_dir, quiet=True)
    assert summary.complete and summary.after["cats"].groups == 4
    rows = read_metrics(run_dir / "metrics.jsonl")
    updates = [row for row in rows if "train/parity_kl" in row]
    assert len(updates) == 3 and all(row["train/parity_kl"] < 1e-8 for row in updates)
    told = [row for row in rows if "env/cats/answers" in row]
    assert all((row["env/cats/answers"], row["env/cats/overridden"]) == (2.0, 2.0) for row in told) and told
    ledger = read_status(run_dir / "status.json")["ledger"]
    assert ledger["trained"] == 3 * 3 * 3 and ledger["invalid"] == ledger["in_flight"] == 0
    parts = sorted((run_dir / "rollouts").glob("*.parquet"))
    stored = [row for part in parts for row in pq.read_table(part).to_pylist()]
    assert all(0 < sum(row["response_mask"]) <= 48 for row in stored)
    assert {row["decoding"]["temperature"] for row in stored} == {1.0}


@pytest.mark.slow
def test_agents_ask_rollout_workers_whose_servers_are_elsewhere(run_dir, tmp_path):
    changes = of_agents("penstock", tmp_path / "p.jsonl", steps=2, curriculum={"eval_frequency": 0})
    lesson = changes["curriculum"]["lessons"]["cats"]
    lesson["environment"]["env_args"]["agent"] = "tests.environments.agents_of_tests.asker"
    changes |= {"inference": {"endpoint": True, "servers": 1}, "learner": {}}
    with running(run_dir, changes) as run:
        run.end()
    parts = sorted(run.directory.rollouts.glob("*.parquet"))
    stored = [row for part in parts for row in pq.read_table(part).to_pylist()]
    assert len(run.trained()) == 2 * 3 * 3
    assert all(row["engines"] and row["engines"][0].startswith("inference-0") for row in stored)


def test_the_endpoint_is_open_where_agents_need_it_and_nowhere_else(tmp_path):
    config = tiny(of_agents("penstock", tmp_path / "p.jsonl", inference={"endpoint": False}))
    with pytest.raises(
        ConfigError, match="inference.endpoint is false, but the environment of lesson 'cats' has agents"
    ):
        LanguageKind.of(config)
    with pytest.raises(ConfigError, match="inference.endpoint is true, but no lesson's environment has agents"):
        LanguageKind.of(tiny({"inference": {"endpoint": True}}))
