"""Pools of inference servers, requests for them, and threads that ask; for fixtures."""

import json
from concurrent.futures import ThreadPoolExecutor

from penstock.inference import ServerPool
from penstock.inference.codec import MalformedAnswer, ServerRequest

WAIT_S = 280.0


def pools():
    """Makes pools, which are closed at the end."""
    made = []

    def make(*servers, **settings):
        pool = ServerPool(**({"request_timeout_s": WAIT_S} | settings))
        made.append(pool)
        pool.set_servers(servers)
        return pool

    yield make
    for pool in made:
        pool.close()


def in_threads():
    """Runs something in another thread; its result is a future."""
    with ThreadPoolExecutor(16) as threads:
        yield threads.submit


def read(content):
    choices = json.loads(content)["choices"]
    if not choices:
        raise MalformedAnswer("it holds no choices")
    return [choice["token_ids"][0] for choice in choices]


def request(seed=1, tokens=10):
    body = json.dumps({"seeds": [seed], "n": 1}).encode()
    return ServerRequest(body, tokens, read)


def metric(pool, name):
    return pool.metrics()[f"inference_client/{name}"]
