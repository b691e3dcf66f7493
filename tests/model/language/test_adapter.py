"""What an adapter adds to a model, in which precision, and what trains of the two."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.adapted import LORA, adapted

from penstock.model.arrays import digests_of
from penstock.model.language import Decoder, Segments, named_arrays
from penstock.model.language.adapter import LoraPair
from penstock.model.language.decoder import decoder_digests
from penstock.model.language.hugging_face import with_merged
from penstock.model.language.lora import MATRICES, LoraConfig
from penstock.types import ConfigError


@pytest.fixture(scope="session")
def rows():
    tokens = np.random.default_rng(0).integers(0, 50, (2, 12)).astype(np.int32)
    positions = np.tile(np.arange(12, dtype=np.int32), (2, 1))
    return jnp.asarray(tokens), jnp.asarray(positions), Segments.of(np.ones_like(tokens))


def test_a_drawn_adapter_changes_nothing_and_a_learned_one_does(tiny_decoder, states, rows):
    decoder = tiny_decoder(model_type="qwen3")
    before = states(decoder, *rows)
    np.testing.assert_allclose(states(adapted(decoder, learned=0.0), *rows), before, atol=1e-5)
    after = states(adapted(decoder), *rows)
    assert float(jnp.abs(after - before).max()) > 0.1
    np.testing.assert_allclose(states(with_merged(adapted(decoder)), *rows), after, atol=2e-5)


def test_only_the_targets_are_adapted(tiny_decoder, states, rows):
    decoder = tiny_decoder()
    few = adapted(decoder, LoraConfig(rank=2, alpha=3, targets=("down_proj", "k_proj")))
    names = [name for name in named_arrays(few) if name.startswith("adapter.")]
    assert names == ["adapter.key.a", "adapter.key.b", "adapter.down.a", "adapter.down.b"]
    assert few.adapter.key.scale == 1.5
    assert few.config.still == ("embedding", "final_norm", "head", "layers.*")
    assert few.config.parameter_count == decoder.config.parameter_count + 2 * 2 * ((16 + 12) + (24 + 16))


def test_full_rank_gives_the_full_gradient_of_each_matrix(tiny_decoder, rows):
    """With A the identity and B zero, d/dB is what d/dW was; or the other way round, where W has fewer columns."""
    decoder = tiny_decoder(num_key_value_heads=2, head_dim=8)
    start = adapted(decoder, LoraConfig(rank=16, alpha=16), learned=0.0)
    identity, pairs = jnp.tile(jnp.eye(16), (2, 1, 1)), {}
    for name in MATRICES.values():
        pair = getattr(start.adapter, name)
        wide = pair.a.shape[1] == 16
        pairs[name] = replace(pair, a=identity) if wide else replace(pair, a=0 * pair.a, b=identity)
    beside = replace(start, adapter=replace(start.adapter, **pairs))

    @jax.jit
    def gradients(layers, adapter):
        def squares(model):
            return jnp.square(model.hidden_states(*rows)).sum()

        whole = jax.grad(lambda layers: squares(replace(decoder, layers=layers)))(layers)
        return whole, jax.grad(lambda adapter: squares(replace(beside, adapter=adapter)))(adapter)

    whole, ours = gradients(decoder.layers, beside.adapter)
    for name, pair in pairs.items():
        expected, found = getattr(whole, name), getattr(ours, name)
        largest = float(jnp.abs(expected).max())
        assert largest > 0.01
        found = found.b if pair.b.any() == 0 else found.a
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-5 * largest, err_msg=name)


def test_what_is_rounded_where():
    """X A is rounded to B's dtype, once; s (x A) B is float32."""
    rng = np.random.default_rng(1)
    x, a, b = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((5, 16), (16, 4), (4, 8)))
    found = LoraPair(a, b, 0.5)(x)
    narrow = (np.asarray(x, np.float32) @ np.asarray(a, np.float32)).astype(jnp.bfloat16)
    expected = np.float32(0.5) * (narrow.astype(np.float32) @ np.asarray(b, np.float32))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)
    exact = LoraPair(a.astype(jnp.float32), b.astype(jnp.float32), 0.5)(x)
    assert 1e-4 < float(jnp.abs(exact - found).max()) < 0.1


def test_merging_into_bfloat16_loses_what_is_kept_apart(tiny_decoder, states, rows):
    """An adapter of a thousandth of the matrices: most of it is below a bfloat16's last bit."""
    decoder = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tiny_decoder())
    decoder = replace(decoder, config=decoder.config.model_copy(update={"dtype": "bfloat16"}))
    small = adapted(decoder, learned=5e-4)

    def exact(model):
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), model)
        return states(wide, *rows)

    truth = exact(small) - exact(adapted(decoder, learned=0.0))
    merged = exact(with_merged(small)) - exact(decoder)
    assert float(jnp.linalg.norm(merged - truth) / jnp.linalg.norm(truth)) > 0.5


def test_the_base_lies_apart_and_its_digests_are_those_of_the_stack(tiny_decoder):
    decoder = tiny_decoder(model_type="qwen2")
    beside = adapted(decoder)
    found, stacked = decoder_digests(named_arrays(beside)), digests_of(named_arrays(decoder))
    assert {name: found[name] for name in stacked} == stacked
    assert found.keys() == beside.config.parameter_shapes().keys()
    other = replace(beside, layers=beside.layers[::-1])
    assert decoder_digests(named_arrays(other))["layers.query"] != stacked["layers.query"]
    assert beside.layers_apart()[1].query is beside.layers[1].query


@pytest.mark.slow
def test_the_gradient_keeps_no_second_base(tiny_decoder):
    """Layers are chosen one by one, in the backward pass again: what is kept grows by a layer, not by all of them."""

    def temporaries(depth: int) -> int:
        decoder = adapted(tiny_decoder(num_hidden_layers=depth, hidden_size=64, intermediate_size=256))
        tokens, segments = jnp.zeros((1, 4), jnp.int32), Segments.of(np.ones((1, 4)))

        def loss(adapter):
            return jnp.square(replace(decoder, adapter=adapter).hidden_states(tokens, tokens, segments, "layer")).sum()

        program = jax.jit(jax.grad(loss)).lower(decoder.adapter).compile()
        return program.memory_analysis().temp_size_in_bytes

    layer = 4 * (3 * 64 * 256 + 2 * 64 * 24 + 2 * 64 * 12)
    assert temporaries(8) - temporaries(2) < layer


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (LoraConfig(rank=13), r"^model\.lora\.rank is 13, and k_proj is 16 × 12: its rank is at most 12; lower the"),
        (LoraConfig(rank=17, targets=("o_proj",)), r"rank is 17, and o_proj is 24 × 16"),
    ],
)
def test_a_rank_that_a_matrix_does_not_have_is_refused(tiny_config, lora, message):
    with pytest.raises(ConfigError, match=message):
        tiny_config().with_lora(lora, "model.lora")


def test_shapes_are_refused_by_field():
    with pytest.raises(ValueError, match=r"rank\n.*greater than 0"):
        LoraConfig(rank=0)
    with pytest.raises(ValueError, match=r"targets.*\n.*'q_proj', 'k_proj'.*lm_head"):
        LoraConfig(targets=("lm_head",))
    with pytest.raises(ValueError, match=r"names no matrix: give some of q_proj"):
        LoraConfig(targets=())
    for word in ("q_proj", "all"):
        with pytest.raises(ValueError, match=f"targets\n.*is '{word}': give a list of some of q_proj, .*all-linear"):
            LoraConfig.model_validate({"targets": word})
    assert LoraConfig(targets="all-linear").targets == tuple(MATRICES)
    assert LoraConfig(targets=("up_proj", "q_proj", "up_proj")).targets == ("q_proj", "up_proj")
    assert LoraConfig(rank=16, alpha=8, use_rslora=True).scale == 2.0


def test_an_adapter_of_none_is_a_model(tiny_decoder):
    with pytest.raises(ConfigError, match="no adapter to be merged"):
        with_merged(tiny_decoder())
    assert isinstance(adapted(tiny_decoder(), LORA), Decoder)
