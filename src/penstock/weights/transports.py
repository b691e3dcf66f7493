"""Makes the broadcaster and the clients that the configuration names."""

from collections.abc import Mapping
from typing import Any

from penstock.types import WeightsError
from penstock.weights.broadcaster import PublishingBroadcaster, TransportServer, new_incarnation
from penstock.weights.client import FetchingClient
from penstock.weights.config import WeightsConfig
from penstock.weights.files import ShelfReader, ShelfStore
from penstock.weights.protocol import Broadcaster, WeightClient


def open_broadcaster(config: WeightsConfig, job: str, token: str | None, default_url: str) -> Broadcaster:
    """A broadcaster that serves as soon as something is published.

    Args:
        config: Transport and encoding.
        job: The run's id; clients of other jobs take nothing from it.
        token: What clients must show, or, where they read files and memory, what signs the publications.
        default_url: Where ``transport: checkpoint`` writes when ``weights.url`` is None.

    Raises:
        ConfigError: the place cannot be written, or the address cannot be listened on.
        WeightsError: another broadcaster of the job still lives.
    """
    incarnation = new_incarnation()
    return PublishingBroadcaster(config, job, _store(config, job, token, default_url, incarnation), incarnation)


def open_client(endpoint: Mapping[str, Any], config: WeightsConfig, token: str | None, client_id: str) -> WeightClient:
    """A client of the broadcaster at this endpoint (`Broadcaster.endpoint`); connects when it is first used.

    Args:
        endpoint: Where; its transport must be the configuration's.
        config: Encoding and limits.
        token: The broadcaster's.
        client_id: Names this client in the broadcaster's metrics and fan-out tree.

    Raises:
        WeightsError: the endpoint is not one of this configuration.
    """
    if endpoint.get("transport") != config.transport or not isinstance(endpoint.get("job"), str):
        raise WeightsError(
            f"an endpoint of transport {endpoint.get('transport')!r} and job {endpoint.get('job')!r}, where "
            f"weights.transport is {config.transport!r}: broadcaster and clients need one configuration"
        )
    job, most = endpoint["job"], config.max_bytes
    if config.transport == "shared_memory":
        from penstock.weights.shared_memory import SharedMemoryShelf

        return FetchingClient(endpoint, config, lambda place: ShelfReader(SharedMemoryShelf(job), job, token, most))
    if config.transport == "checkpoint":
        from penstock.weights.checkpoint import CheckpointFiles

        return FetchingClient(
            endpoint, config, lambda place: ShelfReader(CheckpointFiles(_url(place), job), job, token, most)
        )
    from penstock.weights.flight_client import FlightClient

    return FlightClient(endpoint, config, token, client_id)


def _url(endpoint: Mapping[str, Any]) -> str:
    url = endpoint.get("url")
    if not isinstance(url, str):
        raise WeightsError(f"an endpoint of transport checkpoint has a url, this one {sorted(endpoint)}")
    return url


def _store(config: WeightsConfig, job: str, token: str | None, default_url: str, incarnation: str) -> TransportServer:
    if config.transport == "shared_memory":
        from penstock.weights.shared_memory import SharedMemory

        return ShelfStore(SharedMemory(job), job, token, keep=1)
    if config.transport == "checkpoint":
        from penstock.weights.checkpoint import CheckpointFiles

        folder = CheckpointFiles(config.url or default_url, job)
        return ShelfStore(folder, job, token, config.keep, folder.prepare(token, job, config.max_bytes))
    from penstock.weights.flight_server import FlightServer

    return FlightServer(config, job, token, incarnation)
