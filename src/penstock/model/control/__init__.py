"""Control policies: networks that act in simulators, their distributions, and their folders."""

from typing import TYPE_CHECKING

from penstock.types.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from penstock.model.control.config import ControlModelConfig
    from penstock.model.control.distributions import (
        ActionDistribution,
        Bernoulli,
        Categorical,
        DiagonalGaussian,
        Distribution,
        LeafDistribution,
    )
    from penstock.model.control.encoders import Encoder
    from penstock.model.control.folder import (
        CONTROL_SCHEMA_VERSION,
        control_model_directory,
        load_control_policy,
        read_control_form,
        save_control_policy,
    )
    from penstock.model.control.memory import RecurrentMemory, WindowMemory
    from penstock.model.control.policy import (
        ActionHead,
        ControlNetwork,
        ControlPolicy,
        make_control_policy,
        named_arrays,
        with_named_arrays,
    )

_EXPORTS = {
    "ActionDistribution": "distributions",
    "ActionHead": "policy",
    "Bernoulli": "distributions",
    "CONTROL_SCHEMA_VERSION": "folder",
    "Categorical": "distributions",
    "ControlModelConfig": "config",
    "ControlNetwork": "policy",
    "ControlPolicy": "policy",
    "DiagonalGaussian": "distributions",
    "Distribution": "distributions",
    "Encoder": "encoders",
    "LeafDistribution": "distributions",
    "RecurrentMemory": "memory",
    "WindowMemory": "memory",
    "control_model_directory": "folder",
    "load_control_policy": "folder",
    "make_control_policy": "policy",
    "named_arrays": "policy",
    "read_control_form": "folder",
    "save_control_policy": "folder",
    "with_named_arrays": "policy",
}

__all__ = [
    "ActionDistribution", "ActionHead", "Bernoulli", "CONTROL_SCHEMA_VERSION", "Categorical", "ControlModelConfig",
    "ControlNetwork", "ControlPolicy", "DiagonalGaussian", "Distribution", "Encoder", "LeafDistribution",
    "RecurrentMemory", "WindowMemory", "control_model_directory", "load_control_policy", "make_control_policy",
    "named_arrays", "read_control_form", "save_control_policy", "with_named_arrays",
]  # fmt: skip

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
