"""Every transport, and how a broadcaster and a client of it are made.

A transport is a name in `config.Transport`, a branch here, and a module of its own: `VersionFiles` where it is files of
some kind, else a `TransportServer` and a `TransportReader`. Modules are imported when they are used.
"""

from collections.abc import Mapping
from typing import Any

from penstock.types import WeightsError
from penstock.types.addresses import is_loopback
from penstock.weights.broadcaster import PublishingBroadcaster, TransportServer, new_incarnation
from penstock.weights.client import FetchingClient
from penstock.weights.config import Transport, WeightsConfig
from penstock.weights.files import FileTransport, VersionFiles
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
    if config.transport == "arrow_flight":
        from penstock.weights.flight_server import FlightServer

        server: TransportServer = FlightServer(config, job, token, incarnation)
    else:
        files = _files(config.transport, job, config.url or default_url)
        keep = config.keep if config.transport == "checkpoint" else 1
        server = FileTransport(files, job, token, config.max_bytes, keep).prepare()
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
    job = endpoint["job"]
    if config.transport == "arrow_flight":
        from penstock.weights.flight_client import FlightReader, PeerRelay
        from penstock.weights.flight_messages import Access

        access = Access.from_config(config, token or "")
        relay = PeerRelay(job, access, "127.0.0.1" if is_loopback(config.host) else "0.0.0.0")
        return FetchingClient(
            endpoint, config, lambda place: FlightReader(place, config, access, client_id, relay), on_close=relay.close
        )

    def open_reader(place: Mapping[str, Any]) -> FileTransport:
        url = place.get("url")
        if config.transport == "checkpoint" and not isinstance(url, str):
            raise WeightsError(f"an endpoint of transport checkpoint has a url, this one {sorted(place)}")
        return FileTransport(_files(config.transport, job, url), job, token, config.max_bytes)

    return FetchingClient(endpoint, config, open_reader)


def _files(transport: Transport, job: str, url: Any) -> VersionFiles:
    if transport == "shared_memory":
        from penstock.weights.shared_memory import SharedMemoryFiles

        return SharedMemoryFiles(job)
    from penstock.weights.checkpoint import CheckpointFiles

    return CheckpointFiles(url, job)
