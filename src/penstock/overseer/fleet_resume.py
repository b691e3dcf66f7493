"""Whether a fleet run may go on from a checkpoint: asked before anything is started, whatever the runtime.

A resume keeps the policy of its checkpoint, so a network or simulators that it was not trained with are bad input.
Everything else of a configuration may change. Only the folder's ``config.json`` is read. Not covered: whether the
checkpoint is whole (`penstock.learner.newest_good_checkpoint`), and optimiser state, which the learner checks.
"""

import json
from pathlib import Path

from penstock.fleet.space_agreement import same_form
from penstock.model.control import ControlModelConfig, read_control_form
from penstock.overseer.fleet_config import FleetRunConfig
from penstock.types import ConfigError, Spaces


def check_resume(config: FleetRunConfig, spaces: Spaces, checkpoint: Path) -> None:
    """Compares what a run is to go on with and what its checkpoint was trained with.

    Args:
        config: The run's, with the changes that were asked for.
        spaces: Of its simulators.
        checkpoint: Its folder.

    Raises:
        ConfigError: they do not fit; the message names every field with both values, and the remedy.
        CheckpointError: the checkpoint holds no control policy.
    """
    trained, trained_spaces = read_control_form(checkpoint / "model")
    _check_model(config.model, trained, checkpoint)
    if not same_form(spaces, trained_spaces):
        raise ConfigError(
            f"fleet.tasks: {checkpoint} holds a policy for other observations or actions than these simulators have: "
            "resume with the tasks that it was trained on"
        )


def _check_model(asked: ControlModelConfig, trained: ControlModelConfig, checkpoint: Path) -> None:
    ours, theirs = asked.model_dump(mode="json"), trained.model_dump(mode="json")
    others = [name for name in ours if ours[name] != theirs[name]]
    if not others:
        return
    differences = ", ".join(f"model.{name} is {json.dumps(ours[name])}" for name in others)
    values = " ".join(f"model.{name}={_as_word(theirs[name])}" for name in others)
    raise ConfigError(
        f"{differences}, but {checkpoint} was trained with {values}: a resumed run keeps its network; give these "
        "values, or begin a new run"
    )


def _as_word(value: object) -> str:
    """As an override is written on the command line; JSON is YAML."""
    return json.dumps(value, separators=(",", ":"))
