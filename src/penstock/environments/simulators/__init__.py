"""Simulators: Gymnasium environments by id, the built-in ones, and adapters of engines that have an API of their own.

What a fleet steps (`penstock.fleet`), each in a process of its own. Nothing here imports JAX, and no engine is imported
before it is asked for. Not covered: processes, deadlines and restarts.
"""

from typing import TYPE_CHECKING

from penstock.types.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from penstock.environments.simulators.memory import MemorySimulator
    from penstock.environments.simulators.registry import import_simulator, make_simulator, simulator_ids
    from penstock.environments.simulators.synthetic import SyntheticError, SyntheticSimulator

_EXPORTS = {
    "memory": ["MemorySimulator"],
    "registry": ["import_simulator", "make_simulator", "simulator_ids"],
    "synthetic": ["SyntheticError", "SyntheticSimulator"],
}

__all__ = [
    "MemorySimulator", "SyntheticError", "SyntheticSimulator", "import_simulator", "make_simulator",
    "simulator_ids",
]  # fmt: skip

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
