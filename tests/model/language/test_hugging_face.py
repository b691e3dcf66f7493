import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig

from penstock.model.language import (
    InitConfig,
    ModelConfig,
    PolicyConfig,
    load_decoder,
    load_policy,
    named_arrays,
    save_decoder,
)
from penstock.model.tensor_files import save_tensors
from penstock.text import Tokenizer
from penstock.types import CheckpointError, ConfigError


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load("penstock")


@pytest.fixture
def copy(golden_root, tmp_path):
    """A writable copy of a golden checkpoint."""

    def make(family="llama"):
        return shutil.copytree(golden_root / family, tmp_path / family)

    return make


def change_tensors(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def change_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def equal(one, other):
    a, b = named_arrays(one), named_arrays(other)
    return a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)


def test_saved_and_loaded_again_every_array_is_the_same(golden, family, tmp_path, tokenizer):
    decoder = load_decoder(golden)
    save_decoder(decoder, tmp_path / "saved", tokenizer)
    again = load_decoder(tmp_path / "saved")
    assert again.config == decoder.config
    assert equal(decoder, again)


def test_saved_tensors_are_those_that_transformers_wrote(golden, family, tmp_path, tokenizer):
    save_decoder(load_decoder(golden), tmp_path, tokenizer)
    saved = load_file(tmp_path / "model.safetensors")
    shards = sorted(golden.glob("model*.safetensors"))
    assert len(shards) == (2 if family == "mistral" else 1)
    original = {name: array for shard in shards for name, array in load_file(shard).items()}
    assert saved.keys() == original.keys()
    for name, array in original.items():
        np.testing.assert_array_equal(saved[name], array)


def test_transformers_opens_what_is_saved_with_the_same_numbers(golden, tmp_path, tokenizer):
    save_decoder(load_decoder(golden), tmp_path, tokenizer)
    ours, theirs = (AutoConfig.from_pretrained(each).to_dict() for each in (tmp_path, golden))
    said = {"eos_token_id", "pad_token_id", "head_dim", "rope_parameters", "dtype", "_name_or_path"}
    assert {name: each for name, each in ours.items() if name not in said and theirs[name] != each} == {}


def test_a_file_that_asks_for_something_else_is_named_by_its_path(copy):
    directory = copy()
    change_json(directory / "config.json", lambda config: config.update({"hidden_act": "gelu"}))
    with pytest.raises(ConfigError, match=f"^{directory}/config.json: hidden_act is 'gelu'"):
        load_decoder(directory)


def test_a_saved_directory_says_how_to_generate_with_it(tmp_path, tokenizer, tiny_decoder):
    save_decoder(tiny_decoder(), tmp_path, tokenizer)
    config = json.loads((tmp_path / "config.json").read_text())
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["eos_token_id"] == tokenizer.eos_token_id
    assert generation == {"eos_token_id": [tokenizer.eos_token_id], "pad_token_id": tokenizer.pad_token_id}
    assert (Tokenizer.load(tmp_path).encode("Say cat.") == tokenizer.encode("Say cat.")).all()


def test_what_the_original_says_beyond_the_shape_is_kept(copy, tmp_path, tokenizer):
    directory, first, second = copy(), tmp_path / "first", tmp_path / "second"
    given = {"initializer_range": 0.04, "bos_token_id": 1, "some.library": {"a": [1, None]}, "dtype": "float16"}
    change_json(directory / "config.json", lambda config: config.update(given))
    generation = {"eos_token_id": [2, 7], "pad_token_id": 9, "temperature": 0.7, "top_p": 0.95}
    tokenizer.save(directory)
    (directory / "generation_config.json").write_text(json.dumps(generation))
    decoder = load_decoder(directory)
    save_decoder(decoder, first, Tokenizer.load(directory))
    again = load_decoder(first)
    assert again.config == decoder.config
    save_decoder(again, second, Tokenizer.load(first))
    for saved in (first, second):
        config = json.loads((saved / "config.json").read_text())
        assert {name: config.get(name) for name in given} == given | {"dtype": None}
        assert config["torch_dtype"] == "float32" and config["eos_token_id"] == tokenizer.eos_token_id
        assert json.loads((saved / "generation_config.json").read_text()) == generation
        assert Tokenizer.load(saved).stop_token_ids == (2, 7)


def test_ends_of_text_that_only_the_models_configuration_names_are_kept(copy, tmp_path, tokenizer):
    directory = copy()
    change_json(directory / "config.json", lambda config: config.update(eos_token_id=[2, 7]))
    tokenizer.save(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    save_decoder(load_decoder(directory), tmp_path / "saved", Tokenizer.load(directory))
    assert json.loads((tmp_path / "saved" / "generation_config.json").read_text())["eos_token_id"] == [2, 7]
    assert Tokenizer.load(tmp_path / "saved").stop_token_ids == (2, 7)


@pytest.mark.parametrize(("limit", "files"), [(10**9, 1), (1, 21)])
def test_large_weights_are_written_in_shards(golden_root, tmp_path, tokenizer, limit, files):
    decoder = load_decoder(golden_root / "llama")
    save_decoder(decoder, tmp_path, tokenizer, shard_bytes=10**9 if files > 1 else 1)  # of which nothing is read
    save_decoder(decoder, tmp_path, tokenizer, shard_bytes=limit)
    assert equal(load_decoder(tmp_path), decoder)
    if files == 1:
        assert not (tmp_path / "model.safetensors.index.json").exists()
        return
    assert not (tmp_path / "model.safetensors").exists()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    names = sorted(set(index["weight_map"].values()))
    assert names == [f"model-{i:05d}-of-{files:05d}.safetensors" for i in range(1, files + 1)]
    tensors = [load_file(tmp_path / name) for name in names]
    sizes = [sum(tensor.nbytes for tensor in shard.values()) for shard in tensors]
    assert sum(sizes) == index["metadata"]["total_size"] == 4 * decoder.config.parameter_count


def test_a_shard_holds_no_more_than_the_limit_unless_one_tensor_does(tmp_path):
    tensors = {name: np.zeros(size, np.uint8) for name, size in zip("abcde", [40, 60, 1, 150, 100], strict=True)}
    save_tensors(tensors, tmp_path, shard_bytes=100)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert [file[6:11] for file in index["weight_map"].values()] == ["00001", "00001", "00002", "00003", "00004"]
    assert index["metadata"] == {"total_size": 351}


def test_dtype_is_what_the_caller_asks_for_whatever_the_file_holds(golden, tmp_path, tokenizer):
    narrow = load_decoder(golden, "bfloat16")
    assert narrow.config.dtype == "bfloat16"
    assert {a.dtype for a in named_arrays(narrow).values()} == {jnp.dtype(jnp.bfloat16)}
    save_decoder(narrow, tmp_path, tokenizer)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert equal(load_decoder(tmp_path, "bfloat16"), narrow)
    wide = load_decoder(tmp_path)
    np.testing.assert_array_equal(np.asarray(wide.embedding), np.asarray(narrow.embedding, np.float32))


def test_half_precision_files_are_read(copy):
    directory = copy()
    original = load_decoder(directory)
    change_tensors(directory, lambda t: t.update({name: a.astype(np.float16) for name, a in t.items()}))
    np.testing.assert_allclose(np.asarray(load_decoder(directory).embedding), np.asarray(original.embedding), atol=2e-3)


def test_an_output_matrix_that_the_config_wrongly_calls_the_embedding_is_refused(copy):
    """transformers computes with such a matrix: left out silently, the model would be another one."""
    directory = copy("qwen2")
    change_tensors(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] * 2}))
    with pytest.raises(CheckpointError, match=r"lm_head.weight is not model.embed_tokens.weight, .*set it to false"):
        load_decoder(directory)
    change_json(directory / "config.json", lambda c: c.update(tie_word_embeddings=False))
    assert load_decoder(directory).head is not None


def test_copies_that_older_files_hold_are_ignored(copy):
    directory = copy("qwen2")

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    change_tensors(directory, add)
    assert load_decoder(directory).head is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}),
            "model.layers.0.self_attn.q_proj.bias is unknown",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.up_proj.weight": np.ones((32, 48), np.float32)}),
            r"model.layers.1.mlp.up_proj.weight has shape \[32, 48\], not \[48, 32\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.ones(32, np.int8)}),
            r"\w+: model.norm.weight is stored as I8.*F32",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(copy, change, message):
    directory = copy()
    change_tensors(directory, change)
    with pytest.raises(CheckpointError, match=message):
        load_decoder(directory)


def test_a_layer_that_the_config_does_not_have_is_named(copy):
    directory = copy()
    change_json(directory / "config.json", lambda c: c.update(num_hidden_layers=1))
    with pytest.raises(CheckpointError, match=r"model.layers.1.* is unknown.* and 4 more"):
        load_decoder(directory)


def remove(name):
    return lambda directory: (directory / name).unlink()


def cut(name):
    return lambda directory: (directory / name).write_bytes((directory / name).read_bytes()[:5000])


def remap(file):
    return lambda directory: change_json(
        directory / "model.safetensors.index.json",
        lambda index: index["weight_map"].update({"model.norm.weight": file}),
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove("config.json"), "config.json cannot be read: No such file"),
        (lambda d: (d / "config.json").write_text("{"), "config.json is not valid JSON"),
        (lambda d: (d / "config.json").write_text("[]"), "config.json holds a list, not an object"),
        (remove("model.safetensors.index.json"), "neither model.safetensors nor model.safetensors.index.json"),
        (cut("model-00002-of-00002.safetensors"), r"00002-of-00002.safetensors cannot be read: .*cut short.* again"),
        (remove("model-00002-of-00002.safetensors"), "names 'model-00002-of-00002.safetensors', which is not"),
        (remap("../mistral/model-00001-of-00002.safetensors"), "which is not a file beside it"),
        (remap(3), "index.json names 3, which is not a file beside it"),
        (remap("model-00001-of-00002.safetensors"), "lacks model.norm.weight, which the index says"),
        (lambda d: (d / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
    ],
)
def test_damaged_directories_are_refused_with_the_file_named(copy, damage, message):
    directory = copy("mistral")
    damage(directory)
    with pytest.raises(CheckpointError, match=message):
        load_decoder(directory)


def test_a_policy_is_drawn_from_the_seed_for_the_tokenizer(tokenizer):
    config = PolicyConfig(init=InitConfig(hidden_size=16, num_attention_heads=2))
    decoder = load_policy(config, 3, tokenizer)
    assert decoder.embedding.shape == (tokenizer.vocab_size, 16)
    assert equal(decoder, load_policy(config, 3, tokenizer))
    assert not equal(decoder, load_policy(config, 4, tokenizer))


def test_a_policy_is_loaded_from_a_directory_with_its_tokenizer(tmp_path, tokenizer):
    made = load_policy(
        PolicyConfig(init=InitConfig(hidden_size=16, num_attention_heads=2, vocab_size=400)), 0, tokenizer
    )
    save_decoder(made, tmp_path, tokenizer)
    config = PolicyConfig(path=str(tmp_path), dtype="bfloat16")
    loaded = load_policy(config, 1, Tokenizer.load(config.tokenizer_path))
    assert loaded.config == ModelConfig.model_validate(made.config.model_dump() | {"dtype": "bfloat16"})


def test_a_tokenizer_larger_than_the_model_is_refused_with_both_sizes(golden, tokenizer):
    message = "the tokenizer has 382 tokens but the model's vocab_size is "
    with pytest.raises(ConfigError, match=message + "64"):
        load_policy(PolicyConfig(path=str(golden), tokenizer="penstock"), 0, tokenizer)
    with pytest.raises(ConfigError, match=message + "100"):
        load_policy(PolicyConfig(init=InitConfig(vocab_size=100)), 0, tokenizer)


def test_a_missing_directory_is_the_users_mistake(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match=r"model.path is .*nowhere.*: there is no such directory"):
        load_policy(PolicyConfig(path=str(tmp_path / "nowhere")), 0, tokenizer)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused_by_the_tensors_name(copy, dtype, value):
    directory = copy()
    name = "model.layers.1.mlp.down_proj.weight"

    def damage(tensors):
        tensors.update({each: array.astype(jnp.dtype(dtype)) for each, array in tensors.items()})
        tensors[name][0, 0] = np.finfo(np.float16).max
        save_file(tensors, directory / "model.safetensors")
        load_decoder(directory)  # a large number is one
        tensors[name][-1, -1] = value

    change_tensors(directory, damage)
    with pytest.raises(CheckpointError, match=f"{name} holds numbers that are not finite: the file is damaged"):
        load_decoder(directory)
