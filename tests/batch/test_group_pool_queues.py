from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batch.group_pool import SLACK, DeadlineQueue, FirstUseQueue, OrderedGroups, PooledGroup


def held(order: int) -> PooledGroup:
    return PooledGroup(f"g{order}", order, [])


def orders(groups: list[PooledGroup]) -> list[int]:
    return [group.order for group in groups]


def test_a_line_gives_the_smallest_key_and_skips_who_left():
    line, groups = OrderedGroups(), [held(order) for order in range(4)]
    for group in (groups[2], groups[0], groups[3], groups[1]):
        line.join(group, group.order)
    line.leave(groups[1])
    assert len(line) == 3
    assert orders([line.pop() for _ in range(3)]) == [0, 2, 3]
    assert groups[0].line is None


def test_a_line_does_not_grow_with_those_who_left():
    line = OrderedGroups()
    for order in range(2000):
        group = held(order)
        line.join(group, order)
        if order % 100:
            line.leave(group)
    assert len(line) == 20 and len(line._heap) <= 2 * 20 + SLACK + 1
    assert orders([line.pop() for _ in range(20)]) == list(range(0, 2000, 100))


def test_a_line_that_was_swept_keeps_its_order():
    """512 in an order that is far from sorted, of which one in four stays."""
    line, groups = OrderedGroups(), [held(order) for order in range(512)]
    for place in range(512):
        line.join(groups[place * 155 % 512], place * 155 % 512)
    for group in groups:
        if group.order % 4:
            line.leave(group)
    assert len(line._heap) < 512
    assert orders([line.pop() for _ in range(128)]) == list(range(0, 512, 4))


def test_due_groups_come_by_age_and_deadlines_only_come_nearer():
    deadlines, groups = DeadlineQueue(), [held(order) for order in range(5)]
    for group, step in zip(groups, [7, 5, 9, 5, 6], strict=True):
        deadlines.set(group, step)
    deadlines.set(groups[2], 4)
    deadlines.set(groups[0], 9)
    deadlines.clear(groups[3])
    assert orders(deadlines.pop_due(6)) == [1, 2, 4]
    assert deadlines.pop_due(6) == []
    assert orders(deadlines.pop_due(7)) == [0] and deadlines.pop_due(10_000) == []


def test_deadlines_do_not_grow_with_those_who_left():
    deadlines = DeadlineQueue()
    for order in range(2000):
        group = held(order)
        deadlines.set(group, 10_000 + order)
        deadlines.clear(group)
    assert not deadlines._by_step


def test_a_deadline_that_is_given_again_counts_once():
    deadlines, group = DeadlineQueue(), held(0)
    for step in (9, 5):
        deadlines.set(group, step)
    assert deadlines.pop_due(5) == [group]
    deadlines.set(group, 9)
    assert deadlines.pop_due(9) == [group] and deadlines.pop_due(9) == []


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["set", "due", "pop", "leave"]), st.integers(0, 9), st.integers(0, 12))))
def test_first_uses_agree_with_a_dictionary(operations):
    queue, groups, model = FirstUseQueue(), {order: held(order) for order in range(10)}, {}
    for number, (operation, which, step) in enumerate(operations):
        order = sorted(groups)[which]
        gone: list[int] = []
        if operation == "set":
            queue.set_deadline(groups[order], step)
            model[order] = min(step, model.get(order, step))
        elif operation == "leave":
            queue.leave(groups[order])
            gone = [order]
        elif operation == "due":
            gone = sorted(order for order, deadline in model.items() if deadline <= step)
            assert orders(queue.pop_due(step)) == gone
        elif model:
            gone = [min(model)]
            assert queue.pop().order == gone[0]
        for order in gone:
            model.pop(order, None)
            assert groups.pop(order).deadline_step is None
            groups[order + 10 * (number + 1)] = held(order + 10 * (number + 1))  # who left does not come back
        assert len(queue) == len(model)
        assert {order: g.deadline_step for order, g in groups.items() if g.deadline_step is not None} == model
