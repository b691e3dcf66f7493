"""The one reader of config files: what it takes, and what it refuses before it makes anything of it."""

import time

import pytest

from penstock.rundir.yaml_documents import MOST_BYTES, MOST_NODES, dump_yaml, parse_mapping, parse_yaml, read_mapping
from penstock.types import ConfigError

LAUGHS = "\n".join(
    ["a0: &a0 [x,x,x,x,x,x,x,x,x,x]", *(f"a{i}: &a{i} [{','.join(10 * [f'*a{i - 1}'])}]" for i in range(1, 9))]
)
"""Ten to the ninth words in 600 bytes."""


def test_scalars_are_those_of_yaml_1_2():
    text = "{a: 1e-3, b: no, c: 12:30, d: 1_000, e: 0x10, f: ~, g: true, h: .inf, i: 2024-01-01, j: 017}"
    assert parse_mapping(text, "text") == {
        "a": 0.001, "b": "no", "c": "12:30", "d": 1000, "e": 16, "f": None, "g": True, "h": float("inf"),
        "i": "2024-01-01", "j": "017",
    }  # fmt: skip


def test_what_is_written_is_read_back():
    values = {"a": ["1e-3", "no", "12:30", "", "~"], "b": {"c": 1e-3, "d": float("-inf"), "e": None}, "f": "☃\n\x1b"}
    shared = [1, 2]
    assert parse_yaml(dump_yaml({**values, "g": shared, "h": shared}), "text") == {**values, "g": [1, 2], "h": [1, 2]}


@pytest.mark.attack
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (LAUGHS, "it has more than 100000 entries when its references are written out"),
        ("a: &a [*a]", "line 1, column 4: not valid YAML: it refers to itself"),
        ("a: " + "[" * 100_000, "nested too deeply: more than 200 brackets"),
        ("".join(f"{' ' * depth}a:\n" for depth in range(1500)), "it is nested too deeply"),
        pytest.param("a: [" + "1," * (MOST_NODES + 1) + "]", "it has more than 100000 entries", marks=pytest.mark.slow),
        ("a: !!python/object/apply:os.system [id]", "could not determine a constructor"),
        ("a: " + "9" * 10_000, "not valid YAML: Exceeds the limit"),
    ],
    ids=["laughs", "circle", "brackets", "indents", "wide", "object", "digits"],
)
def test_a_bomb_is_refused_before_it_goes_off(tmp_path, text, problem):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    began_s = time.process_time()
    with pytest.raises(ConfigError, match=problem):
        read_mapping(path)
    assert time.process_time() - began_s < 30


@pytest.mark.attack
def test_a_file_that_is_too_long_is_not_read(tmp_path):
    path = tmp_path / "config.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # which takes no room
    with pytest.raises(ConfigError, match=f"config.yaml has more than {MOST_BYTES >> 20} MiB"):
        read_mapping(path)


def test_what_is_no_mapping_or_no_text_is_named(tmp_path):
    path = tmp_path / "config.yaml"
    for content, problem in {b"- a": "is a list", b"": "is empty", b"a: \xff": "can't decode byte 0xff"}.items():
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=problem):
            read_mapping(path)
    with pytest.raises(FileNotFoundError):
        read_mapping(tmp_path / "missing.yaml")
