"""Offline evaluation: two checkpoints answer in one environment, and what they say carries their versions."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import penstock
from penstock.environments import Example, SingleTurnEnvironment
from penstock.learner.checkpoints import FORMAT_VERSION
from penstock.model.language import load_policy, save_decoder
from penstock.text import Tokenizer
from tests.overseer.conftest import tiny


class Held(SingleTurnEnvironment):
    """Holds something until it is closed."""

    examples = [Example(word, f"Say {word}:") for word in ("stone", "river", "cloud", "table")]

    def __init__(self) -> None:
        super().__init__()
        self.closed = 0

    def score(self, example, text, completion):
        if self.closed:
            raise RuntimeError("what it held is gone")
        return float(len(text))

    def close(self):
        self.closed += 1


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[Path]:
    """Versions 7 and 0 of a run."""
    tokenizer = Tokenizer.load("penstock")
    made = []
    for step in (7, 0):
        path = tmp_path / f"step-{step}"
        save_decoder(load_policy(tiny().model, step, tokenizer), path / "model", tokenizer)
        (path / "state.json").write_text(json.dumps({"format_version": FORMAT_VERSION, "step": step, "states": {}}))
        made.append(path)
    return made


@pytest.mark.slow
def test_a_baseline_answers_in_the_environment_that_was_given_which_is_closed_once(tmp_path: Path, checkpoints):
    mine, path = Held(), tmp_path / "kept.parquet"
    report = penstock.evaluate(
        checkpoints[0], tiny(), n=3, rollouts_path=str(path), baseline=checkpoints[1], environment=mine
    )
    assert mine.closed == 1
    assert report.baseline is not None and report.baseline.lessons["cats"].failed_groups == 0
    assert report.lessons["cats"].rollouts == report.baseline.lessons["cats"].rollouts == 3
    assert pq.read_table(path).column("weight_step").to_pylist() == [7] * 3 + [0] * 3


def test_rollouts_are_parquet_and_nothing_else(tmp_path: Path, checkpoints):
    with pytest.raises(penstock.ConfigError, match=r"--rollouts .*kept\.jsonl is written as Parquet"):
        penstock.evaluate(checkpoints[0], tiny(), n=1, rollouts_path=tmp_path / "kept.jsonl")
    assert not any(tmp_path.glob("kept*"))


@pytest.mark.slow
def test_an_environment_is_closed_where_a_lesson_has_no_result(checkpoints):
    broken = Held()
    broken.score = lambda *given: float("nan")  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(penstock.types.EnvironmentFailure, match="lesson 'cats' has no result"):
        penstock.evaluate(checkpoints[0], tiny(), n=2, environment=broken)
    assert broken.closed == 1
