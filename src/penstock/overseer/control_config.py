"""The configuration of a run whose experience comes from a simulator fleet: every stage's own config, cross-checked.

A YAML with a ``fleet:`` section is such a run; one with a ``curriculum:`` is a `penstock.overseer.config.RunConfig`.
Loads neither JAX nor Gymnasium.
"""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from penstock.fleet.config import FleetConfig
from penstock.learner.control_config import PpoConfig
from penstock.model.control.config import ControlModelConfig
from penstock.overseer.config import OverseerConfig, RayConfig, RoleConfig
from penstock.replay.config import FragmentReplayConfig
from penstock.tracking.config import TrackingConfig
from penstock.types.idle_keys import refuse_idle
from penstock.weights.config import WeightsConfig

FLEET_ROLES = ("learner", "replay", "rollout", "evaluator")
"""What the components of a distributed fleet run do."""


class FleetEvaluationConfig(BaseModel):
    """Episodes that count for nothing but the score: simulators of their own, with seeds that no worker has.

    Attributes:
        every: Versions between two evaluations while the run trains; 0: only before and after it.
        episodes: Per task, exactly. Its simulators play the same number each, or one more, decided beforehand, so that
            short episodes do not count more often.
        simulators: Of all tasks together, at once.
        deterministic: Take the most probable action; false: sample, as in training.
        before: Evaluate the untrained policy, too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    every: int = Field(default=0, ge=0)
    episodes: int = Field(default=32, ge=1, le=1_000_000)
    simulators: int = Field(default=8, ge=1, le=65536)
    deterministic: bool = True
    before: bool = True


class FleetRunConfig(BaseModel):
    """One run of asynchronous reinforcement learning for a control policy.

    Attributes:
        seed: Every random choice derives from it.
        steps: Number of updates, each of several optimiser steps.
        runtime: `local` is one process for learner and workers, and one for each simulator or few of them.
        model: The policy's network.
        fleet: Simulators and their workers.
        replay: Freshness and storage of fragments.
        learner: PPO.
        evaluation: Scoring.
        tracking: Where metrics go besides the run directory.
        overseer: Supervision and checkpoints.
        weights: How new weights reach workers in other processes.
        ray: The cluster.
        roles: Resources by role: learner, replay, rollout, evaluator.
        versions: Of the packages that made the run, as its config.yaml records them; nothing goes by it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    seed: int = Field(default=0, ge=0)
    steps: int = Field(ge=0)
    runtime: Literal["local", "ray"] = "local"
    model: ControlModelConfig = ControlModelConfig()
    fleet: FleetConfig
    replay: FragmentReplayConfig = FragmentReplayConfig()
    learner: PpoConfig = PpoConfig()
    evaluation: FleetEvaluationConfig = FleetEvaluationConfig()
    tracking: TrackingConfig = TrackingConfig()
    overseer: OverseerConfig = OverseerConfig()
    weights: WeightsConfig = WeightsConfig()
    ray: RayConfig = RayConfig()
    roles: dict[str, RoleConfig] = {}
    versions: dict[str, str] = {}

    @model_validator(mode="after")
    def _stages_fit(self) -> Self:
        self._check_replay()
        self._check_evaluation()
        self._check_learner()
        self._check_model()
        numbers = ("return_mean", "return_min", "return_max", "discounted_return_mean")
        self.overseer.check_keep_best(self.fleet.tasks, numbers)
        refuse_idle(self.tracking, ("samples", "samples_per_log"), "simulators have no conversations", at="tracking.")
        unknown = sorted(self.roles.keys() - set(FLEET_ROLES))
        if unknown:
            raise ValueError(f"roles names {', '.join(unknown)}: no such role; there are {', '.join(FLEET_ROLES)}")
        return self

    def _check_replay(self) -> None:
        replay, tasks = self.replay, self.fleet.tasks
        unknown = sorted(replay.tolerances.keys() - tasks.keys())
        if unknown:
            raise ValueError(
                f"replay.tolerances names {', '.join(unknown)}: no such task; fleet.tasks are {', '.join(tasks)}"
            )
        if (replay.store.url or "").startswith("memory:"):
            raise ValueError(
                f"replay.store.url is {replay.store.url}: this process's memory ends with the run, and its fragments "
                "with it; give a path or another URL"
            )
        cut, drop = self.fleet.max_staleness, replay.max_staleness
        if cut is not None and cut > drop:
            raise ValueError(
                f"fleet.max_staleness is {cut}, above replay.max_staleness = {drop}: older steps would be sent only to "
                "be dropped; lower the one or raise the other"
            )

    def _check_learner(self) -> None:
        learner, length, batch = self.learner, self.fleet.fragment_length, self.replay.fragments_per_batch
        if learner.minibatches > batch and self.model.memory != "none":
            raise ValueError(
                f"learner.minibatches is {learner.minibatches}, and replay.fragments_per_batch is {batch}: minibatches "
                "of a policy with memory hold whole fragments; lower the one or raise the other"
            )
        if learner.minibatches > batch * length:
            raise ValueError(
                f"learner.minibatches is {learner.minibatches}, and a batch has {batch * length} steps "
                "(replay.fragments_per_batch · fleet.fragment_length): some would have none; lower it"
            )
        if learner.burn_in and self.model.memory == "none" and self.model.module is None:
            raise ValueError(
                f"learner.burn_in is {learner.burn_in} and model.memory is none: there is no state to bring up to "
                "date; set burn_in to 0, or choose a memory"
            )
        if learner.burn_in >= length:
            raise ValueError(
                f"learner.burn_in is {learner.burn_in}, and fleet.fragment_length is {length}: no step would be "
                "trained; lower the one or raise the other"
            )

    def _check_model(self) -> None:
        model = self.model
        if model.module is not None:
            return
        if model.memory == "none":
            refuse_idle(model, ("memory_size",), "model.memory is 'none'", at="model.")
        if model.memory != "transformer":
            why = f"model.memory is {model.memory!r}, and it is of 'transformer'"
            refuse_idle(model, ("memory_heads", "memory_window"), why, at="model.")
        owners = {
            "pooled_size": ("mlp",),
            "image_features": ("nature_cnn", "impala_cnn"),
            "impala_channels": ("impala_cnn",),
        }
        for key, networks in owners.items():
            if model.network not in networks:
                why = f"model.network is {model.network!r}, and it is of {' and '.join(networks)}"
                refuse_idle(model, (key,), why, at="model.")

    def _check_evaluation(self) -> None:
        tasks, simulators = self.fleet.tasks, self.evaluation.simulators
        if simulators < len(tasks):
            raise ValueError(
                f"evaluation.simulators is {simulators}, and fleet.tasks are {len(tasks)}: every task needs one; "
                f"set at least {len(tasks)}"
            )

    def dump(self) -> dict[str, Any]:
        """Plain values under the names that YAML uses."""
        return self.model_dump(mode="json")

    @property
    def steps_per_update(self) -> int:
        """Simulator steps in the fragments of one update."""
        return self.replay.fragments_per_batch * self.fleet.fragment_length
