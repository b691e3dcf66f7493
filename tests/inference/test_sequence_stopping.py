from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.inference.sequence import StopStrings, text_of


def completing_token(codec, tokens, strings):
    """The definition: the first token after which the whole text contains a stop string."""
    for count in range(1, len(tokens) + 1):
        if any(string in codec.decode(tokens[:count]) for string in strings):
            return count
    return None


def feed(codec, tokens, strings, size):
    watch = StopStrings(codec, strings)
    for start in range(0, len(tokens), size):
        kept = watch.completed_by(tokens[start : start + size])
        if kept is not None:
            return start + kept
    return None


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("ab€x\n", max_size=40),
    strings=st.lists(st.text("ab€x\n", min_size=1, max_size=5), min_size=1, max_size=3),
    size=st.integers(1, 9),
    special=st.sets(st.integers(0, 60), max_size=5),
)
def test_the_completing_token_is_found_whatever_the_dispatches(codec, text, strings, size, special):
    tokens = codec.encode(text).tolist()
    for position in sorted(special):
        tokens.insert(position, 256)  # special tokens have no text
    assert feed(codec, tokens, strings, size) == completing_token(codec, tokens, strings)


def test_several_strings_stay_separate(codec):
    tokens = codec.encode("one two three").tolist()
    assert feed(codec, tokens, ["three", "two"], 4) == len("one two")
    assert feed(codec, tokens, ["threetwo", "twothree"], 4) is None


def test_only_the_tail_is_decoded(codec):
    lengths = []

    class Counting(type(codec)):
        def decode(self, tokens, skip_special_tokens=True):
            lengths.append(len(tokens))
            return super().decode(tokens, skip_special_tokens)

    feed(Counting(), codec.encode("x" * 4000).tolist(), ["never"], 8)
    assert max(lengths) <= 16


def test_text_ends_with_the_first_stop_string(codec):
    assert text_of(codec, codec.encode("say cat.\n\nMore").tolist(), ["\n\n", "."]) == "say cat."
    assert text_of(codec, codec.encode("nothing here").tolist(), ["stop"]) == "nothing here"
