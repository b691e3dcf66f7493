"""docs/run_directory.md says of every metric what it is, or which page does."""

import re
from pathlib import Path

import pytest

from penstock.overseer import FleetRunConfig, train
from penstock.overseer.config_loading import build_config
from penstock.rundir import read_metrics
from tests.overseer.conftest import tiny

DOCS = Path(__file__).parents[2] / "docs"


def said() -> dict[str, set[str]]:
    """Group of metrics → the names that the pages of its row, and the section itself, have in code spans."""
    section = (DOCS / "run_directory.md").read_text("utf-8").partition("\n### Metrics\n")[2].partition("\n### ")[0]
    pages, _, names = section.partition("\n| Name | Means |\n")
    own = spans(pages.partition("\n|")[0]) | spans(names)
    found = {group: set(own) for group in ("rollout", "curriculum", "inference", "overseer", "time", "warm_start")}
    for row in re.findall(r"^\| `.*$", pages, re.MULTILINE):
        linked: set[str] = set()
        for page in re.findall(r"\]\((\w+\.md)#", row):
            linked |= spans((DOCS / page).read_text("utf-8"))
        for group in re.findall(r"`(\w+)/", row.partition(" | ")[0]):
            found.setdefault(group, set(own)).update(linked)
    return found


def spans(text: str) -> set[str]:
    return set(re.findall(r"`([\w/<>]+)`", text))


def is_said(name: str, spans: set[str]) -> bool:
    """Whether a span is the name, its end, or what a table puts in the place of it (`_max`, `p50_s`)."""
    forms = (re.sub(r"<\w+>", "[^/]+", span) for span in spans)
    ends = (f"{'.*' if form.startswith('_') or form in ('p50_s', 'p99_s') else '(.*/)?'}{form}" for form in forms)
    return any(re.fullmatch(end, name) for end in ends)


@pytest.mark.slow
def test_every_metric_of_a_run_is_said(tmp_path):
    kl = {"coefficient": 0.1, "reference": "initial"}
    train(tiny({"steps": 2, "learner": {"kl": kl}}), tmp_path / "cats", quiet=True)
    pole = {"steps": 2, "model": {"hidden_sizes": [8]}, "fleet": {"tasks": {"pole": {"id": "CartPole-v1"}}}}
    train(build_config(FleetRunConfig, pole), tmp_path / "pole", quiet=True)
    names = {
        name for run in ("cats", "pole") for row in read_metrics(tmp_path / run / "metrics.jsonl") for name in row
    } - {"step", "time"}
    assert len(names) > 150
    known = said()
    names = {re.sub("^(eval|eval_report|micro_eval)/cats/", "rollout/cats/", name) for name in names}  # "the same of"
    assert [name for name in sorted(names) if not is_said(name, known.get(name.partition("/")[0], set()))] == []
