import pytest
from pydantic import ValidationError

from penstock.model.control import ControlModelConfig


def test_the_defaults_are_a_small_mlp_without_memory():
    config = ControlModelConfig()
    assert (config.network, config.hidden_sizes, config.memory) == ("mlp", (64, 64), "none")
    assert ControlModelConfig.model_validate(config.model_dump(mode="json")) == config
    assert hash(config) == hash(ControlModelConfig())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"memory": "transformer", "memory_size": 30}, "memory_size is 30, no multiple of memory_heads = 4"),
        ({"memory": "gru", "memory_layers": 2}, "memory_layers is 2, but memory is 'gru'"),
        ({"memory": "lstm", "value_network": "separate"}, "set value_network: shared, or memory: none"),
        ({"log_std_range": (1.0, 1.0)}, "first number must be less than its second"),
        ({"initial_log_std": 3.0}, "outside log_std_range"),
        ({"hidden_sizes": ()}, "hidden_sizes"),
        ({"hidden_sizes": (64, 0)}, "hidden_sizes"),
        ({"network": "resnet"}, "network"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"sizes": 3}, "sizes"),
        ({"policy_gain": float("inf")}, "policy_gain"),
        ({"value_gain": float("inf")}, "value_gain"),
    ],
)
def test_what_does_not_fit_is_named(fields, message):
    with pytest.raises(ValidationError, match=message):
        ControlModelConfig(**fields)
