from pathlib import Path
from typing import Any

import pytest

from penstock.types import WeightsError
from penstock.weights import (
    Broadcaster,
    InProcessBroadcaster,
    WeightClient,
    WeightsConfig,
    open_broadcaster,
    open_client,
)


@pytest.mark.parametrize("transport", ["shared_memory", "checkpoint", "arrow_flight"])
def test_what_is_opened_keeps_the_protocols(transport: str, tmp_path: Path):
    config = WeightsConfig.model_validate({"transport": transport})
    broadcaster = open_broadcaster(config, f"job of {tmp_path}", "t", str(tmp_path))
    client = open_client(broadcaster.endpoint(), config, "t", "c")
    assert isinstance(broadcaster, Broadcaster) and isinstance(client, WeightClient)
    assert broadcaster.endpoint()["transport"] == transport
    client.close()
    broadcaster.close()


def test_the_local_one_is_both():
    assert isinstance(InProcessBroadcaster(), Broadcaster) and isinstance(InProcessBroadcaster(), WeightClient)


@pytest.mark.parametrize(
    "endpoint",
    [
        {},
        {"transport": "checkpoint"},
        {"transport": "arrow_flight", "job": "j"},
        {"transport": "checkpoint", "job": "j"},
    ],
)
def test_an_endpoint_of_another_configuration_is_refused(endpoint: dict[str, Any]):
    with pytest.raises(WeightsError, match="endpoint"):
        open_client(endpoint, WeightsConfig(transport="checkpoint"), "t", "c")
