"""The parts of `benchmarks.generation_table`; its other sides need interpreters of their own."""

import argparse
import json
import sys
from pathlib import Path

import pytest
from benchmarks.campaign import Outcomes
from benchmarks.marks import Marks

from benchmarks import generation_table as table

ECHO = """
import json, sys
print(json.dumps({"ready": "a side"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    tokens = sum(asked["lengths"]) + LOST
    print(json.dumps({"seconds": 0.5, "tokens": tokens, "first": [FIRST]}), flush=True)
"""


def side(tmp_path: Path, lost: int = 0, first: int = 7) -> table.Side:
    program = ECHO.replace("LOST", str(lost)).replace("FIRST", str(first))
    return table.Side([sys.executable, "-c", program], tmp_path)


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    table.add_options(parser)
    return parser.parse_args(["--transformers-python", "python", *words])


def test_ragged_lengths_are_drawn_once_and_prompts_anew():
    first, second = (table.load_of("6M-ragged", number, 8192) for number in (0, 1))
    assert first.lengths == second.lengths and first.prompts != second.prompts
    assert first.prompts == table.load_of("6M-ragged", 0, 8192).prompts
    assert [len(prompt) for prompt in first.prompts] == [len(prompt) for prompt in second.prompts]
    groups = [first.prompts[start : start + 8] for start in range(0, 64, 8)]
    assert all(prompt == group[0] for group in groups for prompt in group) and len({len(g[0]) for g in groups}) > 4
    assert all(16 <= len(prompt) <= 256 for prompt in first.prompts)
    assert 40 <= sum(first.lengths) / 64 <= 56 and min(first.lengths) < 8 and 128 < max(first.lengths) <= 256
    assert first.rows == 32 and first.longest == 512


def test_equal_loads_have_one_prompt_for_each_answer():
    load = table.load_of("1M-8", 0, 4096)
    assert len({tuple(prompt) for prompt in load.prompts}) == load.rows == 8
    assert {len(prompt) for prompt in load.prompts} == {16} and load.lengths == [64] * 8 and load.longest == 80
    assert max(token for prompt in load.prompts for token in prompt) < 4096


def test_rounds_are_of_the_cells_that_are_asked_for_model_by_model():
    asked = table.rounds_of(options("--cases", "6M-8", "1M-1", "--dtype", "float32", "bfloat16", "--rounds", "2"))
    assert [(each.case, each.dtype, each.number) for each in asked] == [
        (case, dtype, number) for case in ("1M-1", "6M-8") for dtype in ("float32", "bfloat16") for number in (0, 1)
    ]  # fmt: skip
    assert len(table.rounds_of(options("--rounds", "1"))) == 15


def test_every_side_answers_in_turns_and_a_token_too_few_is_named(tmp_path):
    sides = {"penstock": side(tmp_path), "transformers": side(tmp_path, first=8)}
    load = table.load_of("1M-8", 0, 4096)
    found = table.one_round(sides, load, 1)
    assert list(found) == ["transformers", "penstock"]
    assert found["penstock"]["tokens"] == 512 and found["penstock"]["seconds"] == 0.5
    with pytest.raises(SystemExit, match="compute something else"):
        table.warm_up(sides, "1M-8", "float32", 4096)
    table.warm_up(sides, "1M-8", "bfloat16", 4096)
    short = side(tmp_path, lost=-1)
    with pytest.raises(SystemExit, match="gave 511 tokens and not 512"):
        short.answer(load)
    for each in (*sides.values(), short):
        each.end()


def test_a_side_that_ends_says_why(tmp_path):
    with pytest.raises(SystemExit, match="no such model"):
        table.Side([sys.executable, "-c", "raise SystemExit('no such model')"], tmp_path)
    with pytest.raises(SystemExit, match="cannot be run: No such file or directory; name an interpreter"):
        table.Side([str(tmp_path / "python")], tmp_path)


def test_an_environment_is_a_sides_own(tmp_path):
    told = "import json, os; print(json.dumps({'ready': os.environ['VLLM_CPU_OMP_THREADS_BIND']}), flush=True)"
    one = table.Side([sys.executable, "-c", told], tmp_path, {"VLLM_CPU_OMP_THREADS_BIND": "0,1"})
    assert one.ready == "0,1"
    one.end()


def outcome(ours: float, theirs: float, idle: float = 0.0) -> dict[str, dict[str, float]]:
    return {
        name: {"seconds": seconds, "processor_s": 2 * seconds, "tokens": 512, "others_s": idle}
        for name, seconds in (("penstock", ours), ("transformers", theirs))
    }


@pytest.mark.parametrize(
    ("case", "dtype", "theirs", "idle", "missed"),
    [
        ("6M-8", "float32", 1.6, 0.0, 0), ("6M-8", "float32", 1.4, 0.0, 1), ("6M-ragged", "float32", 2.4, 0.0, 1),
        ("6M-ragged", "float32", 2.6, 0.0, 0), ("6M-8", "bfloat16", 0.5, 0.0, 0), ("6M-8", "float32", 1.6, 0.5, 1),
    ],
)  # fmt: skip
def test_marks_are_on_the_median_of_ratios(case, dtype, theirs, idle, missed):
    outcomes, marks = Outcomes(None), Marks()
    asked = table.rounds_of(options("--cases", case, "--dtype", dtype, "--rounds", "3"))
    for each, found in zip(asked, (outcome(1, theirs), outcome(2, 2 * theirs, idle), outcome(1, 9)), strict=True):
        outcomes.add(each, found)
    lines = list(table.show(outcomes, asked, marks))
    assert lines[1].split() == ["penstock", "512"]
    assert lines[2].split()[0] == "transformers" and lines[2].split()[2:] == [f"{theirs:.2f}"] * 2
    assert marks.missed == missed, marks.lines


@pytest.mark.parametrize(("as_it_comes", "on_all", "missed"), [(2.0, 1.4, 1), (1.4, 2.0, 1), (1.6, 2.0, 0)])
def test_the_mark_is_on_the_faster_of_a_peers_sides(as_it_comes, on_all, missed):
    outcomes, marks = Outcomes(None), Marks()
    parser = argparse.ArgumentParser()
    table.add_options(parser)
    (asked,) = table.rounds_of(parser.parse_args(["--vllm-python", "python", "--cases", "6M-8", "--rounds", "1"]))
    seconds = {"penstock": 1.0, "vLLM": as_it_comes, "vLLM on all": on_all}
    outcomes.add(asked, {n: {"seconds": s, "processor_s": s, "tokens": 9, "others_s": 0} for n, s in seconds.items()})
    list(table.show(outcomes, [asked], marks))
    assert marks.missed == missed, marks.lines


def test_rounds_that_are_in_the_file_are_not_made_again(tmp_path, monkeypatch):
    given = options("--cases", "6M-8", "--rounds", "3", "--results", str(tmp_path / "rounds.jsonl"))
    first, second, third = table.rounds_of(given)
    kept = Outcomes(given.results)
    kept.add(first, outcome(1, 2))
    kept.add(third, outcome(1, 2))
    with given.results.open("a") as file:
        file.write(json.dumps({"cell": second})[:-5])  # cut off
    made: list[int] = []
    monkeypatch.setattr(table, "prepare", lambda *_: 8192)
    monkeypatch.setattr(table, "sides_of", lambda *_: {"penstock": side(tmp_path), "transformers": side(tmp_path)})
    one_round = table.one_round

    def noted(sides, load, number):
        made.append(number)
        return one_round(sides, load, number)

    monkeypatch.setattr(table, "one_round", noted)
    found = table.measure(given)
    assert made == [1] and found[second]["penstock"]["tokens"] == 512
    assert second in Outcomes(given.results)
    monkeypatch.setattr(table, "sides_of", lambda *_: pytest.fail("nothing is missing"))
    table.measure(given)
