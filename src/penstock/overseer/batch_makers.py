"""Which batch makers a run has; free of JAX."""

from collections.abc import Collection

from penstock.batch import BatchMaker, make_batch_maker
from penstock.overseer.config import RunConfig
from penstock.types import ConfigError, fold


def make_batch_makers(config: RunConfig, environments: Collection[str]) -> list[BatchMaker]:
    """The run's batch makers: one for each environment that has its own, and one for the others.

    Raises:
        ConfigError: ``replay.batch_makers`` names an environment that the run does not have.
    """
    replay, learner = config.replay, config.learner
    unknown = sorted(replay.batch_makers.keys() - set(environments))
    if unknown:
        raise ConfigError(
            f"replay.batch_makers names {', '.join(unknown)}: no such environment; this run has "
            f"{', '.join(sorted(environments))}"
        )
    return [
        make_batch_maker(
            maker,
            advantage=learner.loss.advantage,
            max_tokens=learner.row_length,
            max_samples=replay.max_samples,
            ordered=replay.synchronous,
            allow_truncated_sampling=learner.allow_truncated_sampling,
            seed=fold(config.seed, "batch maker", name or ""),
            environment_name=name,
        )
        for name, maker in [(None, replay.batch_maker), *replay.batch_makers.items()]
    ]
