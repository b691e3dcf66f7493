"""Simulators of one fleet share the form of their arrays."""

from dataclasses import replace

import pytest

from penstock.fleet.pool import SpaceCheck
from penstock.types import ConfigError, LeafSpace, RunFailed, Spaces

_SPACES = Spaces((LeafSpace("x", "box", (2,), "float32", low=0.0),), (LeafSpace("", "discrete", (), "int64", n=(3,)),))


def test_bounds_and_starts_may_differ_but_no_array():
    agreed = SpaceCheck()
    with pytest.raises(RunFailed, match="start the pool first"):
        _ = agreed.spaces
    agreed.adopt("a", _SPACES)
    agreed.adopt("b", replace(_SPACES, observations=(replace(_SPACES.observations[0], low=-1.0),)))
    agreed.adopt("a", _SPACES)
    assert agreed.spaces is _SPACES and agreed.tasks == ["a", "b"]
    with pytest.raises(ConfigError, match=r"task 'c' has actions .*\(4,\).* of task 'a'"):
        agreed.adopt("c", replace(_SPACES, actions=(replace(_SPACES.actions[0], n=(4,)),)))
    with pytest.raises(ConfigError, match="task 'd' has observations"):
        agreed.adopt("d", replace(_SPACES, observations=(replace(_SPACES.observations[0], dtype="uint8"),)))
    agreed.close()
    agreed.adopt("e", replace(_SPACES, actions=()))  # whoever closes all others must not be kept from it
    assert agreed.tasks == ["a", "b", "c", "d"]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_bounds_of_64_bit_integers_are_those_of_all_tasks(order):
    def of(low, high, dtype="int64"):
        return replace(_SPACES, observations=(LeafSpace("x", "box", (2,), dtype, low=low, high=high),))

    tasks, agreed = (of(0, 9), of(-1, 5)), SpaceCheck()
    for number in order:
        agreed.adopt(f"task {number}", tasks[number])
    assert agreed.spaces == of(-1, 9)
    agreed.adopt("unbounded", of(None, 5))
    assert agreed.spaces == of(None, None)
    others = SpaceCheck()
    others.adopt("a", of(0, 9, "int32"))
    others.adopt("b", of(-1, 5, "int32"))
    assert others.spaces == of(0, 9, "int32"), "others need none"


def test_a_policy_fits_where_names_shapes_and_choices_are_the_same():
    lower = replace(_SPACES, observations=(replace(_SPACES.observations[0], low=-1.0),))
    assert _SPACES.same_form(lower) and _SPACES.differences(lower) == ""
    assert not _SPACES.same_form(replace(_SPACES, actions=(replace(_SPACES.actions[0], n=(4,)),)))
    assert not _SPACES.same_form(replace(_SPACES, observations=(replace(_SPACES.observations[0], name="y"),)))
