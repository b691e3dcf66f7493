"""Configuration of the batch maker: which one, and how it picks."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from penstock.types.idle_keys import refuse_idle

BUILT_IN_MAKERS = ("deadline", "recency", "grpo")
FILTER_KEYS = ("filter_zero_variance", "filter_difficulty", "filter_overlong")
"""What is for all environments, whichever batch maker they have."""
_OWN_KEYS = {"recency": ("alpha", "balance", "unit"), "grpo": ("retention",)}


class BatchMakerConfig(BaseModel):
    """Which batch maker a replay buffer asks, and how that one picks; docs/batch.md compares them.

    Attributes:
        name: ``deadline`` (bounded overtaking), ``recency`` (newer rollouts more often), ``grpo`` (a reservoir of
            rollouts with an advantage), or the dotted path of one's own: ``package.module:Class``.
        alpha: recency: P(i) ∝ (i + 1)^alpha over the rank by arrival; 0 is uniform.
        balance: recency: environments share a batch by their ``size``, or ``even``.
        unit: recency: what is picked, and what a batch size counts: a whole ``group`` or single ones (``rollout``).
        retention: grpo: keep only the ``newest`` policy version of each problem, or ``all``.
        filter_zero_variance: Leave out groups whose valid rewards are all equal, before any maker sees them.
        filter_difficulty: Leave out groups whose mean reward (of rewards of 0 and 1 the share that is solved) is below
            the first number or above the second, likewise.
        filter_overlong: Of rollouts that a length limit cut: ``mask`` leaves them out of baseline and batch;
            ``penalise`` takes from every reward what the response's length asks for. None: neither.
        overlong_fraction: penalise: the share of ``max_output_tokens`` over which the penalty grows from 0 to
            `overlong_penalty`.
        overlong_penalty: penalise: taken from the reward of a rollout that was cut.
        arguments: Further keyword arguments of one's own class.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = "deadline"
    alpha: float = Field(default=3.0, ge=0)
    balance: Literal["size", "even"] = "size"
    unit: Literal["group", "rollout"] = "group"
    retention: Literal["newest", "all"] = "newest"
    filter_zero_variance: bool = False
    filter_difficulty: tuple[float, float] | None = None
    filter_overlong: Literal["mask", "penalise"] | None = None
    overlong_fraction: float = Field(default=0.2, gt=0, le=1)
    overlong_penalty: float = Field(default=1.0, gt=0)
    arguments: dict[str, Any] = {}

    @model_validator(mode="after")
    def _known(self) -> "BatchMakerConfig":
        if self.name not in BUILT_IN_MAKERS and ":" not in self.name:
            raise ValueError(
                f"name is {self.name!r}: it must be one of {', '.join(BUILT_IN_MAKERS)}, "
                "or the dotted path of a class, package.module:Class"
            )
        if self.arguments and self.name in BUILT_IN_MAKERS:
            raise ValueError(f"arguments {sorted(self.arguments)} are for one's own class; {self.name!r} takes none")
        for owner, keys in _OWN_KEYS.items():
            if self.name != owner:
                refuse_idle(self, keys, f"name is {self.name!r}, and it is of {owner!r}")
        return self

    @model_validator(mode="after")
    def _filters_fit(self) -> "BatchMakerConfig":
        if self.filter_overlong != "penalise":
            why = f"filter_overlong is {self.filter_overlong!r}, and it is of 'penalise'"
            refuse_idle(self, ("overlong_fraction", "overlong_penalty"), why)
        band = self.filter_difficulty
        if band is not None and not band[0] < band[1]:
            raise ValueError(f"filter_difficulty is {list(band)}: the first number must be below the second")
        return self
