"""A network of one's own: what it may be built of, that both sides see one policy, and what is said of a wrong one."""

import inspect
import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from penstock.fleet.jax_policy import JaxPolicyRunner
from penstock.model.control import (
    ActionHead,
    Categorical,
    ControlModelConfig,
    Distribution,
    Encoder,
    RecurrentMemory,
    load_control_policy,
    make_control_policy,
    named_arrays,
    save_control_policy,
)
from penstock.types import CheckpointError, ConfigError, LeafSpace, Spaces

EXAMPLE = f"{Path(__file__).parents[3]}/examples/own_network.py:Towers"
HERE = f"{__name__}:"
SPACES = Spaces((LeafSpace("", "box", (4,), "float32"),), (LeafSpace("", "discrete", (), "int64", (3,)),))
MASKED = Spaces(
    (LeafSpace("allowed", "multi_binary", (3,), "int8"), LeafSpace("seen", "box", (4,), "float32")), SPACES.actions
)
STEPS, BATCH = 5, 3
FIRST = jnp.zeros((STEPS, BATCH), bool).at[0, 1].set(True).at[3, 0].set(True)


class Cell(eqx.Module):
    """Layers of Equinox, which have functions in their trees, around a GRU, and numbers that do not train."""

    encoder: eqx.nn.MLP
    memory: eqx.nn.GRUCell
    actor: eqx.nn.Linear
    critic: eqx.nn.Linear
    table: tuple[int, ...] = eqx.field(static=True)
    scale: float = 0.5

    def __init__(self, spaces, seed, width=8):
        keys = jax.random.split(jax.random.key(seed), 4)
        self.encoder = eqx.nn.MLP(4, width, width, 1, jax.nn.silu, key=keys[0])
        self.memory = eqx.nn.GRUCell(width, width, key=keys[1])
        self.actor = eqx.nn.Linear(width, 3, key=keys[2])
        self.critic = eqx.nn.Linear(width, 1, key=keys[3])
        self.table = (2, 0, 1)

    def initial_state(self, batch):
        return {"hidden": jnp.zeros((batch, self.memory.hidden_size)), "count": jnp.zeros(batch, jnp.int32)}

    def step(self, observations, state, first):
        features = jax.vmap(self.encoder)(observations[""]) * self.scale
        hidden = jax.vmap(self.memory)(features, state["hidden"])
        scores = jax.vmap(self.actor)(hidden)[:, jnp.array(self.table)] + state["count"][:, None] * jnp.array(
            [0.1, 0.0, 0.0]
        )
        after = {"hidden": hidden, "count": state["count"] + 1}
        return Distribution((Categorical.of(scores, 0),), ("",)), jax.vmap(self.critic)(hidden)[:, 0], after


class Assembled(eqx.Module):
    """Of Penstock's own parts, with an `unroll` of its own."""

    encoder: Encoder
    memory: RecurrentMemory
    head: ActionHead
    value: eqx.nn.Linear

    def __init__(self, spaces, seed):
        config, rng = ControlModelConfig(hidden_sizes=(8,)), np.random.default_rng(seed)
        self.encoder = Encoder.draw(rng, config, spaces.observations)
        self.memory = RecurrentMemory.draw(rng, "lstm", self.encoder.features, 6)
        self.head = ActionHead.draw(rng, config, spaces.actions[0], 6)
        self.value = eqx.nn.Linear(6, 1, key=jax.random.key(seed))

    def initial_state(self, batch):
        return self.memory.initial_state(batch)

    def step(self, observations, state, first):
        features, after = self.memory.step(self.encoder(observations), state, first)
        return Distribution((self.head(features),), ("",)), (features @ self.value.weight.T)[:, 0], after

    def unroll(self, observations, first, state):
        flat = {name: array.reshape(-1, *array.shape[2:]) for name, array in observations.items()}
        features, after = self.memory.unroll(self.encoder(flat).reshape(*first.shape, -1), state, first)
        return Distribution((self.head(features),), ("",)), (features @ self.value.weight.T)[..., 0], after


class Masking(eqx.Module):
    """Only actions that the observation allows are taken."""

    layer: eqx.nn.Linear

    def __init__(self, spaces, seed):
        self.layer = eqx.nn.Linear(4, 4, key=jax.random.key(seed))

    def initial_state(self, batch):
        return {}

    def step(self, observations, state, first):
        outputs = jax.vmap(self.layer)(observations["seen"])
        scores = jnp.where(observations["allowed"] > 0, outputs[:, :3], -1e30)
        return Distribution((Categorical.of(scores, 0),), ("",)), outputs[:, 3], state


class Chained(eqx.Module):
    """Normal numbers of which the second's mean follows the first; no `Distribution`."""

    means: jax.Array
    slope: jax.Array

    def sample(self, key):
        noise = jax.random.normal(key, self.means.shape)
        first = self.means[..., 0] + noise[..., 0]
        return {"": jnp.stack([first, self._second(first) + noise[..., 1]], axis=-1)}

    def mode(self):
        return {"": jnp.stack([self.means[..., 0], self._second(self.means[..., 0])], axis=-1)}

    def log_prob(self, actions):
        pair = actions[""]
        means = jnp.stack([self.means[..., 0], self._second(pair[..., 0])], axis=-1)
        return (-0.5 * jnp.square(pair - means)).sum(-1) - jnp.log(2 * jnp.pi)

    def entropy(self):
        return jnp.full(self.slope.shape, jnp.log(2 * jnp.pi * jnp.e))

    def kl(self, other):
        return 0.5 * jnp.square(self.means - other.means).sum(-1)

    def _second(self, first):
        return self.means[..., 1] + self.slope * first


class Chaining(eqx.Module):
    layer: eqx.nn.Linear

    def __init__(self, spaces, seed):
        self.layer = eqx.nn.Linear(4, 4, key=jax.random.key(seed))

    def initial_state(self, batch):
        return {}

    def step(self, observations, state, first):
        outputs = jax.vmap(self.layer)(observations[""])
        return Chained(outputs[:, :2], outputs[:, 2]), outputs[:, 3], state


def own(module, spaces=SPACES, seed=0, **fields):
    return make_control_policy(ControlModelConfig(module=module, **fields), spaces, seed)


def test_the_page_shows_the_example():
    root = Path(__file__).parents[3]
    example = (root / "examples/own_network.py").read_text()
    shown = re.sub(r'\n +"""(.|\n)*?"""\n', "\n", example[example.index("class Towers") :]).replace(
        ":\n\n    actor", ":\n    actor"
    )
    assert f"```python\n{shown}```" in (root / "docs/control.md").read_text()


@pytest.mark.parametrize("module", [EXAMPLE, HERE + "Cell", HERE + "Assembled"])
@pytest.mark.parametrize("normalized", [False, True])
def test_unrolling_equals_stepping(draw, module, normalized):
    policy = own(module, normalize_observations=normalized)
    observations, actions = draw(SPACES.observations, STEPS, BATCH), draw(SPACES.actions, STEPS, BATCH)
    state = jax.tree.map(lambda array: array + 1, policy.initial_state(BATCH))  # in the middle of an episode
    distribution, values, after = jax.jit(lambda *given: policy.unroll(*given))(observations, FIRST, state)
    for t in range(STEPS):
        row = jax.tree.map(lambda array, t=t: array[t], (observations, actions))
        one, value, state = policy.step(row[0], state, FIRST[t])
        np.testing.assert_allclose(values[t], value, atol=1e-6)
        np.testing.assert_allclose(distribution.log_prob(actions)[t], one.log_prob(row[1]), atol=1e-6)
        for name in state:
            np.testing.assert_allclose(after[name][t], state[name], atol=1e-6)


def test_an_episode_begins_with_zeros_whatever_the_network_does_about_it(draw):
    policy = own(HERE + "Cell")
    observations, used = draw(SPACES.observations, BATCH), jax.tree.map(lambda a: a + 7, policy.initial_state(BATCH))
    _, _, after = policy.step(observations, used, jnp.array([True, False, True]))
    assert after["count"].tolist() == [1, 8, 1]


def test_a_rollout_worker_decides_by_it(draw):
    policy = own(HERE + "Cell")
    runner = JaxPolicyRunner(policy, 4, 4, 1)
    drawn = draw(SPACES.observations, 4)
    seen = {"": np.asarray(drawn[""])}
    decision = runner.decide(np.arange(4), seen, np.ones(4, bool)).result()
    expected = policy.step(drawn, policy.initial_state(4), jnp.ones(4, bool))
    actions = {"": jnp.asarray(decision.actions[""])}
    np.testing.assert_allclose(decision.logprobs, expected[0].log_prob(actions), atol=1e-6)
    np.testing.assert_allclose(decision.values, expected[1], atol=1e-6)
    after = runner.decide(np.arange(4), seen, np.zeros(4, bool)).result()
    assert after.states["count"].tolist() == [1] * 4


def test_only_its_arrays_are_parameters():
    policy = own(HERE + "Cell", kwargs={"width": 5})
    arrays = named_arrays(policy)
    assert "network.encoder.layers.0.weight" in arrays and arrays["network.actor.weight"].shape == (3, 5)
    assert len(arrays) == 4 + 4 + 2 + 2 and policy.still == ()
    assert hash(policy.config) and own(HERE + "Cell", kwargs={"width": 5}).config == policy.config


def test_a_seed_names_the_weights():
    one, same, other = (named_arrays(own(EXAMPLE, seed=seed)) for seed in (1, 1, 2))
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert not np.array_equal(one["network.actor.layers.0.weight"], other["network.actor.layers.0.weight"])


def test_actions_can_be_masked(draw):
    policy = own(HERE + "Masking", MASKED)
    seen = draw(MASKED.observations, 200) | {"allowed": jnp.tile(jnp.array([[1, 0, 1]], jnp.int8), (200, 1))}
    actions, logprobs, _, _ = policy.act(seen, {}, jax.random.key(0))
    assert set(np.unique(actions[""])) == {0, 2} and np.isfinite(logprobs).all()


def test_actions_may_depend_on_one_another(draw):
    pairs = Spaces(SPACES.observations, (LeafSpace("", "box", (2,), "float32"),))
    policy = own(HERE + "Chaining", pairs)
    seen = draw(pairs.observations, STEPS, 4)
    decision = JaxPolicyRunner(policy, 4, 4, 1).decide(np.arange(4), {"": np.asarray(seen[""][0])}, np.ones(4, bool))
    taken = decision.result()
    actions = {"": jnp.zeros((STEPS, 4, 2)).at[0].set(taken.actions[""])}
    distribution, values, _ = policy.unroll(seen, jnp.zeros((STEPS, 4), bool), {})
    np.testing.assert_allclose(taken.logprobs, distribution.log_prob(actions)[0], atol=1e-6)
    np.testing.assert_allclose(taken.values, values[0], atol=1e-6)
    assert len(np.unique(taken.actions[""])) == 8


def test_a_folder_gives_it_back_to_whoever_names_the_code(tmp_path, draw):
    policy = own(HERE + "Cell", kwargs={"width": 5})
    save_control_policy(tmp_path, policy, policy.config, SPACES)
    loaded = load_control_policy(tmp_path, HERE + "Cell")
    arrays = named_arrays(loaded)
    assert all(np.array_equal(array, arrays[name]) for name, array in named_arrays(policy).items())
    assert loaded.config == policy.config and loaded.spaces == SPACES
    with pytest.raises(
        CheckpointError, match=r"does not fit what '.*:Assembled' makes: .*unexpected keyword .*'width'"
    ):
        load_control_policy(tmp_path, HERE + "Assembled")
    with pytest.raises(ConfigError, match=f"module is .*Cell'>: it must be text, as '{HERE}Cell'"):
        inspect.unwrap(load_control_policy)(tmp_path, Cell)  # types are checked in tests alone


FACTOR = 1.0


class Pretrained(Cell):
    def __init__(self, spaces, seed, weights_path, bias=0.0):
        super().__init__(spaces, seed)
        self.scale = float(np.load(weights_path)) * FACTOR


def test_a_file_that_it_reads_may_move(tmp_path):
    np.save(tmp_path / "old.npy", 0.5)
    policy = own(HERE + "Pretrained", kwargs={"weights_path": f"{tmp_path}/old.npy", "bias": 1.0})
    save_control_policy(tmp_path, policy, policy.config, SPACES)
    (tmp_path / "old.npy").rename(tmp_path / "new.npy")
    with pytest.raises(CheckpointError, match=r"FileNotFoundError: .*old.npy' \(model.kwargs says where it lies\)"):
        load_control_policy(tmp_path, HERE + "Pretrained")
    moved = {"weights_path": f"{tmp_path}/new.npy", "bias": 2.0, "more": 3}
    loaded = load_control_policy(tmp_path, HERE + "Pretrained", moved)
    assert loaded.config.kwargs == {"weights_path": f"{tmp_path}/new.npy", "bias": 1.0}, "places alone are taken"


def test_what_computes_with_the_arrays_is_told_where_it_has_changed(tmp_path, caplog, monkeypatch):
    np.save(tmp_path / "half.npy", 0.5)
    policy = own(HERE + "Pretrained", kwargs={"weights_path": f"{tmp_path}/half.npy"})
    save_control_policy(tmp_path / "number", policy, policy.config, SPACES)
    (tmp_path / "nets.py").write_text(Path(EXAMPLE.partition(":")[0]).read_text())
    towers = own(f"{tmp_path}/nets.py:Towers")
    save_control_policy(tmp_path / "file", towers, towers.config, SPACES)
    load_control_policy(tmp_path / "number", HERE + "Pretrained")
    load_control_policy(tmp_path / "file", EXAMPLE)
    assert not caplog.messages, "the same code, wherever it lies"

    monkeypatch.setattr(f"{__name__}.FACTOR", 2.0)
    (tmp_path / "new.py").write_text((tmp_path / "nets.py").read_text().replace("jnp.tanh", "jnp.sin"))
    load_control_policy(tmp_path / "number", HERE + "Pretrained")
    load_control_policy(tmp_path / "file", f"{tmp_path}/new.py:Towers")
    of_number, of_file = caplog.messages
    assert f"number: what '{HERE}Pretrained' makes has changed" in of_number
    assert f"file: what '{tmp_path}/new.py:Towers' makes has changed" in of_file


@pytest.mark.attack
def test_no_code_is_imported_by_a_folders_word(tmp_path):
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')\n")
    policy = own(EXAMPLE)
    save_control_policy(tmp_path, policy, policy.config, SPACES)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace(EXAMPLE, f"{tmp_path}/evil.py:Towers"))
    with pytest.raises(
        CheckpointError, match=r"has a network of somebody's own, which '.*evil.py:Towers' made, and no"
    ):
        load_control_policy(tmp_path)
    assert load_control_policy(tmp_path, EXAMPLE).config.module == EXAMPLE


class Plain:
    def initial_state(self, batch):
        return {}

    def step(self, observations, state, first):
        return None


class Short(eqx.Module):
    weight: jax.Array

    def __init__(self, spaces, seed):
        self.weight = jnp.zeros((4, 3))

    def initial_state(self, batch):
        return {}


class Good(Short):
    """Right, but for what its children change."""

    def values(self, seen):
        return seen.sum(1)

    def distribution(self, scores):
        return Distribution((Categorical.of(scores, 0),), ("",))

    def step(self, observations, state, first):
        seen = observations[""]
        return self.distribution(seen @ self.weight), self.values(seen), state


class Unscaled(Good):
    def distribution(self, scores):
        return Distribution((Categorical(scores, 0),), ("",))


class Half(Good):
    def __init__(self, spaces, seed):
        self.weight = jnp.zeros((4, 3), jnp.bfloat16)


class Counting(Good):
    def __init__(self, spaces, seed):
        self.weight = np.zeros((4, 3), np.int64)


class Keyed(Good):
    key: jax.Array

    def __init__(self, spaces, seed):
        self.weight, self.key = jnp.zeros((4, 3)), jax.random.key(seed)


class Column(Good):
    def values(self, seen):
        return seen.sum(1, keepdims=True)


class Named(Good):
    def distribution(self, scores):
        return Distribution((Categorical.of(scores, 0),), ("jump",))


class Pair(Good):
    def step(self, observations, state, first):
        return self.distribution(observations[""] @ self.weight), self.values(observations[""])


class Ones(Good):
    def initial_state(self, batch):
        return {"seen": jnp.ones((batch, 2))}


class Drifting(Good):
    def initial_state(self, batch):
        return {"seen": jnp.zeros(batch, jnp.int32)}

    def step(self, observations, state, first):
        distribution, values, _ = super().step(observations, state, first)
        return distribution, values, {"seen": state["seen"] + 0.5}


class Scalar(Good):
    def step(self, observations, state, first):
        return self.distribution(jnp.zeros(2)), self.values(observations[""]), state


class Wide(Good):
    def step(self, observations, state, first):
        return self.distribution(observations["camera"] @ self.weight), self.values(observations[""]), state


class Empty(Good):
    def __init__(self, spaces, seed):
        self.weight = None


class Squeezed(Good):
    def values(self, seen):
        return jnp.squeeze(seen.sum(1, keepdims=True))


class Scores(Good):
    def distribution(self, scores):
        return scores


class Bare(Good):
    def distribution(self, scores):
        return Categorical.of(scores, 0)


class Twice(Good):
    def distribution(self, scores):
        return Distribution((Categorical.of(scores, 0),) * 2, ("", ""))


class Longer(Good):
    def __init__(self, spaces, seed):
        self.weight = jnp.zeros((4, 5))


class Floating(Categorical):
    """Choices as floats: their bits would be read as integers."""

    def sample(self, key):
        return super().sample(key).astype(jnp.float32)


class Floats(Good):
    def distribution(self, scores):
        return Distribution((Floating.of(scores, 0),), ("",))


class Batched(Categorical):
    """Samples by the batch's axis, which a fleet's row has not."""

    def sample(self, key):
        return jax.vmap(jax.random.categorical)(jax.random.split(key, len(self.logprobs)), self.logprobs)


class Rowless(Good):
    def distribution(self, scores):
        return Distribution((Batched.of(scores, 0),), ("",))


class Infinite(Good):
    def __init__(self, spaces, seed):
        self.weight = np.full((4, 3), np.nan)


class Dotted(Good):
    more: dict

    def __init__(self, spaces, seed):
        self.weight, self.more = jnp.zeros((4, 3)), {"a.b": jnp.zeros(1), "a": {"b": jnp.zeros(1)}}


class Words(Good):
    def __init__(self, spaces, seed):
        self.weight = np.array(["a"])


class Fixed(Good):
    table: np.ndarray = eqx.field(static=True)

    def __init__(self, spaces, seed):
        self.weight, self.table = jnp.zeros((4, 3)), np.zeros(3)


class Normed(Good):
    norm: eqx.nn.BatchNorm

    def __init__(self, spaces, seed):
        self.weight, self.norm = jnp.zeros((4, 3)), eqx.nn.BatchNorm(4, "batch", mode="ema")


class Dropping(Good):
    def values(self, seen):
        return jax.vmap(eqx.nn.Dropout(0.5))(seen).sum(1)


class Looping(Good):
    """Cannot be differentiated."""

    def values(self, seen):
        return jax.lax.while_loop(lambda x: x.sum() < 3, lambda x: x * 2 + 1, seen.sum(1) * self.weight[0, 0])


class Tupled(Good):
    def initial_state(self, batch):
        return jnp.zeros((batch, 2)), jnp.zeros((batch, 2))


class Nested(Good):
    def initial_state(self, batch):
        return {"lstm": {"hidden": jnp.zeros((batch, 2))}}


class Numbered(Good):
    def initial_state(self, batch):
        return {0: jnp.zeros((batch, 2))}


class Narrow(Good):
    def initial_state(self, batch):
        return {"seen": jnp.zeros((batch, 2), jnp.bfloat16)}


class Forgetting(Good):
    def step(self, observations, state, first):
        return *super().step(observations, state, first)[:2], None


class Unrolled(Good):
    def unroll(self, observations, first, state):
        return self.distribution(observations[""] @ self.weight), jnp.zeros(first.shape[1]), state


WRONG = {
    "Nothing": r"has no 'Nothing'",
    "SPACES": r"making it with \(spaces, seed\) raised TypeError: 'Spaces' object is not callable",
    "Plain": r"making it with \(spaces, seed\) raised TypeError: Plain\(\) takes no arguments",
    "Short": r"it gives a Short, which lacks step; docs/control.md",
    "Unscaled": r"a Categorical's probabilities do not add up to 1: make it by Categorical.of",
    "Half": r"weight is bfloat16: parameters are float32",
    "Counting": r"weight is int32: parameters are float32",
    "Keyed": r"key is key<fry>: parameters are float32",
    "Column": r"step: values is float32\[13, 1\], not float32\[13\]",
    "Named": r"step: action '' is not among what it gives \(action 'jump', ",
    "Pair": r"step raised ValueError: not enough values to unpack",
    "Ones": r"initial_state\(13\)\['seen'\] is float32\[13, 2\]: every episode begins with zeros",
    "Drifting": r"step: state 'seen' is float32\[13\], not int32\[13\]",
    "Scalar": r"step raised TypeError: every array in a distribution begins with the batch's axes, \[13\] here",
    "Wide": r"step raised KeyError: 'camera'",
    "Empty": r"its network has no arrays",
    "Unrolled": r"unroll: values is float32\[13\], not float32\[11, 13\]",
    "Squeezed": r"step: values is float32\[\], not float32\[1\]",
    "Scores": r"step raised TypeError: the first of three results, a distribution, lacks sample, mode, log_prob",
    "Bare": r"step raised TypeError: a Categorical is of one action leaf: give Distribution",
    "Twice": r"step raised TypeError: its Distribution has a name twice: '', ''",
    "Longer": r"step raised TypeError: action '' has scores for 5 choices, and its space has 3",
    "Floats": r"step: action '' is float32\[13\], not int32\[13\]",
    "Rowless": r"sample of one row, whose arrays have no batch's axes, raised [A-Z]",
    "Infinite": r"weight holds numbers that are not finite",
    "Dotted": r"two arrays have one name, by which they would travel \(of weight, more.a.b\)",
    "Words": r"taking its arrays raised TypeError: ",
    "Fixed": r"making it with \(spaces, seed\) raised UserWarning: A JAX array is being set as static",
    "Normed": r"a layer of it changes numbers in step \(an equinox.nn.StateIndex, as of BatchNorm\), which nothing",
    "Dropping": r"step raised RuntimeError: Dropout requires a key",
    "Looping": r"its gradient raised ValueError: Reverse-mode differentiation does not work for lax.while_loop",
    "Tupled": r"initial_state raised TypeError: the state is a tuple, not a mapping of arrays by name",
    "Nested": r"initial_state raised TypeError: the state's 'lstm' is a dict, not an array: a state is flat",
    "Numbered": r"initial_state raised TypeError: the state is a dict, not a mapping of arrays by name",
    "Narrow": r"initial_state\(13\)\['seen'\] is bfloat16\[13, 2\], and fragments keep flags, integers and floats",
    "Forgetting": r"step raised TypeError: the state is a NoneType, not a mapping",
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_by_name(name):
    with pytest.raises(ConfigError, match=f"^model.module '{HERE}{name}'.*{WRONG[name]}"):
        own(HERE + name)


def test_what_is_no_module_is_refused():
    with pytest.raises(ConfigError, match="it gives a Plain, which is no equinox.Module"):
        own(HERE + "plain")


def plain(spaces, seed):
    return Plain()


def test_a_good_one_is_good():
    assert own(HERE + "Good").still == ()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"module": "a:B", "hidden_sizes": (8,)}, "hidden_sizes is .8., .*no effect: module makes the network, 'a:B'"),
        ({"module": "a:B", "memory": "gru"}, "memory is .gru., which has no effect"),
        ({"module": "a:B", "image_layout": "channels_first"}, "and observations are not normalised"),
        ({"kwargs": {"width": 3}}, "kwargs is .*which has no effect: they are arguments of module, which is null"),
    ],
)  # fmt: skip
def test_keys_that_could_not_act_are_refused(fields, words):
    with pytest.raises(ValidationError, match=words):
        ControlModelConfig(**fields)
