import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from penstock.text import Tokenizer, same_tokenizer
from penstock.types import ConfigError, EnvironmentFailure

PACKAGED = Path(str(files("penstock") / "recipes" / "tokenizer"))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load("penstock")


@pytest.fixture
def variant(tmp_path):
    """Loads the packaged tokenizer with its configuration changed."""

    def make(**changes):
        directory = shutil.copytree(PACKAGED, tmp_path / "variant")
        config = json.loads((directory / "tokenizer_config.json").read_text()) | changes
        kept = {name: value for name, value in config.items() if value is not None}
        (directory / "tokenizer_config.json").write_text(json.dumps(kept))
        return directory

    return make


PACKAGED_TOKENIZER = Tokenizer.load("penstock")


@given(st.text())
def test_any_text_survives_the_round_trip(text):
    tokens = PACKAGED_TOKENIZER.encode(text)
    assert tokens.dtype == np.int32
    assert PACKAGED_TOKENIZER.decode(tokens, skip_special_tokens=False) == text


@given(st.lists(st.integers(0, PACKAGED_TOKENIZER.vocab_size - 1)))
def test_any_tokens_decode_to_some_text(tokens):
    assert isinstance(PACKAGED_TOKENIZER.decode(tokens), str)


@given(st.text())
def test_the_bytes_of_tokens_are_those_of_the_text(text):
    tokens = PACKAGED_TOKENIZER.encode(text)
    assert b"".join(map(PACKAGED_TOKENIZER.token_bytes, tokens)) == text.encode()
    assert PACKAGED_TOKENIZER.token_bytes(PACKAGED_TOKENIZER.vocab_size) == b""


def test_the_bytes_of_tokens_with_byte_fallback(tmp_path):
    vocabulary = {"</s>": 0, "<0xC3>": 1, "<0xA9>": 2, "\u2581cat": 3}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    tokenizer = Tokenizer.load(tmp_path)
    assert [tokenizer.token_bytes(token) for token in range(5)] == [b"</s>", b"\xc3", b"\xa9", b" cat", b""]
    assert tokenizer.decode([3, 1, 2]) == " caté"


@pytest.mark.parametrize("text", ["Hello , world !", " two  spaces ", "don 't", "a\r\n\tb", "<calc>1 + 2</calc> ."])
def test_decoding_tidies_nothing(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_half_a_surrogate_pair_is_read_as_its_escape(tokenizer):
    np.testing.assert_array_equal(tokenizer.encode("é\ud800"), tokenizer.encode(r"é\ud800"))


def test_encoding_adds_no_special_tokens_and_recognises_written_ones(tokenizer):
    assert tokenizer.encode("").tolist() == []
    assert tokenizer.encode("7").size == 1
    tokens = tokenizer.encode("7<|im_end|>")
    assert tokens[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(tokens) == "7"
    assert tokenizer.decode(tokens, skip_special_tokens=False) == "7<|im_end|>"


def test_half_a_character_becomes_the_replacement_character(tokenizer):
    tokens = tokenizer.encode("é")
    assert len(tokens) == 2
    assert tokenizer.decode(tokens[:1]) == "\ufffd"


def test_messages_become_turns_with_an_open_answer(tokenizer):
    messages = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1+2"},
        {"role": "assistant", "content": "<calc>1+2</calc>"},
        {"role": "tool", "content": "3"},
    ]
    text = tokenizer.decode(tokenizer.render(messages), skip_special_tokens=False)
    assert text == (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+2<|im_end|>\n"
        "<|im_start|>assistant\n<calc>1+2</calc><|im_end|>\n<|im_start|>tool\n3<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_plain_prompt_is_encoded_as_it_is(tokenizer):
    assert tokenizer.render("12+30=").tolist() == tokenizer.encode("12+30=").tolist()


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "narrator", "content": "Once"}, "unknown role narrator"),
        ({"role": "user", "content": [{"type": "text", "text": "Hi"}]}, "must be text"),
        ({"role": "user"}, "must be text"),
    ],
)
def test_messages_that_the_template_refuses_are_an_error_with_the_remedy(tokenizer, message, reason):
    with pytest.raises(ConfigError, match=f"refused the messages .*{reason}.*template: plain"):
        tokenizer.render([message])


def test_messages_without_a_template_are_an_error_with_the_remedy(variant):
    plain = Tokenizer.load(variant(chat_template=None))
    assert not plain.has_chat_template
    with pytest.raises(ConfigError, match="no chat template .*`template: plain`"):
        plain.render([{"role": "user", "content": "Hi"}])
    assert plain.decode(plain.render("Hi")) == "Hi"


def test_stop_tokens_are_the_end_of_text_the_ends_of_a_turn_and_the_checkpoints_own(tokenizer, variant):
    assert tokenizer.stop_token_ids == (tokenizer.eos_token_id,)
    directory = variant(eos_token="<|pad|>")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    pad, turn_end = 0, 2
    assert Tokenizer.load(directory).stop_token_ids == (pad, turn_end, 5)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert Tokenizer.load(directory).stop_token_ids == (pad, turn_end, 7)


@pytest.mark.parametrize("generation", [None, {"temperature": 0.7}, {"eos_token_id": None}])
def test_where_nothing_says_how_to_generate_the_models_own_ends_of_text_stop(variant, generation):
    directory = variant()
    own = Tokenizer.load(directory).stop_token_ids
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": [5, 7]}))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    assert Tokenizer.load(directory).stop_token_ids == (*own, 5, 7)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert Tokenizer.load(directory).stop_token_ids == (*own, 9)
    (directory / "generation_config.json").unlink()
    (directory / "config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(ConfigError, match=r"config.json: eos_token_id is '</s>': it must be a token's id"):
        Tokenizer.load(directory)


@pytest.mark.parametrize("value", [[None], "x", -1, 2**31, [[2]], 0.5, True])
def test_stop_tokens_that_are_no_ids_are_refused_with_the_remedy(variant, value):
    directory = variant()
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ConfigError, match="eos_token_id is .*: it must be a token's id, or a list .*leave it out"):
        Tokenizer.load(directory)


def test_padding_falls_back_to_the_end_of_text(tokenizer, variant):
    assert tokenizer.pad_token_id == 0
    assert Tokenizer.load(variant(pad_token=None)).pad_token_id == tokenizer.eos_token_id


def test_saved_and_loaded_again_it_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert (again.vocab_size, again.stop_token_ids) == (tokenizer.vocab_size, tokenizer.stop_token_ids)
    messages = [{"role": "user", "content": "Who says meow? <calc>"}]
    assert again.render(messages).tolist() == tokenizer.render(messages).tolist()
    assert again.decode(np.arange(382)) == tokenizer.decode(np.arange(382))


def test_directories_are_compared_by_their_tokenizer_json(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    assert same_tokenizer("penstock", tmp_path) is True
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert same_tokenizer(tmp_path, "penstock") is True
    (tmp_path / "tokenizer.json").write_text((tmp_path / "tokenizer.json").read_text() + " ")
    assert same_tokenizer("penstock", tmp_path) is False
    assert same_tokenizer("penstock", tmp_path / "gone") is None


def test_saving_writes_the_very_files_that_were_loaded_even_when_they_are_gone(variant, tmp_path):
    """transformers would rewrite the configuration for its own version only."""
    directory = variant()
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (directory / "notes.txt").write_text("not a tokenizer's file")
    expected = {p.name: p.read_bytes() for p in directory.iterdir() if p.name != "notes.txt"}
    tokenizer = Tokenizer.load(directory)
    shutil.rmtree(directory)
    tokenizer.save(tmp_path / "saved")
    assert {p.name: p.read_bytes() for p in (tmp_path / "saved").iterdir()} == expected


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "there is no such directory"),
        (lambda d: (d / "tokenizer.json").unlink(), "it has no tokenizer.json"),
        (lambda d: (d / "tokenizer.json").write_text("{"), "cannot be read"),
        (lambda d: (d / "generation_config.json").write_text("{"), "generation_config.json is not valid JSON"),
        (lambda d: (d / "generation_config.json").write_text("[" * 100_000), "generation_config.json is not valid"),
    ],
)
def test_what_is_no_tokenizer_is_refused_in_one_line(variant, damage, message):
    directory = variant()
    damage(directory)
    with pytest.raises(ConfigError, match=message) as caught:
        Tokenizer.load(directory)
    assert "\n" not in str(caught.value)


def test_of_a_runs_checkpoint_the_folder_that_has_the_tokenizer_is_named(variant, tmp_path):
    shutil.move(variant(), tmp_path / "step-60" / "model")
    with pytest.raises(ConfigError, match=f"it has no tokenizer.json: give {tmp_path}/step-60/model, or 'penstock'"):
        Tokenizer.load(tmp_path / "step-60")


def test_a_tokenizer_without_an_end_of_text_is_refused(variant):
    with pytest.raises(ConfigError, match="no eos_token"):
        Tokenizer.load(variant(eos_token=None))


def test_threads_may_share_it(tokenizer):
    texts = [f"Who says {i}? é <calc>{i}+{i}</calc>" for i in range(200)]

    def round_trip(text):
        tokens = tokenizer.render([{"role": "user", "content": text}])
        return tokenizer.decode(tokens)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(round_trip, texts))
    assert found == [f"user\n{text}\nassistant\n" for text in texts]


def test_importing_the_package_loads_neither_jax_nor_transformers():
    code = (
        "import sys; from penstock.text import Tokenizer;"
        "print([m for m in ('jax', 'transformers', 'tokenizers') if m in sys.modules]);"
        "tokenizer = Tokenizer.load('penstock'); tokenizer.decode(tokenizer.render('text'));"
        "print([m for m in ('jax', 'transformers', 'tokenizers') if m in sys.modules]);"
        "tokenizer.render([{'role': 'user', 'content': 'text'}]); print('jax' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split("\n")[:3] == ["[]", "['tokenizers']", "False"]
    assert out.stderr == ""


def _as_told_by_transformers(directory):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(directory)


@pytest.mark.parametrize(
    ("changes", "is_plain"),
    [
        ({}, True),
        ({"pad_token": None, "chat_template": None}, True),
        ({"bos_token": "<|im_start|>", "unk_token": "<|pad|>"}, True),
        ({"eos_token": {"content": "<|im_end|>", "__type": "AddedToken"}}, False),
        ({"pad_token": "<fill>"}, False),
        ({"pad_token": "<calc>"}, False),
        ({"additional_special_tokens": ["<more>"]}, False),
        ({"bos_token": "<|im_start|>", "add_bos_token": True}, False),
        ({"tokenizer_class": "Qwen2TokenizerFast"}, False),
    ],
)
def test_a_plain_directory_is_read_as_transformers_reads_it(variant, changes, is_plain):
    directory = variant(**changes)
    tokenizer, fast = Tokenizer.load(directory), _as_told_by_transformers(directory)
    assert ("_fast" not in vars(tokenizer) and tokenizer._facts.fast is None) == is_plain
    assert tokenizer.eos_token_id == fast.eos_token_id
    assert tokenizer.pad_token_id == (fast.eos_token_id if fast.pad_token_id is None else fast.pad_token_id)
    assert tokenizer.has_chat_template == (fast.chat_template is not None)
    assert tokenizer.vocab_size == len(fast)
    for text in ("Is 7 <more> than 12 ?", "<|im_start|>user\né<fill><calc>1+2</calc>"):
        assert tokenizer.encode(text).tolist() == fast.encode(text, add_special_tokens=False)
        assert tokenizer.render(text).tolist()[-3:] == fast.encode(text)[-3:]
        assert tokenizer.decode(tokenizer.encode(text)) == fast.decode(fast.encode(text), skip_special_tokens=True)


@pytest.mark.parametrize("key", ["truncation", "padding"])
def test_a_directory_whose_tokenizer_cuts_or_fills_texts_is_not_plain(variant, key):
    directory = variant()
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    if key == "truncation":
        backend.enable_truncation(100)
    else:
        backend.enable_padding()
    backend.save(str(directory / "tokenizer.json"))
    assert Tokenizer.load(directory)._facts.fast is not None


def test_messages_are_rendered_when_the_directory_is_gone(variant, tokenizer):
    directory = variant()
    (directory / "chat_template.jinja").write_text("{{ messages[0]['content'] }} .")
    loaded = Tokenizer.load(directory)
    shutil.rmtree(directory)
    assert loaded.has_chat_template
    assert loaded.render_text([{"role": "user", "content": "7"}]) == "7 ."


@pytest.mark.attack
def test_what_cannot_fit_is_refused_before_it_is_encoded(tokenizer, monkeypatch):
    """The longest token, <|im_start|>, has 12 bytes: 10 of them hold 120."""
    assert len(tokenizer.render("<|im_start|>" * 10, 10)) == 10
    assert len(tokenizer.render("a" * 120, 10)) > 10  # more tokens, but that is for whoever asked to judge
    assert len(tokenizer.render("a" * 121)) > 10
    messages = [{"role": "user", "content": "a" * 100}]
    assert len(tokenizer.render(messages)) > 10
    with pytest.raises(EnvironmentFailure, match="bytes, more than max_seq_len = 10 tokens of at most 12 bytes hold"):
        tokenizer.render(messages, 10)  # it fits, but not with what the template adds
    monkeypatch.setattr(tokenizer, "encode", None)
    with pytest.raises(EnvironmentFailure, match="it has 121 bytes"):
        tokenizer.render("a" * 121, 10)
    with pytest.raises(EnvironmentFailure, match="it has 122 bytes"):
        tokenizer.render("\u00e9" * 61, 10)
    monkeypatch.setattr(tokenizer, "_render_messages", None)
    for field in ("role", "content"):
        with pytest.raises(EnvironmentFailure, match="it has 1"):
            tokenizer.render([{"role": "user", "content": "a"} | {field: "a" * 121}], 10)


@pytest.mark.parametrize("text", ["a", "hello world ", "<|im_end|>", "\u00e9\n", "\ud800 "])
def test_long_texts_have_the_tokens_of_short_ones(tokenizer, text, monkeypatch):
    """They are encoded by another call, which lets other threads go on."""
    long = text * (5000 // len(text))
    encoded = tokenizer.encode(long)
    monkeypatch.setattr("penstock.text.tokenizer.LONG_TEXT", 10_000_000)
    assert encoded.tolist() == tokenizer.encode(long).tolist() and encoded.dtype == np.int32
