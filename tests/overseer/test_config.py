import pytest

from penstock.overseer import RunConfig
from penstock.overseer.config_loading import load_config
from penstock.replay import ReplayBufferConfig
from penstock.types import ConfigError
from tests.overseer.conftest import tiny


@pytest.mark.parametrize("word", [False, "false", "no", "off", 0])
def test_async_false_in_any_spelling_is_a_staleness_budget_of_zero(word: object):
    assert tiny({"async": word, "replay": {"staleness_budget": 2}}).replay.staleness_budget == 0
    assert tiny({"asynchronous": word, "replay": {"staleness_budget": 2}}).replay.staleness_budget == 0
    assert tiny({"async": True, "replay": {"staleness_budget": 2}}).replay.staleness_budget == 2


def test_a_dumped_config_loads_as_itself():
    config = tiny({"async": False})
    assert type(config).model_validate(config.dump()) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"overseer": {"checkpoint_every": 20, "keep_every": 50}},
            r"overseer: .*keep_every \(50\) must be a multiple of checkpoint_every \(20\), such as 60",
        ),
        ({"weights": {"bfloat16": True}}, "weights.bfloat16 is true: .* the learner's own arrays.* model.dtype"),
        (
            {"learner": {"parity": {"kl_limit": 0.5}}},
            r"learner.parity: kl_limit is 0.5, above hard_kl_limit \(0.1\).*: lower it, or raise hard_kl_limit",
        ),
        ({"learner": {"parity": {"wait_s": float("inf")}}}, "learner.parity.wait_s is inf: it must be a finite number"),
        ({"overseer": {"no_progress_s": float("inf")}}, "overseer.no_progress_s is inf: it must be a finite number"),
        (
            {"replay": {"max_rollout_timestamp_delay": float("nan")}},
            "replay.max_rollout_timestamp_delay is nan: it must be a finite number",
        ),
        ({"curriculum": {"temperature": 1e-9}}, r"curriculum.temperature is 1e-09: it must be 0 \(greedy\), or from"),
        ({"learner": {"row_length": 32}}, "learner.row_length is 32, shorter than inference.max_seq_len = 48"),
        ({"async": False, "rollout": {"max_concurrent_groups": 2}}, "rollout.max_concurrent_groups is 2"),
        (
            {"curriculum": {"lessons": {"cats": {"sampling_params": {"max_output_tokens": 48}}}}},
            "max_output_tokens is 48",
        ),
        (
            {"curriculum": {"lessons": {"cats": {"sampling_params": {"n_generations_per_prompt": 1}}}}},
            "n_generations_per_prompt is 1: the baseline of rloo needs",
        ),
        ({"curriculum": {"lessons": {"cats": {"sampling_params": {"temperature": 0}}}}}, "temperature is 0: greedy"),
        ({"curriculum": {"lessons": {"cats": {"sampling_params": {"top_k": 5}}}}}, "top_k is 5: its samples come"),
        ({"curriculum": {"lessons": {"cats": {"sampling_params": {"min_p": 0.1}}}}}, "min_p is 0.1: its samples come"),
        (
            {"curriculum": {"lessons": {"cats": {"sampling_params": {"min_p": 2}}}}},
            "min_p is 2: it must be from 0 to 1",
        ),
    ],
)
def test_stages_that_do_not_fit_are_refused_naming_both(changes: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        tiny(changes)


def test_concurrency_is_what_may_be_outstanding():
    assert tiny({"replay": {"groups_per_batch": 4, "staleness_budget": 2}}).concurrency == 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replay": {"tolerances": {"dogs": {"max_rollout_step_delay": 1}}}}, "replay.tolerances names dogs: no such"),
        ({"replay": {"store": {"url": "memory://x"}}}, "memory ends with the run"),
        ({"replay": {"capacity": 2}}, "replay.capacity is 2, below one batch"),
        (
            {"learner": {"loss": {"advantage": "turn"}}, "replay": {"batch_maker": {"filter_zero_variance": True}}},
            "filter_zero_variance is true: it leaves out groups whose episodes earned the same",
        ),
        (
            {"learner": {"loss": {"preset": "ppo"}}, "replay": {"batch_maker": {"name": "grpo"}}},
            r"replay.batch_maker.name is grpo: .* by rloo, but 'gae' is asked for: set learner.loss.advantage: rloo",
        ),
        (
            {"learner": {"loss": {"module": "a.b:C"}}, "replay": {"batch_makers": {"cats": {"name": "grpo"}}}},
            r"replay.batch_makers.cats.name is grpo: .*but those of learner.loss.module are asked for",
        ),
        (
            {
                "learner": {"loss": {"advantage": "reinforce_pp_baseline"}},
                "replay": {"batch_maker": {"name": "recency", "unit": "rollout"}},
            },
            r"replay.batch_maker.unit is rollout, but .* reinforce_pp_baseline has its baseline of the group's",
        ),
        (
            {"async": False, "rollout": {"storage": {"kind": "file", "capacity_groups": 1}}},
            "rollout.storage.capacity_groups is 1, below replay.groups_per_batch",
        ),
    ],
)
def test_what_would_fail_or_do_nothing_later_is_refused_now(changes, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        tiny(changes)


def filters(changes):
    maker = tiny(changes).replay.batch_maker
    return maker.filter_zero_variance, maker.filter_overlong


DAPO = {"learner": {"loss": {"preset": "dapo"}}}


def test_dapo_brings_its_filters_where_nothing_else_is_said():
    assert filters({}) == (False, None) and filters(DAPO) == (True, "mask")
    own = {"filter_zero_variance": False, "name": "recency"}
    assert filters({**DAPO, "replay": {"batch_maker": own}}) == (False, "mask")
    penalised = {"filter_overlong": "penalise", "overlong_fraction": 0.5}
    assert filters({**DAPO, "replay": {"batch_maker": penalised}}) == (True, "penalise")
    assert tiny({**DAPO, "replay": {"groups_per_batch": 5}}).replay.groups_per_batch == 5
    config = tiny(DAPO)
    assert type(config).model_validate(config.dump()) == config
    made = type(config)(**{**dict(config), "replay": ReplayBufferConfig(groups_per_batch=5)})
    assert made.replay.batch_maker.filter_overlong == "mask" and made.replay.groups_per_batch == 5


def test_what_a_run_recorded_before_there_were_filters_stays_without():
    content = tiny({**DAPO, "replay": {"batch_maker": {"filter_overlong": None}}}).dump()
    del content["replay"]["batch_maker"]["filter_overlong"]
    recorded = RunConfig.model_validate(content | {"versions": {"penstock": "0.1"}})
    assert recorded.replay.batch_maker.filter_overlong is None


def test_filters_of_dapo_that_its_other_keys_forbid_are_named_with_what_to_set():
    with pytest.raises(ConfigError, match=r"filter_zero_variance is true.*set it to false"):
        tiny({"learner": {"loss": {"preset": "dapo", "advantage": "turn"}}})


@pytest.mark.parametrize(
    ("recipe", "key", "most"),
    [
        ("cats", "inference.max_slots", 65536),
        ("cats", "inference.max_seq_len", 2**24),
        ("cats", "inference.steps_per_dispatch", 65536),
        ("cats", "inference.max_stop_token_ids", 65536),
        ("cats", "curriculum.eval_n_examples", 1_000_000),
        ("cats", "curriculum.micro_eval_n_examples", 1_000_000),
        ("cats", "curriculum.lessons.cats.sampling_params.n_prompts", 1_000_000),
        ("cats", "curriculum.lessons.cats.sampling_params.n_generations_per_prompt", 65536),
        ("cats", "learner.epochs", 1000),
        ("cats", "learner.row_length", 2**24),
        ("cats", "learner.micro_batch_rows", 65536),
        ("cats", "model.init.hidden_size", 2**20),
        ("cats", "model.init.vocab_size", 2**24),
        ("cats", "overseer.keep_checkpoints", 1_000_000),
        ("cartpole", "fleet.workers", 65536),
        ("cartpole", "fleet.envs_per_worker", 65536),
        ("cartpole", "fleet.fragment_length", 65536),
        ("cartpole", "model.memory_size", 65536),
        ("cartpole", "evaluation.episodes", 1_000_000),
        ("cartpole", "evaluation.simulators", 65536),
    ],
)
def test_what_no_machine_could_hold_or_finish_is_refused_by_its_key(recipe: str, key: str, most: int):
    with pytest.raises(ConfigError, match=rf"^{recipe}: {key} is {most + 1}: it must be at most {most}\b"):
        load_config(recipe, f"{key}={most + 1}")
