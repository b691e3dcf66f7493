from typing import Any

from penstock.overseer.language.rollout import servers_of, serving
from penstock.overseer.supervisor.messages import Identity, Membership, Peer


def peer(index: int, step: int, **address: Any) -> Peer:
    told = {"url": f"http://host:{index}", "lineage": 1, "step": step, **address}
    return Peer(Identity("inference", index, 0), told)


def accepting(*peers: Peer) -> dict[int, bool]:
    return {int(server.name[-1]): server.accepting for server in servers_of(Membership(1, 1, peers))}


def test_those_of_the_present_lineage_are_known_once_they_have_weights():
    silent = Peer(Identity("inference", 3, 0), {})
    assert accepting(peer(0, 4), peer(1, 5), peer(2, 4, lineage=0), silent) == {0: True, 1: True}


def test_one_that_drains_is_known_and_takes_nothing_new():
    draining, other = peer(0, 4, draining=True), peer(1, 4)
    assert accepting(draining, other) == {0: False, 1: True}
    assert serving(Membership(1, 1, (draining, other))) == [other]
    assert accepting(draining) == {0: False}


def test_one_that_is_held_back_takes_nothing_new_once_another_went_on():
    assert accepting(peer(0, 4, held_back=True), peer(1, 4)) == {0: True, 1: True}
    assert accepting(peer(0, 4, held_back=True), peer(1, 5)) == {0: False, 1: True}
    assert accepting(peer(0, 4, held_back=True)) == {0: True}
    assert accepting(peer(0, 4, held_back=True), peer(1, 5, draining=True)) == {0: True, 1: False}
