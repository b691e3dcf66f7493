"""Configuration of the learner of control policies (PPO). Loads neither JAX nor optax.

What PPO minimises, and what is masked where, is in docs/learner.md.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from penstock.learner.config import CorrectionConfig, FrozenConfig, OptimizerConfig, refuse_idle_course
from penstock.types.idle_keys import refuse_idle


class ControlOptimizerConfig(OptimizerConfig, frozen=True):
    """As `OptimizerConfig`, with PPO's usual settings.

    The learning rate's course counts updates, not optimiser steps: all of an update are at one rate.
    """

    learning_rate: float = Field(default=3e-4, ge=0, allow_inf_nan=False)
    warmup_steps: int = Field(default=0, ge=0)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    epsilon: float = Field(default=1e-5, gt=0, allow_inf_nan=False)
    max_grad_norm: float | None = Field(default=0.5, gt=0)

    @model_validator(mode="after")
    def _on_the_chip(self) -> "ControlOptimizerConfig":
        refuse_idle(self, ("offload",), "a control policy's state is small, and its steps are one program")
        return self


class VTraceConfig(FrozenConfig, frozen=True):
    """V-trace instead of GAE for fragments that are old.

    Attributes:
        beyond_staleness: For fragments whose oldest step lies more versions back than this; None: never.
        rho_clip: Largest ratio that a value error is weighted with.
        c_clip: Largest ratio that errors are carried back with.
        policy_clip: Largest ratio that the policy's gradient is weighted with.
    """

    beyond_staleness: int | None = Field(default=1, ge=0)
    rho_clip: float = Field(default=1.0, gt=0)
    c_clip: float = Field(default=1.0, gt=0)
    policy_clip: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _c_below_rho(self) -> "VTraceConfig":
        if self.c_clip > self.rho_clip:
            raise ValueError(
                f"c_clip is {self.c_clip}, more than rho_clip = {self.rho_clip}: V-trace is defined for c_clip ≤ "
                "rho_clip; lower c_clip"
            )
        if self.beyond_staleness is None:
            clips = ("rho_clip", "c_clip", "policy_clip")
            refuse_idle(self, clips, "beyond_staleness is null, so no fragment is old enough for V-trace")
        return self


class ReferenceKlConfig(FrozenConfig, frozen=True):
    """A penalty of coefficient · KL(reference ‖ policy), so that training keeps to what the reference does.

    Attributes:
        coefficient: Before the first update.
        decay: It is multiplied by this after every update.
        reference: Folder of a control policy for the same spaces; None: the learner's own at version
            `reference_version`.
        reference_version: The version that is kept; before it there is no penalty.
    """

    coefficient: float = Field(default=0.2, gt=0, allow_inf_nan=False)
    decay: float = Field(default=0.9995, gt=0, le=1)
    reference: str | None = None
    reference_version: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _one_reference(self) -> "ReferenceKlConfig":
        if self.reference is not None and self.reference_version:
            raise ValueError(
                f"reference is {self.reference!r} and reference_version is {self.reference_version}: the reference is "
                "a folder or one of the run's own versions; remove one"
            )
        return self

    def coefficient_at(self, step: int) -> float:
        """Of update `step`."""
        if self.reference is None and step < self.reference_version:
            return 0.0
        return self.coefficient * self.decay**step


class PpoConfig(FrozenConfig, frozen=True):
    """The learner of control policies.

    Attributes:
        discount: γ.
        gae_lambda: λ of GAE and of V-trace.
        reward_scale: Rewards are multiplied by this for the learner alone, so that the loss of values does not drown
            that of the policy. ``auto``: for each task the inverse root mean square of the discounted returns that are
            not 0, inside all its fragments so far, those of the update included. A number should bring returns to some
            ones or tens. Values are in these units, statistics in the simulator's.
        clip: The ratio is clipped at 1 ± this. It acts from an update's second optimiser step on.
        dual_clip: Lower bound of the surrogate where the advantage is negative, as a multiple of it; likewise. None:
            unbounded.
        value_clip: Values may move by this much in an update before their gradient ends; it is in the units of
            scaled returns; likewise. None: not clipped.
        epochs: How often an update goes through its batch.
        minibatches: Optimiser steps per epoch; each takes steps drawn from all fragments, or whole fragments where the
            policy has memory.
        normalize_advantages: To mean 0 and deviation 1 over the trained steps of a ``minibatch`` or of the ``batch``.
        entropy_coefficient: Of the entropy bonus.
        value_coefficient: Of the value loss.
        target_kl: An update ends after the first epoch whose mean KL from the policy before the update exceeds this;
            None: never.
        burn_in: Steps at a fragment's start that only bring the recurrent state up to date; 0 without memory.
        value_warmup_updates: First updates, in which only `value_arrays` train.
        value_arrays: Names of the arrays that only values depend on; patterns.
        correction: Weight of a step that another version sampled, where V-trace has not weighted it already.
        vtrace: For old fragments.
        reference_kl: Penalty towards a reference policy; None: none.
        optimizer: How the loss is minimised.
        mismatch_limit: Largest difference between log-probabilities as the fleet recorded them and as the learner
            computes them, over steps sampled under the learner's own version.
        max_non_finite_updates: So many updates in a row with a step that was skipped end the run.
    """

    discount: float = Field(default=0.99, ge=0, le=1)
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    reward_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["auto"] = "auto"
    clip: float = Field(default=0.2, gt=0, lt=1)
    dual_clip: float | None = Field(default=None, gt=1)
    value_clip: float | None = Field(default=None, gt=0)
    epochs: int = Field(default=4, ge=1)
    minibatches: int = Field(default=4, ge=1)
    normalize_advantages: Literal["minibatch", "batch", "none"] = "minibatch"
    entropy_coefficient: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    value_coefficient: float = Field(default=0.5, ge=0, allow_inf_nan=False)
    target_kl: float | None = Field(default=None, gt=0)
    burn_in: int = Field(default=0, ge=0)
    value_warmup_updates: int = Field(default=0, ge=0)
    value_arrays: tuple[str, ...] = ("value_head.*", "value_encoder.*")
    correction: CorrectionConfig = CorrectionConfig()
    vtrace: VTraceConfig = VTraceConfig()
    reference_kl: ReferenceKlConfig | None = None
    optimizer: ControlOptimizerConfig = ControlOptimizerConfig()
    mismatch_limit: float = Field(default=1e-3, gt=0)
    max_non_finite_updates: int = Field(default=5, ge=1)

    @model_validator(mode="after")
    def _values_are_trained(self) -> "PpoConfig":
        if self.value_coefficient == 0 and self.value_warmup_updates:
            raise ValueError(
                f"value_warmup_updates is {self.value_warmup_updates} and value_coefficient is 0: the warm-up would "
                "train nothing; raise value_coefficient"
            )
        if self.value_warmup_updates and not self.value_arrays:
            raise ValueError(
                f"value_warmup_updates is {self.value_warmup_updates} and value_arrays is empty: the warm-up would "
                "train nothing; name the value head's arrays"
            )
        return self

    @model_validator(mode="after")
    def _every_key_acts(self) -> "PpoConfig":
        refuse_idle_course(self.optimizer)
        if not self.value_warmup_updates:
            refuse_idle(self, ("value_arrays",), "value_warmup_updates is 0")
        if not self.value_coefficient:
            refuse_idle(self, ("value_clip",), "value_coefficient is 0")
        refuse_idle(self.correction, ("scope", "veto"), "steps of simulators are weighed one by one", at="correction.")
        if self.epochs * self.minibatches == 1:
            why = "an update is one optimiser step, before which nothing has moved (raise minibatches or epochs)"
            refuse_idle(self, ("clip", "dual_clip", "value_clip"), why)
        if self.epochs == 1:
            refuse_idle(self, ("target_kl",), "it ends an update between two epochs, and epochs is 1")
        return self
