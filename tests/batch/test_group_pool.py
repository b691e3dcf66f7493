import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.batch.conftest import small_group

from penstock.batch.group_pool import SLACK, DrawPool, PooledGroup


def held(number: int, width: int) -> PooledGroup:
    return PooledGroup(f"g{number}", number, list(small_group(f"g{number}", [float(i) for i in range(width)])))


@given(
    st.booleans(),
    st.lists(
        st.tuples(
            st.sampled_from(["place", "hidden", "remove", "use", "show", "close up"]),
            st.integers(0, 99),
            st.integers(1, 4),
        ),
        min_size=5,
        max_size=60,
    ),
)
def test_a_pool_agrees_with_a_list(by_member, operations):
    """Units stay in order of arrival, with their own uses and advantages, however often places are closed up."""
    pool, model = DrawPool(by_member), []  # model: [group, member or None, drawable, uses, advantage]
    for number, (operation, which, width) in enumerate(operations):
        if operation in ("place", "hidden"):
            group = held(number, width)
            units = list(group.members) if by_member else [None]
            advantages = np.arange(len(units), dtype=np.float32) + number
            pool.place(group, operation == "place", advantages)
            model += [[group, unit, operation == "place", 0, number + i] for i, unit in enumerate(units)]
        elif model:
            unit = model[which % len(model)]
            slot = pool.slots(unit[0])[[u for u in model if u[0] is unit[0]].index(unit)]
            if operation == "remove":
                pool.remove([slot])
                model.remove(unit)
            elif operation == "close up":
                pool._close_up()
            elif operation == "use":
                unit[3] += 1
                assert pool.count_use(slot) == unit[3]
            else:
                pool.set_drawable([slot], bool(which % 2))
                unit[2] = bool(which % 2)
        assert pool.units == len(model) and len(pool) == sum(unit[2] for unit in model)
        found = []
        for slot in pool.select(range(len(pool))):
            group = pool.owner(slot)
            member = group.members[slot - group.first_slot] if by_member else None
            found.append([group, member, True, pool.uses(slot), pool.advantage(slot)])
        assert found == [unit for unit in model if unit[2]]


def test_empty_places_are_closed_up():
    pool = DrawPool(by_member=True)
    for number in range(500):
        group = held(number, 2)
        pool.place(group, True)
        pool.remove(pool.slots(group))
    assert pool.units == 0 and len(pool._owners) <= SLACK + 2
