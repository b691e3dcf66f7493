import pytest

from penstock.overseer.supervisor.scaling import MOST_OF_A_ROLE, SpecMaker, size_changes
from penstock.types import ConfigError
from tests.overseer.supervisor.world import spec


def makers(least: int = 1) -> dict[str, tuple[SpecMaker, int]]:
    return {"rollout": (lambda index: spec(f"rollout-{index}"), least)}


@pytest.mark.parametrize(
    ("wanted", "staying", "taken", "come", "go"),
    [
        (3, {0, 1, 2}, {0, 1, 2}, [], []),
        (5, {0, 1, 2}, {0, 1, 2}, [3, 4], []),
        (4, {0, 3}, {0, 1, 3}, [2, 4], []),
        (1, {0, 1, 2}, {0, 1, 2}, [], [2, 1]),
        (1, {2, 7}, {2, 7}, [], [7]),
    ],
)
def test_who_comes_and_who_goes(wanted, staying, taken, come, go):
    more, fewer = size_changes(makers(), "rollout", wanted, staying, taken)
    assert [component.index for component in more] == come and fewer == go


@pytest.mark.parametrize(("least", "wanted"), [(1, 0), (2, 1), (1, MOST_OF_A_ROLE + 1)])
def test_numbers_outside_of_the_limits_are_refused(least, wanted):
    with pytest.raises(ConfigError, match=f"rollout={wanted} is outside of {least} to {MOST_OF_A_ROLE}"):
        size_changes(makers(least), "rollout", wanted, {0, 1}, {0, 1})


def test_a_role_that_cannot_be_scaled_is_refused():
    with pytest.raises(ConfigError, match="the role 'learner' cannot be scaled in this run; those that can: rollout"):
        size_changes(makers(), "learner", 2, {0}, {0})
