"""What a run would consist of, without running it: the resolved config, its memory, its components.

The text is itself a recipe: everything but the config is a comment.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.inference.sequence import check_length
from penstock.learner.config import LearnerConfig
from penstock.learner.loss_terms import KlConfig
from penstock.model.language.attention_choice import attention_kernel, check_attention
from penstock.model.language.config import ModelConfig
from penstock.overseer.config import RunConfig, rollout_workers
from penstock.overseer.estimate import (
    base_bytes,
    bytes_text,
    computes_on_cpu,
    estimate_memory,
    memory_lines,
    model_shape,
    moving_bytes,
    trained_count,
)
from penstock.rundir.yaml_documents import dump_yaml

if TYPE_CHECKING:
    from penstock.overseer.control_config import FleetRunConfig


def describe_plan(config: "RunConfig | FleetRunConfig", checkpoint: Path | None = None) -> str:
    """The config as YAML, followed by the memory estimate and the components as comments.

    Args:
        config: Of the run.
        checkpoint: What a run would go on from: its policy, whatever has become of what the run began with.

    Raises:
        ConfigError: the model or tokenizer that the config names is not there, its engine's sequences may be longer
            than what the model is meant for, attention cannot be computed so, something is to be kept in another
            memory than there is, or arrays or tokens are named that the model does not have.
    """
    if isinstance(config, RunConfig):
        comments = _language_lines(config.going_on(checkpoint))
    else:
        from penstock.overseer.control.plan import fleet_plan_lines

        comments = fleet_plan_lines(config)
    return dump_yaml(config.dump()) + "\n" + "\n".join(f"# {line}".rstrip() for line in comments)


def _language_lines(config: RunConfig) -> list[str]:
    from penstock.learner.optimizer import beside_base, initial_state  # only what one kind of run needs is loaded
    from penstock.model.language import Decoder
    from penstock.overseer.language.kind import check_with_model

    config.check_trains()
    model = model_shape(config.model)
    beside, on_cpu = not config.replay.synchronous, computes_on_cpu()
    platform = "cpu" if on_cpu and find_spec("libtpu") is None else "gpu"
    check_attention(config.learner.attention, platform, model)
    config.learner.check_host_memory(platform)
    check_with_model(config, model)
    initial_state(beside_base(config.learner.optimizer, model), Decoder.of_shapes(model))  # which looks at all names
    memory = estimate_memory(model, config.inference, config.learner, on_cpu, snapshots=beside)
    if config.replay.from_rollouts is not None or config.inference.external is not None:
        del memory["parameters of the engine"], memory["KV cache"]
    else:
        check_length(model, config.inference)
    return [
        f"Model: {model.model_type}, {model.parameter_count:,} parameters, {model.dtype}, "
        f"vocabulary {model.vocab_size:,}",
        *_adapter_lines(model, config),
        "",
        "Memory, estimated:",
        *memory_lines(memory),
        "",
        "Components, threads of one process:" if config.runtime == "local" else "Components, processes under Ray:",
        *_component_lines(config, _rows(config.learner, model, on_cpu)),
    ]


def check_code(config: "RunConfig | FleetRunConfig", checkpoint: Path | None = None) -> None:
    """Makes what a run of a language policy imports, environments, batch makers and loss, and lets go of it.

    Simulators and networks of a control policy are made by `describe_plan`, which asks them what they show.

    Args:
        config: Of the run.
        checkpoint: As of `describe_plan`.

    Raises:
        ConfigError: as where the run would begin.
    """
    if not isinstance(config, RunConfig):
        return
    from penstock.learner.losses import check_own_loss  # only what one kind of run needs is loaded
    from penstock.overseer.language.kind import LanguageKind

    if config.replay.from_rollouts is None:
        LanguageKind.of(config).check(config.going_on(checkpoint))
    else:
        check_own_loss(config.learner)


def _adapter_lines(model: ModelConfig, config: RunConfig) -> list[str]:
    if model.lora is None:
        return []
    count, share = trained_count(model, config.learner), moving_bytes(model) / (base_bytes(model) or 1)
    return [
        f"Adapter: rank {model.lora.rank} on {', '.join(model.lora.targets)}; {count:,} parameters train, in "
        f"{model.lora.dtype}, and {bytes_text(moving_bytes(model))} travel for a version: {share:.1%} of the base, "
        f"which stays in {model.base}",
    ]


def _rows(learner: LearnerConfig, model: ModelConfig, on_cpu: bool) -> str:
    """``rows of 128 tokens (dense attention) or 8192 tokens (attention by blocks)``."""
    platform = "cpu" if on_cpu else "gpu"
    lengths = [shape.length for shape in learner.row_shapes]
    kernels = [attention_kernel(learner.attention, platform, length, model.dtype, model.head_dim) for length in lengths]
    if len({*kernels}) == 1:
        return f"rows of {' or '.join(map(str, lengths))} tokens, {_attention(kernels[0])}"
    each = (f"{lengths[i]} tokens ({_attention(kernel)})" for i, kernel in enumerate(kernels))
    return f"rows of {' or '.join(each)}"


def _attention(kernel: str) -> str:
    return "dense attention" if kernel == "dense" else f"attention by {kernel}"


def _component_lines(config: RunConfig, rows: str) -> list[str]:
    replay, learner = config.replay, config.learner
    warm_start = f"{learner.warm_start.steps} supervised steps, then " if learner.warm_start is not None else ""
    stored = {"stored rollouts": f"{replay.from_rollouts}, {replay.groups_per_batch} groups per update"}
    parts = {
        "overseer": f"watches; ends a run that stands still for {config.overseer.no_progress_s:g} s",
        **(_generating_lines(config) if replay.from_rollouts is None else stored),
        "learner": f"{warm_start}{config.steps} updates, {rows}, "
        f"loss {learner.loss.preset}{' with a value head' if learner.has_critic else ''}"
        + _in_steps(learner.optimizer_steps),
        **({} if learner.kl.reference is None else {"reference": _reference(learner.kl)}),
        "checkpoints": config.overseer.checkpoints_in_words,
        "trackers": ", ".join(["metrics.jsonl", *config.tracking.labels]),
    }
    return [f"  {name:<18}{what}" for name, what in parts.items()]


def _generating_lines(config: RunConfig) -> dict[str, str]:
    replay, engine, several = config.replay, config.inference, config.runtime == "ray"
    lessons = ", ".join(config.curriculum.lessons)
    engines = f"{engine.servers} × " if several else ""
    workers = f"{rollout_workers(config)} × " if several else ""
    return {
        "curriculum": f"{len(config.curriculum.lessons)} lessons: {lessons}",
        "inference engine": f"{engines}{engine.max_slots} slots of {engine.max_seq_len} tokens"
        + _over(engine.model_parallel)
        if engine.external is None
        else f"{engines}{engine.engine}: {_external(config)}",
        "rollout worker": f"{workers}up to {config.rollout.max_concurrent_groups or config.concurrency} groups at once",
        "rollout storage": f"{config.rollout.storage.kind}, up to {config.rollout.storage.capacity_groups} groups",
        "replay buffer": f"{replay.groups_per_batch} groups per update, staleness budget {replay.staleness_budget}",
        "batch maker": replay.batch_maker.name
        + "".join(f", {maker.name} for {name}" for name, maker in replay.batch_makers.items()),
        **({"weights": f"{config.weights.transport}, {config.weights.encoding}"} if several else {}),
    }


def _external(config: RunConfig) -> str:
    """Where the servers are or how they are started, and how they get weights."""
    external = config.inference.external
    assert external is not None
    if external.launch:
        where = "started by " + " ".join(config.server_command("{model}", "{port}"))
    else:
        where = f"at {', '.join(external.urls)}"
    exact = "; at staleness zero two runs are not the same to the last bit" if config.replay.synchronous else ""
    return f"{where}; weights by {external.weights}{exact}"


def _reference(kl: KlConfig) -> str:
    what = {"initial": "the weights before the first update", "ema": f"average of the policy, decay {kl.ema_decay:g}"}
    synced = "" if kl.sync_every is None else f", replaced by the policy every {kl.sync_every} updates"
    reader = f"KL of {kl.coefficient:g} ({kl.estimator}) in the {kl.place}" if kl.coefficient else "for one's own loss"
    return f"{what.get(str(kl.reference), kl.reference)}{synced}; {reader}"


def _in_steps(count: int) -> str:
    return "" if count == 1 else f", up to {count} optimiser steps each"


def _over(devices: int | None) -> str:
    if devices == 1:
        return ""
    return f", split over {'all local' if devices is None else devices} devices"
