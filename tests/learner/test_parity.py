"""Agreement of engines and learner: the numbers of a check, and which of them end a run."""

import logging
import math

import numpy as np
import pytest

from penstock.learner.config import LearnerConfig, ParityConfig
from penstock.learner.parity import KL_LIMITS, Parity, ParityMonitor, differences_of, example_of
from penstock.types import Completion, MismatchError


def noise(kl: float, tokens: int = 64, seed: int = 0) -> np.ndarray:
    """Differences whose expm1(x) − x ≈ x²/2 has that mean."""
    return np.random.default_rng(seed).normal(0.0, math.sqrt(2 * kl), tokens)


def test_the_numbers_of_a_check_are_those_of_the_formula():
    x = np.array([0.1, -0.2, 0.0, 0.3])
    parity = Parity.of(x)
    terms = np.expm1(x) - x
    # the largest term, of 0.3, counts as the second largest, of -0.2
    assert parity.kl == pytest.approx((terms[0] + 2 * terms[1]) / 4, rel=1e-12)
    assert (parity.tokens, parity.p99, parity.max) == (4, 0.3, 0.3)
    assert parity.mean == pytest.approx(0.15)
    one = Parity.of(np.array([0.5]))
    assert one.kl == pytest.approx(math.expm1(0.5) - 0.5)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 700.0, 1e6])
def test_one_token_never_ends_anything_but_two_that_are_no_numbers_do(wrong: float):
    monitor = ParityMonitor(ParityConfig(), "float32")
    monitor.calibrate(noise(1e-11))
    for step in range(20):
        x = noise(1e-11, seed=step)
        x[step] = wrong
        metrics = monitor.judge(step, {"inference-0": x})
        assert metrics["train/parity_kl"] < 1e-10 and not metrics["train/parity_max"] < 500
    x[:3] = np.nan
    with pytest.raises(MismatchError, match="version 20: inference-0 and the learner disagree .*KL inf"):
        monitor.judge(20, {"inference-0": x})


@pytest.mark.parametrize("dtype, usual", [("float32", 1e-11), ("bfloat16", 2e-5), ("bfloat16", 9e-4)])
def test_noise_ends_nothing_and_a_fault_is_named_within_three_checks(dtype: str, usual: float):
    monitor = ParityMonitor(ParityConfig(), dtype)
    monitor.calibrate(noise(usual))
    for step in range(300):
        monitor.judge(step, {"inference-0": noise(usual, seed=step)})
    with pytest.raises(MismatchError) as raised:
        for step in range(300, 303):
            monitor.judge(step, {"inference-0": noise(usual * 30, seed=step)})
    message = str(raised.value)
    assert dtype in message and "inference-0" in message and "usual causes" in message.lower()


def test_a_rounding_now_and_then_hides_no_fault_and_one_check_alone_is_no_jump():
    """A small bfloat16 model: most checks differ by nothing, one in ten by one rounding."""
    monitor = ParityMonitor(ParityConfig(), "bfloat16")
    monitor.calibrate(noise(1.1e-6))
    for step in range(100):
        monitor.judge(step, {"inference-0": noise(1e-6 if step % 10 == 0 else 3e-14, seed=step)})
    monitor.judge(100, {"inference-0": noise(4e-3, seed=100)})  # once
    for step in range(101, 110):
        monitor.judge(step, {"inference-0": noise(3e-14, seed=step)})
    monitor.judge(110, {"inference-0": noise(5e-4, seed=110)})
    with pytest.raises(MismatchError, match=r"version 111: .* times what was usual in this run"):
        monitor.judge(111, {"inference-0": noise(5e-4, seed=111)})


def test_noise_that_grows_with_the_policy_is_followed_up_to_the_limit_of_the_dtype():
    monitor = ParityMonitor(ParityConfig(), "bfloat16")
    monitor.calibrate(noise(1e-6))
    growing = np.geomspace(1e-6, 2e-3, 400)
    for step, kl in enumerate(growing):
        monitor.judge(step, {"inference-0": noise(kl, seed=step)})
    with pytest.raises(MismatchError, match=r"the limit is 0.005 \(learner.parity.kl_limit\)"):
        for step in range(400, 420):
            monitor.judge(step, {"inference-0": noise(1.2e-2, seed=step)})


def test_a_kl_beyond_the_hard_limit_acts_at_once_and_before_anything_was_usual():
    with pytest.raises(MismatchError, match=r"more than 0.1 \(learner.parity.hard_kl_limit\)"):
        ParityMonitor(ParityConfig(), "bfloat16").judge(0, {"inference-1": np.full(8, 0.6)})


def test_a_start_beyond_the_limit_is_refused_and_the_limit_is_a_key():
    x = np.full(32, 0.01)  # KL 5e-5
    with pytest.raises(MismatchError, match=r"at start-up: KL 5.02e-05.*float32 .the limit is 1e-08; learner.parity"):
        ParityMonitor(ParityConfig(), "float32").calibrate(x)
    loose = ParityMonitor(ParityConfig(kl_limit=1e-3), "float32")
    assert loose.limit == 1e-3 and loose.calibrate(x).kl == pytest.approx(5.02e-5, rel=1e-2)
    assert (KL_LIMITS["float32"], KL_LIMITS["bfloat16"]) == (1e-8, 5e-3)


def test_at_the_start_eight_times_what_rounding_alone_does_is_the_limit():
    """A fault that is there from the beginning would become what is usual."""
    config, monitor = ParityConfig(), ParityMonitor(ParityConfig(), "bfloat16")
    rounding = np.full(32, 0.01)  # KL 5e-5
    assert monitor.limit_at_start(rounding) == pytest.approx(8 * 5.02e-5, rel=1e-2)
    assert monitor.calibrate(noise(2e-4, 256), rounding).kl < 4e-4
    with pytest.raises(MismatchError, match=r"at start-up: KL .* in bfloat16 .the limit is 0.000401; learner.parity"):
        monitor.calibrate(noise(8e-4, 256), rounding)
    assert monitor.calibrate(noise(8e-4, 256)).kl > 4e-4  # nothing is known of its rounding
    assert monitor.limit_at_start(np.full(32, 0.5)) == monitor.limit == 5e-3  # that of the dtype is never exceeded
    assert monitor.limit_at_start(np.zeros(32)) == 5e-6  # a policy that is sure of everything rounds nothing
    own = ParityMonitor(config.model_copy(update={"kl_limit": 1e-3}), "bfloat16")
    assert own.limit_at_start(rounding) == 1e-3


def test_each_engine_is_judged_by_itself_and_one_without_evidence_is_counted():
    monitor = ParityMonitor(ParityConfig(), "float32")
    few = noise(1e-11, 7)
    metrics = monitor.judge(0, {"inference-0": noise(1e-11), "inference-1": few})
    assert (metrics["train/parity_checked"], metrics["train/parity_unchecked"]) == (64, 1)
    assert "train/parity_kl/inference-0" not in metrics  # there is one number, and it is that
    metrics = monitor.judge(1, {})
    assert (metrics["train/parity_checked"], metrics["train/parity_unchecked"]) == (0, 2)
    assert "train/parity_kl" not in metrics
    metrics = monitor.judge(2, {"inference-0": noise(1e-11), "inference-1": noise(4e-11, seed=1)})
    assert metrics["train/parity_kl"] == metrics["train/parity_kl/inference-1"] > metrics["train/parity_kl/inference-0"]
    with pytest.raises(MismatchError, match="inference-1 and the learner"):
        for step in range(3, 9):
            monitor.judge(step, {"inference-0": noise(1e-11, seed=step), "inference-1": noise(3e-8, seed=step)})


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [8, 48, 256])
@pytest.mark.parametrize("dtype, usual", [("float32", 1e-12), ("bfloat16", 3e-5), ("bfloat16", 9e-4)])
def test_ten_thousand_undisturbed_checks_raise_no_false_alarm(dtype: str, usual: float, tokens: int):
    """With heavy tails: most tokens agree far better than the few that make the mean."""
    monitor, rng = ParityMonitor(ParityConfig(), dtype), np.random.default_rng(tokens)
    scale = math.sqrt(2 * usual)
    monitor.calibrate(rng.standard_t(4, 64) * scale)
    for step in range(10_000):
        monitor.judge(step, {"inference-0": rng.standard_t(4, tokens) * scale})


def done(steps: list[int], oldest: int | None = None) -> Completion:
    count = len(steps)
    return Completion(
        prompt_tokens=np.array([5, 6], np.int32),
        response_tokens=np.arange(count, dtype=np.int32),
        response_logprobs=np.full(count, -1.0, np.float32),
        weight_steps=np.array(steps, np.int32),
        oldest_weight_step=min(steps) if oldest is None else oldest,
        lineage=0,
        text="",
        finish_reason="length",
    )


@pytest.mark.parametrize("steps, oldest, compared", [
    ([3, 3, 3], None, 3),
    ([3, 3, 4], None, 2),  # up to the first swap
    ([2, 3, 3], None, 0),  # an older version began it
    ([3, 3, 3], 2, 0),  # an older version read its prompt
    ([4, 4, 4], None, 0),
])  # fmt: skip
def test_tokens_before_the_first_swap_are_compared(steps: list[int], oldest: int | None, compared: int):
    example = example_of(done(steps, oldest), temperature=1.0)
    scores = [np.array([0, 0, -1.5, -1.25, -1.0], np.float32)]
    found = differences_of([example], scores, 3)
    assert found.tolist() == [-0.5, -0.25, 0.0][:compared]


def test_the_key_of_earlier_configurations_is_dropped_with_a_note(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        config = LearnerConfig.model_validate({"mismatch_limit": 0.1, "row_length": 64})
    assert config.row_length == 64 and not hasattr(config, "mismatch_limit")
    assert caplog.messages == [
        "learner.mismatch_limit (0.1) is dropped: engines and learner are compared by KL now; learner.parity.kl_limit "
        "is the limit, and needs no value for bfloat16"
    ]
