"""What docs/batch.md says, against the real classes."""

import re
import sys
from pathlib import Path

import numpy as np
import yaml
from tests.batch.conftest import advantages_of

from penstock.batch import BatchMakerConfig, make_batch_maker
from penstock.batch.config import BUILT_IN_MAKERS
from penstock.batch.reservoir import REMEMBERED

PAGE = (Path(__file__).parents[2] / "docs" / "batch.md").read_text()


def block(language: str, containing: str) -> str:
    (found,) = [text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if containing in text]
    return found


def test_ones_own_maker_works_as_shown(tmp_path, monkeypatch, add):
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "makers.py").write_text(block("python", "class Highest"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    config = yaml.safe_load(block("yaml", "batch_makers"))["replay"]["batch_makers"]["cats"]
    maker = make_batch_maker(
        BatchMakerConfig.model_validate(config),
        advantage="rloo", max_tokens=8, max_samples=1, ordered=False, allow_truncated_sampling=False, seed=0,
    )  # fmt: skip
    add(maker, "a-0-0", rewards=(0.25, 1.0, 0.75))
    batch = maker.create_batch(2)
    assert advantages_of(batch) == {"a-0-0/1": 1.0, "a-0-0/2": 0.75}
    assert maker.get_batch_metadata(batch) == {"metrics": {"train/examples": 2.0}}
    assert maker.create_batch(1) is None
    for name in ("my_package.makers", "my_package"):
        sys.modules.pop(name)


def test_the_example_of_a_config_is_valid():
    replay = yaml.safe_load(block("yaml", "batch_makers"))["replay"]
    for config in [replay["batch_maker"], *replay["batch_makers"].values()]:
        BatchMakerConfig.model_validate(config)


def test_every_built_in_maker_has_its_column_and_section():
    for name in BUILT_IN_MAKERS:
        assert f"\n### {name}\n" in PAGE and re.search(rf"^\| \|.* `{name}`", PAGE, re.MULTILINE)


def test_numbers_are_those_of_the_code():
    assert f"for the last {REMEMBERED:,} of them" in PAGE
    weights = np.arange(1, 10_001) ** 3.0
    newest_sixth = weights[-10_000 // 6 :].sum() / weights.sum()
    assert 0.5 < newest_sixth < 0.53, "half of all draws fall to the newest sixth"
