"""A tiny model and batches for the tests of `penstock.learner`."""

from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
import pytest

from penstock.learner import LearnerConfig
from penstock.model.language import Decoder, ModelConfig
from penstock.types import RLExample, TrainingBatch

VOCAB = 41


@pytest.fixture
def strict_dtypes() -> Iterator[None]:
    """Implicit promotion is an error: a stray dtype would change what a formula means (optax itself promotes)."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="session")
def decoder() -> Decoder:
    """Two layers, grouped queries, biases; weights large enough that log-probabilities differ visibly."""
    config = ModelConfig(
        model_type="qwen2",
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        tie_word_embeddings=True,
    )
    drawn = Decoder.initialise(config, jax.random.key(0))
    return jax.tree.map(lambda leaf: leaf * 10 if leaf.shape == (VOCAB, 16) else leaf, drawn)


@pytest.fixture
def config() -> LearnerConfig:
    """Rows of 24, two at once, a head tile that divides nothing evenly."""
    return LearnerConfig(row_length=24, micro_batch_rows=2, head_tile_tokens=7)


def make_examples(
    lengths: Sequence[tuple[int, int]], seed: int = 0, weight_step: int = 0, temperature: float = 1.0
) -> tuple[RLExample, ...]:
    """Examples of these (prompt, response) lengths; some response tokens are not the policy's."""
    rng = np.random.default_rng(seed)
    examples = []
    for index, (prompt, response) in enumerate(lengths):
        length = prompt + response
        mask = np.arange(length) >= prompt
        mask[prompt + 1 :] &= rng.random(response - 1) > 0.2
        examples.append(
            RLExample(
                tokens=rng.integers(0, VOCAB, length).astype(np.int32),
                loss_mask=mask,
                segment_ids=np.ones(length, np.int32),
                position_ids=np.arange(length, dtype=np.int32),
                advantage=np.where(mask, rng.normal(), 0).astype(np.float32),
                generator_log_probs=np.where(mask, -rng.random(length) * 6, 0).astype(np.float32),
                reference_log_probs=None,
                temperature=np.full(length, temperature, np.float32),
                weight_steps=np.where(mask, weight_step, -1).astype(np.int32),
                rollout_ids=(f"t-0-0/{index}",),
            )
        )
    return tuple(examples)


UNEQUAL = ((2, 3), (5, 12), (3, 20), (1, 7), (4, 1), (2, 9), (6, 14))


@pytest.fixture
def examples() -> tuple[RLExample, ...]:
    """Seven sequences of unequal lengths, sampled under version 0 by another policy."""
    return make_examples(UNEQUAL)


@pytest.fixture
def make_batch() -> Callable[..., TrainingBatch]:
    """A training batch of given examples."""

    def make(examples: Sequence[RLExample], step: int = 0, **metrics: float) -> TrainingBatch:
        return TrainingBatch("batch", step, tuple(examples), ("t-0-0",), metrics)

    return make


@pytest.fixture
def draw_examples() -> Callable[..., tuple[RLExample, ...]]:
    """`make_examples`, for tests that need several different batches."""
    return make_examples


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """How many programs were compiled since the fixture's list was cleared."""
    seen: list[str] = []

    def listen(event: str, duration: float, **details: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)
