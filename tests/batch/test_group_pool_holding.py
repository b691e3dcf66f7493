import pytest
from tests.batch.conftest import small_group

from penstock.batch.group_pool import GroupTable, ticket_order
from penstock.batch.maker import Unit, check_choice, uses_limit
from penstock.types import ConfigError, InvalidRolloutError


def test_a_resumed_cohort_keeps_its_order():
    """Reissued tickets carry the new lineage; what was sealed before carries the old one."""
    assert sorted(["a-1-3", "a-0-4", "a-1-12", "a-0-11"], key=ticket_order) == ["a-1-3", "a-0-4", "a-0-11", "a-1-12"]
    assert ticket_order("le-ss-on-2-7") == ("le-ss-on", 7, 2)
    assert ticket_order("free text") == ("free text", 0, 0)


def test_a_bound_maker_refuses_other_environments_by_name():
    held = GroupTable(8, environment_name="cats")
    held.add(small_group("a-0-0", [0.0], env="cats")[0])
    with pytest.raises(InvalidRolloutError, match="a-0-0/0 is of environment 'dogs', .* takes 'cats' only"):
        held.add(small_group("a-0-0", [0.0], env="dogs")[0])
    assert len(held) == 1


def test_groups_that_were_discarded_do_not_arrive():
    held = GroupTable(8)
    for group_id in ("a-0-0", "a-0-1"):
        for rollout in small_group(group_id):
            held.add(rollout)
    assert held.discard("a-0-0/0") is None
    gone = held.discard("a-0-0/1")
    assert gone is not None and gone.group_id == "a-0-0"
    assert [group.group_id for group in held.arrived()] == ["a-0-1"]
    assert held.arrived() == [] and len(held) == 1


@pytest.mark.parametrize("value", [0, -2])
def test_max_samples_is_checked(value):
    with pytest.raises(ConfigError, match=f"max_samples is {value}: it must be at least 1, or -1"):
        uses_limit(value)


def test_no_limit_is_infinite():
    assert uses_limit(-1) == float("inf") and uses_limit(3) == 3


def test_a_choice_is_checked():
    check_choice("unit", "group", Unit)
    with pytest.raises(ConfigError, match="unit is 'groups': it must be one of group, rollout"):
        check_choice("unit", "groups", Unit)
