"""What can never be placed is refused with the role's field, its number and the cluster's."""

import pytest

from penstock.overseer.config import RoleConfig
from penstock.overseer.launch.launcher import amounts, check_fits
from penstock.overseer.supervisor.messages import Identity
from penstock.types import ConfigError

LEARNER = Identity("learner", 0, 0)
MACHINES = [{"CPU": 4.0, "memory": 1e9}, {"CPU": 2.0, "GPU": 1.0, "big_disk": 1.0}]


def test_amounts_leave_out_what_is_not_asked_for():
    assert amounts(RoleConfig()) == {}
    assert amounts(RoleConfig(num_cpus=1, num_gpus=0.5, resources={"x": 2, "y": 0})) == {"CPU": 1, "GPU": 0.5, "x": 2}


@pytest.mark.parametrize(
    "wanted", [{}, {"num_cpus": 4}, {"num_gpus": 0.25}, {"num_cpus": 2, "num_gpus": 1, "resources": {"big_disk": 1}}]
)
def test_what_fits_is_taken(wanted):
    check_fits(LEARNER, RoleConfig(**wanted), MACHINES, [])


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"num_cpus": 5}, "roles.learner.num_cpus is 5, but no machine of the cluster has more than 4"),
        ({"num_gpus": 2}, "roles.learner.num_gpus is 2, but no machine of the cluster has more than 1"),
        (
            {"resources": {"tape": 1}},
            "roles.learner.resources.tape is 1, but no machine of the cluster has more than 0",
        ),
        ({"num_cpus": 4, "num_gpus": 1}, "roles.learner asks for 4 CPU, 1 GPU, and no single machine"),
    ],
)
def test_what_no_machine_has_is_refused(wanted, words):
    with pytest.raises(ConfigError, match=words):
        check_fits(LEARNER, RoleConfig(**wanted), MACHINES, [])


def test_what_the_others_leave_is_counted():
    check_fits(LEARNER, RoleConfig(num_gpus=0.5), MACHINES, [{"GPU": 0.5}, {"CPU": 4}])
    with pytest.raises(ConfigError, match="of the cluster's 1 the run's other components reserve 0.75: learner-0 has"):
        check_fits(LEARNER, RoleConfig(num_gpus=0.5), MACHINES, [{"GPU": 0.5}, {"GPU": 0.25}])


def test_tenths_add_up():
    check_fits(LEARNER, RoleConfig(num_gpus=0.2), [{"GPU": 1.0}], [{"GPU": 0.4}] * 2)
