"""Prompts of well-known families: their templates with tools, switches and BOS, as transformers renders them."""

import json

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from penstock.text import Tokenizer
from penstock.types import ConfigError, EnvironmentFailure

TURNS = (
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- else %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    '{{- \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson + '}\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
)
TOOLS_FIRST = (
    "{%- if tools %}"
    "{{- '<|im_start|>system\n# Tools\n<tools>' }}"
    "{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}"
    "{{- '\n</tools><|im_end|>\n' }}"
    "{%- endif %}"
)
OPEN = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
QWEN2_5 = TOOLS_FIRST + TURNS + OPEN + "{%- endif %}"
QWEN3 = (
    TOOLS_FIRST + TURNS + OPEN + "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for message in messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + "
    "'<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
FORGETFUL = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{{- message.content[-1:] if message.role == 'assistant' else message.content }}"
    "{{- '<|im_end|>\n' }}{%- endfor %}" + OPEN + "{%- endif %}"
)
"""Keeps only the last character of earlier answers, as Qwen3 drops earlier thoughts."""
FAMILIES = {
    "forgetful": (FORGETFUL, None, "<|im_end|>"),
    "qwen2.5": (QWEN2_5, None, "<|im_end|>"),
    "qwen3": (QWEN3, None, "<|im_end|>"),
    "smollm2": (SMOLLM2, "<|im_start|>", "<|im_end|>"),
    "llama3": (LLAMA3, "<|begin_of_text|>", "<|end_of_text|>"),
}
SPECIAL = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|im_start|>",
    "<|im_end|>", "<think>", "</think>",
]  # fmt: skip
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2?"}]


@pytest.fixture
def directory(tmp_path):
    """A byte-level tokenizer of a family; Llama's puts BOS before any text by itself."""

    def make(family, single="<|begin_of_text|> $A", **config):
        template, bos, eos = FAMILIES[family]
        letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        backend = Backend(models.BPE(letters, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
        if family == "llama3":
            ids = [(token, backend.token_to_id(token)) for token in (bos, eos)]
            backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
        backend.save(str(tmp_path / "tokenizer.json"))
        named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos} | config
        named["chat_template"] = template
        kept = {name: value for name, value in named.items() if value is not None}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(kept))
        return tmp_path

    return make


def text_of(tokenizer, tokens):
    return tokenizer.decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("messages", [ASKED, ASKED[1:]], ids=["system", "user"])
def test_a_conversation_has_the_tokens_that_transformers_gives_it(directory, family, messages):
    path = directory(family)
    theirs = PreTrainedTokenizerFast.from_pretrained(path)
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert Tokenizer.load(path).render(messages).tolist() == expected


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen2.5", "<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen3", "<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n"),
        (
            "smollm2",
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n"
            "<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "llama3",
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n1+2?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
    ],
)
def test_a_question_is_what_the_family_reads(directory, family, expected):
    tokenizer = Tokenizer.load(directory(family))
    assert text_of(tokenizer, tokenizer.render(ASKED[1:])) == expected


def test_tools_their_calls_and_their_answers_go_through_the_template(directory):
    path = directory("qwen3")
    tokenizer, theirs = Tokenizer.load(path), PreTrainedTokenizerFast.from_pretrained(path)
    said = [
        ASKED[1],
        {"role": "assistant", "content": "Let me add.", "tool_calls": [CALL]},
        {"role": "tool", "content": "3"},
    ]
    tokens = tokenizer.render(said, chat_template_kwargs={"tools": [TOOL], "enable_thinking": False})
    assert text_of(tokenizer, tokens) == (
        f"<|im_start|>system\n# Tools\n<tools>\n{json.dumps(TOOL)}\n</tools><|im_end|>\n"
        "<|im_start|>user\n1+2?<|im_end|>\n"
        '<|im_start|>assistant\nLet me add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    expected = theirs.apply_chat_template(
        said, tools=[TOOL], enable_thinking=False, add_generation_prompt=True, return_dict=False
    )
    assert tokens.tolist() == expected


def test_what_is_given_at_loading_holds_for_every_conversation_until_a_call_says_otherwise(directory):
    path = directory("qwen3")
    quiet, plain = Tokenizer.load(path, {"enable_thinking": False}), Tokenizer.load(path)
    assert text_of(quiet, quiet.render(ASKED)).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert text_of(plain, plain.render(ASKED)).endswith("<|im_start|>assistant\n")
    thinking = quiet.render(ASKED, chat_template_kwargs={"enable_thinking": True})
    assert thinking.tolist() == plain.render(ASKED).tolist()
    assert quiet.render("1+2?").tolist() == plain.render("1+2?").tolist()


@pytest.mark.parametrize("name", ["enable_thinkin", "chat_template", "messages", "tokenize", "eos_token", "a b", ""])
def test_what_the_template_does_not_take_is_refused_by_name(directory, name):
    path = directory("qwen3")
    message = f"chat_template_kwargs: the chat template takes no {name!r}: leave it out, or"
    with pytest.raises(ConfigError, match=message):
        Tokenizer.load(path, {name: 1})
    with pytest.raises(ConfigError, match=message):
        Tokenizer.load(path).render(ASKED, chat_template_kwargs={name: 1})
    with pytest.raises(ConfigError, match="takes no 'tools'"):
        Tokenizer.load(directory("llama3")).render(ASKED, chat_template_kwargs={"tools": [TOOL]})


def test_a_template_has_its_bos_once_and_so_has_a_text(directory):
    path = directory("llama3")
    tokenizer, theirs = Tokenizer.load(path), PreTrainedTokenizerFast.from_pretrained(path)
    bos = theirs.bos_token_id
    for prompt in ("Once", "", "é", "x" * 5000):
        assert tokenizer.render(prompt).tolist() == theirs(prompt).input_ids
        assert tokenizer.encode(prompt).tolist() == theirs(prompt, add_special_tokens=False).input_ids
    assert tokenizer.render("<|begin_of_text|>Once").tolist() == tokenizer.render("Once").tolist()
    assert tokenizer.render("Once").dtype == np.int32
    assert tokenizer.render(ASKED).tolist().count(bos) == 1
    assert tokenizer.encode("more").tolist().count(bos) == 0


def test_bos_is_what_tokenizer_json_says_whatever_the_configuration_says(directory):
    """As transformers reads a directory: where there is a tokenizer.json, `add_bos_token` beside it has no say."""
    path = directory("smollm2", add_bos_token=True)
    tokenizer, theirs = Tokenizer.load(path), PreTrainedTokenizerFast.from_pretrained(path)
    assert tokenizer.render("Once").tolist() == theirs("Once").input_ids == tokenizer.encode("Once").tolist()


def test_an_end_of_text_that_the_tokenizer_puts_after_texts_ends_no_prompt(directory):
    path = directory("llama3", single="<|begin_of_text|> $A <|end_of_text|>")
    tokenizer, theirs = Tokenizer.load(path), PreTrainedTokenizerFast.from_pretrained(path)
    assert tokenizer.render("Once").tolist() == theirs("Once").input_ids[:-1]
    assert text_of(tokenizer, tokenizer.render("Once")) == "<|begin_of_text|>Once"


def test_tools_count_for_the_longest_prompt(directory):
    tokenizer = Tokenizer.load(directory("qwen3"))
    huge = TOOL | {"notes": "x" * 10_000}
    with pytest.raises(EnvironmentFailure, match="max_seq_len = 100"):
        tokenizer.render(ASKED, 100, {"tools": [huge]})
