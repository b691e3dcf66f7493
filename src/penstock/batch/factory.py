"""The batch maker that a config names: a built-in one, or one's own by its dotted path."""

import inspect
from typing import Any

from penstock.batch.advantages import AdvantageName, GroupAdvantage
from penstock.batch.config import BatchMakerConfig
from penstock.batch.deadline import DeadlineBatchMaker
from penstock.batch.maker import BatchMaker
from penstock.batch.recency import RecencyBatchMaker
from penstock.batch.reservoir import GrpoBatchMaker
from penstock.types import ConfigError
from penstock.types.errors import errors_of_user_code
from penstock.types.importing import load_attribute

FIELD = "replay.batch_maker.name"
"""What error messages call the config's `name`."""


def make_batch_maker(
    config: BatchMakerConfig,
    *,
    advantage: AdvantageName | GroupAdvantage,
    max_tokens: int,
    max_samples: int,
    ordered: bool,
    allow_truncated_sampling: bool,
    seed: int | None,
    environment_name: str | None = None,
) -> BatchMaker:
    """Makes the batch maker that a config names.

    One's own class is called with `BatchMakerConfig.arguments`, and with those of the arguments below that its
    constructor names as well.

    Args:
        config: Which one, and how it picks.
        advantage: Name of the advantage, or a function of a group. The grpo maker has its own, rloo, and refuses any
            other.
        max_tokens: Longest trainable sequence, prompt and response together: the learner's row length.
        max_samples: Batches that a rollout may be in; −1 means any number.
        ordered: Deadline maker: order by ticket, not by arrival.
        allow_truncated_sampling: Take rollouts of truncated sampling, such as top-k.
        seed: Of the makers that draw; None means from the operating system.
        environment_name: Take rollouts of this environment only; None means any.

    Raises:
        ConfigError: the name stands for no batch maker, or the arguments do not fit.
    """
    offered: dict[str, Any] = {
        "advantage": advantage,
        "max_tokens": max_tokens,
        "max_samples": max_samples,
        "ordered": ordered,
        "allow_truncated_sampling": allow_truncated_sampling,
        "seed": seed,
        "environment_name": environment_name,
    }
    if config.name == "deadline":
        return _construct(DeadlineBatchMaker, {}, offered)
    if config.name == "recency":
        own = {"alpha": config.alpha, "balance": config.balance, "unit": config.unit}
        return _construct(RecencyBatchMaker, own, offered)
    if config.name == "grpo":
        if advantage != "rloo":
            raise ConfigError(
                "the grpo batch maker measures advantages by rloo, but "
                f"{'those of learner.loss.module are' if callable(advantage) else repr(advantage) + ' is'} asked for: "
                "set learner.loss.advantage: rloo, or choose another replay.batch_maker.name"
            )
        return _construct(GrpoBatchMaker, {"retention": config.retention}, offered)
    return _construct(_load_class(config.name), config.arguments, offered)


def _construct(cls: type[BatchMaker], own: dict[str, Any], offered: dict[str, Any]) -> BatchMaker:
    """Calls a class with its own arguments and those on offer that it names."""
    signature = inspect.signature(cls)
    arguments = {name: value for name, value in offered.items() if name in signature.parameters} | own
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"replay.batch_maker.arguments {own} do not fit {cls.__name__}{signature}: {error}"
        ) from error
    told = f"replay.batch_maker: making a {cls.__name__} raised"
    with errors_of_user_code(ConfigError, told, " (PENSTOCK_TRACEBACK=1 shows where)"):
        return cls(**arguments)


def _load_class(path: str) -> type[BatchMaker]:
    found = load_attribute(path, FIELD)
    if not _is_maker(found):
        raise ConfigError(
            f"{FIELD} {path!r}: {found!r} is no class derived from penstock.batch.BatchMaker; "
            "docs/batch.md shows one of fifteen lines"
        )
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"{FIELD} {path!r}: {found.__name__} is abstract: define {missing}")
    return found


def _is_maker(found: object) -> bool:
    return inspect.isclass(found) and issubclass(found, BatchMaker)
