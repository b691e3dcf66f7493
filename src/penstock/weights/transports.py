"""Every transport, and how a broadcaster and a client of it are made.

A transport is a name in `config.Transport`, an entry of `TRANSPORTS`, and a module of its own: `VersionFiles` where it
is files of some kind, else a `TransportServer` and a `TransportReader`. Modules are imported when they are used.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.types import WeightsError
from penstock.weights.broadcaster import PublishingBroadcaster, TransportServer, new_incarnation
from penstock.weights.client import FetchingClient
from penstock.weights.config import WeightsConfig
from penstock.weights.files import FileTransport
from penstock.weights.protocol import Broadcaster, WeightClient


@dataclass(frozen=True, slots=True)
class Transport:
    """One way of weights from process to process.

    Attributes:
        serve: Makes what offers publications, of the configuration, job, token, default URL and incarnation.
        connect: Makes a client, of the endpoint, configuration, token and client's name.
    """

    serve: Callable[[WeightsConfig, str, str | None, str, str], TransportServer]
    connect: Callable[[Mapping[str, Any], WeightsConfig, str | None, str], WeightClient]


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
    server = TRANSPORTS[config.transport].serve(config, job, token, default_url, incarnation)
    return PublishingBroadcaster(config, job, server, incarnation)


def open_client(endpoint: Mapping[str, Any], config: WeightsConfig, token: str | None, client_id: str) -> WeightClient:
    """A client of the broadcaster at this endpoint (`Broadcaster.endpoint`); connects when it is first used.

    Args:
        endpoint: Where; its transport must be the configuration's.
        config: Encoding and limits.
        token: The broadcaster's.
        client_id: Names this client in the broadcaster's metrics and distribution tree.

    Raises:
        WeightsError: the endpoint is not one of this configuration.
    """
    if endpoint.get("transport") != config.transport or not isinstance(endpoint.get("job"), str):
        raise WeightsError(
            f"an endpoint of transport {endpoint.get('transport')!r} and job {endpoint.get('job')!r}, where "
            f"weights.transport is {config.transport!r}: broadcaster and clients need one configuration"
        )
    return TRANSPORTS[config.transport].connect(endpoint, config, token, client_id)


def _serve_memory(config: WeightsConfig, job: str, token: str | None, _url: str, _inc: str) -> TransportServer:
    from penstock.weights.shared_memory import SharedMemoryFiles

    return FileTransport(SharedMemoryFiles(job), job, token, config.max_bytes).prepare()


def _connect_memory(endpoint: Mapping[str, Any], config: WeightsConfig, token: str | None, _name: str) -> WeightClient:
    from penstock.weights.shared_memory import SharedMemoryFiles

    job = endpoint["job"]
    return FetchingClient(
        endpoint, config, lambda _: FileTransport(SharedMemoryFiles(job), job, token, config.max_bytes)
    )


def _serve_checkpoint(
    config: WeightsConfig, job: str, token: str | None, url: str, _incarnation: str
) -> TransportServer:
    from penstock.weights.checkpoint import CheckpointFiles

    files = CheckpointFiles(config.url or url, job)
    return FileTransport(files, job, token, config.max_bytes, config.keep).prepare()


def _connect_checkpoint(
    endpoint: Mapping[str, Any], config: WeightsConfig, token: str | None, _name: str
) -> WeightClient:
    from penstock.weights.checkpoint import CheckpointFiles

    job = endpoint["job"]

    def open_reader(place: Mapping[str, Any]) -> FileTransport:
        url = place.get("url")
        if not isinstance(url, str):
            raise WeightsError(f"an endpoint of transport checkpoint has a url, this one {sorted(place)}")
        return FileTransport(CheckpointFiles(url, job), job, token, config.max_bytes)

    return FetchingClient(endpoint, config, open_reader)


def _serve_flight(config: WeightsConfig, job: str, token: str | None, _url: str, incarnation: str) -> TransportServer:
    from penstock.weights.flight_server import FlightServer

    return FlightServer(config, job, token, incarnation)


def _connect_flight(endpoint: Mapping[str, Any], config: WeightsConfig, token: str | None, name: str) -> WeightClient:
    from penstock.weights.flight_client import FlightReader, PeerRelay
    from penstock.weights.flight_messages import Access, is_loopback

    access = Access.from_config(config, token or "")
    relay = PeerRelay(endpoint["job"], access, "127.0.0.1" if is_loopback(config.host) else "0.0.0.0")
    return FetchingClient(
        endpoint, config, lambda place: FlightReader(place, config, access, name, relay), on_close=relay.close
    )


TRANSPORTS: Mapping[str, Transport] = {
    "shared_memory": Transport(_serve_memory, _connect_memory),
    "checkpoint": Transport(_serve_checkpoint, _connect_checkpoint),
    "arrow_flight": Transport(_serve_flight, _connect_flight),
}
