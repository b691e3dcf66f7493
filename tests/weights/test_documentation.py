"""docs/weights.md is true: its example runs, and the names in its tables exist."""

import re
from pathlib import Path

import numpy as np

from penstock.types import WeightVersion
from penstock.weights import WeightsConfig, open_broadcaster, open_client

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "weights.md").read_text("utf-8")


def test_the_example_runs():
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    sent = {"w": np.arange(5, dtype=np.float32)}
    names = {"token": "t", "arrays": sent}
    exec(code, names)
    assert names["version"] == WeightVersion(0, 0) and np.array_equal(names["arrays"]["w"], sent["w"])
    names["client"].close()
    names["broadcaster"].close()


def test_every_metric_of_the_table_is_measured_and_the_other_way_round():
    rows = dict(re.findall(r"^\| (learner|learner, Flight|client|client, Flight) \| (.*) \|$", PAGE, re.MULTILINE))
    named = {where: {f"weights/{name}" for name in re.findall(r"`(\w+)`", text)} for where, text in rows.items()}
    config = WeightsConfig(encoding="delta")
    broadcaster = open_broadcaster(config, "job", "t", "unused")
    client = open_client(broadcaster.endpoint(), config, "t", "c")
    for step in range(2):
        broadcaster.publish(WeightVersion(0, step), {"w": np.zeros(5000, np.float32)})
        client.fetch(WeightVersion(0, step))
    assert named["learner"] | named["learner, Flight"] == broadcaster.metrics().keys()
    assert named["client"] | named["client, Flight"] == client.metrics().keys()
    client.close()
    broadcaster.close()


def test_every_module_has_its_place_on_the_page():
    modules = {path.stem for path in (ROOT / "src" / "penstock" / "weights").glob("*.py")} - {"__init__"}
    section = PAGE.partition("## Where it is")[2]
    named = {name for line in section.splitlines() if line.startswith("| `") for name in re.findall(r"`(\w+)`", line)}
    assert named >= modules
