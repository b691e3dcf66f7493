"""Whether a fleet run may go on from a checkpoint: asked before anything is started, whatever the runtime.

A resume keeps the policy of its checkpoint, so a network or simulators that it was not trained with are bad input.
Everything else of a configuration may change. Only the folder's ``config.json`` is read. Not covered: whether the
checkpoint is whole (`penstock.learner.newest_good_checkpoint`), and optimiser state, which the learner checks.
"""

from pathlib import Path

from penstock.fleet.space_agreement import same_form
from penstock.model.control import read_control_form
from penstock.overseer.fleet_config import FleetRunConfig
from penstock.overseer.kept_model import check_kept
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
    ours, theirs = config.model.model_dump(mode="json"), trained.model_dump(mode="json")
    check_kept(ours, theirs, checkpoint, lambda name: f"model.{name}")
    if not same_form(spaces, trained_spaces):
        raise ConfigError(
            f"fleet.tasks: {checkpoint} holds a policy for other observations or actions than these simulators have: "
            "resume with the tasks that it was trained on"
        )
