"""The estimate by hand, and against the bytes that XLA's compiler allots to the real programs."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from penstock.batch import RowShape
from penstock.inference.config import EngineConfig
from penstock.inference.decoding import ServedWeights, create_cache
from penstock.inference.dispatch import SlotRows
from penstock.inference.model_runner import ONE_DEVICE
from penstock.learner import step
from penstock.learner.config import LearnerConfig
from penstock.learner.micro_batches import empty_micro_batch
from penstock.learner.optimizer import applier, initial_state
from penstock.model.language import Decoder
from penstock.model.language.attention_choice import attention_kernel
from penstock.model.language.config import ModelConfig
from penstock.model.language.lora import LoraConfig
from penstock.overseer.estimate import (
    activation_bytes,
    attention_bytes,
    base_bytes,
    bytes_text,
    chunk_temporaries,
    estimate_memory,
    gradient_temporaries,
    kv_cache_bytes,
    memory_lines,
    moving_bytes,
    optimizer_state_bytes,
    prefill_temporaries,
    step_temporaries,
    trained_count,
)
from tests.adapted import adapted

MODEL = ModelConfig(
    vocab_size=100, hidden_size=16, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=4, tie_word_embeddings=True,
)  # fmt: skip
HALF = MODEL.model_copy(update={"dtype": "bfloat16"})
CLOSE = 0.15


def test_kv_cache_by_hand():
    # keys and values · 3 layers · 5 slots · 7 positions · (2 heads · 4) · 4 bytes
    assert kv_cache_bytes(MODEL, 5, 7) == 2 * 3 * 5 * 7 * 8 * 4
    assert kv_cache_bytes(HALF, 5, 7) == 2 * 3 * 5 * 7 * 8 * 2


def test_attention_scores_are_quadratic_in_the_row_length_by_hand():
    # 2 rows · 4 heads · 10 · 10 · (scores 4 + gradient 4 + weights)
    rows = RowShape(10, 2)
    assert attention_bytes(MODEL, rows) == attention_bytes(HALF, rows) == 2 * 4 * 100 * 12
    assert attention_bytes(HALF, rows, on_cpu=False) == 2 * 4 * 100 * 10
    assert attention_bytes(MODEL, RowShape(20, 2)) == 4 * attention_bytes(MODEL, rows)


def test_attention_of_other_kernels_is_linear_in_the_row_length_by_hand():
    rows = RowShape(10, 2)
    assert attention_bytes(MODEL, rows, "blocks") == 20 * (16 + 8) * 8 * 4
    assert attention_bytes(MODEL, rows, "blocks", remat="products") == 20 * (16 + 8) * 12 * 4
    every_layer = 3 * 2 * 4 * 100 * 4
    assert attention_bytes(MODEL, rows, remat="none") == attention_bytes(MODEL, rows) + every_layer
    assert attention_bytes(HALF, rows, "triton", on_cpu=False) == 20 * (16 + 8) * 8 * 2
    assert attention_bytes(MODEL, RowShape(20, 2), "blocks") == 2 * attention_bytes(MODEL, rows, "blocks")


def test_of_several_row_lengths_that_which_takes_most_counts():
    learner = LearnerConfig(row_lengths=(100, 1000), micro_batch_rows=1, attention="dense")
    longest = LearnerConfig(row_length=1000, micro_batch_rows=1, attention="dense")
    assert gradient_temporaries(MODEL, learner) == gradient_temporaries(MODEL, longest)
    by_blocks = learner.model_copy(update={"attention": "auto"})
    short = LearnerConfig(row_length=100, micro_batch_rows=10)
    assert gradient_temporaries(MODEL, by_blocks) == gradient_temporaries(MODEL, short)  # the short rows are dense


def test_activations_by_hand():
    rows, tokens, inside = RowShape(10, 2), 20, 4 * 16 + 3 * 16 + 4 * 8 + 4 * 48
    kept = 3 * tokens * (2 * 16 + 2 * 16 + 2 * 8 + 2 * 48)
    assert activation_bytes(MODEL, rows, remat="layer") == 3 * tokens * 16 * 4 + tokens * inside * 4
    assert activation_bytes(MODEL, rows, "blocks", "layer") == 3 * tokens * (16 + 16) * 4 + tokens * inside * 4
    assert activation_bytes(HALF, rows, remat="layer", on_cpu=False) == 3 * tokens * 16 * 2 + tokens * inside * 2
    assert activation_bytes(MODEL, rows, remat="products") == kept * 4 + tokens * (16 + 2 * 48) * 4
    assert activation_bytes(HALF, rows, "triton", remat="offload", on_cpu=False) == tokens * inside * 2
    everything = 3 * tokens * (11 * 16 + 3 * 16 + 2 * 8 + 6 * 48)
    assert activation_bytes(MODEL, rows, remat="none") == everything * 4 + tokens * (16 + 2 * 48) * 4
    assert activation_bytes(HALF, rows, remat="products") == kept * 2 + 2 * tokens * inside * 4


def test_what_is_frozen_has_no_gradient_and_no_state():
    learner = LearnerConfig(row_length=10, optimizer={"frozen": ["layers.*"]})
    estimate = estimate_memory(HALF, EngineConfig(max_slots=5, max_seq_len=7), learner)
    trained = 100 * 16 + 16  # the embedding and the last norm
    assert (estimate["gradients"], estimate["optimiser state"]) == (trained * 6, trained * 12)
    assert estimate["parameters of the learner"] == 2 * HALF.parameter_count * 2


def test_the_state_of_each_optimiser_by_hand():
    def state_bytes(**optimizer):
        return optimizer_state_bytes(MODEL, LearnerConfig(optimizer=optimizer))

    matrices = 3 * (16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 48)
    vectors = 3 * 2 * 16 + 16
    others = 100 * 16 + vectors
    assert state_bytes() == 8 * (matrices + others)
    assert state_bytes(name="muon") == 4 * matrices + 8 * others
    rows_and_columns = 3 * (32 + 2 * 24 + 32 + 3 * 64) + 116
    assert state_bytes(name="adafactor") == 4 * (rows_and_columns + vectors)
    assert state_bytes(name="adafactor", frozen=["embedding"]) == 4 * (rows_and_columns - 116 + vectors)


@pytest.mark.parametrize(("model", "width", "state"), [(MODEL, 4, 8), (HALF, 2, 12)])
def test_a_run_counts_two_versions_on_either_side_and_a_master_in_float32(model, width, state):
    count = model.parameter_count
    estimate = estimate_memory(model, EngineConfig(max_slots=5, max_seq_len=7), LearnerConfig(row_length=10))
    assert estimate["parameters of the learner"] == estimate["parameters of the engine"] == 2 * count * width
    assert estimate["gradients"] == count * (4 + width) and estimate["optimiser state"] == count * state
    assert estimate["KV cache"] == 2 * kv_cache_bytes(model, 5, 7)
    copies = 4 * count + 8 * 100 * 16 + 4 * 100 * 16 + 2 * kv_cache_bytes(model, 5, 7)
    assert estimate["float32 copies on a CPU"] == (0 if width == 4 else copies)
    *parts, total = memory_lines(estimate)
    assert len(parts) == len(estimate) and total.split() == ["total", *bytes_text(sum(estimate.values())).split()]


def test_an_offloaded_state_takes_nothing_on_the_device_and_a_step_what_is_new():
    learner = LearnerConfig(optimizer={"offload": True})
    estimate = estimate_memory(HALF, EngineConfig(), learner, on_cpu=False)
    assert estimate["optimiser state"] == 0 and step_temporaries(HALF, learner) == 2 * HALF.parameter_count


@pytest.mark.parametrize(("model", "width", "state"), [(MODEL, 4, 8), (HALF, 2, 12)])
def test_a_checkpoint_that_is_written_beside_the_training_takes_what_it_holds_once_more(model, width, state):
    learner = LearnerConfig(kl={"reference": "initial", "coefficient": 0.1})
    without = estimate_memory(model, EngineConfig(), learner)
    beside = estimate_memory(model, EngineConfig(), learner, snapshots=True)
    assert beside == without | {"a checkpoint being written": model.parameter_count * (2 * width + state)}


@pytest.mark.parametrize(("devices", "sets"), [(1, 2), (2, 3), (None, 3)])
def test_an_engine_over_several_devices_has_parameters_of_its_own(devices, sets):
    estimate = estimate_memory(MODEL, EngineConfig(model_parallel=devices), LearnerConfig())
    assert estimate["parameters of the engine"] == sets * MODEL.parameter_count * 4


QWEN_HALF_BILLION = (896, 4864, 24, 14, 151936, True)
QWEN_ONE_AND_A_HALF = (1536, 8960, 28, 12, 151936, True)
QWEN_SEVEN = (3584, 18944, 28, 28, 152064, False)


@pytest.mark.parametrize(
    ("shape", "kv_heads", "row_length", "rows", "gigabytes"),
    [
        (QWEN_HALF_BILLION, 2, 4096, 1, 4.1),
        (QWEN_HALF_BILLION, 2, 4096, 8, 23.7),
        (QWEN_HALF_BILLION, 2, 16384, 1, 43.7),
        (QWEN_ONE_AND_A_HALF, 2, 4096, 1, 6.2),
        (QWEN_ONE_AND_A_HALF, 2, 4096, 8, 25.0),
        (QWEN_SEVEN, 4, 4096, 1, 21.8),
    ],
)
def test_the_gradient_takes_what_the_compiler_for_an_h100_allotted(shape, kv_heads, row_length, rows, gigabytes):
    """Temporaries of the update compiled for that card, bfloat16, remat, dense; nothing was run on one."""
    hidden, wide, layers, heads, vocabulary, tied = shape
    model = ModelConfig(
        model_type="qwen2", vocab_size=vocabulary, hidden_size=hidden, intermediate_size=wide,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=hidden // heads, tie_word_embeddings=tied, dtype="bfloat16",
    )  # fmt: skip
    learner = LearnerConfig(row_length=row_length, micro_batch_rows=rows, attention="dense", head_tile_tokens=256)
    assert sum(gradient_temporaries(model, learner, on_cpu=False).values()) / 1e9 == pytest.approx(gigabytes, rel=CLOSE)


LONG = {"rows": 1, "row_length": 2048, "slots": 64, "window": 128, "prompts": (1, 1024)}
SHORT = {"rows": 16, "row_length": 128, "slots": 32, "window": 512, "prompts": (8, 64)}
NARROW = {"hidden_size": 256, "intermediate_size": 656, "num_hidden_layers": 6, "num_attention_heads": 4}
WIDE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8}


def peak_bytes(lowered: Any) -> int:
    """What a program needs while it runs: arguments, temporaries, and results that take no argument's place."""
    memory = lowered.compile().memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + results


@pytest.fixture(params=["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def dtype(request):
    return request.param


@pytest.fixture(
    params=[(NARROW, 8192, LONG), pytest.param((WIDE, 32768, SHORT), marks=pytest.mark.slow)], ids=["long", "short"]
)
def shapes(request, dtype):
    fields, vocabulary, sizes = request.param
    model = ModelConfig(
        vocab_size=vocabulary, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True, dtype=dtype, **fields
    )
    shapes = model.parameter_shapes().items()
    drawn = lambda: Decoder.from_arrays(model, {n: jnp.zeros(shape, jnp.dtype(dtype)) for n, shape in shapes})  # noqa: E731
    return model, jax.eval_shape(drawn), sizes


@pytest.mark.parametrize("remat", ["layer", "products", pytest.param("none", marks=pytest.mark.slow)])
@pytest.mark.parametrize("attention", ["auto", pytest.param("dense", marks=pytest.mark.slow)])
def test_the_gradient_takes_what_the_compiler_allots(shapes, remat, attention):
    model, decoder, sizes = shapes
    learner = LearnerConfig(
        row_length=sizes["row_length"], micro_batch_rows=sizes["rows"], remat=remat, attention=attention
    )
    run = step.policy_accumulator(learner.loss, step.ForwardOptions(remat, learner.head_tile("cpu"), attention))
    batch = empty_micro_batch(RowShape(sizes["row_length"], sizes["rows"]))
    allotted = peak_bytes(run.lower(decoder, jax.eval_shape(step.zeros, decoder), batch))
    estimate = estimate_memory(model, EngineConfig(), learner)
    held = estimate["parameters of the learner"] // 2 + 4 * model.parameter_count
    assert held + sum(gradient_temporaries(model, learner).values()) == pytest.approx(allotted, rel=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["layer", "products"])
def test_the_gradient_of_an_adapter_takes_what_the_compiler_allots(shapes, remat):
    model, decoder, sizes = shapes
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), decoder)
    decoder = adapted(zeros, LoraConfig(rank=16))
    model, batch = decoder.config, empty_micro_batch(RowShape(sizes["row_length"], sizes["rows"]))
    learner = LearnerConfig(row_length=sizes["row_length"], micro_batch_rows=sizes["rows"], remat=remat)
    run = step.policy_accumulator(learner.loss, step.ForwardOptions(remat, learner.head_tile("cpu")), model.still)
    so_far = jax.eval_shape(lambda parameters: step.zeros(parameters, model.still), decoder)
    allotted = peak_bytes(run.lower(decoder, so_far, batch))
    held = base_bytes(model) + moving_bytes(model) + 4 * trained_count(model, learner)
    assert held + sum(gradient_temporaries(model, learner).values()) == pytest.approx(allotted, rel=0.2)


def test_a_run_with_an_adapter_has_its_base_once():
    model = MODEL.model_copy(update={"dtype": "bfloat16"}).with_lora(LoraConfig(rank=4), "model.lora")
    adapter = 3 * 4 * ((16 + 16) + 2 * (16 + 8) + (16 + 16) + 3 * (16 + 48))
    learner = LearnerConfig(kl={"coefficient": 0.1, "reference": "initial"})
    found = estimate_memory(model, EngineConfig(), learner)
    assert trained_count(model, learner) == adapter
    assert found["parameters of the learner"] == 2 * HALF.parameter_count + 2 * 2 * adapter
    assert found["parameters of the engine"] == 2 * 2 * adapter and found["parameters of the reference"] == 2 * adapter
    assert (found["gradients"], found["optimiser state"]) == (6 * adapter, 12 * adapter)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_the_optimiser_step_takes_what_the_compiler_allots(shapes, name):
    model, decoder, _ = shapes
    learner = LearnerConfig(optimizer={"name": name})
    gradients, scalar = jax.eval_shape(step.zeros, decoder).policy, jax.ShapeDtypeStruct((), jnp.float32)
    state = jax.eval_shape(lambda parameters: initial_state(learner.optimizer, parameters), decoder)
    moments = sum(leaf.size * 4 for leaf in jax.tree.leaves(state.adam))
    assert optimizer_state_bytes(model, learner) == pytest.approx(
        moments, abs=512
    )  # counters, and what factored arrays keep
    allotted = peak_bytes(applier(learner.optimizer).lower(decoder, state, gradients, scalar, scalar))
    held = moments + 8 * model.parameter_count  # and the gradient, and the master or the parameters without one
    assert held + step_temporaries(model, learner) == pytest.approx(allotted, rel=CLOSE)


def test_prefill_and_decoding_take_what_the_compiler_allots(shapes):
    model, decoder, sizes = shapes
    weights = jax.eval_shape(ServedWeights.of, decoder)
    cache = jax.eval_shape(lambda: create_cache(model, sizes["slots"], sizes["window"]))
    run: Any = ONE_DEVICE
    decoding = peak_bytes(run.decode.lower(weights, cache, SlotRows.array(sizes["slots"], 8), steps=8))
    estimate = estimate_memory(
        model, EngineConfig(max_slots=sizes["slots"], max_seq_len=sizes["window"]), LearnerConfig()
    )
    held = estimate["parameters of the engine"] // 2 + estimate["KV cache"] // 2
    scores = 6 * 4 * model.vocab_size * sizes["slots"]
    copies = estimate["float32 copies on a CPU"] - gradient_temporaries(model, LearnerConfig())["copies"]
    assert held + max(scores, copies) == pytest.approx(decoding, rel=CLOSE)
    rows, length = sizes["prompts"]
    kernel = attention_kernel("auto", "cpu", length, model.dtype, model.head_dim)
    prompts = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    prefilling = peak_bytes(run.prefill.lower(weights, prompts, kernel=kernel))
    held = estimate["parameters of the engine"] // 2 + kv_cache_bytes(model, rows, length)
    close = CLOSE if model.dtype == "float32" else 0.2
    assert held + prefill_temporaries(model, rows, length) == pytest.approx(prefilling, rel=close)
    chunk, zero = jax.ShapeDtypeStruct((128,), jnp.int32), jnp.int32(0)
    extending = peak_bytes(run.extend.lower(weights, cache, chunk, zero, zero))
    held = estimate["parameters of the engine"] // 2 + estimate["KV cache"] // 2
    of_head = 4 * model.vocab_size * model.hidden_size  # of one position it is read as it is
    chunk_bytes = max(chunk_temporaries(model, 128, sizes["window"]), copies - of_head)
    assert held + chunk_bytes == pytest.approx(extending, rel=close)


def test_long_prompts_take_a_chunk_of_memory_where_they_go_by_chunks():
    model = MODEL.model_copy(update={"intermediate_size": 4096})

    def prefilled(on_cpu, **fields):
        engine = EngineConfig(max_seq_len=4096, prefill_chunk=128, **fields)
        found = estimate_memory(model, engine, LearnerConfig(), on_cpu)["attention"]
        return found - gradient_temporaries(model, LearnerConfig(), on_cpu)["attention"]

    whole = prefill_temporaries(model, 1, 4094)
    assert prefilled(True) == max(chunk_temporaries(model, 128, 4096), prefill_temporaries(model, 4, 256)) < whole / 2
    assert prefilled(True, model_parallel=2) == whole
    assert prefilled(False) == prefill_temporaries(model, 1, 4094, on_cpu=False)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**20, "3.0 MiB"), (2**31, "2.0 GiB"), (2**42, "4.0 TiB")],
)
def test_bytes_are_written_for_people(count, text):
    assert bytes_text(count) == text
