"""The inference servers, as rollout workers, the evaluator and the learner's probe see them."""

from urllib.parse import urlsplit

from penstock.inference import Server, ServerPool
from penstock.overseer.distributed.records import View
from penstock.overseer.distributed.roles.settings import Settings
from penstock.weights.own_address import own_address


def make_pool(settings: Settings) -> ServerPool:
    """A client of the run's inference servers; it knows none yet."""
    config = settings.config.inference
    authority = None if config.tls_ca is None else str(config.tls_ca)
    return ServerPool(settings.token, request_timeout_s=config.request_timeout_s, certificate_authority=authority)


def reachable(url: str) -> str:
    """The URL by which other machines reach a server that listens on all of this machine's addresses."""
    parts = urlsplit(url)
    if parts.hostname not in ("0.0.0.0", "::"):
        return url
    return f"{parts.scheme}://{own_address()}:{parts.port}"


def servers_of(view: View) -> list[Server]:
    """Those that serve weights of the run's present lineage."""
    return [
        Server(peer.identity.name, peer.identity.incarnation, str(peer.address["url"]))
        for peer in view.of("inference")
        if "url" in peer.address and peer.address.get("lineage") == view.lineage
    ]
