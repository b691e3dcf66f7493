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
    "config": ["ControlModelConfig"],
    "distributions": [
        "ActionDistribution", "Bernoulli", "Categorical", "DiagonalGaussian", "Distribution", "LeafDistribution",
    ],
    "encoders": ["Encoder"],
    "folder": [
        "CONTROL_SCHEMA_VERSION", "control_model_directory", "load_control_policy", "read_control_form",
        "save_control_policy",
    ],
    "memory": ["RecurrentMemory", "WindowMemory"],
    "policy": [
        "ActionHead", "ControlNetwork", "ControlPolicy", "make_control_policy", "named_arrays", "with_named_arrays",
    ],
}  # fmt: skip

__all__ = [
    "ActionDistribution", "ActionHead", "Bernoulli", "CONTROL_SCHEMA_VERSION", "Categorical", "ControlModelConfig",
    "ControlNetwork", "ControlPolicy", "DiagonalGaussian", "Distribution", "Encoder", "LeafDistribution",
    "RecurrentMemory", "WindowMemory", "control_model_directory", "load_control_policy", "make_control_policy",
    "named_arrays", "read_control_form", "save_control_policy", "with_named_arrays",
]  # fmt: skip

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
