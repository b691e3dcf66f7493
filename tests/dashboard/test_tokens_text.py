import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.dashboard.tokens import TokenSpan, TokenText
from penstock.rundir import RunDirectory
from penstock.types import ConfigError
from tests.dashboard.sample_run import TOKENIZER


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> TokenText:
    return TokenText.of_run(RunDirectory.create(tmp_path_factory.mktemp("run") / "r", {}))  # the packaged one


def test_each_token_has_its_own_text(text):
    tokens = [*TOKENIZER.encode("a cat").tolist(), TOKENIZER.eos_token_id]
    pieces = text.pieces(tokens)
    assert [piece.stop - piece.start for piece in pieces] == [1] * len(tokens)
    assert "".join(piece.text for piece in pieces) == "a cat<|im_end|>"


def test_a_character_of_several_tokens_is_one_piece(text):
    tokens = TOKENIZER.encode("猫!").tolist()
    assert text.pieces(tokens) == [TokenSpan(0, 3, "猫"), TokenSpan(3, 4, "!")]


def test_broken_bytes_stand_alone(text):
    first, second, _ = TOKENIZER.encode("猫").tolist()
    one = TOKENIZER.encode("1").tolist()
    pieces = text.pieces([first, second, *one])
    assert [(piece.start, piece.stop) for piece in pieces] == [(0, 2), (2, 3)]
    assert set(pieces[0].text) == {"\ufffd"} and pieces[1].text == "1"
    assert [piece.stop for piece in text.pieces([first] * 20)][-1] == 20


def test_no_piece_crosses_a_break(text):
    tokens = TOKENIZER.encode("猫").tolist()
    assert [(p.start, p.stop) for p in text.pieces(tokens, breaks={1})] == [(0, 1), (1, 3)]


def test_ids_without_a_token_are_shown(text):
    assert text.pieces([999_999])[0].text == "⟨999999⟩"
    assert "".join(p.text for p in text.pieces([*TOKENIZER.encode("a").tolist(), 999_999])) == "a⟨999999⟩"


@given(said=st.text(max_size=30))
@settings(max_examples=100, deadline=None)
def test_pieces_are_the_text(text, said):
    tokens = TOKENIZER.encode(said).tolist()
    pieces = text.pieces(tokens)
    assert [p.start for p in pieces] == [0, *(p.stop for p in pieces)][:-1] or not tokens
    assert "".join(p.text for p in pieces) == TOKENIZER.decode(tokens, skip_special_tokens=False)


def test_the_newest_checkpoint_comes_first(tmp_path):
    directory = RunDirectory.create(tmp_path / "run", {"model": {"tokenizer": str(tmp_path / "named")}})
    with pytest.raises(ConfigError, match=r"the run has no tokenizer: .*named/tokenizer\.json is missing"):
        TokenText.of_run(directory)
    TOKENIZER.save(directory.checkpoints / "step-9" / "model")
    assert TokenText.of_run(directory).pieces(TOKENIZER.encode("cat").tolist())[0].text == "cat"
    broken = directory.checkpoints / "step-10" / "model"
    broken.mkdir(parents=True)
    (broken / "tokenizer.json").write_text(json.dumps({"nothing": 1}))
    assert TokenText.of_run(directory).pieces(TOKENIZER.encode("cat").tolist())[0].text == "cat"
    shutil.rmtree(directory.checkpoints / "step-9")
    with pytest.raises(ConfigError, match=r"step-10/model/tokenizer\.json cannot be read"):
        TokenText.of_run(directory)
