"""What a control run would consist of, without running it: its policy, its memory, its components.

One simulator of each task is made, because only
simulators know what they show; where that is impossible on this machine, the text says why and leaves sizes out.

Memory is estimated by pure functions; nothing is allocated. With P parameters of 4 bytes, observations of o bytes, a
recurrent state of r bytes, N = workers × envs_per_worker slots, fragments of L steps, B of them in an update and W
waiting:

- *parameters* 3 · 4 P: the learner's, the published ones, and each worker's (one more set per further worker);
- *optimiser* 4 · 4 P: gradients, their clipped copy, and Adam's two moments;
- *fragments* (B + W + workers · queue + N) (L + 1) (o + r + 64): training, waiting, to be sent, being filled; twice B,
  because the learner's batch is a copy;
- *shared memory* 2 N o: what simulators write, with their final observations;
- *simulators* `SIMULATOR_BYTES` for each process, where the simulator itself is light.

An upper estimate to decide by; activations of convolutions and heavy simulators come on top.
"""

from penstock.overseer.control_config import FleetRunConfig
from penstock.overseer.estimate import PROCESS_BYTES, memory_lines
from penstock.types import LeafSpace, PenstockError, Spaces

SIMULATOR_BYTES = 30 * 2**20
"""Of a process with a light simulator: what it does not share with the one that it was forked from."""


def estimate_fleet_memory(
    config: FleetRunConfig, spaces: Spaces, parameters: int, state_bytes: int = 0
) -> dict[str, int]:
    """The memory of a fleet run on one machine: bytes by purpose, see the module's docstring.

    Args:
        config: The run's.
        spaces: What the policy sees and does.
        parameters: Of the policy.
        state_bytes: Of one slot's recurrent state.
    """
    fleet, replay = config.fleet, config.replay
    slots = fleet.workers * fleet.envs_per_worker
    step_bytes = sum(leaf.nbytes for leaf in (*spaces.observations, *spaces.actions)) + 64
    seen_bytes = sum(leaf.nbytes for leaf in spaces.observations)
    fragment_bytes = (fleet.fragment_length + 1) * step_bytes + state_bytes
    waiting = replay.buffer_config().capacity if replay.most_waiting is None else replay.most_waiting
    fragments = 2 * replay.fragments_per_batch + waiting + fleet.workers * fleet.queue_fragments + slots
    return {
        "parameters of learner and workers": (2 + fleet.workers) * 4 * parameters,
        "gradients and optimiser state": 4 * 4 * parameters,  # of AdamW, which has most
        "fragments": fragments * fragment_bytes,
        "shared memory of the simulators": 2 * slots * seen_bytes,
        "processes of light simulators": fleet.workers * fleet.processes_per_worker * SIMULATOR_BYTES,
        "the process itself": PROCESS_BYTES,
    }


def fleet_plan_lines(config: FleetRunConfig) -> list[str]:
    """Policy, memory estimate and components.

    Raises:
        ConfigError: a simulator cannot be made here, where the run would make them, or the policy cannot be.
    """
    return [*_size_lines(config), "", "Components:", *_component_lines(config)]


def _size_lines(config: FleetRunConfig) -> list[str]:
    from penstock.overseer.control.simulators import probe_spaces

    try:
        spaces = probe_spaces(config)
    except PenstockError as error:
        if config.runtime == "local":
            raise
        return [f"Model and memory: unknown, because no simulator can be made here: {' '.join(str(error).split())}"]
    from penstock.learner import ControlLearner
    from penstock.overseer.control.policies import count_parameters, make_policy, state_bytes

    policy = make_policy(config, spaces)
    ControlLearner(policy, config.learner, config.steps)  # which looks at all names
    parameters, model = count_parameters(policy), config.model
    memory = estimate_fleet_memory(config, spaces, parameters, state_bytes(policy))
    parts = model.module or f"{model.network}{'' if model.memory == 'none' else f', {model.memory}'}"
    return [
        f"Model: {parts}, {parameters:,} parameters",
        f"Observations: {_leaves(spaces.observations)}",
        f"Actions: {_leaves(spaces.actions)}",
        "",
        "Memory, estimated:",
        *memory_lines(memory),
    ]


def _leaves(leaves: tuple[LeafSpace, ...]) -> str:
    return ", ".join(
        " ".join(part for part in (leaf.name, leaf.kind, f"{leaf.dtype}{list(leaf.shape)}", _choices(leaf)) if part)
        for leaf in leaves
    )


def _choices(leaf: LeafSpace) -> str:
    return f"of {', '.join(map(str, leaf.n[:4]))}{'…' if len(leaf.n) > 4 else ''}" if leaf.n else ""


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
        "checkpoints": config.overseer.checkpoints_in_words,
        "trackers": ", ".join(["metrics.jsonl", *config.tracking.labels]),
    }
    return [f"  {name:<18}{what}" for name, what in parts.items()]
