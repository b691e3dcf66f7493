"""The tree: who fetches from whom, and what becomes of places that are not used."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.weights.flight_tree import ROOT, DistributionTree


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def make(fanout, clock=None):
    tree = DistributionTree(fanout, lease_s=10.0, forget_s=60.0, clock=clock or Clock())
    tree.start(1)
    return tree


def test_the_root_gives_so_many_copies_and_then_clients_give():
    tree = make(2)
    assert [tree.parent(1, name) for name in "abc"] == [ROOT, ROOT, None]
    assert tree.finished(1, "a", "host:1")
    assert [tree.parent(1, name) for name in "cde"] == ["host:1", "host:1", None]
    assert tree.finished(1, "c", "host:3")
    assert tree.parent(1, "e") == "host:3"


def test_children_go_to_the_parent_that_has_fewest():
    tree = make(2)
    assert [tree.parent(1, name) for name in "ab"] == [ROOT, ROOT]
    tree.finished(1, "a", "host:1")
    assert tree.parent(1, "c") == "host:1"
    tree.finished(1, "b", "host:2")
    assert [tree.parent(1, name) for name in "def"] == ["host:2", "host:1", "host:2"]


def test_asking_again_gives_the_same_place():
    tree = make(1)
    assert tree.parent(1, "a") == ROOT == tree.parent(1, "a")
    assert tree.parent(1, "b") is None


def test_a_client_whose_parent_failed_goes_to_the_root_and_the_parent_gets_no_more():
    tree = make(2)
    tree.parent(1, "a")
    tree.finished(1, "a", "host:1")
    assert tree.parent(1, "b") == "host:1"
    tree.failed(1, "b")
    assert tree.parent(1, "b") == ROOT
    assert tree.parent(1, "c") is None  # host:1 has a place, but it failed
    tree.finished(1, "b", "host:2")
    assert tree.parent(1, "c") == "host:2"


def test_a_place_at_the_root_that_failed_is_given_anew():
    tree = make(1)
    assert tree.parent(1, "a") == ROOT
    tree.failed(1, "a")
    assert tree.parent(1, "b") == ROOT


def test_a_client_that_is_silent_loses_its_place():
    clock = Clock()
    tree = make(1, clock)
    assert tree.parent(1, "a") == ROOT
    clock.now += 9.9
    assert tree.parent(1, "b") is None
    clock.now += 0.2
    assert tree.parent(1, "b") == ROOT


def test_a_client_that_fetches_slowly_keeps_its_place():
    clock = Clock()
    tree = make(1, clock)
    assert tree.parent(1, "a") == ROOT
    for _ in range(5):
        clock.now += 9.0
        tree.moves("a")
    assert tree.parent(1, "b") is None and tree.clients == 1
    tree.moves("stranger")  # has no place
    clock.now += 10.1
    assert tree.parent(1, "b") == ROOT


def test_with_nobody_under_way_the_root_serves_beyond_its_number():
    tree = make(1)
    assert tree.parent(1, "a") == ROOT
    assert tree.finished(1, "a", None)  # it serves nobody
    assert tree.parent(1, "b") == ROOT


def test_a_new_version_begins_a_new_tree():
    tree = make(1)
    tree.parent(1, "a")
    tree.finished(1, "a", "host:1")
    tree.start(2)
    assert tree.parent(2, "b") == ROOT
    assert not tree.finished(1, "c", "host:3")  # of the version before
    assert tree.parent(2, "d") is None
    assert tree.parent(1, "e") == ROOT  # which says that it is superseded


def test_clients_are_counted_while_they_are_heard_of():
    clock = Clock()
    tree = make(1, clock)
    tree.note("a")
    assert (tree.clients, tree.has_relays, tree.knows("a")) == (1, False, True)
    tree.note("b")
    assert (tree.clients, tree.has_relays) == (2, True)
    clock.now += 61.0
    assert (tree.clients, tree.knows("a")) == (0, False)


@given(
    st.integers(1, 4), st.lists(st.tuples(st.sampled_from("ask finish fail".split()), st.integers(0, 30)), max_size=120)
)
def test_without_failures_nobody_gives_more_than_its_number_and_all_are_served(fanout, events):
    tree, gave, fetching, done = make(fanout), {}, {}, set()
    for kind, number in events:
        client = f"c{number}"
        if client in done:
            continue
        if kind == "finish" and client in fetching:
            del fetching[client]
            done.add(client)
            tree.finished(1, client, f"host:{number}")
        elif client not in fetching and (parent := tree.parent(1, client)) is not None:
            fetching[client] = parent
            gave[parent] = gave.get(parent, 0) + 1
            assert parent == ROOT or f"c{parent[5:]}" in done
    assert all(count <= fanout for count in gave.values())
    assert fetching or tree.parent(1, "last") is not None
