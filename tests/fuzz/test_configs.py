"""Malformed recipes, overrides, and checkpoints."""

import json
import shutil
import zlib

import jax
import pytest
from tests.fuzz.fuzzing import COUNTS, altered, damaged, fuzz, json_bytes

from penstock.learner import Learner, LearnerConfig, load_checkpoint, save_checkpoint
from penstock.model.language import Decoder, ModelConfig
from penstock.overseer.config import RunConfig
from penstock.overseer.config_loading import apply_overrides, build_config, load_config, load_recipe
from penstock.text import Tokenizer
from penstock.types import CheckpointError, ConfigError

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
"""Nine levels of nine references: 600 bytes that would be 10⁹ words if anybody wrote them out."""


@pytest.mark.attack
@pytest.mark.parametrize("count", COUNTS)
def test_recipe_files_are_read_or_refused(tmp_path, count):
    path = tmp_path / "mine.yaml"
    written = b"# A comment.\nsteps: 3\nmodel:\n  init: {hidden_size: 8}\nrate: 1e-3\nlist: [1, no, 2001-01-01, ~]\n"

    def target(content):
        path.write_bytes(content)
        load_recipe(path)

    def make(rng):
        return damaged(written, rng) if rng.random() < 0.7 else json_bytes({"steps": 1, "model": {"a": [1]}}, rng)

    assert 0 < fuzz(target, make, count, ConfigError) < count


@pytest.mark.parametrize("count", COUNTS)
def test_configs_are_built_or_refused(count):
    recipe = load_config("cats").model_dump(mode="json", by_alias=True)

    def make(rng):
        values = recipe
        for _ in range(rng.randint(1, 2)):
            changed = altered(values, rng)
            values = changed if isinstance(changed, dict) else values
        return values

    assert 0.2 * count < fuzz(lambda values: build_config(RunConfig, values, "mine.yaml"), make, count, ConfigError)


@pytest.mark.parametrize("count", COUNTS)
def test_overrides_are_applied_or_refused(count):
    recipe = load_recipe("cats")
    words = (b"steps=7", b"learner.optimizer.learning_rate=1e-3", b"model.init={hidden_size: 8}", b"a.0.b=[1, {c: d}]")

    def target(word):
        build_config(RunConfig, apply_overrides(recipe, [word]))

    def make(rng):
        return damaged(rng.choice(words), rng).decode("utf-8", rng.choice(("replace", "surrogateescape")))

    assert 0.2 * count < fuzz(target, make, count, ConfigError)


@pytest.mark.attack
@pytest.mark.parametrize("place", ["", "ray: {runtime_env: *i}\n", "steps: *i\n", "model: {path: *i}\n", "seed: *i\n"])
def test_a_recipe_of_references_is_never_written_out(tmp_path, place):
    path = tmp_path / "bomb.yaml"
    path.write_text(BOMB + place)
    with pytest.raises(ConfigError) as raised:
        fuzz(lambda _: load_config(path), lambda _: None, 3, ())
    assert len(str(raised.value)) < 10_000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    tokenizer = Tokenizer.load("penstock")
    shape = ModelConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=4, intermediate_size=4, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=4, tie_word_embeddings=True,
    )  # fmt: skip
    learner = Learner(Decoder.initialise(shape, jax.random.key(0)), LearnerConfig(), 1)
    return save_checkpoint(tmp_path_factory.mktemp("checkpoints"), 0, learner, tokenizer, {"replay": {"waiting": []}})


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    "name", ["manifest.json", "state.json", "learner.safetensors", "model/config.json", "model/model.safetensors"]
)
def test_checkpoints_are_read_or_refused(checkpoint, name, count):
    """Damage with the right checksum in the manifest: as by a writer that was wrong, or by somebody who means it."""
    path, manifest_path = checkpoint / name, checkpoint / "manifest.json"
    good, manifest = path.read_bytes(), json.loads(manifest_path.read_bytes())

    def target(content):
        path.write_bytes(content)
        if path != manifest_path:
            fingerprint = {"bytes": len(content), "crc32": zlib.crc32(content)}
            manifest_path.write_text(json.dumps(manifest | {name: fingerprint}))
        load_checkpoint(checkpoint).decoder  # noqa: B018 — read when it is asked for

    def make(rng):
        return damaged(good, rng) if name.endswith("safetensors") else json_bytes(json.loads(good), rng)

    try:
        assert 0.2 * count < fuzz(target, make, count, CheckpointError)
    finally:
        path.write_bytes(good)
        manifest_path.write_text(json.dumps(manifest))
    assert load_checkpoint(checkpoint).step == 0


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_tokenizers_are_read_or_refused(checkpoint, tmp_path, name, count):
    """Read, not used: steps of a tokenizer are a program, and some lengthen the text without bound."""
    directory = shutil.copytree(checkpoint / "model", tmp_path / "model")
    good = (directory / name).read_bytes()

    def target(content):
        (directory / name).write_bytes(content)
        tokenizer = Tokenizer.load(directory)
        assert min(tokenizer.vocab_size, tokenizer.pad_token_id + 1, *(i + 1 for i in tokenizer.stop_token_ids)) > 0
        tokenizer.decode([0, tokenizer.eos_token_id, 2**31 - 1])

    def make(rng):
        return damaged(good, rng) if rng.random() < 0.5 else json_bytes(json.loads(good), rng)

    assert 0.2 * count < fuzz(target, make, count, ConfigError) < count
