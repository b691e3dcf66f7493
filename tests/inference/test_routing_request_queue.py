import asyncio
import time

import pytest

from penstock.inference.routing import PinnedServer, RequestQueue, Routing, Server
from penstock.types import UnreachableError

A, B = (Server(f"inference-{i}", 0, f"http://h:{i}") for i in range(2))
LIMIT_S = 280.0


def run(scenario, *servers, most_tokens=100):
    """Runs a scenario over a queue, within a limit."""

    async def limited():
        routing = Routing(most_tokens)
        routing.set_servers(servers)
        async with asyncio.timeout(LIMIT_S):
            await scenario(RequestQueue(routing, time.monotonic), routing)

    asyncio.run(limited())


def ask(queue, number, tokens, session=None, target=None):
    return asyncio.ensure_future(queue.admit(number, tokens, session, target))


async def settle():
    """Lets everything run that can without anything new happening."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_request_waits_for_room_and_its_waiting_is_counted():
    async def scenario(queue, routing):
        assert await queue.admit(0, 100, None, None) == A
        waiting = ask(queue, 1, 50)
        await settle()
        assert not waiting.done() and queue.length == 1 and queue.waited_s > 0
        queue.release(A, 100)
        assert await waiting == A
        assert queue.length == 0 and routing.outstanding == {A.name: 50}

    run(scenario, A)


def test_a_large_request_is_not_overtaken_by_small_ones():
    async def scenario(queue, routing):
        await queue.admit(0, 60, None, None)
        large, small = ask(queue, 1, 80), ask(queue, 2, 10)
        await settle()
        assert not large.done() and not small.done(), "there is room for the small one, but it came later"
        queue.release(A, 60)
        assert (await large, await small) == (A, A)

    run(scenario, A)


def test_one_that_waits_for_its_sessions_server_holds_up_nobody_elsewhere():
    async def scenario(queue, routing):
        home = await queue.admit(0, 90, "talk", None)
        waiting = ask(queue, 1, 90, "talk")
        other = await queue.admit(2, 90, None, None)
        assert other != home and not waiting.done()
        waiting.cancel()

    run(scenario, A, B)


def test_an_older_request_that_comes_back_goes_first():
    async def scenario(queue, routing):
        await queue.admit(0, 100, None, None)
        young, old = ask(queue, 7, 100), ask(queue, 3, 100)
        await settle()
        queue.release(A, 100)
        await settle()
        assert old.done() and not young.done()
        young.cancel()

    run(scenario, A)


def test_a_request_waits_for_the_first_server():
    async def scenario(queue, routing):
        waiting = ask(queue, 0, 1)
        await settle()
        assert not waiting.done()
        routing.set_servers([B])
        queue.servers_changed()
        assert await waiting == B

    run(scenario)


def test_a_server_that_is_left_alone_is_tried_again_by_itself():
    async def scenario(queue, routing):
        routing.refused(A, time.monotonic())
        assert await queue.admit(0, 1, None, None) == A

    run(scenario, A)


def test_a_cancelled_request_leaves_no_trace():
    async def scenario(queue, routing):
        await queue.admit(0, 100, None, None)
        waiting = ask(queue, 1, 100)
        await settle()
        queue.release(A, 100)  # found, but not told yet
        waiting.cancel()
        await settle()
        assert waiting.cancelled() and routing.outstanding == {A.name: 0} and queue.length == 0

    run(scenario, A)


def test_an_incarnation_that_does_not_live_fails_those_who_want_no_other():
    async def scenario(queue, routing):
        await queue.admit(0, 100, None, None)
        waiting = ask(queue, 1, 100, target=PinnedServer(A.name, 0))
        patient = ask(queue, 2, 100, target=PinnedServer(A.name))
        await settle()
        reborn = Server(A.name, 1, A.url)
        routing.set_servers([reborn])
        queue.servers_changed()
        with pytest.raises(UnreachableError, match="inference-0#0 does not live"):
            await waiting
        assert await patient == reborn
        with pytest.raises(UnreachableError):
            await queue.admit(3, 1, None, PinnedServer(A.name, 0))

    run(scenario, A)
