"""The inference servers, as rollout workers, the evaluator and the learner's probe see them."""

from penstock.inference import Server, ServerPool
from penstock.overseer.distributed.records import View
from penstock.overseer.distributed.roles.settings import Settings


def make_pool(settings: Settings) -> ServerPool:
    """A client of the run's inference servers; it knows none yet."""
    return ServerPool(settings.token, request_timeout_s=settings.config.inference.request_timeout_s)


def servers_of(view: View) -> list[Server]:
    """Those that serve weights of the run's present lineage."""
    return [
        Server(peer.identity.name, peer.identity.incarnation, str(peer.address["url"]))
        for peer in view.of("inference")
        if "url" in peer.address and peer.address.get("lineage") == view.lineage
    ]
