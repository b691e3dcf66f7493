import json

import jax
import numpy as np
import pytest

from penstock.model.control import ControlModelConfig, load_control_policy, named_arrays, save_control_policy
from penstock.types import CheckpointError, ConfigError, LeafSpace, SchemaVersionError

BOUNDED = LeafSpace("push", "box", (), "float32", low=-1.0, high=1.0)


@pytest.fixture
def policy(make_policy):
    return make_policy(actions=(BOUNDED, LeafSpace("turn", "discrete", (), "int64", (3,))), memory="lstm")


@pytest.fixture
def folder(policy, tmp_path):
    save_control_policy(tmp_path / "model", policy, policy.config, policy.spaces)
    return tmp_path / "model"


def test_a_policy_is_read_as_it_was_written(policy, folder):
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    loaded = load_control_policy(folder)
    assert (loaded.config, loaded.spaces) == (policy.config, policy.spaces)
    assert jax.tree.structure(loaded) == jax.tree.structure(policy)
    for name, array in named_arrays(policy).items():
        np.testing.assert_array_equal(named_arrays(loaded)[name], array)


def test_the_config_says_what_it_is(folder):
    content = json.loads((folder / "config.json").read_text())
    assert (content["kind"], content["schema_version"]) == ("penstock.control_policy", 1)
    assert content["model"]["memory"] == "lstm" and content["spaces"]["actions"][0]["high"] == 1.0


def rewrite(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_newer_schema_is_refused(folder):
    rewrite(folder, schema_version=2)
    with pytest.raises(SchemaVersionError, match="schema version 2, this Penstock reads up to 1"):
        load_control_policy(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "llama"}, "kind is 'llama'.* no control policy"),
        ({"schema_version": "1"}, "schema_version is '1'"),
        ({"model": {"memory": "ram"}}, "model.memory: Input should be"),
        ({"model": {"hidden_sizes": [4]}}, "does not fit its config.json"),
        ({"spaces": {"observations": []}}, "these are no spaces"),
    ],
)
def test_a_config_that_is_wrong_says_where(folder, changes, message):
    rewrite(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_control_policy(folder)


def test_missing_and_torn_files_are_named(folder):
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-8])
    with pytest.raises(CheckpointError, match="model.safetensors cannot be read"):
        load_control_policy(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="holds no config.json"):
        load_control_policy(folder)


def test_another_config_than_the_policys_is_not_written(policy, tmp_path):
    with pytest.raises(ConfigError, match="must be those that the policy was made with"):
        save_control_policy(tmp_path, policy, ControlModelConfig(), policy.spaces)
