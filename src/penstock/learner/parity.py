"""Whether engines and learner agree about log-probabilities of the same weights, judged at every update.

Of an engine's tokens that one version sampled, x = ℓ_learner − ℓ_engine. Per check and engine the numbers are the mean
and quantiles of |x| and a winsorised mean of expm1(x) − x, an estimate of KL(engine ‖ learner) that is never negative
(http://joschu.net/blog/kl-approx.html, k3). The largest percent of the terms, and one more, count as the largest of the
others: one token never ends anything, however wrong it is.

Three rules, in the order of how bad it is:

- *hard*: a KL above `hard_kl_limit` acts at once;
- *limit*: the excess over the limit of the dtype, at most once that limit per check, summed over checks (a cumulative
  sum that falls back to 0), reaches twice that limit;
- *jump*: log KL lies beyond what this model and engine showed before, summed over checks in standard deviations
  (CUSUM, Page 1954), at most four of them per check. What they showed is learned as the run goes on, from the probe at
  the start, slowly: noise that grows with the policy is followed, a fault is not. All below a thousandth of the limit
  counts as that: most checks of a small bfloat16 model differ in nothing, and one rounding in a few of them would make
  the deviation of their logarithms so large that no fault stands out.

At the start nothing was usual yet, and a fault below the limit of the dtype would become it. But what rounding to
that dtype alone does to this model is known: the learner scores the probe's tokens in float32, too. Engine and learner
may be eight times as far apart, an engine being as rounded as a learner is.

Measured noise: float32 about 1e-11, bfloat16 1e-5 to 1e-3 (docs/learner.md); limits 1e-8 and 5e-3.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.learner.config import ParityConfig
from penstock.types import Completion, MismatchError, RLExample

KL_LIMITS: Mapping[str, float] = {"float32": 1e-8, "bfloat16": 5e-3, "float16": 1e-4}
"""Of the winsorised KL, by the dtype that the model computes in."""
LEAST_TOKENS = 8
"""Fewer are no evidence."""
_EXCESS = 2.0
_SLACK, _ALARM = 3.0, 5.0  # standard deviations: of one check that counts as usual, and of their sum
_MOST_SURPRISE = 4.0  # beyond the slack, of one check
_LEAST_DEVIATION = 0.5  # of log KL
_MEMORY = 1 / 32  # weight of a check in what is usual
_LEAST_CHECKS = 4
_ROUNDINGS = 8.0  # KL at the start over that of rounding alone; two independent ones would have 2
_NEGLIGIBLE = 1e-3  # of the limit: a smaller KL is no fault that could matter
_CAUSES = (
    "usual causes: other weights (a tensor that did not arrive), another temperature, RoPE base or attention mask, "
    "another precision of matrix products, a stale prefix cache, another token than was recorded"
)


@dataclass(frozen=True, slots=True)
class Parity:
    """How far engine and learner are apart, over the tokens of one check.

    Attributes:
        tokens: How many.
        kl: Winsorised mean of expm1(x) − x, nats.
        mean: Of |x|.
        p99: 99th percentile of |x|.
        max: Largest |x|.
    """

    tokens: int
    kl: float
    mean: float
    p99: float
    max: float

    @classmethod
    def of(cls, differences: np.ndarray) -> "Parity":
        """Of x = ℓ_learner − ℓ_engine, float [tokens], one or more. NaN counts as infinitely far."""
        distances = np.abs(np.asarray(differences, np.float64))
        distances[np.isnan(distances)] = np.inf
        with np.errstate(over="ignore", invalid="ignore"):
            terms = np.where(np.isfinite(distances), np.expm1(differences) - differences, np.inf)
        terms = np.sort(np.maximum(terms, 0.0))  # rounding makes some −1e-17
        left_out = min(1 + len(terms) // 100, len(terms) - 1)
        terms[len(terms) - left_out :] = terms[len(terms) - left_out - 1]
        mean, p99 = float(distances.mean()), float(np.quantile(distances, 0.99, method="higher"))
        return cls(len(terms), float(terms.mean()), mean, p99, float(distances.max()))

    def __str__(self) -> str:
        return f"KL {self.kl:.3g}, |difference| mean {self.mean:.3g}, p99 {self.p99:.3g}, max {self.max:.3g}"


class ParityMonitor:
    """Judges checks of one run. One thread at a time.

    Args:
        config: The limits' keys.
        dtype: Of the model.
    """

    def __init__(self, config: ParityConfig, dtype: str) -> None:
        self._dtype = dtype
        self._config = config
        self._limit = KL_LIMITS[dtype] if config.kl_limit is None else config.kl_limit
        self._usual: _Usual | None = None
        self._engines: dict[str, _Engine] = {}
        self.unchecked = 0

    @property
    def limit(self) -> float:
        """Of the winsorised KL."""
        return self._limit

    def limit_at_start(self, rounding: np.ndarray | None) -> float:
        """Of the winsorised KL of the start-up probe.

        Args:
            rounding: `Learner.rounding` of the tokens that are probed, float [tokens]; None: not known.
        """
        if rounding is None or self._config.kl_limit is not None:
            return self._limit
        return min(self._limit, max(_ROUNDINGS * Parity.of(rounding).kl, _NEGLIGIBLE * self._limit))

    def calibrate(self, differences: np.ndarray, rounding: np.ndarray | None = None) -> Parity:
        """Takes the start-up probe as what is usual for this model and engine.

        Args:
            differences: x, float [tokens].
            rounding: As of `limit_at_start`.

        Raises:
            MismatchError: it exceeds the limit already.
        """
        found, limit = Parity.of(differences), self.limit_at_start(rounding)
        if not found.kl <= limit:
            raise MismatchError(
                f"engine and learner disagree about log-probabilities at start-up: {found}, over {found.tokens} tokens "
                f"in {self._dtype} (the limit is {limit:.3g}; learner.parity.kl_limit changes it); {_CAUSES}"
            )
        self._usual = _Usual(self._log(found.kl))
        return found

    def judge(self, step: int, differences: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Takes the evidence about version `step`.

        Args:
            step: Number of the version.
            differences: By engine, x of its tokens, float [tokens]; engines without evidence have none.

        Returns:
            ``train/parity_{kl,mean,p99,max}`` of the engine that is worst by KL, ``train/parity_checked`` (tokens),
            ``train/parity_unchecked`` (engines and versions so far without evidence), and with several engines
            ``train/parity_kl/<engine>``.

        Raises:
            MismatchError: an engine and the learner disagree.
        """
        found = {name: Parity.of(x) for name, x in sorted(differences.items()) if len(x) >= LEAST_TOKENS}
        self.unchecked += len(differences) - len(found) if differences else 1
        for name, parity in found.items():
            self._judge(step, name, parity)
        metrics = {
            "train/parity_checked": float(sum(parity.tokens for parity in found.values())),
            "train/parity_unchecked": float(self.unchecked),
        }
        if found:
            worst = max(found.values(), key=lambda parity: parity.kl)
            metrics |= {f"train/parity_{name}": getattr(worst, name) for name in ("kl", "mean", "p99", "max")}
        if len(found) > 1:
            metrics |= {f"train/parity_kl/{name}": parity.kl for name, parity in found.items()}
        return metrics

    def _judge(self, step: int, name: str, parity: Parity) -> None:
        engine = self._engines.setdefault(name, _Engine())
        if self._usual is None:
            self._usual = _Usual(self._log(parity.kl))
        rule = ""
        if not parity.kl <= self._config.hard_kl_limit:
            rule = f"more than {self._config.hard_kl_limit:g} (learner.parity.hard_kl_limit)"
        elif engine.exceeds(parity.kl / self._limit):
            rule = f"the limit is {self._limit:g} (learner.parity.kl_limit)"
        elif engine.jumps(self._usual.surprise(self._log(parity.kl))):
            rule = f"{parity.kl / math.exp(self._usual.mean):.3g} times what was usual in this run"
        if rule:
            raise MismatchError(
                f"version {step}: {name} and the learner disagree about log-probabilities of the same weights: "
                f"{parity}, over {parity.tokens} tokens in {self._dtype}; {rule}. {_CAUSES[0].upper()}{_CAUSES[1:]}"
            )
        self._usual.learn(self._log(parity.kl))

    def _log(self, kl: float) -> float:
        return math.log(max(kl, _NEGLIGIBLE * self._limit))


class _Usual:
    """Mean and deviation of log KL, with exponentially less weight on what was long ago."""

    def __init__(self, first: float) -> None:
        self.mean = first
        self._variance = _LEAST_DEVIATION**2
        self._checks = 0

    def surprise(self, value: float) -> float:
        """Standard deviations above the mean; 0 while too little was seen."""
        if self._checks < _LEAST_CHECKS:
            return 0.0
        return (value - self.mean) / max(math.sqrt(self._variance), _LEAST_DEVIATION)

    def learn(self, value: float) -> None:
        """What surprises is learned from only as far as it is usual."""
        self._checks += 1
        weight = max(_MEMORY, 1 / (self._checks + 1))
        allowed = _SLACK * max(math.sqrt(self._variance), _LEAST_DEVIATION)
        step = min(max(value - self.mean, -allowed), allowed) if self._checks > _LEAST_CHECKS else value - self.mean
        self.mean += weight * step
        self._variance += weight * (step * step - self._variance)


class _Engine:
    """Sums over the checks of one engine."""

    def __init__(self) -> None:
        self._excess = 0.0
        self._surprise = 0.0

    def exceeds(self, of_limit: float) -> bool:
        self._excess = max(0.0, self._excess + min(of_limit - 1.0, 1.0))  # one check alone never reaches it
        return self._excess >= _EXCESS

    def jumps(self, deviations: float) -> bool:
        self._surprise = max(0.0, self._surprise + min(deviations - _SLACK, _MOST_SURPRISE))
        return self._surprise >= _ALARM


def differences_of(examples: Sequence[RLExample], scores: Sequence[np.ndarray], version_step: int) -> np.ndarray:
    """ℓ_learner − ℓ_engine of the tokens that a version sampled before the first swap.

    A causal model's log-probabilities of those are exact, whatever came later.

    Args:
        examples: One sequence each, as recorded.
        scores: float32 [pos] of each, the learner's under that version.
        version_step: Number of the version.

    Returns:
        float32 [tokens].
    """
    parts = [np.zeros(0, np.float32)]
    for example, score in zip(examples, scores, strict=True):
        sampled = np.flatnonzero(example.loss_mask)
        before_swap = np.cumprod(example.weight_steps[sampled] == version_step).astype(bool)
        chosen = sampled[before_swap]
        parts.append(score[chosen] - example.generator_log_probs[chosen])
    return np.concatenate(parts)


def example_of(done: Completion, temperature: float) -> RLExample:
    """A completion as an example, for scoring alone."""
    prompt, length = len(done.prompt_tokens), len(done.prompt_tokens) + len(done.response_tokens)
    logprobs, steps = np.zeros(length, np.float32), np.full(length, -1, np.int32)
    logprobs[prompt:], steps[prompt:] = done.response_logprobs, done.weight_steps
    if done.oldest_weight_step < int(done.weight_steps.min(initial=np.iinfo(np.int32).max)):
        steps[prompt:] = done.oldest_weight_step  # the prompt's cache was of an older version
    return RLExample(
        tokens=np.concatenate((done.prompt_tokens, done.response_tokens)).astype(np.int32),
        loss_mask=np.arange(length) >= prompt,
        segment_ids=np.ones(length, np.int32),
        position_ids=np.arange(length, dtype=np.int32),
        advantage=np.zeros(length, np.float32),
        generator_log_probs=logprobs,
        reference_log_probs=None,
        temperature=np.full(length, temperature, np.float32),
        weight_steps=steps,
        rollout_ids=("",),
    )
