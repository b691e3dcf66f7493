"""Whether the machines of a cluster have what a component asks for: said at once, instead of waited for in vain."""

from collections.abc import Mapping, Sequence

from penstock.overseer.config import RoleConfig
from penstock.overseer.distributed.records import Identity
from penstock.types import ConfigError

Amounts = Mapping[str, float]
"""Resources by the names that Ray gives them: ``CPU``, ``GPU``, and custom ones."""

_FIELDS = {"CPU": "num_cpus", "GPU": "num_gpus"}


def amounts(wanted: RoleConfig) -> dict[str, float]:
    """What a role's component reserves."""
    named = {"CPU": wanted.num_cpus, "GPU": wanted.num_gpus, **wanted.resources}
    return {name: amount for name, amount in named.items() if amount > 0}


def check_fits(
    identity: Identity, wanted: RoleConfig, machines: Sequence[Amounts], reserved: Sequence[Amounts]
) -> None:
    """Looks whether a component can be placed at all.

    That all together fit does not mean that they can be packed: what is reserved is compared with the cluster's sums
    only.

    Args:
        identity: Whose.
        wanted: Of its role.
        machines: What each living machine has in all.
        reserved: What each of the run's other components has reserved.

    Raises:
        ConfigError: no machine has so much, or the others leave too little.
    """
    asked = amounts(wanted)
    for name, amount in asked.items():
        field = f"roles.{identity.role}.{_field(name)}"
        largest = max((machine.get(name, 0.0) for machine in machines), default=0.0)
        if amount > largest:
            raise ConfigError(
                f"{field} is {amount:g}, but no machine of the cluster has more than {largest:g}: "
                "ask for less, or start Ray on a machine that has it"
            )
        total = sum(machine.get(name, 0.0) for machine in machines)
        taken = sum(other.get(name, 0.0) for other in reserved)
        if amount > total - taken + 1e-6:
            raise ConfigError(
                f"{field} is {amount:g}, but of the cluster's {total:g} the run's other components reserve {taken:g}: "
                f"{identity.name} has no room; ask for less, start fewer, or add machines"
            )
    if asked and not any(
        all(machine.get(name, 0.0) >= amount for name, amount in asked.items()) for machine in machines
    ):
        words = ", ".join(f"{amount:g} {name}" for name, amount in asked.items())
        raise ConfigError(
            f"roles.{identity.role} asks for {words}, and no single machine of the cluster has all of it: "
            "ask for less, or start Ray on a machine that has it"
        )


def _field(name: str) -> str:
    return _FIELDS.get(name, f"resources.{name}")
