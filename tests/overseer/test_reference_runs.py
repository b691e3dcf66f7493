"""Runs with a KL to a reference: a batch is scored before it is written, and a resumed run goes on the same way."""

import threading
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from penstock.model.language import Decoder, ModelConfig, save_decoder
from penstock.overseer import train
from penstock.overseer.config_loading import load_config
from penstock.overseer.estimate import estimate_memory, model_shape
from penstock.overseer.language.replay import ReferenceScores
from penstock.overseer.plan import describe_plan
from penstock.rundir import RunDirectory, read_json_lines
from penstock.rundir.example_rows import read_examples
from penstock.rundir.live_files import RunFiles
from penstock.rundir.parquet import read_parquet
from penstock.text import Tokenizer
from penstock.types import ConfigError, RunFailed, UnreachableError
from tests.overseer.conftest import tiny
from tests.replay.stored import example

IN_REWARD = {"coefficient": 0.25, "place": "reward", "reference": "initial"}


def config_of(kl: dict, steps: int = 3, staleness: int = 0):
    changes = {"steps": steps, "replay": {"staleness_budget": staleness}, "overseer": {"checkpoint_every": 1}}
    return tiny(changes | {"learner": {"kl": kl, "optimizer": {"learning_rate": 0.01, "warmup_steps": 0}}})


def updates(run: Path) -> list[dict]:
    return [row for row in read_json_lines(run / "metrics.jsonl") if "train/loss" in row]


def batches(run: Path) -> dict[int, list]:
    """Examples by update."""
    return {read_parquet(path)["step"][0].as_py(): read_examples(path) for path in (run / "batches").glob("*.parquet")}


@pytest.mark.slow
def test_with_a_kl_in_the_reward_the_stored_advantages_are_those_of_the_lowered_rewards(tmp_path: Path):
    train(config_of(IN_REWARD), tmp_path / "run", quiet=True)
    made = batches(tmp_path / "run")
    assert sorted(made) == [0, 1, 2]
    files = RunFiles.list_now(RunDirectory(tmp_path / "run"))
    for step, examples in made.items():
        records = files.read_rollouts([each.rollout_ids[0] for each in examples])
        lowered: dict[str, dict[str, float]] = defaultdict(dict)
        furthest = 0.0
        for each in examples:
            rollout_id = each.rollout_ids[0]
            strayed = (each.generator_log_probs - each.reference_log_probs)[each.loss_mask].sum()
            furthest = max(furthest, abs(strayed))
            lowered[rollout_id.rpartition("/")[0]][rollout_id] = (
                records[rollout_id].rollout.episode_reward - 0.25 * strayed
            )
        assert bool(furthest < 1e-4) == (step == 0), "the policy is its own reference at first"
        for each in examples:
            group = lowered[each.rollout_ids[0].rpartition("/")[0]]
            others = [reward for name, reward in group.items() if name != each.rollout_ids[0]]
            expected = group[each.rollout_ids[0]] - np.mean(others)
            np.testing.assert_allclose(each.advantage[each.loss_mask], expected, atol=1e-5)
    rows = updates(tmp_path / "run")
    assert all("train/kl_reference" in row and row["time/reference"] > 0 for row in rows)
    assert abs(rows[0]["train/kl_penalty"]) < 1e-4 < rows[2]["train/kl_reference"]
    assert {row["data/untrained"] for row in rows} == {0.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kl",
    [
        IN_REWARD | {"reference": "ema", "ema_decay": 0.5},
        IN_REWARD | {"sync_every": 2},
        {"coefficient": 0.3, "estimator": "k2", "reference": "initial"},
    ],
)
def test_a_resumed_run_is_the_run_that_went_straight_on(tmp_path: Path, kl: dict):
    train(config_of(kl, 4), tmp_path / "straight", quiet=True)
    train(config_of(kl, 2), tmp_path / "resumed", quiet=True)
    train(config_of(kl, 4), tmp_path / "resumed", resume=True, quiet=True)
    rows = [updates(tmp_path / name) for name in ("straight", "resumed")]
    for name in ("train/loss", "train/grad_norm", "train/kl_reference", "train/advantage_std"):
        assert [row[name] for row in rows[0]] == [row[name] for row in rows[1]]
    assert rows[0][1]["train/kl_reference"] > 0
    stored = [batches(tmp_path / name)[3] for name in ("straight", "resumed")]
    for one, other in zip(*stored, strict=True):
        np.testing.assert_array_equal(one.reference_log_probs, other.reference_log_probs)
        np.testing.assert_array_equal(one.advantage, other.advantage)


@pytest.mark.slow
def test_an_asynchronous_run_scores_every_batch_that_is_formed_ahead(tmp_path: Path):
    train(config_of(IN_REWARD | {"reference": "ema"}, 4, staleness=1), tmp_path / "run", quiet=True)
    assert all(each.reference_log_probs is not None for made in batches(tmp_path / "run").values() for each in made)
    assert [row["step"] for row in updates(tmp_path / "run")] == [1, 2, 3, 4]


# --- what is kept of the scores --------------------------------------------------------------------------------------


class Scorer:
    """A learner whose scores are the number of the call that computed them."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.version = 0

    def call(self, method, examples, *, timeout_s):
        assert method == "reference_logprobs" and timeout_s > 0
        self.asked.append([each.rollout_ids[0] for each in examples])
        return self.version, [np.full(4, len(self.asked), np.float32) for _ in examples]


def scores_of(max_samples: int) -> tuple[ReferenceScores, Scorer]:
    kl = {"coefficient": 0.1, "reference": "initial", "sync_every": 5}
    config = tiny({"learner": {"kl": kl}, "replay": {"staleness_budget": 2, "max_samples": max_samples}})
    scorer = Scorer()
    return ReferenceScores(config, scorer), scorer


def first_of(completed) -> list[float]:
    return [float(each.reference_log_probs[0]) for each in completed[0]]


def test_scores_are_kept_where_rollouts_are_used_again_until_the_reference_changes():
    scores, scorer = scores_of(max_samples=4)
    assert first_of(scores.complete([example("g/0"), example("g/1")], [])) == [1, 1]
    assert first_of(scores.complete([example("g/1"), example("g/2")], [])) == [1, 2]
    scorer.version = 1
    assert first_of(scores.complete([example("g/2"), example("g/3")], [])) == [4, 4]
    assert scorer.asked == [["g/0", "g/1"], ["g/2"], ["g/3"], ["g/2", "g/3"]]
    assert first_of(scores.complete([example("g/1")], [])) == [5], "of another version"


def test_scores_of_what_is_gone_are_forgotten():
    scores, scorer = scores_of(max_samples=4)
    waiting = {"g/0"}
    pool = SimpleNamespace(
        changed=threading.RLock(), complete=None, waiting=SimpleNamespace(find=lambda n: n in waiting or None)
    )
    scores.attach(pool)
    pool.complete([example("g/0"), example("g/1")], [])
    pool.complete([example("g/0"), example("g/1")], [])
    assert scorer.asked == [["g/0", "g/1"], ["g/1"]]


def test_scores_are_not_kept_where_a_rollout_is_used_once():
    scores, scorer = scores_of(max_samples=1)
    for _ in range(2):
        scores.complete([example("g/0")], [])
    assert scorer.asked == [["g/0"], ["g/0"]] and not scores._kept


def test_a_learner_that_never_answers_ends_the_run_by_name():
    scores, _ = scores_of(max_samples=1)

    def nobody(*_, timeout_s):
        raise UnreachableError("learner-0 is dead")

    scores._calls._caller = SimpleNamespace(call=nobody)
    scores._calls._limit_s = 0.0
    with pytest.raises(RunFailed, match=r"could not be scored under the reference.*learner-0 is dead"):
        scores.complete([example("g/0")], [])


# --- configuration, plan and memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replay", "message"),
    [
        ({"batch_maker": {"name": "grpo"}}, "replay.batch_maker.name is grpo: its advantages are computed before"),
        ({"batch_maker": {"name": "recency", "unit": "rollout"}}, "replay.batch_maker.unit rollout: its advantages"),
        ({"batch_maker": {"name": "own.module:Maker"}}, "name is own.module:Maker: its advantages are computed"),
        ({"batch_maker": {"filter_zero_variance": True}}, "filter_zero_variance is true: it leaves out groups"),
    ],
)
def test_a_kl_in_the_reward_needs_batches_of_whole_groups(replay: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        tiny({"learner": {"kl": IN_REWARD}, "replay": replay})
    in_loss = {"coefficient": 0.25, "reference": "initial"}
    assert tiny({"learner": {"kl": in_loss}, "replay": replay}).learner.kl.estimator == "k3"


def test_a_reference_that_is_not_there_or_of_another_vocabulary_is_refused_before_anything_is_written(tmp_path: Path):
    tokenizer = Tokenizer.load("penstock")
    small = ModelConfig(vocab_size=tokenizer.vocab_size, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True)  # fmt: skip
    folder = tmp_path / "reference"
    save_decoder(Decoder.initialise(small, jax.random.key(0)), folder, tokenizer)
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " ")
    with pytest.raises(ConfigError, match=r"learner\.kl\.reference is .*: its tokenizer is another than that of"):
        train(config_of({"coefficient": 0.1, "reference": str(folder)}), tmp_path / "run", quiet=True)
    other = small.model_copy(update={"num_hidden_layers": 2})
    save_decoder(Decoder.initialise(other, jax.random.key(0)), folder, tokenizer)
    with pytest.raises(ConfigError, match=r"its num_hidden_layers is 2, the policy's 1; name a model of"):
        train(config_of({"coefficient": 0.1, "reference": str(folder)}), tmp_path / "run", quiet=True)
    with pytest.raises(ConfigError, match=r"learner\.kl\.reference is .*nowhere: .*config\.json cannot be read"):
        train(config_of({"coefficient": 0.1, "reference": str(tmp_path / "nowhere")}), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_names_are_no_paths_and_paths_count_from_where_they_are_written(tmp_path: Path):
    recipe = "model: {init: {hidden_size: 16}}\nlearner: {kl: {coefficient: 0.1, reference: %s}}\nsteps: 1\n"
    lessons = "curriculum: {lessons: {cats: {environment: {env_class: penstock.environments.cats.CatsEnvironment}}}}\n"
    for written, found in (("initial", "initial"), ("ema", "ema"), ("sub/model", str(tmp_path / "sub/model"))):
        (tmp_path / "own.yaml").write_text(recipe % written + lessons)
        assert load_config(tmp_path / "own.yaml").learner.kl.reference == found


def test_the_plan_and_the_estimate_count_the_reference():
    plain, changes = load_config("cats", []), ["learner.kl.coefficient=0.05", "learner.kl.estimator=k2"]
    config = load_config("cats", [*changes, "learner.kl.reference=initial", "learner.kl.sync_every=10"])
    text = describe_plan(config)
    line = "the weights before the first update, replaced by the policy every 10 updates; KL of 0.05 (k2) in the loss"
    assert f"reference         {line}" in text and "parameters of the reference" in text
    assert "reference  " not in describe_plan(plain)
    shape = model_shape(config.model)
    half = shape.model_copy(update={"dtype": "bfloat16"})

    def reference_bytes(model, *words):
        changed = load_config("cats", ["learner.kl.coefficient=0.05", *words])
        parts = estimate_memory(model, changed.inference, changed.learner)
        return parts["parameters of the reference"] / model.parameter_count

    assert "parameters of the reference" not in estimate_memory(shape, plain.inference, plain.learner)
    assert (
        reference_bytes(shape, "learner.kl.reference=initial")
        == reference_bytes(shape, "learner.kl.reference=ema")
        == 4
    )
    assert reference_bytes(half, "learner.kl.reference=initial") == 2
    assert reference_bytes(half, "learner.kl.reference=ema") == 6


# --- with a value head ------------------------------------------------------------------------------------------------


def with_values(steps: int):
    changes = {
        "steps": steps,
        "replay": {"staleness_budget": 0},
        "overseer": {"checkpoint_every": 1},
        "curriculum": {"lessons": {"cats": {"sampling_params": {"n_generations_per_prompt": 1}}}},
        "learner": {"loss": {"preset": "ppo"}, "epochs": 2, "kl": IN_REWARD, "critic": {"learning_rate": 0.01}},
    }
    return tiny(changes)


@pytest.mark.slow
def test_a_run_with_a_value_head_needs_no_group_and_resumes_the_same(tmp_path: Path):
    train(with_values(4), tmp_path / "straight", quiet=True)
    train(with_values(2), tmp_path / "resumed", quiet=True)
    train(with_values(4), tmp_path / "resumed", resume=True, quiet=True)
    rows = [updates(tmp_path / name) for name in ("straight", "resumed")]
    for name in ("train/loss", "train/value_loss", "train/value_mean", "train/grad_norm", "train/kl_penalty"):
        assert [row[name] for row in rows[0]] == [row[name] for row in rows[1]]
    files = RunFiles.list_now(RunDirectory(tmp_path / "straight"))
    for examples in batches(tmp_path / "straight").values():
        records = files.read_rollouts([each.rollout_ids[0] for each in examples])
        for each in examples:
            strayed = (each.generator_log_probs - each.reference_log_probs)[each.loss_mask]
            first = records[each.rollout_ids[0]].rollout.episode_reward - 0.25 * strayed.sum()
            assert each.advantage[each.loss_mask][0] == pytest.approx(first, abs=1e-5), "the reward still to come"


def test_groups_without_variance_are_not_filtered_where_a_value_head_learns_from_them():
    with pytest.raises(ConfigError, match=r"filter_zero_variance is true.*gae compares with a value head"):
        tiny({"learner": {"loss": {"preset": "ppo"}}, "replay": {"batch_maker": {"filter_zero_variance": True}}})
    assert "loss ppo with a value head" in describe_plan(load_config("cats", ["learner.loss.preset=ppo"]))
