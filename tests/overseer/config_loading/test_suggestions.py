"""Unknown keys of other libraries lead to ours; where there is none, that is said."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from penstock.overseer.config import RunConfig
from penstock.overseer.config_loading import is_key, load_config, suggest
from penstock.overseer.config_loading.suggestions import _NAMES
from penstock.overseer.control_config import FleetRunConfig
from penstock.types import ConfigError

SAMPLING = "curriculum.lessons.cats.sampling_params"


def refused(recipe: str, override: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, [override])
    message = str(caught.value)
    assert message.startswith(f"{recipe}: unknown key ") and "\n" not in message
    return message.removeprefix(f"{recipe}: unknown key ")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lr=1e-3", "lr: did you mean learner.optimizer.learning_rate?"),
        ("learner.optimizer.lr=1e-3", "learner.optimizer.lr: did you mean learner.optimizer.learning_rate?"),
        ("temprature=1", f"temprature: did you mean {SAMPLING}.temperature or curriculum.temperature?"),
        ("max_completion_length=8", f"max_completion_length: did you mean {SAMPLING}.max_output_tokens?"),
        ("num_generations=8", f"num_generations: did you mean {SAMPLING}.n_generations_per_prompt?"),
        ("rollout.n=8", f"rollout.n: did you mean {SAMPLING}.n_generations_per_prompt?"),
        (
            "max_prompt_length=8",
            "max_prompt_length: did you mean inference.max_seq_len (a prompt and its response together)?",
        ),
        ("epsilon=0.2", "epsilon: did you mean learner.loss.clip_epsilon_low?"),
        ("learner.loss.loss_type=grpo", "learner.loss.loss_type: did you mean learner.loss.preset?"),
        (
            "num_iterations=2",
            "num_iterations: did you mean learner.epochs (how often experience is trained on)?",
        ),
        (
            "gradient_accumulation_steps=4",
            "gradient_accumulation_steps: did you mean learner.micro_batch_rows (a batch goes through the model in "
            "pieces; how many follows from its size)?",
        ),
        (
            "per_device_train_batch_size=4",
            "per_device_train_batch_size: did you mean learner.micro_batch_rows (what an update trains on is "
            "replay.groups_per_batch, or fragments_per_batch)?",
        ),
        (
            "actor_rollout_ref.actor.optim.lr=1e-6",
            "actor_rollout_ref.actor.optim.lr: did you mean learner.optimizer.learning_rate?",
        ),
        ("model.lora.r=8", "model.lora.r: did you mean model.lora.rank?"),
        ("lora_alpha=8", "lora_alpha: did you mean model.lora.alpha?"),
        ("target_modules=q_proj", "target_modules: did you mean model.lora.targets?"),
        ("model.lora.lora_dropout=0.1", "model.lora.lora_dropout: adapters have no dropout; remove it"),
        ("use_peft=true", "use_peft: did you mean model.lora?"),
        (
            "load_in_4bit=true",
            "load_in_4bit: weights are never quantised (a language model takes least memory in bfloat16, beside an "
            "adapter); remove it",
        ),
        ("attn_implementation=sdpa", "attn_implementation: did you mean learner.attention?"),
        (
            "learner.offload_optimizer=true",
            "learner.offload_optimizer: did you mean learner.optimizer.offload (of an accelerator, to the host's "
            "memory)?",
        ),
        ("total_step=5", "total_step: did you mean steps (in updates)?"),
        ("learner.loss.kl_coef=0.1", "learner.loss.kl_coef: did you mean learner.kl.coefficient?"),
        ("algorithm.kl_ctrl.kl_coef=0.1", "algorithm.kl_ctrl.kl_coef: did you mean learner.kl.coefficient?"),
        ("beta=0.04", "beta: did you mean learner.kl.coefficient?"),
        ("ref_model_sync_steps=64", "ref_model_sync_steps: did you mean learner.kl.sync_every?"),
        ("kl_coef=0.1", "kl_coef: did you mean learner.kl.coefficient?"),
        ("ppo_epochs=2", "ppo_epochs: did you mean learner.epochs (how often experience is trained on)?"),
        ("num_mini_batch=4", "num_mini_batch: did you mean learner.minibatches?"),
        ("gamma=0.9", "gamma: did you mean learner.critic.discount?"),
        ("learner.gae_lambda=0.9", "learner.gae_lambda: did you mean learner.critic.gae_lambda?"),
        ("vf_coef=0.5", "vf_coef: did you mean learner.critic.coefficient?"),
        ("critic.optim.lr=1e-5", "critic.optim.lr: did you mean learner.critic.learning_rate?"),
        ("cliprange_value=0.2", "cliprange_value: did you mean learner.critic.clip?"),
        (
            "mask_truncated_completions=true",
            "mask_truncated_completions: did you mean replay.batch_maker.filter_overlong (mask or penalise)?",
        ),
        (
            "use_vllm=true", "use_vllm: did you mean inference.engine (vllm: servers of vLLM, driven by the run)?",
        ),
        ("resume=true", "resume: penstock train --resume RUN_DIR goes on; remove it"),
        (
            "early_stopping=true", "early_stopping: did you mean curriculum.when_complete (stop: once all lessons have "
            "graduated; by a rule of your own, break out of penstock.updates)?",
        ),
        ("device=cpu", "device: JAX_PLATFORMS=cpu in the environment keeps off GPUs; remove it"),
        ("weight_decay=0.1", "weight_decay: did you mean learner.optimizer.weight_decay?"),
    ],
)  # fmt: skip
def test_a_name_of_another_library_in_a_language_run(override, message):
    assert refused("cats", override) == message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lr=1e-3", "lr: did you mean learner.optimizer.learning_rate?"),
        ("beta=0.04", "beta: did you mean learner.reference_kl.coefficient?"),
        ("gamma=0.9", "gamma: did you mean learner.discount?"),
        ("vf_coef=0.5", "vf_coef: did you mean learner.value_coefficient?"),
        ("clip_range_vf=0.2", "clip_range_vf: did you mean learner.value_clip?"),
        ("critic_lr=1e-3", "critic_lr: policy and values have one learning rate here; remove it"),
        ("ent_coef=0", "ent_coef: did you mean learner.entropy_coefficient?"),
        ("clip_range=0.1", "clip_range: did you mean learner.clip?"),
        ("n_epochs=3", "n_epochs: did you mean learner.epochs (how often experience is trained on)?"),
        ("normalize_input=true", "normalize_input: did you mean model.normalize_observations?"),
        ("use_vllm=true", "use_vllm: there is no such key in this kind of run; remove it"),
        ("num_workers=2", "num_workers: did you mean fleet.workers?"),
        ("num_generations=8", "num_generations: there is no such key in this kind of run; remove it"),
        (
            "replay.from_rollouts=runs/a",
            "replay.from_rollouts: runs of simulators train on no stored fragments; remove it",
        ),
    ],
)
def test_the_same_names_lead_elsewhere_in_a_run_of_simulators(override, message):
    assert refused("cartpole", override) == message


def test_the_examples_of_the_command_lines_page_are_answered_as_it_says():
    page = (Path(__file__).parents[3] / "docs" / "cli.md").read_text("utf-8")
    shown = re.findall(r"^\$ penstock train cats (\S+)\npenstock: cats: unknown key (.+)$", page, re.MULTILINE)
    assert len(shown) == 2
    assert [refused("cats", override) for override, _ in shown] == [message for _, message in shown]


def test_a_misspelt_section_is_named_and_not_what_stands_in_it():
    message = refused("cats", "learner.optimzer.learning_rate=1")
    assert message == "learner.optimzer: did you mean learner.optimizer?"


def test_a_nearly_equal_spelling_in_the_section_goes_before_another_librarys_name():
    assert (
        refused("cats", "learner.optimizer.beta=1") == "learner.optimizer.beta: did you mean learner.optimizer.beta2?"
    )


def test_every_key_that_a_name_leads_to_exists_in_some_kind_of_config():
    from penstock.inference.config import ServeConfig

    models = (RunConfig, FleetRunConfig, ServeConfig)
    keys = {key for name in _NAMES for key in name.keys}
    assert [key for key in keys if not any(is_key(model, key.split(".")) for model in models)] == []
    assert [name for name in _NAMES if not name.keys and not name.absent] == []
    names = [name for each in _NAMES for name in each.names.split()]
    assert sorted(names) == sorted(set(names))


class Leaf(BaseModel):
    rate: float = 0.0


class Branch(BaseModel):
    leaf: Leaf | None = None
    by_name: dict[str, Leaf] = {}


class Tree(BaseModel):
    branch: Branch = Branch()
    third: Leaf = Leaf()


def test_a_spelling_in_the_same_section_comes_first_then_the_name_in_others():
    assert suggest(Tree, ("branch", "leaf", "rat")).keys == ["branch.leaf.rate"]
    assert suggest(Branch, ("by_nam",)).keys == ["by_name"]
    assert suggest(Tree, ("rate",)).keys == ["branch.leaf.rate", "branch.by_name.*.rate", "third.rate"]
    assert suggest(Tree, ("branch", "rate")).keys == [], "three are too many for what stands in a section"
    assert suggest(Branch, ("leaf", "zzz")).keys == suggest(Tree, ("zzz",)).keys == []
