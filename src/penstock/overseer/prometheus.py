"""A run's numbers for Prometheus to scrape: ``/metrics`` of a small server beside the overseer.

Names are those of ``metrics.jsonl``, with ``penstock_`` before them and ``_`` for ``/``; a lesson or task in the middle
of a name, and a role, component or pattern at its end, becomes a label. What counts only up is a counter: rollouts by
fate, deaths of components, tokens. Everything has its newest value; what the overseer knows between two updates
(components, the ledger, throughput) is as new as ``status.json``.
"""

import os
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from penstock.inference.access import AccessRules
from penstock.inference.http_server import HttpServer
from penstock.tracking import PrometheusConfig
from penstock.types import ConfigError
from penstock.types.addresses import is_loopback

LABELS_AT_THE_END = {
    "inference_client/outstanding_tokens": "component", "time/idle": "role", "train/fragments": "lesson",
    "train/learning_rate": "pattern", "train/parity_kl": "component", "weights/lag": "component",
}  # fmt: skip
"""Of names with a third part that names no number."""
STATES = ("in_flight", "waiting")
"""Of the ledger, what is no fate: rollouts leave it again."""
LEDGER = "replay/ledger/"
"""Numbers that ``rollouts_total`` and ``rollouts_now`` have already."""
STOP_S = 1.0


class PrometheusEndpoint:
    """Implements `penstock.tracking.Tracker`: keeps the newest of each number, and serves them.

    Args:
        config: Where it listens.
        run: The run's name.

    Raises:
        ConfigError: the address is taken, or other machines reach it and there is no token.
    """

    def __init__(self, config: PrometheusConfig, run: str) -> None:
        token = os.environ.get("PENSTOCK_TOKEN")
        if token is None and not is_loopback(config.host):
            raise ConfigError(
                f"tracking.prometheus.host is {config.host}, which other machines reach: set PENSTOCK_TOKEN to what "
                "Prometheus is to send (its `authorization`), or leave the host out"
            )
        self._run = run
        self._lock = threading.Lock()
        self._numbers: dict[str, float] = {}
        self._status: Mapping[str, Any] = {}
        self._updated = 0.0
        routes = [Route("/metrics", self._metrics), Route("/health", self._health)]
        rules = AccessRules(host=config.host, token=token)
        try:
            self._server = HttpServer(
                Starlette(routes=routes, middleware=rules.middleware(0)), config.host, config.port, STOP_S
            )
        except ConfigError as error:
            raise ConfigError(
                f"tracking.prometheus: {error}; set tracking.prometheus.port to another, or to 0 for a free one"
            ) from error
        self._server.start()

    @property
    def url(self) -> str:
        """What Prometheus is to scrape."""
        return f"{self._server.url}/metrics"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Takes numbers of an update or of an evaluation.

        Raises:
            RunFailed: the server has ended.
        """
        self._server.raise_if_failed()
        with self._lock:
            self._numbers |= metrics
            if "train/loss" in metrics:
                self._updated = time.time()

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Ignores conversations."""

    def note_status(self, status: Mapping[str, Any]) -> None:
        """Takes what status.json says."""
        with self._lock:
            self._status = status
            self._numbers |= status["numbers"]

    def close(self) -> None:
        """Ends the server."""
        self._server.stop()

    def families(self) -> list[Metric]:
        """All numbers, sorted by name, each with its kind and labels."""
        with self._lock:
            numbers, status, updated = dict(self._numbers), self._status, self._updated
        kept = _Families()
        kept.add("run_info", 1.0, {"run": self._run, "runtime": str(status.get("runtime", ""))})
        if updated:
            kept.add("last_update_time_seconds", updated)
        for name, value in numbers.items():
            if not name.startswith(LEDGER):
                kept.add(*_named(name, value))
        _add_status(kept, status)
        return kept.sorted()

    async def _metrics(self, _: Request) -> Response:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collected(self.families()))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def _health(self, _: Request) -> Response:
        return PlainTextResponse("ok\n")


class _Collected(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """What was handed over."""
        return self._families


class _Families:
    """Samples by the name of their family, whose labels are all that any of its samples has."""

    def __init__(self) -> None:
        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}

    def add(self, name: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        """One sample, under its name without ``penstock_``."""
        self._samples.setdefault(name, []).append((labels or {}, value))

    def sorted(self) -> list[Metric]:
        """As Prometheus has them; what ends in ``_total`` is a counter."""
        found: list[Metric] = []
        for name, samples in sorted(self._samples.items()):
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            labels = sorted({label for each, _ in samples for label in each})
            family = kind(f"penstock_{name}", "", labels=labels)
            for each, value in samples:
                family.add_metric([each.get(label, "") for label in labels], value)
            found.append(family)
        return found


def _named(name: str, value: float) -> tuple[str, float, dict[str, str]]:
    """The family, the value and the labels of a number of metrics.jsonl."""
    group, *rest = name.split("/")
    if len(rest) < 2:
        return _plain(name), value, {}
    label = LABELS_AT_THE_END.get(f"{group}/{rest[0]}")
    if label is not None:
        return _plain(f"{group}/{rest[0]}"), value, {label: "/".join(rest[1:])}
    return _plain("/".join([group, *rest[1:]])), value, {"lesson": rest[0]}


def _plain(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _add_status(kept: _Families, status: Mapping[str, Any]) -> None:
    for name in ("step", "steps", "lineage"):
        if isinstance(status.get(name), int):
            kept.add(name, float(status[name]))
    pace = status.get("training", {}).get("units_per_s")
    if pace is not None:
        kept.add("training_units_per_s", pace)
    for state, count in status.get("ledger", {}).items():
        if state in STATES:
            kept.add("rollouts_now", float(count), {"state": state})
        else:
            kept.add("rollouts_total", float(count), {"fate": state})
    for component, fields in status.get("components", {}).items():
        kept.add("component_state", 1.0, {"component": component, "state": str(fields.get("state", ""))})
        kept.add("component_deaths_total", float(fields.get("deaths", 0)), {"component": component})
        kept.add("component_incarnation", float(fields.get("incarnation", 0)), {"component": component})
