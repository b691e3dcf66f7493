"""Configuration of the learner of language policies, and what that of control policies shares with it.

Loads neither JAX nor optax.
A loss preset fills in every field that was not given, so a dumped config shows the whole loss, and a dumped
config loads as itself.
"""

import logging
import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from penstock.batch.advantages import AdvantageName, GroupAdvantage
from penstock.batch.packing import RowShape
from penstock.learner.loss_terms import CriticConfig, KlConfig
from penstock.model.language.attention_choice import AttentionChoice, Platform, Remat
from penstock.types import ConfigError, RLLossModule
from penstock.types.idle_keys import refuse_idle
from penstock.types.importing import load_attribute

Preset = Literal["rloo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "reinforce_pp", "ppo"]
Surrogate = Literal["ppo", "reinforce", "cispo"]
Aggregation = Literal["token", "sequence", "constant"]

PRESETS: dict[str, dict[str, Any]] = {
    "rloo": {"advantage": "rloo", "aggregation": "token"},
    "grpo": {"advantage": "grpo", "aggregation": "sequence"},
    "dr_grpo": {"advantage": "dr_grpo", "aggregation": "constant"},
    "dapo": {"advantage": "grpo", "aggregation": "token", "clip_epsilon_high": 0.28},
    "gspo": {
        "advantage": "grpo",
        "aggregation": "sequence",
        "ratio": "sequence",
        "clip_epsilon_low": 3e-4,
        "clip_epsilon_high": 4e-4,
    },
    "cispo": {"advantage": "grpo", "surrogate": "cispo", "aggregation": "token", "clip_epsilon_high": 4.0},
    "reinforce_pp": {"advantage": "reinforce_pp", "aggregation": "token"},
    "ppo": {"advantage": "gae", "aggregation": "token"},
}
"""What each preset changes of the defaults below; docs/learner.md has the table with sources."""

PRESET_FILTERS: dict[str, dict[str, Any]] = {"dapo": {"filter_zero_variance": True, "filter_overlong": "mask"}}
"""What presets change of ``replay.batch_maker``, whose filters act before the learner has anything."""


class FrozenConfig(BaseModel, frozen=True, extra="forbid"):
    """Of a section of the configuration."""


class CorrectionConfig(FrozenConfig, frozen=True):
    """Off-policy correction: what multiplies a token's loss, from w = exp(ℓ_p − ℓ_b).

    Attributes:
        kind: ``truncate`` min(w, cap); ``mask`` w where low ≤ w ≤ high, else 0; ``none`` 1, which gives up the
            guard against stale rollouts and therefore has to be written out.
        scope: Over what w is formed: each ``token``; the ``sequence``, exp Σ over its sampled tokens; or its geometric
            mean, ``sequence_mean``, which does not grow with the length.
        cap: Of ``truncate``, at least 1, which is the weight of a token as probable as when it was sampled.
        low: Of ``mask``, below 1.
        high: Of ``mask``, above 1.
        veto: A sequence of which any token has exp(ℓ_p − ℓ_b) below this has weight 0 (and stays in the denominators);
            1e-4 is usual. None: none.
    """

    kind: Literal["none", "truncate", "mask"] = "truncate"
    scope: Literal["token", "sequence", "sequence_mean"] = "token"
    cap: float = Field(default=2.0, ge=1)
    low: float = Field(default=0.5, ge=0)
    high: float = Field(default=5.0, gt=0)
    veto: float | None = Field(default=None, gt=0, lt=1)

    @model_validator(mode="after")
    def _ordered(self) -> "CorrectionConfig":
        if not self.low < 1 < self.high:
            raise ValueError(
                f"low is {self.low} and high is {self.high}: 1, the weight of a token as probable as when it was "
                "sampled, must lie between them, or fresh rollouts would train nothing"
            )
        for owner, keys in {"truncate": ("cap",), "mask": ("low", "high")}.items():
            if self.kind != owner:
                refuse_idle(self, keys, f"kind is {self.kind!r}, and it is of {owner!r}")
        if self.kind == "none":
            refuse_idle(self, ("scope",), "kind is 'none', so that no weight is formed")
        return self


ProximalSource = Literal["current", "stored", "behaviour"]
"""Where ℓ_p comes from: the forward pass itself, the micro-batch, or the engine's ℓ_b."""


class LossConfig(FrozenConfig, frozen=True):
    """The policy loss; see `penstock.learner.losses` for the equations.

    Attributes:
        preset: Fills in what is not given.
        advantage: From rewards; the batch maker computes it. ``turn`` asks in which turn of a conversation reward fell,
            ``gae`` at which token, and compares with a value head's (`learner.critic`); the others ask for the
            episode's sum.
        ratio: What the surrogate clips: exp(ℓ_θ − ℓ_p) of each ``token``, or its geometric mean over a ``sequence``.
            Both are 1 where an update takes one optimiser step, but with `learner.proximal: behaviour`.
        surrogate: Of the policy gradient.
        aggregation: From tokens to the loss of one optimiser step.
        clip_epsilon_low: The ratio is clipped at 1 − this (ppo). It acts where an update takes several optimiser steps
            (`learner.minibatches`, `learner.epochs`), or with `learner.proximal: behaviour`.
        clip_epsilon_high: The ratio is clipped at 1 + this (ppo, cispo); likewise.
        dual_clip: Lower bound of the surrogate where the advantage is negative, as a multiple of it (ppo); likewise.
            None: unbounded.
        entropy_coefficient: Of the entropy bonus, which is subtracted from each token's loss.
        max_tokens: Denominator of ``constant`` aggregation, tokens per sequence; None: max_output_tokens of the
            sequence's lesson.
        correction: For rollouts older than the learner.
        module: A loss of one's own, ``package.module:Class`` or ``path/to/file.py:Class``: a `RLLossModule`, whose
            advantages and loss take the place of all above but `aggregation` and `max_tokens`. None: the loss above.
    """

    preset: Preset = "rloo"
    advantage: AdvantageName = "rloo"
    ratio: Literal["token", "sequence"] = "token"
    surrogate: Surrogate = "ppo"
    aggregation: Aggregation = "token"
    clip_epsilon_low: float = Field(default=0.2, gt=0, lt=1)
    clip_epsilon_high: float = Field(default=0.2, gt=0)
    dual_clip: float | None = Field(default=None, gt=1)
    entropy_coefficient: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    max_tokens: int | None = Field(default=None, gt=0)
    correction: CorrectionConfig = CorrectionConfig()
    module: str | None = None

    @model_validator(mode="wrap")
    @classmethod
    def _fill_preset(cls, given: Any, handler: Callable[[Any], Any]) -> Any:
        """What is filled in does not count as given, so that another preset takes its place in a changed copy."""
        if not isinstance(given, dict):
            return handler(given)
        preset = given.get("preset", "rloo")
        made = handler(PRESETS.get(preset, {}) | given if isinstance(preset, str) else given)
        made.model_fields_set.intersection_update(given)
        return made

    @model_validator(mode="after")
    def _every_key_acts(self) -> "LossConfig":
        idle = {
            "ppo": (),
            "cispo": ("clip_epsilon_low", "dual_clip"),
            "reinforce": ("ratio", "clip_epsilon_low", "clip_epsilon_high", "dual_clip"),
        }
        why = f"surrogate is {self.surrogate!r}, which does not clip there"
        refuse_idle(self, idle[self.surrogate], why, preset=PRESETS[self.preset])
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_epsilon_high:
            raise ValueError(
                f"dual_clip is {self.dual_clip}, not above 1 + clip_epsilon_high = {1 + self.clip_epsilon_high:g}: it "
                "bounds what the first clip leaves; raise it (3 is usual)"
            )
        if self.aggregation != "constant":
            refuse_idle(self, ("max_tokens",), f"aggregation is {self.aggregation!r}, and it is of 'constant'")
        if self.module is not None:
            kept = {"aggregation", "max_tokens", "module"}
            replaced = [key for key in LossConfig.model_fields if key not in kept]
            refuse_idle(self, replaced, f"module {self.module!r} has a loss of its own")
        return self

    def each_alone(self, proximal: ProximalSource) -> bool:
        """Whether a token's loss depends on no other's ℓ_θ: where ℓ_p is ℓ_θ itself, a sequence's ratio is 1."""
        within = self.correction.scope == "token" and self.correction.veto is None
        ratio = self.ratio == "token" or proximal == "current"
        return self.module is None and ratio and (within or proximal == "behaviour")

    def estimator(self) -> AdvantageName | GroupAdvantage:
        """What makes advantages of rewards: `advantage`, or one's own loss, which is made; raises as `load_module`."""
        own = self.load_module()
        return self.advantage if own is None else own.compute_advantages

    def load_module(self) -> RLLossModule | None:
        """One's own loss, imported and made; None where there is none.

        Raises:
            ConfigError: `module` stands for nothing that can be imported and made without arguments, or for what lacks
                a method.
        """
        if self.module is None:
            return None
        found = load_attribute(self.module, "learner.loss.module")
        if not callable(found):
            raise ConfigError(f"learner.loss.module {self.module!r} is a {type(found).__name__}: name its class")
        try:
            made = found()
        except (Exception, SystemExit) as error:  # whatever the user's class raises
            raise ConfigError(
                f"learner.loss.module {self.module!r}: making one raised {type(error).__name__}: {error}; it takes no "
                "arguments"
            ) from error
        methods = ("compute_advantages", "loss")
        lacking = " and no ".join(name for name in methods if not callable(getattr(made, name, None)))
        if lacking or not isinstance(made, RLLossModule):
            raise ConfigError(
                f"learner.loss.module {self.module!r} gives a {type(made).__name__}, which has no {lacking}; "
                "docs/learner.md shows one of ten lines"
            )
        return made


_ADAMW_KEYS = ("beta1", "beta2", "epsilon")


class OptimizerConfig(FrozenConfig, frozen=True):
    """An optimiser with warm-up and clipping; `penstock.learner.optimizer` has the equations.

    Attributes:
        name: ``adamw``; ``adafactor``, whose second moments are a row and a column per matrix; ``muon``, which
            orthogonalises the momentum of every matrix inside the layers, and is AdamW for all else.
        learning_rate: Peak; 0 trains nothing (a control).
        warmup_steps: Updates over which it rises linearly; the first one already has 1 / warmup_steps of it.
        schedule: After the warm-up: constant, or down to `final_fraction` at the run's last update; ``wsd`` stays
            constant and falls linearly over the last `decay_fraction` of the updates.
        final_fraction: Share of the peak that is left at the end (cosine, linear, wsd).
        decay_fraction: Share of the run's updates that ``wsd`` falls over.
        weight_decay: Decoupled; norms and biases are spared.
        beta1: Decay of the gradient's mean (adamw, and muon where it is AdamW).
        beta2: Decay of its square's mean (likewise).
        epsilon: Added to the root of the latter (likewise).
        momentum: Decay of the mean that muon orthogonalises.
        max_grad_norm: Gradients of a larger global norm are scaled down to it; None: never.
        frozen: Names of arrays that do not train, such as ``embedding`` or ``layers.*``; they cost no gradient, moments
            or arithmetic, and do not travel with new weights.
        offload: Keep moments and master in the host's memory, and take them to the chip piece by piece at every step
            (adamw; where the chip has memory of its own). The learner then has no optimiser state on the device.
        rates: By pattern of names, such as ``{"embedding": 0.1, "layers.*norm": 2}``: what multiplies the learning
            rate of those arrays, decay included; the product where several match.
    """

    name: Literal["adamw", "adafactor", "muon"] = "adamw"
    learning_rate: float = Field(default=1e-5, ge=0, allow_inf_nan=False)
    warmup_steps: int = Field(default=5, ge=0)
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "constant"
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    epsilon: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    momentum: float = Field(default=0.95, ge=0, lt=1)
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    frozen: tuple[str, ...] = ()
    offload: bool = False
    rates: dict[str, float] = {}

    def __hash__(self) -> int:
        """Of all fields; a dict has none of its own."""
        return hash(self.model_dump_json())

    @model_validator(mode="after")
    def _every_key_acts(self) -> "OptimizerConfig":
        if self.schedule != "wsd":
            refuse_idle(self, ("decay_fraction",), f"schedule is {self.schedule!r}, and it is of 'wsd'")
        if self.name == "adafactor":
            refuse_idle(self, _ADAMW_KEYS, "name is 'adafactor', whose constants are Shazeer and Stern's")
        if self.offload and self.name != "adamw":
            raise ValueError(
                f"offload is true and name {self.name!r}, whose step needs whole matrices: take adamw, which goes "
                "piece by piece, or leave offload out"
            )
        if self.name != "muon":
            refuse_idle(self, ("momentum",), f"name is {self.name!r}, and it is of 'muon'")
        for pattern, multiplier in self.rates.items():
            if not 0 < multiplier < float("inf"):
                raise ValueError(
                    f"rates has {multiplier} for {pattern!r}: it multiplies the learning rate and must be above 0; "
                    "arrays that should not train belong into frozen"
                )
        return self

    def rate_at(self, step: int, total_steps: int) -> float:
        """The learning rate of update `step` (from 0) of `total_steps`.

        Linear warm-up, (step + 1) / warmup_steps of the peak; then constant, or from the peak down to
        `final_fraction` of it at the last update, along a line or half a cosine; that floor beyond. ``wsd`` stays at
        the peak and takes the line over the last `decay_fraction` of the updates (Hu et al. 2024,
        https://arxiv.org/abs/2404.06395), or over what the warm-up leaves of them.
        """
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        begin = self.warmup_steps
        if self.schedule == "wsd":
            begin = max(begin, total_steps - 1 - max(round(self.decay_fraction * total_steps), 1))
        progress = min(max(step - begin, 0) / max(total_steps - 1 - begin, 1), 1.0)
        left = (1.0 + math.cos(math.pi * progress)) / 2 if self.schedule == "cosine" else 1.0 - progress
        return self.learning_rate * (self.final_fraction + (1.0 - self.final_fraction) * left)

    def rate_of(self, name: str) -> float:
        """What multiplies the learning rate of an array."""
        return math.prod(multiplier for pattern, multiplier in self.rates.items() if fnmatchcase(name, pattern))

    def orthogonalises(self, name: str, rank: int) -> bool:
        """Whether Muon's own rule is an array's, by its name and number of axes; else it has AdamW's.

        A matrix that is no embedding and no head; ``layers.`` of a language policy are stacked, one axis more.
        """
        if self.name != "muon" or rank - name.startswith(STACKED) != 2:
            return False
        return not name.endswith(("norm", "bias")) and _OUTER.isdisjoint(name.split("."))


STACKED = ("layers.", "adapter.")
"""Arrays whose name begins so have the layer as their first axis (`ModelConfig.parameter_shapes`)."""

_OUTER = frozenset(("embedding", "head", "heads", "value_head"))
"""Parts of names of what is at a policy's ends."""


class WarmStartConfig(FrozenConfig, frozen=True):
    """Supervised steps on reference solutions before the reinforcement learning begins.

    Attributes:
        steps: Number of optimiser steps.
        batch_size: Reference solutions per step.
        learning_rate: Peak; rises over the first twentieth of the steps, then falls along a cosine.
        lessons: Whose environments give the solutions; none named: the lessons without dependencies.
    """

    steps: int = Field(gt=0)
    batch_size: int = Field(default=64, gt=0, le=65536)
    learning_rate: float = Field(default=1e-3, ge=0, allow_inf_nan=False)
    lessons: tuple[str, ...] = ()

    def optimizer(self, config: OptimizerConfig) -> OptimizerConfig:
        """The run's optimiser settings with this warm start's learning rate."""
        own = {
            "learning_rate": self.learning_rate,
            "warmup_steps": max(self.steps // 20, 1),
            "schedule": "cosine",
        }
        return config.model_copy(update=own)


class ParityConfig(FrozenConfig, frozen=True):
    """How engines and learner are held to the same log-probabilities; `penstock.learner.parity` has the rules.

    Attributes:
        every: Updates between two checks.
        sequences: So many sequences that the learner's own version sampled are scored per check, and as many more as it
            takes for eight sampled tokens.
        canary_prompts: Of an engine that gave none, so many prompts of the batch are answered anew, and more where its
            answers are so short that they would be no evidence.
        canary_tokens: Longest of those answers.
        wait_s: Longest wait for them once the update is made, a minute the first time that an engine is asked; one that
            has not answered then is unchecked.
        kl_limit: Of the winsorised KL of a check; None: 1e-8 in float32, 5e-3 in bfloat16.
        hard_kl_limit: A KL beyond it ends the run at once.
    """

    every: int = Field(default=1, ge=1)
    sequences: int = Field(default=2, ge=1)
    canary_prompts: int = Field(default=2, ge=1)
    canary_tokens: int = Field(default=16, ge=8, le=16)
    wait_s: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    kl_limit: float | None = Field(default=None, gt=0)
    hard_kl_limit: float = Field(default=0.1, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _hard_is_higher(self) -> "ParityConfig":
        if self.kl_limit is not None and self.kl_limit > self.hard_kl_limit:
            raise ValueError(
                f"kl_limit is {self.kl_limit:g}, above hard_kl_limit ({self.hard_kl_limit:g}), beyond which one check "
                "alone ends the run: lower it, or raise hard_kl_limit"
            )
        return self


def refuse_idle_course(optimizer: OptimizerConfig) -> None:
    """Refuses keys of a learning rate's course that it does not have."""
    if optimizer.schedule == "constant":
        refuse_idle(optimizer, ("final_fraction",), "schedule is 'constant'", at="optimizer.")


class LearnerConfig(FrozenConfig, frozen=True):
    """The learner.

    Attributes:
        loss: What is minimised.
        kl: What keeps the policy near a reference.
        critic: The value head of `loss.advantage: gae`.
        optimizer: Which one; learning rate and its course, decay, clipping.
        epochs: How often an update goes through its batch.
        minibatches: Optimiser steps per epoch, each on whole groups with denominators of its own; no more than groups
            are in the batch.
        proximal: What the surrogate's ratio is taken against, ℓ_p. ``recompute``: the weights of the update's
            beginning, by a forward pass of its own; ``auto``: that where an update takes several optimiser steps, else
            the forward pass of the step itself; ``behaviour``: the weights that sampled, so that the ratio is all of
            the off-policy ratio, and no correction is applied again.
        row_length: Tokens of a packed row; the longest sequence that can be trained.
        row_lengths: Several lengths of rows, ascending, for sequences of very different lengths. The last is
            `row_length`, which need not be written beside it. An optimiser step takes those that need the fewest
            micro-batches.
        micro_batch_rows: Rows that go through the model at once; memory is in proportion to it. Of shorter
            `row_lengths` as many more as have the tokens of these.
        attention: What computes attention. ``auto``: ``dense`` for short rows; for long ones ``blocks``, plain JAX that
            skips what is masked, on CPUs and of float32 models, else ``pallas``, a kernel for GPUs and TPUs.
            ``cudnn``: NVIDIA's for packed rows, by a private interface of JAX. Only ``dense`` takes memory that is
            quadratic in the length of rows.
        remat: What is kept of each layer for the backward pass, which computes the rest again. ``layer``: its input,
            and what ``blocks`` or a GPU's kernel of attention gave, which costs a CPU next to nothing, because memory
            that is not touched is not paged in either; ``offload``: the input in the host's memory, where the chip has
            its own; ``products``: the results of its matrix
            products; ``none``: everything. (``true`` and ``false`` of before are
            ``layer`` and ``products``.)
        head_tile_tokens: Tokens whose scores over the vocabulary exist at the same time; None: 256 on a CPU, 1024 on a
            GPU or TPU.
        parity: How engines and learner are held to the same log-probabilities.
        max_non_finite_updates: So many skipped updates in a row end the run.
        allow_truncated_sampling: Train on samples of top-k and the like, whose distribution is not the one that is
            differentiated.
        warm_start: Supervised steps first; None: no warm start.
    """

    loss: LossConfig = LossConfig()
    kl: KlConfig = KlConfig()
    critic: CriticConfig = CriticConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    epochs: int = Field(default=1, ge=1, le=1000)
    minibatches: int = Field(default=1, ge=1)
    proximal: Literal["auto", "recompute", "behaviour"] = "auto"
    row_length: int = Field(default=1024, ge=2, le=2**24)
    row_lengths: tuple[Annotated[int, Field(ge=2)], ...] = Field(default=(), max_length=4)
    micro_batch_rows: int = Field(default=8, ge=1, le=65536)
    remat: Remat = "layer"
    head_tile_tokens: int | None = Field(default=None, ge=1)
    attention: AttentionChoice = "auto"
    parity: ParityConfig = ParityConfig()
    max_non_finite_updates: int = Field(default=5, ge=1)
    allow_truncated_sampling: bool = False
    warm_start: WarmStartConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_mismatch_limit(cls, values: Any) -> Any:
        """Configurations of before had a limit of the largest difference of a token."""
        if not isinstance(values, Mapping) or "mismatch_limit" not in values:
            return values
        logging.getLogger(__name__).warning(
            "learner.mismatch_limit (%s) is dropped: engines and learner are compared by KL now; "
            "learner.parity.kl_limit is the limit, and needs no value for bfloat16",
            values["mismatch_limit"],
        )
        return {name: value for name, value in values.items() if name != "mismatch_limit"}

    @field_validator("remat", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        """Configurations of before said whether, and not what."""
        return {True: "layer", False: "products"}[value] if isinstance(value, bool) else value

    @model_validator(mode="wrap")
    @classmethod
    def _longest_row(cls, values: Any, handler: Callable[[Any], Any]) -> Any:
        """Rows of several lengths say what the longest is, which does not count as given."""
        if not isinstance(values, Mapping) or not values.get("row_lengths") or "row_length" in values:
            return handler(values)
        lengths = values["row_lengths"]
        whole = isinstance(lengths, list | tuple) and all(isinstance(length, int) for length in lengths)
        made = handler({**values, "row_length": max(lengths)} if whole else values)
        made.model_fields_set.discard("row_length")
        return made

    @property
    def row_shapes(self) -> tuple[RowShape, ...]:
        """Of micro-batches, ascending by length, of equally many tokens as near as whole rows allow."""
        tokens = self.micro_batch_rows * self.row_length
        return tuple(self.row_shape(length, tokens // length) for length in self.row_lengths or (self.row_length,))

    def row_shape(self, length: int, rows: int = 1) -> RowShape:
        """So many rows; cuDNN's time and memory grow with the sequences that there is room for."""
        return RowShape(length, rows, tight=self.attention == "cudnn")

    def head_tile(self, platform: Platform) -> int:
        """Of `head_tile_tokens` what is taken there.

        A tile of n tokens reads and writes 12 bytes per element of the output matrix and multiplies 8 n: at an H100's
        and a v5e's rates the first takes a quarter of the second's time where n is 1024, and as long where it is 256.
        """
        return self.head_tile_tokens or (256 if platform == "cpu" else 1024)

    def check_host_memory(self, platform: Platform) -> None:
        """Refuses what would go to the host's memory where the device has no other.

        Raises:
            ConfigError: naming the key.
        """
        asked = {
            "remat is 'offload'": self.remat == "offload", "optimizer.offload is true": self.optimizer.offload,
        }  # fmt: skip
        for words in (words for words, is_so in asked.items() if is_so and platform == "cpu"):
            raise ConfigError(
                f"learner.{words}, and this runs on a CPU, whose memory is the host's: it is for GPUs and TPUs; leave "
                "it out"
            )

    @property
    def optimizer_steps(self) -> int:
        """Of an update, where its batch has groups enough."""
        return self.epochs * self.minibatches

    @property
    def recomputes_proximal(self) -> bool:
        """Whether an update begins with a forward pass for ℓ_p."""
        return self.proximal == "recompute" or (self.proximal == "auto" and self.optimizer_steps > 1)

    @property
    def reads_reference(self) -> bool:
        """Whether the loss is given ℓ_ref: for a KL of its own, or since it is a module of one's own."""
        return self.kl.reference is not None and (self.kl.in_loss or self.loss.module is not None)

    @property
    def needs_every_sequence(self) -> bool:
        """Whether a sequence has a gradient at advantage zero: of a KL, entropy, values, or a loss of one's own."""
        has_term = self.kl.in_loss or self.loss.entropy_coefficient > 0 or self.has_critic
        return has_term or self.loss.module is not None

    @property
    def has_critic(self) -> bool:
        """Whether there is a value head."""
        return self.loss.advantage == "gae"

    @model_validator(mode="after")
    def _every_key_acts(self) -> "LearnerConfig":
        if self.row_lengths and self.row_lengths != (*sorted({*self.row_lengths}),):
            raise ValueError(f"row_lengths is {list(self.row_lengths)}: name each length once, the shortest first")
        if self.row_lengths and self.row_length != self.row_lengths[-1]:
            raise ValueError(
                f"row_length is {self.row_length} and the longest of row_lengths {self.row_lengths[-1]}: set it "
                f"to that, too, or leave one of them out"
            )
        if not self.has_critic:
            keys, why = (
                tuple(CriticConfig.model_fields),
                f"loss.advantage is {self.loss.advantage!r}, which asks no value",
            )
            refuse_idle(self.critic, keys, why, at="critic.")
        if not self.kl.coefficient and self.loss.module is None:
            refuse_idle(self.kl, ("reference",), "coefficient is 0, and nothing else reads a reference", at="kl.")
        if self.warm_start is None:  # which ends along a cosine
            refuse_idle_course(self.optimizer)
        if self.proximal == "behaviour":
            self._check_behaviour_ratio()
        elif self.optimizer_steps == 1:
            of_ratio = ("ratio", "clip_epsilon_low", "clip_epsilon_high", "dual_clip")
            why = "an update is one optimiser step, in which the ratio is 1 (raise minibatches or epochs)"
            refuse_idle(self.loss, of_ratio, why, at="loss.", preset=PRESETS[self.loss.preset])
        return self

    def _check_behaviour_ratio(self) -> None:
        if self.loss.surrogate == "reinforce":
            raise ValueError(
                "proximal is 'behaviour' and loss.surrogate 'reinforce', which has no ratio: nothing would account for "
                "older rollouts; leave proximal out"
            )
        keys = tuple(CorrectionConfig.model_fields)
        why = "proximal is 'behaviour', whose ratio is all there is to correct"
        refuse_idle(self.loss.correction, keys, why, at="loss.correction.")
