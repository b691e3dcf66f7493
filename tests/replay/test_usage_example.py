"""The example that a newcomer reads first: it runs, shows what it promises, and uses nothing private."""

import re
import runpy
from pathlib import Path

from penstock.replay import RolloutStore

EXAMPLE = Path(__file__).parents[2] / "examples" / "replay_usage.py"


def test_the_example_stores_groups_makes_a_batch_and_reads_both_back(tmp_path, capsys):
    runpy.run_path(str(EXAMPLE))["main"](str(tmp_path / "experience"))
    printed = capsys.readouterr().out
    assert re.match(r"batch_[0-9a-f]{32}_\d+: 8 examples\n", printed)
    counts = {"replay/ledger/started": 16.0, "replay/ledger/waiting": 8.0, "replay/ledger/trained": 8.0}
    assert str(counts) in printed
    rows = re.findall(r"(question-\d) +│ +(\d) │ +(0\.5) │ +(\d) │", printed)
    assert [row[:3] for row in rows] == [(f"question-{question}", "4", "0.5") for question in range(4)]
    assert sum(int(trained) for *_, trained in rows) == 8
    store = RolloutStore(tmp_path / "experience")
    assert len(store.read_records()) == 16 and len(store.history().batches) == 1
    store.close()


def test_the_example_is_short_and_public():
    source = EXAMPLE.read_text()
    assert len(source.splitlines()) < 60
    assert not re.search(r"\.(_[a-z]\w*)|import _|penstock\.\w+\.\w+", source)
