"""Configuration of what a language policy's loss has beside its policy gradient: a KL, and values. Loads no JAX."""

from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from penstock.types.idle_keys import refuse_idle


class KlConfig(BaseModel, frozen=True, extra="forbid"):
    """KL(policy ‖ reference) of a language policy, from x = ℓ_θ − ℓ_ref at the sampled tokens.

    Attributes:
        coefficient: β; 0: none, and no reference is loaded.
        estimator: ``k1`` x; ``k2`` x²/2, whose gradient is that of the KL; ``k3`` expm1(−x) + x. Usual are k3 in the
            loss, and k1 in the reward, where nothing else can stand.
        place: ``loss`` adds β · estimate to each token's loss; ``reward`` subtracts β · k1, summed over the sampled
            tokens, from the rollout's reward before advantages are computed.
        reference: ``initial``, the weights that reinforcement learning begins with (after a warm start); ``ema``, a
            moving average of the policy that begins there; or the path of a Hugging Face directory with the policy's
            shape and vocabulary. None: none, which a coefficient does not allow.
        sync_every: The policy's weights become the reference after every so many updates; None: never.
        ema_decay: Of ``ema``: after an update the reference is this · reference + (1 − this) · policy.
    """

    coefficient: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    estimator: Literal["k1", "k2", "k3"] = "k3"
    place: Literal["loss", "reward"] = "loss"
    reference: str | None = Field(default=None, min_length=1)
    sync_every: int | None = Field(default=None, ge=1)
    ema_decay: float = Field(default=0.999, gt=0, lt=1)

    @model_validator(mode="wrap")
    @classmethod
    def _fill_estimator(cls, given: Any, handler: Callable[[Any], Any]) -> Any:
        """The only one of a reward, which does not count as given."""
        if not isinstance(given, dict) or given.get("place") != "reward" or "estimator" in given:
            return handler(given)
        made = handler({**given, "estimator": "k1"})
        made.model_fields_set.discard("estimator")
        return made

    @model_validator(mode="after")
    def _sound(self) -> "KlConfig":
        if self.coefficient and self.reference is None:
            raise ValueError(
                f"coefficient is {self.coefficient:g} and reference is null: name one: initial (the weights that "
                "reinforcement learning begins with), ema, or the path of a Hugging Face directory"
            )
        if self.coefficient and self.place == "loss" and self.estimator == "k1":
            raise ValueError(
                "estimator is 'k1' and place is 'loss': the expected gradient of k1 is zero; take k2 or k3, or "
                "place: reward"
            )
        if self.coefficient and self.place == "reward" and self.estimator != "k1":
            raise ValueError(
                f"estimator is {self.estimator!r} and place is 'reward': only k1 is the reward of a KL penalty; set "
                "estimator: k1, or place: loss"
            )
        if not self.coefficient:
            refuse_idle(self, ("place", "estimator"), "coefficient is 0")  # a place decides on the estimator
        if self.reference is None:
            refuse_idle(self, ("sync_every", "ema_decay"), "there is no reference")
        elif self.reference == "ema":
            refuse_idle(self, ("sync_every",), "reference is 'ema', which moves with every update")
        else:
            refuse_idle(self, ("ema_decay",), f"reference is {self.reference!r}, and it is of 'ema'")
        return self

    @property
    def directory(self) -> str | None:
        """Where the reference is loaded from; None where it is the run's own, or there is none."""
        return None if self.reference in (None, "initial", "ema") else self.reference

    @property
    def in_loss(self) -> bool:
        """Whether the loss has a term of it."""
        return self.coefficient > 0 and self.place == "loss"

    @property
    def in_reward(self) -> bool:
        """Whether rewards are lowered by it before advantages are computed."""
        return self.coefficient > 0 and self.place == "reward"


class CriticConfig(BaseModel, frozen=True, extra="forbid"):
    """The value head of a language policy, where `learner.loss.advantage` is ``gae``.

    Attributes:
        learning_rate: Peak of the head's own; its course, and the rest of its optimiser, are as `learner.optimizer`.
        coefficient: Of the value loss; what reaches the policy's layers of it is in proportion.
        clip: Values may move by this much in an update before their gradient ends; None: not clipped.
        discount: γ, per sampled token.
        gae_lambda: λ: 1 compares all reward that is still to come with the value, 0 the next value with it.
        normalize_advantages: To mean 0 and deviation 1 over the batch's sampled tokens.
    """

    learning_rate: float = Field(default=1e-4, ge=0, allow_inf_nan=False)
    coefficient: float = Field(default=0.5, gt=0, allow_inf_nan=False)
    clip: float | None = Field(default=0.2, gt=0)
    discount: float = Field(default=1.0, gt=0, le=1)
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    normalize_advantages: bool = True
