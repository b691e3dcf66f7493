"""What was probably meant by an unknown key: another spelling, another section, or another library's name for it.

`unknown_key` says it in one line. `_NAMES` holds the names of TRL (``GRPOConfig`` and transformers'
``TrainingArguments``), PEFT, verl, and of PPO's usual implementations for what has a key here, and says so of what has
none. Keys are tried against the model, so that the same name may lead elsewhere in a run of simulators. Not covered:
other libraries' values, whose meaning may differ; docs/config.md has ours.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel

from penstock.overseer.config_loading.keys import all_keys, is_key, keys_at, matches

_MOST_PLACES, _MOST_PLACES_FROM_A_SECTION = 4, 2
_CERTAIN, _LIKELY = 0.85, 0.8
"""How alike two names are, as difflib counts it."""
_SAMPLING = "curriculum.lessons.*.sampling_params"
_ENVIRONMENT = "curriculum.lessons.*.environment.env_args"
_JSONL = "of penstock.environments.jsonl.JsonlEnvironment"


class _Name(NamedTuple):
    """What other libraries call by any of some names.

    Attributes:
        names: Last parts of their dotted keys, one or more, separated by spaces.
        keys: Ours, the best first; those that the model has are suggested.
        absent: Why there is none, where the model has none of them.
        hint: What is different about ours.
    """

    names: str
    keys: tuple[str, ...] = ()
    absent: str = ""
    hint: str = ""


_NAMES = (
    _Name("lr optim.lr learning_rate", ("learner.optimizer.learning_rate",)),
    _Name("lr_scheduler_type lr_scheduler lr_schedule", ("learner.optimizer.schedule",)),
    _Name("min_lr_ratio", ("learner.optimizer.final_fraction",)),
    _Name(
        "warmup_ratio lr_warmup_steps lr_warmup_steps_ratio num_warmup_steps", ("learner.optimizer.warmup_steps",),
        hint="in updates",
    ),
    _Name("adam_beta1", ("learner.optimizer.beta1",)),
    _Name("adam_beta2", ("learner.optimizer.beta2",)),
    _Name("adam_epsilon", ("learner.optimizer.epsilon",)),
    _Name("grad_clip gradient_clipping max_grad_norm clip_grad", ("learner.optimizer.max_grad_norm",)),
    _Name("filter_groups", ("replay.batch_maker.filter_zero_variance",)),
    _Name("optim optimizer_name optimizer_type", ("learner.optimizer.name",), hint="adamw, adafactor or muon"),
    _Name(
        "beta kl_coef kl_coeff init_kl_coef kl_loss_coef kl_beta kl_ctrl kl_penalty kl_loss_type use_kl_loss "
        "use_kl_in_reward", ("learner.kl.coefficient", "learner.reference_kl.coefficient"),
    ),
    _Name(
        "sync_ref_model ref_model_sync_steps", ("learner.kl.sync_every", "learner.reference_kl.reference"),
    ),
    _Name(
        "ref_model_mixup_alpha ref_model", ("learner.kl.reference", "learner.reference_kl.reference"),
    ),
    _Name(
        "entropy_coeff entropy_coef ent_coef entropy_bonus",
        ("learner.loss.entropy_coefficient", "learner.entropy_coefficient"),
    ),
    _Name(
        "num_iterations ppo_epochs n_epochs update_epochs", ("learner.epochs", "replay.max_samples"),
        hint="how often experience is trained on",
    ),
    _Name(
        "epsilon epsilon_low clip_ratio clip_ratio_low clip_range cliprange clip_coef clip_eps",
        ("learner.loss.clip_epsilon_low", "learner.clip"),
    ),
    _Name("epsilon_high clip_ratio_high", ("learner.loss.clip_epsilon_high", "learner.clip")),
    _Name("delta clip_ratio_c", ("learner.loss.dual_clip", "learner.dual_clip")),
    _Name("loss_type policy_loss loss_mode algorithm", ("learner.loss.preset",)),
    _Name("loss_agg_mode", ("learner.loss.aggregation",)),
    _Name(
        "scale_rewards adv_estimator norm_adv_by_std_in_grpo",
        ("learner.loss.advantage", "learner.normalize_advantages"),
    ),
    _Name("importance_sampling_level", ("learner.loss.ratio",), absent="a simulator's steps are weighed one by one"),
    _Name(
        "rollout_is vllm_importance_sampling_mode", ("learner.loss.correction.scope", "learner.correction.scope"),
    ),
    _Name("rollout_token_veto_threshold", ("learner.loss.correction.veto", "learner.correction.veto")),
    _Name("tis_imp_ratio_cap vllm_importance_sampling_cap", ("learner.loss.correction.cap", "learner.correction.cap")),
    _Name("gamma", ("learner.critic.discount", "learner.discount")),
    _Name("lam gae_lambda lambda_", ("learner.critic.gae_lambda", "learner.gae_lambda")),
    _Name(
        "vf_coef value_coef value_loss_coef vf_loss_coeff",
        ("learner.critic.coefficient", "learner.value_coefficient"),
    ),
    _Name(
        "critic_lr critic_learning_rate critic.optim.lr value_lr", ("learner.critic.learning_rate",),
        absent="policy and values have one learning rate here",
    ),
    _Name(
        "cliprange_value clip_range_vf vf_clip_param value_clip", ("learner.critic.clip", "learner.value_clip"),
    ),
    _Name(
        "norm_adv whiten_advantages normalize_advantage",
        ("learner.critic.normalize_advantages", "learner.normalize_advantages"),
    ),
    _Name("num_mini_batches num_minibatches n_minibatches", ("learner.minibatches",)),
    _Name(
        "num_generations rollout.n n_samples_per_prompt group_size num_return_sequences sampling_params.n",
        (f"{_SAMPLING}.n_generations_per_prompt",),
    ),
    _Name(
        "max_completion_length max_response_length response_length max_new_tokens max_tokens",
        (f"{_SAMPLING}.max_output_tokens",),
    ),
    _Name(
        "max_prompt_length prompt_length max_seq_length max_length max_model_len",
        ("inference.max_seq_len", "engine.max_seq_len"), hint="a prompt and its response together",
    ),
    _Name("stop stop_sequences stop_strings", (f"{_SAMPLING}.stop_tokens",)),
    _Name("from_rollouts", absent="runs of simulators train on no stored fragments"),
    _Name("repetition_penalty presence_penalty frequency_penalty", absent="sampling has no such penalty"),
    _Name(
        "per_device_train_batch_size micro_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu "
        "ppo_max_token_len_per_gpu", ("learner.micro_batch_rows", "learner.minibatches"),
        hint="what an update trains on is replay.groups_per_batch, or fragments_per_batch",
    ),
    _Name(
        "gradient_accumulation_steps", ("learner.micro_batch_rows", "learner.minibatches"),
        hint="a batch goes through the model in pieces; how many follows from its size",
    ),
    _Name(
        "train_batch_size batch_size rollout_batch_size ppo_mini_batch_size generation_batch_size global_batch_size",
        ("replay.groups_per_batch", "replay.fragments_per_batch"), hint="what one update trains on",
    ),
    _Name("gradient_checkpointing enable_gradient_checkpointing", ("learner.remat",), absent="it is not offered here"),
    _Name("max_steps total_steps total_training_steps num_updates total_timesteps", ("steps",), hint="in updates"),
    _Name("num_train_epochs total_epochs", ("steps",), hint="in updates; data/epoch counts epochs"),
    _Name("shuffle_dataset", ("curriculum.lessons.*.order",), hint="shuffle, sequential or iid"),
    _Name("bf16 torch_dtype model_dtype mixed_precision", ("model.dtype",)),
    _Name("fp16", absent="float16 is not supported; model.dtype is float32 or bfloat16"),
    _Name(
        "model_name_or_path pretrained_model pretrain model_name model_id", ("model.path",), hint="a local directory"
    ),
    _Name("resume_from init_from load_checkpoint_path", ("model.initial_checkpoint",), hint="a new run from it"),
    _Name("r lora_r lora_rank", ("model.lora.rank",), absent="only language runs have adapters"),
    _Name("lora_alpha", ("model.lora.alpha",), absent="only language runs have adapters"),
    _Name("target_modules lora_target_modules", ("model.lora.targets",), absent="only language runs have adapters"),
    _Name("use_peft peft_config lora_config", ("model.lora",), absent="only language runs have adapters"),
    _Name("lora_dropout", absent="adapters have no dropout"),
    _Name(
        "load_in_4bit load_in_8bit quantization quantization_config bnb_4bit_compute_dtype",
        absent="weights are never quantised (a language model takes least memory in bfloat16, beside an adapter)",
    ),
    _Name(
        "attn_implementation use_flash_attention flash_attention use_flash_attn", ("learner.attention",),
        absent="policies of simulators attend to nothing",
    ),
    _Name(
        "optimizer_offload offload_optimizer cpu_offload param_offload", ("learner.optimizer.offload",),
        absent="nothing is offloaded here", hint="of an accelerator, to the host's memory",
    ),
    _Name("use_dora modules_to_save", absent="adapters are of matrices alone, without magnitudes"),
    _Name("tokenizer_name_or_path tokenizer_name", ("model.tokenizer",)),
    _Name("save_steps save_freq save_interval", ("overseer.checkpoint_every",), hint="in updates"),
    _Name("save_total_limit max_ckpt_to_keep", ("overseer.keep_checkpoints",)),
    _Name("eval_steps test_freq eval_interval", ("curriculum.eval_frequency", "evaluation.every"), hint="in updates"),
    _Name("val_before_train", ("curriculum.eval_before", "evaluation.before")),
    _Name("log_completions", ("rollout.log_freq",), absent="there are no completions in a run of simulators"),
    _Name("logging_steps", absent="every update is logged"),
    _Name("report_to logger", ("tracking.wandb", "tracking.tensorboard")),
    _Name("project_name wandb_project", ("tracking.wandb.project",)),
    _Name("experiment_name", ("tracking.wandb.name",)),
    _Name(
        "output_dir log_dir default_local_dir run_name",
        absent="--run-dir, in Python run_dir, says where a run is written",
    ),
    _Name("resume resume_from_checkpoint resume_mode", absent="penstock train --resume RUN_DIR goes on"),
    _Name(
        "early_stopping early_stopping_patience patience target_reward", ("curriculum.when_complete",),
        absent="no rule ends a run early; in Python, break out of penstock.updates",
        hint="stop: once all lessons have graduated; by a rule of your own, break out of penstock.updates",
    ),
    _Name("reward_funcs reward_fn reward_function custom_reward_function", (f"{_ENVIRONMENT}.reward",), hint=_JSONL),
    _Name("reward_weights", (f"{_ENVIRONMENT}.reward_weights",), hint=_JSONL),
    _Name(
        "mask_truncated_completions overlong_filter overlong_filtering", ("replay.batch_maker.filter_overlong",),
        hint="mask or penalise",
    ),
    _Name("train_files dataset dataset_name train_dataset data_path", (f"{_ENVIRONMENT}.path",), hint=_JSONL),
    _Name("val_files eval_dataset", (f"{_ENVIRONMENT}.eval_path",), hint=_JSONL),
    _Name("prompt_key", (f"{_ENVIRONMENT}.prompt_column",), hint=_JSONL),
    _Name("system_prompt", (f"{_ENVIRONMENT}.system_prompt",), hint="of most environments"),
    _Name("num_workers num_rollout_workers", ("rollout.workers", "fleet.workers")),
    _Name("num_envs n_envs env_num", ("fleet.envs_per_worker",), absent="there are no simulators in a language run"),
    _Name("normalize_input norm_obs normalize_obs obs_normalization", ("model.normalize_observations",),
          absent="there are no simulators in a language run"),
    _Name(
        "n_steps num_steps rollout_length", ("fleet.fragment_length", "steps"),
        hint="of a fragment; in a language run: updates",
    ),
    _Name("tensor_model_parallel_size tensor_parallel_size vllm_tensor_parallel_size", ("inference.model_parallel",)),
    _Name("max_num_seqs max_running_requests", ("inference.max_slots", "engine.max_slots")),
    _Name("gpu_memory_utilization vllm_gpu_memory_utilization", ("inference.max_slots", "engine.max_slots"),
          hint="memory follows from slots and lengths"),
    _Name("device devices accelerator use_cpu no_cuda", absent="JAX_PLATFORMS=cpu in the environment keeps off GPUs"),
    _Name("use_vllm vllm_mode", ("inference.engine",), hint="vllm: servers of vLLM, driven by the run"),
    _Name("n_gpus_per_node num_gpus", ("roles.*.num_gpus",)),
    _Name("deepspeed fsdp fsdp_config ddp_backend", absent="the learner has one device in this release"),
    _Name("max_off_policy_steps max_staleness async_level max_async_level", ("replay.staleness_budget",)),
)  # fmt: skip
NOT_HERE = "there is no such key in this kind of run"
_BY_NAME = {name: each for each in _NAMES for name in each.names.split()}


def unknown_key(model: type[BaseModel], path: Sequence[str | int], values: Mapping[str, Any] | None = None) -> str:
    """One line about a key that a model has not: what was probably meant, or which keys there are.

    Args:
        model: The model that refused.
        path: The key; where its value is a section, that may be another library's.
        values: The whole config; its names stand in place of a ``*`` where there is just one.
    """
    parts = [str(part) for part in path]
    if not difflib.get_close_matches(parts[-1], keys_at(model, parts[:-1]), n=1, cutoff=_CERTAIN):
        parts = [*parts, *_below(parts, values or {})]
    refused = f"unknown key {'.'.join(parts)}"
    meant, note = suggest(model, parts)
    if meant:
        places = " or ".join(_named(key, values or {}) for key in meant)
        return f"{refused}: did you mean {places}{f' ({note})' if note else ''}?"
    if note:
        return f"{refused}: {note}; remove it"
    known = ", ".join(keys_at(model, path[:-1])) or "none"
    return f"unknown key {'.'.join(map(str, path))}: remove it; the keys known here are {known}"


class Suggestion(NamedTuple):
    """What an unknown key may have meant.

    Attributes:
        keys: The valid dotted keys that were probably meant, best first; ``*`` stands for any name.
        note: What is different about them; where there are none, why; empty where nothing is known.
    """

    keys: list[str]
    note: str = ""


def suggest(model: type[BaseModel], path: Sequence[str | int]) -> Suggestion:
    """What was probably meant by a path whose last part is unknown.

    In this order: a nearly equal spelling in the same section, another library's name, the same name in other
    sections, a close spelling in the same section, a close spelling in others.
    """
    parts = [str(part) for part in path]
    *section, key = parts
    siblings = keys_at(model, section)
    certain = difflib.get_close_matches(key, siblings, n=1, cutoff=_CERTAIN)
    if certain:
        return Suggestion([".".join([*section, certain[0]])])
    foreign = _foreign(parts)
    if foreign is not None:
        beside = [name for each in foreign.keys if (name := each.rpartition(".")[2]) in siblings]
        if section and beside:
            return Suggestion([".".join([*section, beside[0]])])
        found = [each for each in foreign.keys if is_key(model, each.split("."))]
        return Suggestion(found[:1], foreign.hint) if found else Suggestion([], foreign.absent or NOT_HERE)
    most = _MOST_PLACES_FROM_A_SECTION if section else _MOST_PLACES
    same = _elsewhere(model, key, most)
    if same:
        return Suggestion(same)
    close = difflib.get_close_matches(key, siblings, n=1)
    if close:
        return Suggestion([".".join([*section, close[0]])])
    return Suggestion(_elsewhere(model, key, most, _LIKELY))


def _foreign(parts: Sequence[str]) -> _Name | None:
    """The entry of the longest end of a path that another library has, or spells almost so."""
    for begin in range(len(parts)):
        found = _BY_NAME.get(".".join(parts[begin:]).lower())
        if found is not None:
            return found
    close = difflib.get_close_matches(parts[-1].lower(), _BY_NAME, n=1, cutoff=0.93)
    return _BY_NAME[close[0]] if close else None


def _elsewhere(model: type[BaseModel], key: str, most: int, likeness: float = 1.0) -> list[str]:
    """Keys of that name, or of one spelled as much alike, in any section, unless there are more than `most`."""
    by_name: dict[str, list[str]] = {}
    for each in all_keys(model):
        by_name.setdefault(each.path.rpartition(".")[2], []).append(each.path)
    for name in [key, *difflib.get_close_matches(key, by_name, n=1, cutoff=likeness)]:
        places = by_name.get(name, [])
        if 0 < len(places) <= most:
            return places
    return []


def _below(parts: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """The way from an unknown section to the first key in it that another library has."""
    for _, value in matches(values, parts):
        for way in _ways(value):
            if way and _foreign([*parts, *way]) is not None:
                return way
    return []


def _ways(node: Any) -> list[list[str]]:
    if not isinstance(node, Mapping):
        return [[]]
    return [[str(name), *way] for name, value in node.items() for way in _ways(value)]


def _named(key: str, values: Mapping[str, Any]) -> str:
    """A key with the one name that a config has in place of each ``*``."""
    parts = key.split(".")
    while "*" in parts:
        place = parts.index("*")
        names = [path.rpartition(".")[2] for path, _ in matches(values, parts[: place + 1])]
        if len(names) != 1:
            break
        parts[place] = names[0]
    return ".".join(parts)
