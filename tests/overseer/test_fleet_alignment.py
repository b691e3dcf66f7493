"""What belongs to what, from a simulator's step to the learner's arrays: real processes, policy, cutter, rows, arrays.

Two tasks, one of whose simulators dies in every life; two versions of a recurrent policy take turns.
"""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.fleet.config import FleetConfig, SimulatorConfig, SimulatorLimits
from penstock.fleet.fragments import FragmentCutter
from penstock.fleet.jax_policy import JaxPolicyRunner
from penstock.fleet.pool import SimulatorPool
from penstock.fleet.rollout_loop import RolloutWorker
from penstock.fleet.sender import cut_stale
from penstock.learner.control_config import PpoConfig
from penstock.learner.control_step import BatchShape, FragmentReadOptions, _next_values, preparer, stack_fragments
from penstock.model.control import make_control_policy, named_arrays
from penstock.model.control.config import ControlModelConfig
from penstock.rundir.fragment_rows import fragments_from_table, table_from_fragments
from penstock.types import RolloutRecord, WeightVersion
from tests.overseer.clockwork import ENDS, LENGTHS, reward_of

CLOCKWORK = "tests.overseer.clockwork:Clockwork"
FLEET = FleetConfig(
    tasks={"steady": SimulatorConfig(id=CLOCKWORK), "mortal": SimulatorConfig(id=CLOCKWORK, kwargs={"exit_at": 6})},
    envs_per_worker=4, envs_per_process=2, batch_size=2, fragment_length=7,
    limits=SimulatorLimits(backoff_s=0.01, spawn_timeout_s=30.0, restarts_per_minute=1000),
)  # fmt: skip
MODEL = ControlModelConfig(hidden_sizes=(8,), memory="gru", memory_size=6, policy_gain=1.0)
FLAGS = ((1, 0, 0), (0, 1, 0), (1, 0, 0), (0, 1, 1), (1, 1, 0))  # terminated, truncated, fault, by the kind of end
EACH = 10  # fragments of each slot


@pytest.fixture(scope="module")
def played():
    """Policies by version, and the fragments that two versions made, before and after storage."""
    return _played(FLEET)


def _played(config):
    pool = SimulatorPool(config, "w0", 3)
    try:
        pool.start(30.0)
        policies = [make_control_policy(MODEL, pool.spaces, seed) for seed in (0, 1)]
        runner = JaxPolicyRunner(policies[0], config.envs_per_worker, config.most_in_batch, 5)
        runner.compile()
        cutter = FragmentCutter(pool, 7, "w0", "w0-0", keep_states=True)
        unsent = []
        worker = RolloutWorker(pool, runner, config, lambda batch: unsent.extend(cutter.add(batch)))
        for turn in range(20_000):
            by_slot = Counter(each.fragment.slot for each in unsent)
            if len(by_slot) == 4 and min(by_slot.values()) >= EACH:
                break
            if turn % 37 == 0:
                version = (turn // 37) % 2
                runner.set_weights(WeightVersion(0, version), named_arrays(policies[version]))
            worker.run_once(0.05)
        worker.finish()
    finally:
        pool.close()
    unsent = [each for each in unsent if int(each.fragment.group_id.rpartition("-")[2]) < EACH]
    assert len(unsent) == 4 * EACH
    table = table_from_fragments([RolloutRecord(each.fragment, each.fragment.group_id) for each in unsent])
    stored = [record.rollout for record in fragments_from_table(table)]
    return pool.spaces, policies, unsent, stored


def test_every_row_of_every_fragment_is_its_own(played):
    _, _, _, fragments = played
    seen = Counter()
    for fragment in fragments:
        finals = dict(zip(fragment.final_steps.tolist(), range(99), strict=False))
        for t in range(fragment.length):
            seen[_check_step(fragment, t, finals)] += 1
        assert set(finals) <= set(np.flatnonzero(fragment.terminated | fragment.truncated).tolist())
    assert set(seen) == {*ENDS, "inside", "lost"}


@pytest.mark.slow
def test_rows_are_their_own_also_where_processes_are_replaced():
    limits = FLEET.limits.model_copy(update={"restart_interval_s": 0.02})
    immortal = FLEET.tasks["steady"]
    changes = {"limits": limits, "tasks": {"steady": immortal, "other": immortal}}
    _, _, _, fragments = _played(FLEET.model_copy(update=changes))
    seen = Counter()
    for fragment in fragments:
        finals = dict(zip(fragment.final_steps.tolist(), range(99), strict=False))
        for t in range(fragment.length):
            seen[_check_replaced(fragment, t, finals)] += 1
    assert seen["cut"] and seen["replaced"] and seen["inside"], seen


def _check_replaced(fragment, t, finals):
    """`_check_step`, where the next observation may be the first one of another life."""
    episode, step, _, _ = _seen(fragment.observations, t)
    if not _begins_a_life(fragment, t + 1):
        return _check_step(fragment, t, finals)
    move, push = int(fragment.actions["move"][t]), float(fragment.actions["arm.push"][t, 0])
    after = (episode, step + 1, move, float(np.clip(np.float32(push), -1, 1)))
    assert fragment.rewards[t] == reward_of(episode, step, move)
    assert (t in finals) == (not fragment.faults[t])
    assert t not in finals or _seen(fragment.final_observations, finals[t]) == after
    if step + 1 == LENGTHS[episode % 5]:
        assert (fragment.terminated[t], fragment.truncated[t]) == FLAGS[episode % 5][:2]
        return "replaced"
    assert fragment.truncated[t] and not fragment.terminated[t]
    assert fragment.faults[t] == (episode % 5 == 2 and step == 1)
    return "cut"


def _check_step(fragment, t, finals):
    episode, step, _, _ = _seen(fragment.observations, t)
    move, push = int(fragment.actions["move"][t]), float(fragment.actions["arm.push"][t, 0])
    pushed = float(np.clip(np.float32(push), -1, 1))
    ends = (bool(fragment.terminated[t]), bool(fragment.truncated[t]), bool(fragment.faults[t]))
    assert bool(fragment.first[t]) == (step == 0)
    if _begins_a_life(fragment, t + 1):  # this simulator died, or the one that shares its process
        assert fragment.task == "mortal" and ends == (False, True, True)
        assert fragment.rewards[t] == 0 and t not in finals
        return "lost"
    assert fragment.task != "mortal" or (episode, step) != (6, 1)
    kind, last = episode % 5, step + 1 == LENGTHS[episode % 5]
    assert fragment.rewards[t] == reward_of(episode, step, move)
    after = (episode, step + 1, move, pushed)
    if not last:
        assert ends == (False, False, kind == 2 and step == 1) and t not in finals
        assert _seen(fragment.observations, t + 1) == after and not fragment.first[t + 1]
        return "inside" if not ends[2] else ENDS[2]
    assert _seen(fragment.observations, t + 1) == (episode + 1, 0, 0, 0) and fragment.first[t + 1]
    if t + 1 < fragment.length:
        assert fragment.episodes[t + 1] == fragment.episodes[t] + 1
    assert ends == FLAGS[kind]
    if kind == 3:
        assert t not in finals
    else:
        assert _seen(fragment.final_observations, finals[t]) == after
    return ENDS[kind]


def _begins_a_life(fragment, t):
    return bool(fragment.first[t]) and _seen(fragment.observations, t)[1:] == (0, -1, 0)


def _seen(observations, t):
    last = observations["last"][t].tolist()
    return (int(observations["clock.episode"][t]), int(observations["clock.step"][t]), *last)


def test_fragments_of_a_slot_join_on(played):
    _, _, unsent, fragments = played
    by_slot: dict[int, list] = {}
    for fragment in fragments:
        by_slot.setdefault(fragment.slot, []).append(fragment)
    assert len({fragment.rollout_id for fragment in fragments}) == len(fragments)
    for row in by_slot.values():
        for before, after in zip(row, row[1:], strict=False):
            assert _seen(before.observations, 7) == _seen(after.observations, 0)
            assert before.first[7] == after.first[0] and before.values[7] == after.values[0]
            assert int(after.episodes[0]) == int(before.episodes[6]) + bool(after.first[0])
    for sent, stored in zip(unsent, fragments, strict=True):
        for name in ("observations", "actions", "final_observations", "initial_state"):
            for leaf, array in getattr(sent.fragment, name).items():
                np.testing.assert_array_equal(array, getattr(stored, name)[leaf])
                assert array.dtype == getattr(stored, name)[leaf].dtype


def test_each_step_was_decided_by_the_version_and_the_state_that_it_claims(played):
    _, policies, unsent, fragments = played
    steps = [_compiled(policy) for policy in policies]
    mixed = 0
    for sent, fragment in zip(unsent, fragments, strict=True):
        state = {name: jnp.asarray(array)[None] for name, array in fragment.initial_state.items()}
        mixed += len(set(fragment.weight_steps.tolist())) > 1
        for t in range(fragment.length):
            if t in sent.states:
                first = np.asarray(0.0 if fragment.first[t] else state["hidden"])
                np.testing.assert_allclose(sent.states[t]["hidden"], np.broadcast_to(first, (1, 6))[0], atol=1e-5)
            version = int(fragment.weight_steps[t])
            logprob, value, state = _decided(steps[version], fragment, t, state)
            assert abs(logprob - fragment.logprobs[t]) < 1e-5
            assert abs(value - fragment.values[t]) < 1e-5
        last = [_value(step, fragment, fragment.length, state) for step in steps]
        assert min(abs(value - fragment.values[fragment.length]) for value in last) < 1e-5
    assert mixed >= 3 and mixed < len(fragments)


def _compiled(policy):
    return jax.jit(lambda observations, state, first: policy.step(observations, state, first))


def _row(observations, t):
    return {name: jnp.asarray(array[t])[None] for name, array in observations.items()}


def _decided(step, fragment, t, state):
    distribution, value, after = step(_row(fragment.observations, t), state, jnp.asarray(fragment.first[t])[None])
    logprob = distribution.log_prob(_row(fragment.actions, t))
    return float(logprob[0]), float(value[0]), after


def _value(step, fragment, t, state):
    return float(step(_row(fragment.observations, t), state, jnp.asarray(fragment.first[t])[None])[1][0])


def test_a_fragment_whose_older_steps_were_cut_off_still_begins_with_its_own_state(played):
    _, policies, unsent, _ = played
    step, cut = _compiled(policies[1]), 0
    for sent in unsent:
        fragment = cut_stale(sent, 1)
        if fragment is None or fragment.length == sent.fragment.length:
            continue
        cut += 1
        state = {name: jnp.asarray(array)[None] for name, array in fragment.initial_state.items()}
        for t in range(fragment.length):
            _check_step(fragment, t, dict(zip(fragment.final_steps.tolist(), range(99), strict=False)))
            logprob, value, state = _decided(step, fragment, t, state)
            assert abs(logprob - fragment.logprobs[t]) < 1e-5 and abs(value - fragment.values[t]) < 1e-5
    assert cut >= 2


def test_the_learner_recomputes_what_the_fleet_decided_and_bootstraps_from_what_it_should(played):
    spaces, policies, _, fragments = played
    policy, step, start = policies[1], _compiled(policies[1]), {"hidden": np.zeros((1, 6), np.float32)}
    shape = BatchShape.holding(fragments, 5)
    arrays = jax.tree.map(jnp.asarray, stack_fragments(fragments, shape, FragmentReadOptions(spaces, start, 1, None)))
    values, states, following = _unrolled(policy, arrays)
    config = PpoConfig(minibatches=5, normalize_advantages="none", discount=0.9, gae_lambda=0.8, burn_in=0)
    targets, summary = preparer(config)(policy, arrays, jnp.ones(shape.fragments, jnp.float32))
    advantages, logprobs = np.asarray(targets.advantages), np.asarray(targets.logprobs)
    own = 0
    for column, fragment in enumerate(fragments):
        t_own = [t for t in range(7) if arrays.own_version[t, column]]
        own += len(t_own)
        for t in t_own:
            assert abs(logprobs[t, column] - fragment.logprobs[t]) < 1e-5
            assert abs(values[t, column] - fragment.values[t]) < 1e-5
        if (fragment.weight_steps == 1).all():
            assert t_own == np.flatnonzero(~fragment.faults).tolist()
        expected = _gae(step, fragment, values[:, column], states, column, following[:, column])
        np.testing.assert_allclose(advantages[:, column], expected, atol=1e-4)
    assert own > 50 and float(summary.mismatch_max) < 1e-5
    assert not arrays.counted[:, len(fragments) :].any()


@jax.jit
def _unrolled(policy, arrays):
    _, values, states = policy.unroll(arrays.observations, arrays.first, arrays.initial_state)
    return values, states, _next_values(policy, arrays, values, states)


def _gae(step, fragment, values, states, column, following):
    """δ and the sum over what follows in the same episode, step by step; a fault is 0 and ends the sum before it."""
    total, advantages = 0.0, np.zeros(7)
    for t in reversed(range(7)):
        ended = fragment.terminated[t] or fragment.truncated[t]
        if fragment.faults[t]:
            total = 0.0
            continue
        bootstrap = values[t + 1]
        if fragment.truncated[t] and not fragment.terminated[t]:
            k = fragment.final_steps.tolist().index(t)
            state = {name: array[t, column][None] for name, array in states.items()}
            bootstrap = float(step(_row(fragment.final_observations, k), state, jnp.zeros(1, bool))[1][0])
        if not fragment.terminated[t]:
            assert abs(bootstrap - following[t]) < 1e-5
        delta = fragment.rewards[t] + 0.9 * (0.0 if fragment.terminated[t] else bootstrap) - values[t]
        total = delta + (0.0 if ended else 0.9 * 0.8 * total)
        advantages[t] = total
    return advantages
