import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.model.language import Decoder, Segments, grouped_attention, named_arrays, rotary_tables
from penstock.model.language.attention_choice import attends_again


def rows(tokens, segments=None):
    tokens = jnp.asarray(tokens, jnp.int32)
    segments = Segments.of(np.ones(tokens.shape) if segments is None else segments)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return tokens, positions, segments


def test_a_later_token_changes_no_earlier_state(tiny_decoder, states):
    decoder = tiny_decoder()
    before = states(decoder, *rows([[3, 4, 5, 6, 7]]))
    after = states(decoder, *rows([[3, 4, 5, 49, 7]]))
    changed = np.abs(np.asarray(before - after)).max(axis=-1)[0]
    assert (changed[:3] == 0).all()
    assert (changed[3:] > 1e-3).all()


def test_segments_of_a_row_do_not_see_each_other_whatever_their_order(tiny_decoder, states):
    decoder = tiny_decoder()
    tokens = jnp.array([[3, 4, 5, 8, 9, 0]], jnp.int32)
    positions = jnp.array([[0, 1, 2, 0, 1, 0]], jnp.int32)
    packed = states(decoder, tokens, positions, Segments.of([[1, 1, 1, 2, 2, 0]]))[0]
    first = states(decoder, *rows([[3, 4, 5]]))[0]
    second = states(decoder, *rows([[8, 9]]))[0]
    np.testing.assert_allclose(np.asarray(packed[:3]), np.asarray(first), atol=1e-5)
    np.testing.assert_allclose(np.asarray(packed[3:5]), np.asarray(second), atol=1e-5)


def test_positions_come_from_the_ids_not_from_the_place_in_the_row(tiny_decoder, states):
    decoder = tiny_decoder()
    tokens, positions, segments = rows([[3, 4, 5]])
    spread = states(decoder, tokens, positions * 3, segments)
    shifted = states(decoder, tokens, positions + 20, segments)
    usual = states(decoder, tokens, positions, segments)
    np.testing.assert_allclose(np.asarray(shifted), np.asarray(usual), atol=1e-4)
    assert np.abs(np.asarray(spread - usual)).max() > 1e-2


def test_rows_of_padding_alone_stay_finite_with_their_gradients(tiny_decoder):
    decoder = tiny_decoder()

    def score(model):
        states = model.hidden_states(*rows([[3, 4, 0], [0, 0, 0]], [[1, 1, 0], [0, 0, 0]]))
        return (states**2).sum()

    value, gradients = jax.jit(jax.value_and_grad(score))(decoder)
    assert np.isfinite(value)
    assert all(np.isfinite(np.asarray(g)).all() for g in jax.tree.leaves(gradients))


def test_padding_receives_no_gradient_from_real_positions(tiny_decoder):
    decoder = tiny_decoder(tie_word_embeddings=False)

    def score(model):
        states = model.hidden_states(*rows([[0, 3, 4, 0]], [[0, 1, 1, 0]]))
        return (states[:, 1:3] ** 2).sum()

    gradient = np.asarray(jax.jit(jax.grad(score))(decoder).embedding)
    assert (gradient[0] == 0).all()
    assert np.abs(gradient[3]).max() > 0


@pytest.mark.parametrize("remat", ["none", "layer", "offload"])
def test_what_is_kept_changes_neither_values_nor_gradients(tiny_decoder, remat):
    decoder = tiny_decoder(model_type="qwen2")
    batch = rows([[3, 4, 5, 6], [7, 8, 9, 1]])

    def grads(remat):
        return jax.jit(jax.value_and_grad(lambda m: (m.hidden_states(*batch, remat=remat) ** 3).sum()))(decoder)

    (value, products), (again, others) = grads("products"), grads(remat)
    np.testing.assert_allclose(value, again, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(products), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * np.abs(a).max())


@pytest.mark.parametrize(("remat", "again"), [("layer", 0), ("products", 0), ("none", 0), ("offload", 1)])
def test_attention_by_blocks_runs_forward_once_where_what_it_gave_is_kept(tiny_decoder, remat, again):
    batch = rows([[3, 4, 5, 6], [7, 8, 9, 1]])

    def score(model):
        return model.hidden_states(*batch, remat=remat, kernel="blocks").sum()

    program = str(jax.make_jaxpr(jax.grad(score))(tiny_decoder()))
    assert program.count(" while[") == 2 + again  # a loop over pairs of blocks forward, one backward
    assert attends_again(remat, "blocks") == bool(again) and attends_again("layer", "splash")


def test_gradient_agrees_with_finite_differences(tiny_decoder):
    decoder = tiny_decoder(num_hidden_layers=1)
    batch = rows([[3, 4, 5]])

    def score(model):
        return jnp.sin(model.hidden_states(*batch)).sum()

    score_and_slopes = jax.jit(jax.value_and_grad(score))
    slope = sum(float(g.sum()) for g in jax.tree.leaves(score_and_slopes(decoder)[1]))
    step = 1e-3
    up, down = (score_and_slopes(jax.tree.map(lambda p, s=s: p + s, decoder))[0] for s in (step, -step))
    assert slope == pytest.approx(float(up - down) / (2 * step), rel=0.02)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_decoding_token_by_token_with_a_cache_gives_the_packed_states(tiny_decoder, model_type, states):
    """What an inference engine does with `project`, `grouped_attention` and `finish`."""
    decoder = tiny_decoder(model_type=model_type)
    tokens, positions, segments = rows([[3, 4, 5, 6, 7]])
    packed = np.asarray(states(decoder, tokens, positions, segments))[0]

    @jax.jit
    def step(decoder, keys, values, t):
        x = decoder.embed(tokens[:, t])
        cos, sin = rotary_tables(decoder.config, positions[:, t])
        visible = (jnp.arange(5) <= t)[None, None]
        for i in range(2):
            layer = decoder.layers_apart()[i]
            query, key, value = layer.project(x, cos, sin)
            keys, values = keys.at[i, :, :, t].set(key), values.at[i, :, :, t].set(value)
            x = layer.finish(x, grouped_attention(query[:, None], keys[i], values[i], visible)[:, 0])
        return decoder.normalise(x), keys, values

    keys = values = jnp.zeros((2, 1, 2, 5, 6))
    for t in range(5):
        x, keys, values = step(decoder, keys, values, t)
        np.testing.assert_allclose(np.asarray(x)[0], packed[t], atol=1e-4)


def test_logits_use_the_embedding_where_tied_and_the_head_where_not(tiny_decoder):
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((3, 16), np.float32))
    tied, untied = tiny_decoder(tie_word_embeddings=True), tiny_decoder(tie_word_embeddings=False)
    assert tied.head is None
    np.testing.assert_allclose(np.asarray(tied.logits(hidden)), np.asarray(hidden @ tied.embedding.T), atol=1e-5)
    np.testing.assert_allclose(np.asarray(untied.logits(hidden)), np.asarray(hidden @ untied.head.T), atol=1e-5)
    assert untied.output_matrix is untied.head


def test_bfloat16_states_and_float32_logits_without_implicit_promotion(tiny_decoder):
    decoder = tiny_decoder(dtype="bfloat16", model_type="qwen3")
    with jax.numpy_dtype_promotion("strict"):
        found = jax.jit(lambda d: d.hidden_states(*rows([[3, 4, 5]])))(decoder)
        logits = decoder.logits(found)
    assert found.dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32


def test_initialise_is_the_same_for_the_same_key_and_another_for_another(tiny_config):
    config = tiny_config()
    first, again, other = (named_arrays(Decoder.initialise(config, key)) for key in map(jax.random.key, (0, 0, 1)))
    assert all((first[name] == again[name]).all() for name in first)
    assert not (first["layers.query"] == other["layers.query"]).any()
    assert not (first["layers.query"][0] == first["layers.query"][1]).any()


def test_initialise_draws_the_stated_deviations(tiny_config):
    arrays = named_arrays(
        Decoder.initialise(
            tiny_config(model_type="qwen2", hidden_size=64, intermediate_size=128, vocab_size=500),
            jax.random.key(0),
        )
    )
    expected = {
        "embedding": 0.02, "head": 0.02, "layers.query": 64**-0.5, "layers.gate": 64**-0.5,
        "layers.output": (24 * 4) ** -0.5, "layers.down": (128 * 4) ** -0.5,
    }  # fmt: skip
    for name, std in expected.items():
        assert float(arrays[name].std()) == pytest.approx(std, rel=0.05), name
    assert (arrays["final_norm"] == 1).all() and (arrays["layers.query_bias"] == 0).all()


def test_a_fresh_policy_is_close_to_uniform(tiny_config, states):
    decoder = Decoder.initialise(tiny_config(hidden_size=64), jax.random.key(0))
    logprobs = jax.nn.log_softmax(decoder.logits(states(decoder, *rows([[3, 4, 5]]))))
    assert float(jnp.abs(logprobs + np.log(50)).max()) < 1.0


def test_parameters_are_those_of_the_config(tiny_config):
    for model_type in ("llama", "qwen2", "qwen3", "mistral"):
        config = tiny_config(model_type=model_type, tie_word_embeddings=model_type == "llama")
        arrays = named_arrays(Decoder.initialise(config, jax.random.key(0)))
        assert {name: array.shape for name, array in arrays.items()} == config.parameter_shapes()
        assert list(arrays) == list(config.parameter_shapes())
