"""docs/weights.md is true: its example runs, and the names in its tables exist."""

import re
from pathlib import Path

import numpy as np
import pytest

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


@pytest.mark.parametrize("transport", ["arrow_flight", "shared_memory", "checkpoint"])
def test_every_metric_of_the_table_is_measured_and_the_other_way_round(transport, tmp_path):
    table = re.findall(r"^\| ((?:learner|client)(?:, [\w ]+)?) \| (.*) \|$", PAGE, re.MULTILINE)
    rows = {where: {f"weights/{name}" for name in re.findall(r"`(\w+)`", text)} for where, text in table}
    more = "Flight" if transport == "arrow_flight" else "memory and files"
    config = WeightsConfig.model_validate({"encoding": "delta", "transport": transport})
    broadcaster = open_broadcaster(config, f"job of {tmp_path}", "t", str(tmp_path))
    client = open_client(broadcaster.endpoint(), config, "t", "c")
    for step in range(2):
        broadcaster.publish(WeightVersion(0, step), {"w": np.zeros(5000, np.float32)})
        client.fetch(WeightVersion(0, step))
    published, fetched = broadcaster.metrics().keys(), client.metrics().keys()
    assert rows["learner"] | rows[f"learner, {more}"] == published
    assert rows["client"] | rows.get(f"client, {more}", set()) == fetched
    assert not published & fetched, "one would overwrite the other in a line of metrics"
    client.close()
    broadcaster.close()
