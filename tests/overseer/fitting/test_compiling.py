"""Programs from shapes alone, and what is read from what a compiler made of them."""

import importlib.util
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import penstock
from penstock.overseer.estimate import model_shape
from penstock.overseer.fitting.chips import CHIPS, Chip
from penstock.overseer.fitting.compiling import (
    ChipCompiler,
    RunShapes,
    _compiled,
    array_bytes,
    largest_temporaries,
    temporaries_of,
    tree_bytes,
)
from penstock.overseer.fitting.search import shape_named, with_adapter

HLO = """HloModule jit_f

%fused_computation (p0: f32[8,1024]) -> f32[8,1024] {
  %p0 = f32[8,1024]{1,0} parameter(0)
  ROOT %big = f32[8,1024,1024]{2,1,0} broadcast(%p0), metadata={op_name="jit(f)/inside a fusion"}
}

%body (p: (s32[], f32[4,64])) -> (s32[], f32[4,64]) {
  %p = (s32[], f32[4,64]{1,0}) parameter(0)
  %x = f32[4,64]{1,0} get-tuple-element(%p), index=1
  %scores = f32[4,512]{1,0} dot(%x, %x), metadata={op_name="jit(f)/while/body/closed_call/attention/dot_general"}
  %again = f32[4,512]{1,0} dot(%x, %x), metadata={op_name="jit(f)/while/body/closed_call/attention/dot_general"}
  ROOT %t = (s32[], f32[4,64]{1,0}) tuple(%i, %x)
}

ENTRY %main (a: f32[8,1024]) -> f32[8,1024] {
  %a = f32[8,1024]{1,0} parameter(0)
  %pair = (bf16[16,256]{1,0}, f32[3]{0}) fusion(%a), kind=kLoop, calls=%fused_computation, metadata={op_name="jit(f)/transpose(jvp())/mul"}
  ROOT %out = f32[8,1024]{1,0} add(%a, %a)
}
"""  # noqa: E501


def test_the_largest_arrays_that_a_program_makes_are_named_and_counted():
    found = list(largest_temporaries(HLO, 3))
    assert [(each.shape, each.size_bytes, each.count) for each in found] == [
        ("f32[8,1024]", 32768, 1), ("f32[4,512]", 8192, 2), ("bf16[16,256]", 8192, 1),
    ]  # fmt: skip
    assert [each.made_by for each in found] == ["add", "attention/dot_general", "transpose(jvp())/mul (backward)"]


def test_bytes_of_an_array_by_hand():
    assert (array_bytes("f32[2,3]"), array_bytes("bf16[7]"), array_bytes("pred[4,4]")) == (24, 14, 16)


class Refusing:
    def __init__(self, message):
        self.message = message

    def compile(self, options):
        raise jax.errors.JaxRuntimeError(self.message)


def test_a_program_that_its_compiler_refuses_needs_what_the_refusal_says():
    words = "RESOURCE_EXHAUSTED: Ran out of memory. Used 23.50G of 15.75G hbm. Exceeded by 7.75G.\nmore"
    part = _compiled(Refusing(words), None, 2**30, "tpu")
    assert part.refused == words.splitlines()[0]
    assert part.arguments_bytes + part.temporaries_bytes == 23.5 * 2**30
    with pytest.raises(jax.errors.JaxRuntimeError, match="UNIMPLEMENTED"):
        _compiled(Refusing("UNIMPLEMENTED: no such kernel"), None, 0, "tpu")


def analysis(peak: int, temporaries: int = 60):
    """As `memory_analysis()` has it: arguments of 100, of which results of 40 overwrite 30."""
    sizes = {"argument": 100, "output": 40, "alias": 30, "temp": temporaries}
    return SimpleNamespace(peak_memory_in_bytes=peak, **{f"{name}_size_in_bytes": n for name, n in sizes.items()})


@pytest.mark.parametrize(
    ("memory", "platform", "temporaries"),
    [
        (analysis(150), "tpu", 40), (analysis(200), "tpu", 60), (analysis(105), "tpu", 0),
        (analysis(150), "cuda", 60), (analysis(150), "cpu", 60),
    ],
)  # fmt: skip
def test_a_tpu_s_temporaries_are_those_of_its_peak_and_another_s_one_array(memory, platform, temporaries):
    assert temporaries_of(memory, platform) == temporaries


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the extra tpu-fit")
def test_a_tpu_s_compiler_refuses_by_the_peak(monkeypatch):
    """Gradients through a scan, of which the compiler's sum of temporaries is larger, beside an array that fills up."""
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    chip = CHIPS["v5e"]
    compiler, layers, width = ChipCompiler(chip), 32, 4096

    def gradient(total, matrices, rows, beside):
        def loss(matrices):
            step = jax.checkpoint(lambda x, matrix: (jnp.tanh(x @ matrix).astype(x.dtype), None))
            return jax.lax.scan(step, rows, matrices)[0].astype(jnp.float32).sum()

        return total + jax.grad(loss)(matrices).astype(jnp.float32), beside[0, 0]

    def compiled(beside_bytes: int):
        shapes = (
            ((layers, width, width), jnp.float32),
            ((layers, width, width), jnp.bfloat16),
            ((width, width), jnp.bfloat16),
        )
        arrays = [jax.ShapeDtypeStruct(*each) for each in (*shapes, ((beside_bytes // 4096, 1024), jnp.float32))]
        return compiler.compile("it", "learner", partial(jax.jit(gradient, donate_argnums=0).lower, *arrays))

    part = compiled(2**20)
    room = chip.memory_bytes - part.arguments_bytes - part.extra_bytes
    assert part.refused is None and compiled(room - 2**26).refused is None
    assert compiled(room + 2**26).refused is not None


@pytest.fixture(scope="module")
def config():
    return penstock.load_config("cats", ["model.dtype=bfloat16"])


def test_seven_billion_parameters_are_counted_without_an_array(config):
    model, before = shape_named("7b", config), len(jax.live_arrays())
    shapes = RunShapes(config, model)
    count = model.parameter_count
    assert count == 7_615_616_512
    assert tree_bytes(shapes.decoder) == tree_bytes(shapes.weights) == 2 * count
    assert shapes.optimizer_bytes == 12 * count + 4  # moments and master, and Adam's count
    assert 4 * count <= shapes.gradient_bytes < 4 * count + 100  # and the sums of metrics
    assert len(jax.live_arrays()) - before < 4


def test_an_adapter_has_its_base_once_and_all_that_trains_is_its_own(config):
    model = with_adapter(shape_named("0.5b", config), 16)
    shapes = RunShapes(config, model)
    adapter = model.parameter_count - shape_named("0.5b", config).parameter_count
    assert tree_bytes(shapes.decoder) == tree_bytes(shapes.weights) == 2 * model.parameter_count
    assert shapes.shared_bytes == 2 * (model.parameter_count - adapter)
    assert shapes.optimizer_bytes == 12 * adapter + 4
    assert 4 * adapter <= shapes.gradient_bytes < 4 * adapter + 100


def test_engine_and_learner_share_a_model_s_ends(config):
    model = shape_named("0.5b", config)
    assert RunShapes(config, model).shared_bytes == 2 * (model.vocab_size + 1) * model.hidden_size


def test_a_swap_takes_layers_one_by_one_and_beside_an_adapter_none(config):
    model = model_shape(config.model)
    shapes = RunShapes(config, model)
    swap = shapes.engine_programs["swap, a layer"]
    part = ChipCompiler(Chip("here", "cpu", 2**30, 1e9, {"float32": 1e9})).compile("swap", "engine", swap)
    of_layers = tree_bytes(shapes.decoder.layers)
    assert part.arguments_bytes >= of_layers and part.temporaries_bytes == 0
    assert part.results_bytes == pytest.approx(of_layers / model.num_hidden_layers, rel=0.01)
    adapted = RunShapes(config, with_adapter(shape_named("0.5b", config), 16))
    assert "swap, a layer" not in adapted.engine_programs


def test_frozen_arrays_have_no_part_in_gradient_and_state(config):
    frozen = penstock.load_config(config, {"learner.optimizer.frozen": ["layers.*"]})
    model = shape_named("0.5b", config)
    trained = model.vocab_size * model.hidden_size + model.hidden_size
    assert RunShapes(frozen, model).optimizer_bytes == 12 * trained + 4


def test_what_is_lowered_twice_is_compiled_once_and_keeps_its_name():
    compiler = ChipCompiler(Chip("here", "cpu", 2**30, 1e9, {"float32": 1e9}))
    double = jax.jit(lambda x: (x @ x).sum())
    lowering = partial(double.lower, jax.ShapeDtypeStruct((64, 64), jnp.float32))
    first, second = compiler.compile("one", "learner", lowering), compiler.compile("two", "engine", lowering)
    assert (first.name, first.side, second.name, second.side) == ("one", "learner", "two", "engine")
    assert first.arguments_bytes == second.arguments_bytes == 64 * 64 * 4
    assert len(compiler._done) == 1
