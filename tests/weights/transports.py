"""Every transport behind one rig, and what the tests publish over it."""

import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from penstock.weights import (
    Broadcaster,
    InProcessBroadcaster,
    WeightClient,
    WeightsConfig,
    open_broadcaster,
    open_client,
)

TOKEN = "correct horse"
LONG_S = 30.0
CROSSING = [
    ("shared_memory", "full"),
    ("shared_memory", "delta"),
    ("checkpoint", "full"),
    ("checkpoint", "delta"),
    ("memory_url", "full"),
    ("memory_url", "delta"),
    ("arrow_flight", "full"),
    ("arrow_flight", "delta"),
]


class Rig:
    """Opens broadcasters and clients of one transport, and closes them."""

    def __init__(self, transport: str, encoding: str, folder: Path) -> None:
        self.job = f"runs/{uuid.uuid4().hex}"
        self.transport, self.crossing = transport, transport != "local"
        self.url = f"memory://{uuid.uuid4().hex}" if transport == "memory_url" else str(folder)
        name = "checkpoint" if transport == "memory_url" else transport
        self.config = None if name == "local" else WeightsConfig.model_validate(
            {"transport": name, "encoding": encoding, "fetch_timeout_s": LONG_S}
        )  # fmt: skip
        self._open: list[Any] = []

    def broadcaster(self, job: str | None = None, token: str = TOKEN, **changes: Any) -> Broadcaster:
        if self.config is None:
            made: Broadcaster = InProcessBroadcaster()
        else:
            made = open_broadcaster(self.config.model_copy(update=changes), job or self.job, token, self.url)
        self._open.append(made)
        return made

    def client(self, broadcaster: Broadcaster, token: str = TOKEN, **changes: Any) -> WeightClient:
        if isinstance(broadcaster, InProcessBroadcaster):
            return broadcaster
        assert self.config is not None
        config = self.config.model_copy(update=changes)
        made = open_client(broadcaster.endpoint(), config, token, f"client-{len(self._open)}")
        self._open.append(made)
        return made

    def close(self) -> None:
        for each in reversed(self._open):
            each.close()


def rig_of(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(*request.param, tmp_path)
    yield rig
    rig.close()


def arrays(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(7)
    kernel = random.standard_normal((40, 50)).astype(np.float32)
    kernel[:, :step] += 0.25
    return {
        "embedding": random.standard_normal((64, 8)).astype(ml_dtypes.bfloat16),
        "kernel": kernel,
        "scale": np.array(float(step)),
        "empty": np.zeros((0, 3), np.int32),
        "flags": np.array([True, step % 2 == 0, False]),
    }


def assert_arrays_of(step: int, found: Mapping[str, Any]) -> None:
    """Bit for bit."""
    for name, expected in arrays(step).items():
        array = np.asarray(found[name])
        assert (array.dtype, array.shape, array.tobytes()) == (expected.dtype, expected.shape, expected.tobytes()), name
    assert found.keys() == arrays(step).keys()
