"""A trained policy in a program of one's own: the environment's own observations and actions, and memory between."""

import gymnasium
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces as gym

from penstock.fleet import GymPolicy
from penstock.fleet.spaces import spaces_of
from penstock.model.control import ControlModelConfig, load_control_policy, make_control_policy, save_control_policy
from penstock.types import ConfigError

SEEN = gym.Dict({"place": gym.Box(-1, 1, (3,), np.float64), "held": gym.Discrete(4, start=1)})
DONE = gym.Tuple((gym.Discrete(5, start=-2), gym.Box(-0.01, 0.01, (2,), np.float32)))


def policy_for(seen, done, **fields):
    config = ControlModelConfig(hidden_sizes=(8,), policy_gain=3.0, **fields)
    return make_control_policy(config, spaces_of(seen, done), 0)


def observation(seed):
    rng = np.random.default_rng(seed)
    return {"place": rng.uniform(-1, 1, 3), "held": int(rng.integers(1, 5))}


def test_actions_are_the_environments_own_and_the_most_probable():
    policy = policy_for(SEEN, DONE)
    playing = GymPolicy(policy, SEEN, DONE)
    for seed in range(20):
        seen = observation(seed)
        turn, push = playing.act(seen)
        arrays = {"place": jnp.asarray(seen["place"], jnp.float32)[None], "held": jnp.asarray([seen["held"] - 1])}
        modes = policy.step(arrays, {}, jnp.ones(1, bool))[0].mode()
        assert turn == int(modes["0"][0]) - 2 and DONE.contains((turn, push))
        np.testing.assert_allclose(push, np.clip(modes["1"][0], -0.01, 0.01), rtol=1e-5)
    assert isinstance(turn, (int, np.integer))


def test_memory_is_carried_until_reset():
    policy = policy_for(SEEN, DONE, memory="gru", memory_size=8)
    playing = GymPolicy(policy, SEEN, DONE, deterministic=False, seed=3)
    state, seen, begun = policy.initial_state(1), observation(0), True
    for call in range(6):
        if call == 3:
            playing.reset()
            begun = True
        playing.act(seen)
        arrays = {"place": jnp.asarray(seen["place"], jnp.float32)[None], "held": jnp.asarray([seen["held"] - 1])}
        _, _, state = policy.step(arrays, state, jnp.array([begun]))
        begun = False
        np.testing.assert_allclose(playing._runner._states["hidden"][0], state["hidden"][0], atol=1e-6)


def test_samples_follow_the_seed():
    seen, policy = observation(0), policy_for(SEEN, DONE)

    def some(seed):
        playing = GymPolicy(policy, SEEN, DONE, deterministic=False, seed=seed)
        return [int(playing.act(seen)[0]) for _ in range(12)]

    assert some(1) == some(1) != some(2) and len(set(some(1))) > 1


def test_it_plays_from_a_checkpoint(tmp_path):
    env = gymnasium.make("CartPole-v1")
    policy = policy_for(env.observation_space, env.action_space)
    save_control_policy(tmp_path / "step-3/model", policy, policy.config, policy.spaces)
    playing = GymPolicy(load_control_policy(tmp_path / "step-3"), env.observation_space, env.action_space)
    seen, _ = env.reset(seed=0)
    for _ in range(5):
        seen, reward, *_ = env.step(playing.act(seen))
        assert reward == 1
    env.close()


def test_a_network_of_ones_own_plays_as_any(tmp_path):
    env = gymnasium.make("CartPole-v1")
    spaces, module = spaces_of(env.observation_space, env.action_space), "tests.model.control.test_own_policy:Assembled"
    policy = make_control_policy(ControlModelConfig(module=module), spaces, 0)
    save_control_policy(tmp_path, policy, policy.config, policy.spaces)
    playing = GymPolicy(load_control_policy(tmp_path, module), env.observation_space, env.action_space)
    (seen, _), state = env.reset(seed=0), policy.initial_state(1)
    for step in range(5):
        distribution, _, state = policy.step({"": jnp.asarray(seen)[None]}, state, jnp.array([step == 0]))
        assert playing.act(seen) == int(distribution.mode()[""][0])
        seen = env.step(int(distribution.mode()[""][0]))[0]
    np.testing.assert_allclose(playing._runner._states["hidden"][0], state["hidden"][0], atol=1e-6)
    env.close()


def test_other_spaces_and_observations_are_refused_by_name():
    policy = policy_for(SEEN, DONE)
    other = gym.Dict({"place": gym.Box(-1, 1, (4,), np.float64), "held": gym.Discrete(4)})
    with pytest.raises(
        ConfigError, match=r"other observations or actions \(observations 'place': box float64 \[4\], the"
    ):
        GymPolicy(policy, other, DONE)
    with pytest.raises(ValueError, match="observation 'held' is 7, outside its space's bounds 1 and 4"):
        GymPolicy(policy, SEEN, DONE).act(observation(0) | {"held": 7})
