import pytest

from penstock.inference.config import EngineConfig
from penstock.learner.config import LearnerConfig
from penstock.model.language.config import ModelConfig
from penstock.overseer.estimate import (
    PROCESS_BYTES,
    activation_bytes,
    bytes_text,
    estimate_memory,
    kv_cache_bytes,
)

MODEL = ModelConfig(
    vocab_size=100, hidden_size=16, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=4, tie_word_embeddings=True,
)  # fmt: skip


def test_kv_cache_by_hand():
    # keys and values · 3 layers · 5 slots · 7 positions · (2 heads · 4) · 4 bytes
    assert kv_cache_bytes(MODEL, 5, 7) == 2 * 3 * 5 * 7 * 8 * 4
    assert kv_cache_bytes(MODEL.model_copy(update={"dtype": "bfloat16"}), 5, 7) == 2 * 3 * 5 * 7 * 8 * 2


def test_activations_by_hand():
    tokens = 2 * 10
    between = 3 * tokens * 16 * 4
    inside = tokens * ((4 * 16 + 3 * 16 + 4 * 8 + 4 * 48) * 4 + 8 * 4 * 10)
    assert activation_bytes(MODEL, 2, 10, remat=True) == between + inside
    assert activation_bytes(MODEL, 2, 10, remat=False) == between + 3 * inside


def test_a_run_counts_two_parameter_sets():
    estimate = estimate_memory(
        MODEL, EngineConfig(max_slots=5, max_seq_len=7), LearnerConfig(row_length=10, head_tile_tokens=512)
    )
    parameters = MODEL.parameter_count * 4
    assert estimate.parameters_bytes == estimate.optimizer_bytes == 2 * parameters
    assert estimate.kv_cache_bytes == 2 * kv_cache_bytes(MODEL, 5, 7)
    assert estimate.vocabulary_bytes == 2 * 4 * 100 * 512
    parts = (
        estimate.parameters_bytes + estimate.gradients_bytes + estimate.optimizer_bytes + estimate.kv_cache_bytes
        + estimate.activations_bytes + estimate.vocabulary_bytes + PROCESS_BYTES
    )  # fmt: skip
    assert estimate.total_bytes == parts


@pytest.mark.parametrize(("devices", "sets"), [(1, 2), (2, 3), (None, 3)])
def test_an_engine_over_several_devices_has_parameters_of_its_own(devices, sets):
    estimate = estimate_memory(MODEL, EngineConfig(model_parallel=devices), LearnerConfig())
    assert estimate.parameters_bytes == sets * MODEL.parameter_count * 4


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**20, "3.0 MiB"), (2**31, "2.0 GiB"), (2**42, "4.0 TiB")],
)
def test_bytes_are_written_for_people(count, text):
    assert bytes_text(count) == text
