import jax.numpy as jnp
import pytest

from penstock.model.control import named_arrays, with_named_arrays
from penstock.types import WeightsError


def test_names_are_paths_and_arrays_go_by_reference(make_policy):
    policy = make_policy(memory="gru")
    arrays = named_arrays(policy)
    assert list(arrays) == [
        "encoder.mlp.layers.0.weight", "encoder.mlp.layers.0.bias", "encoder.mlp.layers.1.weight",
        "encoder.mlp.layers.1.bias", "memory.gates.weight", "memory.gates.bias", "memory.recurrent",
        "memory.candidate_bias", "heads.0.dense.weight", "heads.0.dense.bias", "value_head.weight", "value_head.bias",
    ]  # fmt: skip
    assert arrays["memory.recurrent"] is policy.memory.recurrent


def test_arrays_make_a_policy_again(make_policy):
    source, target = make_policy(seed=1), make_policy(seed=2)
    filled = with_named_arrays(target, named_arrays(source))
    assert all(a is b for a, b in zip(named_arrays(filled).values(), named_arrays(source).values(), strict=True))
    assert (target.value_head.weight != source.value_head.weight).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("value_head.bias"), "value_head.bias is missing"),
        (lambda a: a.update(extra=jnp.ones(1)), "extra is unknown"),
        (lambda a: a.update({"value_head.bias": jnp.ones(2)}), r"value_head.bias is float32\[2\], not float32\[1\]"),
        (lambda a: a.update({"value_head.bias": jnp.ones(1, jnp.int32)}), r"is int32\[1\], not float32\[1\]"),
        (lambda a: a.clear(), "and 3 more"),
    ],
)
def test_arrays_that_do_not_fit_are_named(make_policy, change, message):
    policy = make_policy()
    arrays = named_arrays(policy)
    change(arrays)
    with pytest.raises(WeightsError, match=message):
        with_named_arrays(policy, arrays)
