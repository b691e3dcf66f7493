"""The tokenizer that ships with the recipes: what is one token, and that its script still makes it."""

import runpy
from importlib.resources import files
from pathlib import Path

import pytest

from penstock.text import Tokenizer, vocabulary_size

ROOT = Path(__file__).parent.parent.parent
PACKAGED = Path(str(files("penstock") / "recipes" / "tokenizer"))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load("penstock")


def test_the_script_makes_the_very_files_that_ship(tmp_path):
    runpy.run_path(str(ROOT / "scripts" / "make_tokenizer.py"))["main"](tmp_path)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    shipped = {path.name: path.read_bytes() for path in PACKAGED.iterdir()}
    assert made.keys() == {"tokenizer.json", "tokenizer_config.json"}
    assert made == shipped


def test_the_vocabulary_is_small(tokenizer):
    assert tokenizer.vocab_size == vocabulary_size("penstock") == 382


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Who says meow?", ["Who", " says", " meow", "?"]),
        ("Name it: cat.", ["Name", " it", ":", " cat", "."]),
        (
            "Which is a colour? A) cat B) red Answer: C",
            ["Which", " is", " a", " colour", "?", " A", ")", " cat", " B", ")", " red", " Answer", ":", " C"],
        ),
        ("(12+3)*4-50/6=", list("(12+3)*4-50/6=")),
        ("2 14 ٣", ["2", " ", "1", "4", " ", "\ufffd", "\ufffd"]),
        ("<calc>12+3</calc>", ["<calc>", "1", "2", "+", "3", "</calc>"]),
        ("<result>15</result>", ["<result>", "1", "5", "</result>"]),
        ("catch", list("catch")),
        (" catch", list(" catch")),
        ("cat\ncat", ["cat", "\n", "cat"]),
    ],
)
def test_words_of_the_recipes_digits_and_tags_are_single_tokens(tokenizer, text, pieces):
    tokens = tokenizer.encode(text)
    assert [tokenizer.decode([token]) for token in tokens] == pieces


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_a_turn_costs_five_tokens_beside_its_content(tokenizer, role):
    with_one = tokenizer.render([{"role": role, "content": "7"}])
    with_two = tokenizer.render([{"role": role, "content": "7"}] * 2)
    assert len(with_two) - len(with_one) == 6  # <|im_start|> role \n 7 <|im_end|> \n
