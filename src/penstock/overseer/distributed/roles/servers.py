"""The inference servers, as rollout workers, the evaluator and the learner's probe see them."""

from urllib.parse import urlsplit

from penstock.inference import Server, ServerPool
from penstock.overseer.distributed.records import Peer, View
from penstock.overseer.distributed.roles.settings import Settings


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
    from penstock.weights.flight_messages import own_address  # its module loads Flight

    return f"{parts.scheme}://{own_address()}:{parts.port}"


def serving(view: View) -> list[Peer]:
    """Servers that take new requests, with weights of the run's present lineage."""
    return [peer for peer in _there(view) if not peer.address.get("draining")]


def servers_of(view: View) -> list[Server]:
    """All servers with weights of the run's present lineage, as clients know them.

    Nothing new goes to one that drains, nor to one that an evaluation holds back, at a version that others have left:
    what it generated would be staler than its ticket allows for.
    """
    newest = max((peer.address["step"] for peer in serving(view)), default=0)
    return [
        Server(peer.identity.name, peer.identity.incarnation, str(peer.address["url"]), _accepts(peer, newest))
        for peer in _there(view)
    ]


def _there(view: View) -> list[Peer]:
    return [p for p in view.of("inference") if "url" in p.address and p.address.get("lineage") == view.lineage]


def _accepts(peer: Peer, newest: int) -> bool:
    address = peer.address
    return not (address.get("draining") or (address.get("held_back") and address["step"] < newest))
