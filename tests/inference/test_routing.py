from collections import Counter
from dataclasses import replace

import pytest

from penstock.inference import routing as module
from penstock.inference.routing import PinnedServer, Routing, Server
from penstock.types import WeightVersion

A, B, C = (Server(f"inference-{i}", 0, f"http://h:{i}") for i in range(3))


def make(*servers, most_tokens=1000):
    routing = Routing(most_tokens)
    routing.set_servers(servers)
    return routing


def choose(routing, tokens=10, session=None, target=None, now=0.0):
    return routing.choose(tokens, session, target, now)


def test_the_server_with_the_fewest_outstanding_tokens_is_chosen():
    routing = make(A, B)
    first = choose(routing, 100)
    other = B if first == A else A
    assert [choose(routing, 40) for _ in range(3)] == [other, other, other]  # 40, 80, 120
    assert choose(routing, 1) == first
    assert routing.outstanding == {first.name: 101, other.name: 120}
    routing.release(other, 80)
    assert choose(routing) == other


def test_ties_are_broken_differently_by_different_clients():
    firsts = Counter()
    for salt in range(60):
        routing = Routing(1000, salt)
        routing.set_servers([A, B, C])
        firsts[choose(routing)] += 1
    assert min(firsts[s] for s in (A, B, C)) > 8


def test_idle_servers_take_turns():
    routing = make(A, B, C)
    chosen = []
    for _ in range(6):
        server = choose(routing)
        routing.release(server, 10)
        chosen.append(server)
    assert Counter(chosen) == {A: 2, B: 2, C: 2}


def test_a_session_stays_with_its_server_however_busy_that_is():
    routing = make(A, B)
    home = choose(routing, session="talk")
    assert [choose(routing, 300, session="talk") for _ in range(3)] == [home] * 3
    assert choose(routing, 300, session="other") != home
    assert choose(routing, 300, session="talk") == frozenset({home.name})  # it waits for room there


def test_a_session_moves_when_its_server_is_gone_replaced_or_draining():
    routing = make(A, B)
    home = choose(routing, session="talk")
    other = B if home == A else A
    routing.set_servers([other])
    assert choose(routing, session="talk") == other
    routing.set_servers([A, B])
    assert choose(routing, session="talk") == other, "it has moved for good"
    routing.set_servers([home, Server(other.name, 0, other.url, accepting=False)])
    assert choose(routing, session="talk") == home


def test_the_oldest_sessions_are_forgotten(monkeypatch):
    monkeypatch.setattr(module, "MOST_SESSIONS", 2)
    routing = make(A, B, most_tokens=10**9)
    for name in ("first", "second", "first", "third"):
        choose(routing, session=name)
    assert list(routing._sessions) == ["first", "third"]


def test_a_full_server_is_waited_for_and_an_empty_one_takes_anything():
    routing = make(A, most_tokens=100)
    assert choose(routing, 500) == A  # larger than the limit, but it has nothing
    assert choose(routing, 1) == frozenset({A.name})
    routing.release(A, 500)
    assert choose(routing, 60) == A and choose(routing, 40) == A
    assert choose(routing, 1) == frozenset({A.name})


def test_room_that_an_earlier_request_waits_for_is_left_to_it():
    routing = make(A)
    assert routing.choose(1, None, None, 0.0, frozenset({A.name})) == frozenset({A.name})


def test_a_target_is_the_only_one_even_when_it_accepts_nothing_new():
    draining = Server(A.name, 3, A.url, accepting=False)
    routing = make(draining, B)
    assert [choose(routing, target=PinnedServer(A.name)) for _ in range(3)] == [draining] * 3
    assert choose(routing, target=PinnedServer(A.name, 3)) == draining
    assert choose(routing, target=PinnedServer(A.name, 2)) == frozenset()
    assert routing.is_alive(PinnedServer(A.name, 3)) and not routing.is_alive(PinnedServer(A.name, 2))
    assert {choose(routing, 100) for _ in range(5)} == {B}, "busier, but it accepts"
    choose(routing, session="talk", target=PinnedServer(A.name))
    assert choose(routing, session="talk") == B, "a target is no home"


def test_a_server_that_refused_is_left_alone_twice_as_long_each_time():
    routing, now, pauses = make(A), 0.0, []
    for _ in range(8):
        assert choose(routing, now=now) == A
        routing.refused(A, now)
        routing.refused(A, now)  # another request's refusal at the same moment is no news
        chance = routing.next_chance(now)
        assert chance is not None and choose(routing, now=chance - 1e-6) == frozenset()
        pauses.append(round(chance - now, 6))
        now = chance
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


def test_after_a_pause_one_request_tries_and_the_others_follow_when_it_was_served():
    routing = make(A)
    choose(routing)
    routing.refused(A, 0.0)
    assert choose(routing, now=0.05) == A
    assert choose(routing, now=0.05) == frozenset()
    routing.served(A)
    assert choose(routing, now=0.05) == A and routing.next_chance(0.05) is None


def test_requests_go_elsewhere_while_a_server_is_left_alone_but_a_session_waits():
    routing = make(A, B)
    home = choose(routing, session="talk")
    other = B if home == A else A
    routing.refused(home, 0.0)
    assert choose(routing, 500, now=0.01) == other and choose(routing, 1, now=0.01) == other
    assert choose(routing, session="talk", now=0.01) == frozenset()
    assert choose(routing, session="talk", now=0.06) == home


def test_a_session_leaves_a_server_that_failed():
    routing = make(A, B)
    home = choose(routing, session="talk")
    routing.failed(home, 0.0)
    moved = choose(routing, session="talk", now=0.01)
    assert moved != home
    assert choose(routing, session="talk", now=99.0) == moved


def test_a_failure_counts_although_the_server_was_refusing():
    routing = make(A, B)
    home = choose(routing, session="talk")
    routing.refused(home, 0.0)
    routing.failed(home, 0.01)
    assert choose(routing, session="talk", now=0.02) != home


def test_a_newer_version_ends_what_refusals_asked_for_but_not_what_failures_did():
    """A server that is behind turns requests away until it is known to have the version."""
    routing = make(A, B)
    for server in (A, B):
        routing.refused(server, 0.0)
    routing.failed(B, 0.0)
    assert choose(routing, target=PinnedServer(A.name)) == frozenset()
    routing.set_servers([A, B])
    assert choose(routing, target=PinnedServer(A.name)) == frozenset()  # nothing is new
    routing.set_servers([replace(server, version=WeightVersion(0, 1)) for server in (A, B)])
    assert choose(routing, target=PinnedServer(A.name)) == A
    assert choose(routing, target=PinnedServer(B.name)) == frozenset()


def test_a_new_incarnation_begins_with_a_clean_slate():
    routing = make(A)
    choose(routing, 900)
    routing.failed(A, 0.0)
    reborn = Server(A.name, 1, A.url)
    assert routing.set_servers([reborn]) == [A]
    assert choose(routing, 900) == reborn
    routing.release(A, 900)  # the dead one's request ends late
    routing.failed(A, 0.0)
    assert routing.outstanding == {A.name: 900} and routing.next_chance(0.0) is None


def test_the_same_list_again_changes_nothing():
    routing = make(A, B)
    choose(routing, 7)
    assert routing.set_servers([B, A]) == [] and sum(routing.outstanding.values()) == 7
    assert routing.servers == (A, B)


@pytest.mark.parametrize("server", [Server("inference-0", 4, "u")])
def test_a_server_is_told_by_name_and_incarnation(server):
    assert str(server) == "inference-0#4"
