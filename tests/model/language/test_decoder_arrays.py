import jax.numpy as jnp
import pytest

from penstock.model.language import named_arrays, with_named_arrays
from penstock.types import WeightsError


def test_names_are_paths_and_arrays_go_by_reference(tiny_decoder):
    decoder = tiny_decoder(model_type="qwen2", tie_word_embeddings=True)
    arrays = named_arrays(decoder)
    assert list(arrays) == [
        "embedding", "layers.input_norm", "layers.query", "layers.key", "layers.value", "layers.query_bias",
        "layers.key_bias", "layers.value_bias", "layers.output", "layers.post_norm", "layers.gate", "layers.up",
        "layers.down", "final_norm",
    ]  # fmt: skip
    assert arrays["layers.gate"] is decoder.layers.gate


def test_arrays_make_a_decoder_again_without_a_copy(tiny_decoder):
    source, target = tiny_decoder(seed=1), tiny_decoder(seed=2)
    filled = with_named_arrays(target, named_arrays(source))
    assert filled.config == target.config
    assert all(a is b for a, b in zip(named_arrays(filled).values(), named_arrays(source).values(), strict=True))
    assert (target.embedding != source.embedding).any()  # the target itself is untouched


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("final_norm"), "final_norm is missing"),
        (lambda a: a.update(extra=jnp.ones(1)), "extra is unknown"),
        (lambda a: a.update(head=jnp.ones((50, 8))), r"head is float32\[50, 8\], not float32\[50, 16\]"),
        (lambda a: a.update(head=jnp.ones((50, 16), jnp.bfloat16)), r"head is bfloat16\[50, 16\], not float32"),
    ],
)
def test_arrays_that_do_not_fit_are_named(tiny_decoder, change, message):
    decoder = tiny_decoder()
    arrays = named_arrays(decoder)
    change(arrays)
    with pytest.raises(WeightsError, match=message):
        with_named_arrays(decoder, arrays)


def test_many_problems_are_counted(tiny_decoder):
    with pytest.raises(WeightsError, match="and 7 more"):
        with_named_arrays(tiny_decoder(), {})
