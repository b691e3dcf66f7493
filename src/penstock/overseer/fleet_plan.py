"""What a fleet run would consist of, without running it: the resolved config, its memory, its components.

The text is itself a recipe: everything but the config is a comment. One simulator of each task is made, because only
simulators know what they show; where that is impossible on this machine, the text says why and leaves sizes out.
"""

from penstock.overseer.estimate import bytes_text
from penstock.overseer.fleet_config import FleetRunConfig
from penstock.overseer.fleet_estimate import FleetMemoryEstimate, estimate_fleet_memory
from penstock.rundir.yaml_documents import dump_yaml
from penstock.types import LeafSpace, PenstockError


def describe_fleet_plan(config: FleetRunConfig) -> str:
    """The config as YAML, followed by policy, memory estimate and components as comments."""
    comments = [*_size_lines(config), "", "Components:", *_component_lines(config)]
    return dump_yaml(config.dump()) + "\n" + "\n".join(f"# {line}".rstrip() for line in comments)


def _size_lines(config: FleetRunConfig) -> list[str]:
    from penstock.overseer.fleet_simulators import probe_spaces

    try:
        spaces = probe_spaces(config)
    except PenstockError as error:
        return [f"Model and memory: unknown, because no simulator can be made here: {' '.join(str(error).split())}"]
    from penstock.overseer.fleet_policies import count_parameters, make_policy, state_bytes

    policy = make_policy(config, spaces)
    parameters = count_parameters(policy)
    memory = config.model.memory
    return [
        f"Model: {config.model.network}{'' if memory == 'none' else f', {memory}'}, {parameters:,} parameters",
        f"Observations: {_leaves(spaces.observations)}",
        f"Actions: {_leaves(spaces.actions)}",
        "",
        "Memory, estimated:",
        *_memory_lines(estimate_fleet_memory(config, spaces, parameters, state_bytes(policy))),
    ]


def _leaves(leaves: tuple[LeafSpace, ...]) -> str:
    return ", ".join(
        " ".join(part for part in (leaf.name, leaf.kind, f"{leaf.dtype}{list(leaf.shape)}", _choices(leaf)) if part)
        for leaf in leaves
    )


def _choices(leaf: LeafSpace) -> str:
    return f"of {', '.join(map(str, leaf.n[:4]))}{'…' if len(leaf.n) > 4 else ''}" if leaf.n else ""


def _memory_lines(memory: FleetMemoryEstimate) -> list[str]:
    parts = {
        "parameters of learner and workers": memory.parameters_bytes,
        "gradients and optimiser state": memory.optimizer_bytes,
        "fragments": memory.fragments_bytes,
        "shared memory of the simulators": memory.shared_bytes,
        "processes of light simulators": memory.simulators_bytes,
        "the process itself": memory.process_bytes,
        "total": memory.total_bytes,
    }
    return [f"  {name:<34}{bytes_text(count):>11}" for name, count in parts.items()]


def _component_lines(config: FleetRunConfig) -> list[str]:
    fleet, replay, evaluation = config.fleet, config.replay, config.evaluation
    when = f"every {evaluation.every} updates, " if evaluation.every else ""
    processes = fleet.workers * fleet.processes_per_worker
    parts = {
        "overseer": f"watches; ends a run that stands still for {config.overseer.no_progress_s:g} s",
        "simulators": f"{processes} processes of {fleet.envs_per_process}: "
        + ", ".join(f"{name} ({task.id})" for name, task in fleet.tasks.items()),
        "rollout workers": f"{fleet.workers} of {fleet.envs_per_worker} simulators, up to {fleet.most_in_batch} in an "
        f"inference, fragments of {fleet.fragment_length} steps",
        "replay buffer": f"{replay.fragments_per_batch} fragments per update ({config.steps_per_update:,} steps), at "
        f"most {replay.most_waiting or 'any number'} wait, up to {replay.max_staleness} versions old",
        "learner": f"PPO, {config.steps} updates",
        "evaluator": f"{when}{evaluation.episodes} episodes per task at the end, in {evaluation.simulators} simulators",
        "checkpoints": f"every {config.overseer.checkpoint_every} updates, the last "
        f"{config.overseer.keep_checkpoints} kept",
        "trackers": ", ".join(["metrics.jsonl", *config.tracking.labels]),
    }
    return [f"  {name:<18}{what}" for name, what in parts.items()]
