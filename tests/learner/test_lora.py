"""A learner of an adapter: what trains, what is published and saved, and that the base is shared and never changes."""

import gc
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.adapted import LORA, adapted

from penstock.inference.decoding import ServedWeights
from penstock.learner import KlConfig, Learner, LearnerConfig, OptimizerConfig, load_checkpoint, save_checkpoint
from penstock.learner.checkpoints import restore_learner
from penstock.learner.reference import check_reference
from penstock.model.language import Decoder, load_decoder, named_arrays, save_decoder
from penstock.model.language.decoder import decoder_digests
from penstock.model.language.lora import LoraConfig
from penstock.text import Tokenizer
from penstock.types import CheckpointError, ConfigError
from penstock.weights import trained_arrays

FAST = OptimizerConfig(learning_rate=0.02, warmup_steps=0)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load("penstock")


@pytest.fixture
def beside(decoder, tokenizer, tmp_path) -> Decoder:
    """A drawn adapter beside a base that lies in a directory."""
    save_decoder(decoder, tmp_path / "base", tokenizer)
    return load_decoder(tmp_path / "base", lora=LORA, seed=1)


@pytest.fixture
def batch_of(make_batch, examples):
    """Of version `step`."""
    return lambda step: make_batch(examples, step)


def made(decoder: Decoder, config: LearnerConfig, **changes: object) -> Learner:
    return Learner(decoder, config.model_copy(update={"optimizer": FAST, **changes}), 10)


def base_of(learner: Learner) -> dict[str, str]:
    return {name: d for name, d in decoder_digests(learner.named_arrays()).items() if not name.startswith("adapter.")}


def pointers(decoder: Decoder) -> set[int]:
    still = [array for name, array in named_arrays(decoder).items() if not name.startswith("adapter.")]
    return {array.unsafe_buffer_pointer() for array in still}


def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())


def test_only_the_adapter_learns(beside, config, batch_of):
    learner = made(beside, config)
    bytes_before, scores_before = base_of(learner), learner.score(batch_of(0).examples)
    for step in range(3):
        metrics = learner.update(batch_of(step), step)
    assert metrics["train/grad_norm"] > 0 and metrics["train/changed_fraction"] > 0.9
    assert base_of(learner) == bytes_before and pointers(learner.decoder) == pointers(beside)
    moved = [np.abs(a - b).max() for a, b in zip(scores_before, learner.score(batch_of(0).examples), strict=True)]
    assert max(moved) > 0.01
    published = trained_arrays(learner.named_arrays(), learner.optimizer.frozen)
    assert list(published) == [name for name in beside.config.parameter_shapes() if name.startswith("adapter.")]
    sizes = sum(array.size for array in published.values())
    state = learner.state_arrays()
    assert sum(a.size for name, a in state.items() if name.startswith("adam")) == 2 * sizes + 1
    gradients = jax.eval_shape(learner._zeros, learner.decoder).policy
    assert sum(leaf.size for leaf in jax.tree.leaves(gradients)) == sizes


def test_engine_and_learner_read_the_same_base(beside, config, batch_of):
    learner = made(beside, config)
    served = ServedWeights.of(learner.decoder)
    learner.update(batch_of(0), 0)
    newer = served.renewed(trained_arrays(learner.named_arrays(), learner.optimizer.frozen))
    apart = jax.tree.leaves((served.ends, [replace(layer, adapter=None) for layer in served.layers]))
    again = jax.tree.leaves((newer.ends, [replace(layer, adapter=None) for layer in newer.layers]))
    assert {a.unsafe_buffer_pointer() for a in apart} == {a.unsafe_buffer_pointer() for a in again} == pointers(beside)
    assert newer.digests() == decoder_digests(learner.named_arrays()) != served.digests()


def test_engine_and_learner_hold_the_base_once(decoder, config, batch_of):
    """By the bytes that live, those of an update in between too: no copy of any of it, by whatever name."""
    shape = decoder.config.model_copy(update={"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4})
    wide = adapted(Decoder.initialise(shape, jax.random.key(0)))
    sizes = {name: array.nbytes for name, array in named_arrays(wide).items()}
    adapter = sum(size for name, size in sizes.items() if name.startswith("adapter."))
    gc.collect()
    before = live_bytes()
    learner = made(wide, config)
    served = ServedWeights.of(learner.decoder)
    learner.update(batch_of(0), 0)
    newer = served.renewed(trained_arrays(learner.named_arrays(), learner.optimizer.frozen))
    assert newer.digests() == decoder_digests(learner.named_arrays()) != served.digests()
    gc.collect()
    added, base = live_bytes() - before, sum(sizes.values()) - adapter
    assert 3 * adapter < added < 8 * adapter < base / 2


def test_engine_and_learner_read_the_same_frozen_ends(decoder, config, batch_of):
    learner = made(decoder, config, optimizer=FAST.model_copy(update={"frozen": ("embedding", "layers.gate")}))
    first = ServedWeights.of(learner.decoder)
    learner.update(batch_of(0), 0)
    served = first.renewed(trained_arrays(learner.named_arrays(), learner.optimizer.frozen))
    assert served.ends.embedding is learner.decoder.embedding is decoder.embedding
    assert (
        served.ends.output_matrix is learner.decoder.output_matrix and served.ends.final_norm is not decoder.final_norm
    )
    assert all(one.gate is other.gate for one, other in zip(served.layers, first.layers, strict=True))
    assert served.digests() == decoder_digests(learner.named_arrays()) != first.digests()


def test_a_first_update_is_that_of_the_whole_model_in_its_numbers(beside, decoder, config, batch_of):
    """The adapter is zero: loss, entropy and log-probabilities are the base's."""
    ours, whole = made(beside, config).update(batch_of(0), 0), made(decoder, config).update(batch_of(0), 0)
    for name in ("train/loss", "train/entropy", "train/ratio_mean"):
        assert ours[name] == pytest.approx(whole[name], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("reference", ["initial", pytest.param("ema", marks=pytest.mark.slow)])
def test_the_reference_is_another_adapter_over_the_same_base(beside, config, batch_of, tmp_path, tokenizer, reference):
    kl = KlConfig(coefficient=0.1, reference=reference)
    learner = made(beside, config, kl=kl)
    for step in range(2):
        learner.update(batch_of(step), step)
    held = learner._reference.current(learner.decoder)
    assert pointers(held.decoder) == pointers(learner.decoder)
    off = not held.decoder.adapter.query.b.any()
    assert off == (reference == "initial")
    kept = learner.state_arrays()
    prefix = "reference." if reference == "initial" else "reference_average."
    names = {name.removeprefix(prefix) for name in kept if name.startswith(prefix)}
    assert names == {name for name in beside.config.parameter_shapes() if name.startswith("adapter.")}

    folder = save_checkpoint(tmp_path / "run", 2, learner, tokenizer, {})
    resumed = restore_learner(load_checkpoint(folder), learner._config.model_copy(update={"optimizer": FAST}), 10)
    for one in (learner, resumed):
        one.update(batch_of(2), 2)
    ours, theirs = ({**one.state_arrays(), **one.named_arrays()} for one in (learner, resumed))
    assert ours.keys() == theirs.keys()
    assert all((np.asarray(ours[name]) == np.asarray(theirs[name])).all() for name in ours)


def test_a_checkpoint_holds_no_base(beside, config, batch_of, tmp_path, tokenizer):
    learner = made(beside, config)
    learner.update(batch_of(0), 0)
    folder = save_checkpoint(tmp_path / "run", 1, learner, tokenizer, {})
    assert not (folder / "model" / "model.safetensors").exists()
    loaded = load_checkpoint(folder).decoder
    assert loaded.config == learner.decoder.config
    assert (loaded.adapter.query.b == learner.decoder.adapter.query.b).all()
    (tmp_path / "base" / "config.json").rename(tmp_path / "gone.json")
    with pytest.raises(CheckpointError, match=r"model is an adapter of .*base, where no config.json lies"):
        load_checkpoint(folder).decoder  # noqa: B018


@pytest.mark.slow
def test_a_float32_adapter_beside_a_bfloat16_base_needs_no_master(decoder, config, batch_of, tmp_path, tokenizer):
    save_decoder(decoder, tmp_path / "base", tokenizer)
    own = LORA.model_copy(update={"dtype": "float32"})
    kinds = {None: (jnp.bfloat16, True), own.dtype: (jnp.float32, False)}
    for dtype, (expected, masters) in kinds.items():
        lora = LORA.model_copy(update={"dtype": dtype})
        learner = made(load_decoder(tmp_path / "base", "bfloat16", lora=lora), config)
        learner.update(batch_of(0), 0)
        assert learner.decoder.adapter.up.b.dtype == expected and learner.decoder.embedding.dtype == jnp.bfloat16
        assert any(name.startswith("master") for name in learner.state_arrays()) == masters
        folder = save_checkpoint(tmp_path / f"run-{dtype}", 1, learner, tokenizer, {})
        loaded = load_checkpoint(folder).decoder
        assert loaded.config == learner.decoder.config
        assert (loaded.adapter.up.b == learner.decoder.adapter.up.b).all()


def test_what_is_frozen_of_an_adapter(beside, config, batch_of):
    halves = FAST.model_copy(update={"frozen": ("adapter.*.a",)})
    learner = made(beside, config, optimizer=halves)
    learner.update(batch_of(0), 0)
    published = trained_arrays(learner.named_arrays(), learner.optimizer.frozen)
    assert published and all(name.endswith(".b") for name in published)
    assert (learner.decoder.adapter.up.a == beside.adapter.up.a).all()
    message = r"frozen has \['layers\.\*'\], and beside an adapter all but the adapter stays as it is: name some"
    with pytest.raises(ConfigError, match=message):
        made(beside, config, optimizer=FAST.model_copy(update={"frozen": ("adapter.*.a", "layers.*")}))


def test_a_directory_as_reference(beside, decoder, config, batch_of, tmp_path, tokenizer):
    other = jax.tree.map(lambda leaf: leaf * 1.5, decoder)
    save_decoder(other, tmp_path / "other", tokenizer)
    learner = made(beside, config, kl=KlConfig(coefficient=0.1, reference=str(tmp_path / "other")))
    examples = batch_of(0).examples
    _, theirs = learner.reference_logprobs(examples)
    expected = made(other, config).score(examples)
    for ours, scores, example in zip(theirs, expected, examples, strict=True):
        np.testing.assert_allclose(ours[example.loss_mask], scores[example.loss_mask], atol=1e-4)
    shape = adapted(decoder, LoraConfig(rank=2)).config
    with pytest.raises(ConfigError, match="it is an adapter, and the policy has none; merge it by penstock export"):
        check_reference("d", shape, decoder.config)
    with pytest.raises(
        ConfigError, match=r"kl\.reference is d: its adapter's rank is 2, and model\.lora\.rank 4; .* merge"
    ):
        check_reference("d", shape, beside.config)
