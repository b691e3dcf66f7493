"""What a run takes at its worst moment, and how fast a step can be, by hand."""

import io
import json
from types import SimpleNamespace

import pytest
from rich.console import Console

import penstock
from penstock.model.language.config import ModelConfig
from penstock.model.language.lora import LoraConfig
from penstock.overseer.estimate import moving_bytes, optimizer_state_bytes
from penstock.overseer.fitting.chips import Chip
from penstock.overseer.fitting.compiling import CompiledPart, Temporary
from penstock.overseer.fitting.report import (
    VLLM_OTHER_BYTES,
    FitReport,
    Phase,
    Remedy,
    StepWork,
    attention_flops,
    causal_flops,
    host_bytes,
    layer_matrices,
    memory_parts,
    phases_of,
    sharing_words,
    vllm_parts,
)

MODEL = ModelConfig(
    vocab_size=100, hidden_size=16, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=4, tie_word_embeddings=True,
)  # fmt: skip
CHIP = Chip("a chip", "cuda", 1000, 10.0, {"float32": 100.0, "bfloat16": 200.0})
PROGRAMS = [
    CompiledPart("gradient", "learner", 0, 500, 7),
    CompiledPart("empty gradient", "learner", 0, 0, 10_000),
    CompiledPart("optimiser step", "learner", 0, 20, 300),
    CompiledPart("decode", "engine", 0, 40, 0),
    CompiledPart("prefill, 1 × 62 prompt tokens", "engine", 0, 90, 30),
]


class Sized:
    def __init__(self, count):
        self.shape, self.dtype = (count,), SimpleNamespace(itemsize=1)


@pytest.fixture
def shapes():
    return SimpleNamespace(
        model=MODEL, decoder=[Sized(300)], weights=[Sized(301)], optimizer_bytes=2400, gradient_bytes=1200,
        cache=lambda slots, window: [Sized(slots * window)], shared_bytes=50,
    )  # fmt: skip


def config(*changes):
    rows = ["learner.row_length=128", "learner.micro_batch_rows=4", "learner.minibatches=1", "learner.remat=layer"]
    return penstock.load_config("cats", ["inference.max_slots=2", "inference.windows=[32]", *rows, *changes])


def test_learner_and_engine_at_their_worst_are_added_where_both_run(shapes):
    assert memory_parts(config(), shapes, PROGRAMS) == {
        "parameters of the learner": 300, "parameters of the engine": 251, "optimiser state": 2400,
        "KV cache": 2 * 64, "accumulated gradient": 1200, "temporaries of the learner (gradient)": 507,
        "the engine's next version": 301,
    }  # fmt: skip


def test_at_staleness_zero_the_worse_of_the_two_counts(shapes):
    parts = memory_parts(config("async=false"), shapes, PROGRAMS)
    assert "accumulated gradient" in parts and "the engine's next version" not in parts


def test_several_optimiser_steps_keep_the_version_that_engines_read(shapes):
    parts = memory_parts(config("learner.minibatches=2"), shapes, PROGRAMS)
    assert parts["the version that engines read"] == 300


def test_what_is_offloaded_lies_in_the_host_s_memory(shapes):
    programs = [CompiledPart("gradient", "learner", 0, 500, 7, host_bytes=60), *PROGRAMS[1:]]
    offloading = config("learner.optimizer.offload=true")
    assert "optimiser state" not in memory_parts(offloading, shapes, programs)
    assert host_bytes(offloading.learner, shapes, programs) == 2460
    assert host_bytes(config().learner, shapes, PROGRAMS) == 0
    assert "In the host's memory beside it: 2.4 KiB" in printed(report(host_bytes=2460))


def test_beside_an_adapter_the_base_is_there_once_and_the_next_version_small(shapes):
    shapes.model = MODEL.with_lora(LoraConfig(rank=2), "model.lora")
    base = 4 * MODEL.parameter_count
    shapes.decoder, shapes.weights = [Sized(base + 30)], [Sized(base + 31)]
    shapes.shared_bytes = base
    parts = memory_parts(config("learner.minibatches=2"), shapes, PROGRAMS)
    assert parts["parameters of the engine"] == 31 and parts["the version that engines read"] == 30


def test_a_prefill_that_leads_brings_what_it_prefilled(shapes):
    programs = [*PROGRAMS[:4], CompiledPart("prefill, 1 × 62 prompt tokens", "engine", 0, 900, 30)]
    parts = memory_parts(config(), shapes, programs)
    assert parts["temporaries of the engine (prefill, 1 × 62 prompt tokens)"] == 900
    assert parts["prefilled keys and values"] == 30


def through_vllm(**external):
    launch = ["vllm", "serve", "{model}"]
    return ["inference.engine=vllm", "inference.windows=null",
            f"inference.external={json.dumps({'launch': launch} | external)}"]  # fmt: skip


def test_a_vllm_server_s_share_follows_from_the_shapes():
    """2 slots of 64 tokens; 100 tokens of 16 numbers, tied: whole, with an output matrix of its own."""
    head, entry = 100 * 16, 2 * 3 * 2 * 4  # keys and values of three layers, two heads of four
    per_token = 3 * 48 + 4 * 16 + 16 + 2 * 8
    assert vllm_parts(config(*through_vllm()), MODEL) == {
        "vLLM: parameters": 4 * (MODEL.parameter_count + head),
        "vLLM: KV cache": 2 * 64 * entry * 4,
        "vLLM: activations": 2 * 64 * per_token * 4 + 3 * 4 * 2 * 100,
    }
    adapted = MODEL.with_lora(LoraConfig(rank=2), "model.lora")
    lora = ["model.init=null", "model.path=.", "model.lora={rank: 2}", "replay.staleness_budget=1"]
    parts = vllm_parts(config(*through_vllm(weights="lora"), *lora), adapted)
    assert parts["vLLM: parameters"] == 4 * MODEL.parameter_count + 3 * moving_bytes(adapted)


def test_learner_and_vllm_are_added_unless_they_take_turns(shapes):
    programs = PROGRAMS[:3]
    server = vllm_parts(config(*through_vllm()), MODEL)
    learner = {
        "parameters of the learner": 300, "optimiser state": 2400, "accumulated gradient": 1200,
        "temporaries of the learner (gradient)": 507, "vLLM: CUDA, its graphs (assumed)": VLLM_OTHER_BYTES,
    }  # fmt: skip
    assert memory_parts(config(*through_vllm()), shapes, programs) == learner | server
    assert memory_parts(config(*through_vllm(), "async=false"), shapes, programs) == learner | server
    parts = memory_parts(config(*through_vllm(colocate=True)), shapes, programs)
    assert parts.keys() >= server.keys() and "accumulated gradient" not in parts  # the server is the larger of the two


def test_what_each_is_to_be_given_of_a_card_is_said(shapes):
    needed = sum(vllm_parts(config(*through_vllm()), MODEL).values()) + VLLM_OTHER_BYTES
    card = Chip("a card", "cuda", round(0.92 * 9.5 * needed), 1.0, {"float32": 1.0})
    words = sharing_words(config(*through_vllm()), MODEL, card)
    assert (
        "--gpu-memory-utilization 0.11. Start Penstock with XLA_PYTHON_CLIENT_MEM_FRACTION=0.81" in words
    )  # rounded up
    assert "ALLOCATOR=platform" in sharing_words(config(*through_vllm(colocate=True)), MODEL, card)
    for share in (["--gpu-memory-utilization", "0.4"], ["--gpu-memory-utilization=0.4"]):
        given = through_vllm(launch=["vllm", "serve", "{model}", *share])
        assert "; external.launch gives it 0.4." in sharing_words(config(*given), MODEL, card)
    assert "One card: much" in printed(report(sharing="One card: much"))


def test_a_phase_takes_the_longer_of_products_and_traffic():
    assert Phase.of("p", 1000.0, 20.0, CHIP, "float32") == Phase("p", 1000.0, 20.0, 10.0, "products")
    assert Phase.of("p", 1000.0, 200.0, CHIP, "bfloat16") == Phase("p", 1000.0, 200.0, 20.0, "memory")


def test_the_work_of_a_step_is_that_of_longest_answers():
    work = StepWork.of(config())
    assert work == StepWork(sequences=16 * 8, prompts=16, prompt_tokens=64 - 12, answer_tokens=12)
    assert work.sequence_tokens == 64


def test_products_by_hand():
    assert layer_matrices(MODEL) == 3 * (2 * 16 * (16 + 8) + 3 * 16 * 48)
    assert attention_flops(MODEL, 5, 7) == 4 * 3 * 16 * 5 * 7
    phases = {phase.name: phase for phase in phases_of(config(), MODEL, MODEL.parameter_count, CHIP)}
    assert phases["prefill"].flops == 16 * (2 * layer_matrices(MODEL) * 52 + attention_flops(MODEL, 52, 52))
    seen = 52 + 6
    per_token = 2 * (layer_matrices(MODEL) + 100 * 16) + attention_flops(MODEL, 1, seen)
    assert phases["decode"].flops == 128 * 12 * per_token
    # 128 sequences of 64 in rows of 128, 8 rows at once
    body = 8 * (2 * layer_matrices(MODEL) * 8 * 128 + 8 * attention_flops(MODEL, 128, 128))
    assert phases["gradient"].flops == 4 * body + 3 * 2 * 100 * 16 * 128 * 12
    assert phases["optimiser"].moved_bytes == MODEL.parameter_count * (2 * 8 + 4 + 8)
    kept = {phase.name: phase for phase in phases_of(config("learner.remat=none"), MODEL, 1, CHIP)}
    assert kept["gradient"].flops == phases["gradient"].flops - body
    head = 2 * 100 * 16 * 128 * 12
    for *changes, more in (
        ("learner.loss.preset=ppo", body),
        ("learner.kl={coefficient: 0.1, reference: initial, place: loss}", body + head),
        ("learner.kl={coefficient: 0.1, reference: initial, estimator: k1, place: reward}", body + head),
    ):
        beside = {phase.name: phase for phase in phases_of(config(*changes), MODEL, MODEL.parameter_count, CHIP)}
        assert beside["gradient"].flops == phases["gradient"].flops + more


def bytes_of(phase, model, *changes):
    found = phases_of(config(*changes), model, model.parameter_count, CHIP)
    return next(each.moved_bytes for each in found if each.name == phase)


def test_an_optimiser_moves_the_state_that_it_has():
    """AdamW's two moments of each parameter; Adafactor's rows and columns of each matrix."""
    gradient_and_both_versions = MODEL.parameter_count * (4 + 8)
    adamw = bytes_of("optimiser", MODEL) - gradient_and_both_versions
    adafactor = bytes_of("optimiser", MODEL, "learner.optimizer.name=adafactor") - gradient_and_both_versions
    assert adamw == 2 * 8 * MODEL.parameter_count
    assert adafactor == 2 * optimizer_state_bytes(MODEL, config("learner.optimizer.name=adafactor").learner)
    wide = LoraConfig(rank=2, dtype="float32")
    beside = MODEL.model_copy(update={"dtype": "bfloat16"}).with_lora(wide, "model.lora")
    count = beside.parameter_count - MODEL.parameter_count
    found = phases_of(config(), beside, count, CHIP)
    assert next(each.moved_bytes for each in found if each.name == "optimiser") == count * (2 * 8 + 4 + 2 * 4)


def test_of_an_embedding_that_is_no_output_matrix_nothing_is_read():
    apart = MODEL.model_copy(update={"tie_word_embeddings": False})
    assert apart.parameter_count == MODEL.parameter_count + 100 * 16
    for phase in ("prefill", "decode"):
        assert bytes_of(phase, apart) == bytes_of(phase, MODEL)


def test_layers_with_a_window_meet_no_more_keys_than_that():
    """32 tokens: 512 pairs where all are seen; with a window of 8: 8 · (32 − 4)."""
    changes = {"sliding_window": 8, "layer_types": ("sliding_attention", "full_attention", "sliding_attention")}
    assert causal_flops(MODEL, 32) == 4 * 16 * 3 * 512
    assert causal_flops(MODEL.model_copy(update=changes), 32) == 4 * 16 * (512 + 2 * 224)
    long = ["inference.max_seq_len=128", "learner.attention=blocks"]
    whole, cut = (phases_of(config(*long), each, 1, CHIP) for each in (MODEL, MODEL.model_copy(update=changes)))
    less = causal_flops(MODEL, 128) - causal_flops(MODEL.model_copy(update=changes), 128)
    assert whole[2].flops - cut[2].flops == 128 * 3 * less


def test_an_adapter_s_base_has_no_gradient_of_its_own_and_does_not_travel():
    model = MODEL.with_lora(LoraConfig(rank=2), "model.lora")
    plain, beside = ({p.name: p for p in phases_of(config(), each, 1, CHIP)} for each in (MODEL, model))
    products = 8 * 2 * layer_matrices(MODEL) * 8 * 128  # attention hands on gradients all the same
    assert plain["gradient"].flops - beside["gradient"].flops == products + 2 * 100 * 16 * 128 * 12
    assert beside["hand-over"].moved_bytes == 2 * 4 * (model.parameter_count - MODEL.parameter_count)


def report(**changes):
    fields = {
        "model": "qwen2", "chip": "a chip", "capacity_bytes": 1000, "parts": {"parameters": 600, "KV cache": 300},
        "programs": tuple(PROGRAMS), "slots": (4, 64), "slot_bytes": 30,
        "phases": (Phase("decode", 1.0, 1.0, 3.0, "memory"), Phase("gradient", 1.0, 1.0, 1.0, "products")),
    }  # fmt: skip
    return FitReport(**fields | changes)


def test_it_fits_where_there_is_room_and_nothing_was_refused():
    assert report().fits and report().exit_code == 0 and report().room_slots == 3
    assert not report(capacity_bytes=899).fits and report(capacity_bytes=899).exit_code == 1
    refused = CompiledPart("gradient", "learner", 0, 1, 0, refused="RESOURCE_EXHAUSTED")
    assert not report(programs=(refused,)).fits


def printed(found):
    console = Console(file=io.StringIO(), width=100)
    found.print(console)
    return console.file.getvalue()


def test_a_report_says_what_was_only_compiled_and_what_would_fit():
    largest = (Temporary("f32[8,8]", "attention/dot_general", 256, 2),)
    programs = (CompiledPart("gradient", "learner", 5, 600, 0, largest=largest), *PROGRAMS[1:])
    text = printed(report(programs=programs, capacity_bytes=800, remedy=Remedy(("inference.max_slots=2",), 700)))
    assert "not yet measured" in text and "900 B of 800 B: does not fit" in text
    assert "attention/dot_general" in text and "f32[8,8]" in text and "2 ×" in text
    assert "A step takes 4 s at best, 75% of it decode, bound by memory" in text
    assert "It fits with inference.max_slots=2: 700 B" in text
    assert "No change" in printed(report(remedy=Remedy((), 0)))
    plain = json.loads(json.dumps(report().to_json()))
    assert (plain["total_bytes"], plain["fits"], plain["step_s"]) == (900, True, 4.0)
