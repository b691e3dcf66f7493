"""Both kinds of memory: what a step computes, that unrolling is stepping, resets, gradients."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.model.control.memory import RecurrentMemory, WindowMemory, reset

STEPS, BATCH, INPUTS, SIZE, WINDOW = 9, 3, 5, 8, 4
INPUT = jnp.asarray(np.random.default_rng(1).standard_normal((STEPS, BATCH, INPUTS)), jnp.float32)
FIRST = jnp.zeros((STEPS, BATCH), bool).at[0, 0].set(True).at[4, 1].set(True).at[5, 0].set(True).at[6, 0].set(True)


def perturbed(tree):
    rng = np.random.default_rng(2)
    return jax.tree.map(lambda a: a + 0.2 * rng.standard_normal(a.shape).astype(np.float32), tree)


@pytest.fixture(params=["gru", "lstm", "transformer"])
def memory(request):
    rng = np.random.default_rng(0)
    if request.param == "transformer":
        return perturbed(WindowMemory.draw(rng, INPUTS, SIZE, depth=2, heads=2, window=WINDOW))
    return perturbed(RecurrentMemory.draw(rng, request.param, INPUTS, SIZE))


def stepped(memory, inputs, state, first):
    rows, states = [], []
    step = jax.jit(lambda *args: memory.step(*args))
    for x, begins in zip(inputs, first, strict=True):
        row, state = step(x, state, begins)
        rows.append(row)
        states.append(state)
    return jnp.stack(rows), jax.tree.map(lambda *arrays: jnp.stack(arrays), *states)


def unrolled(memory, *args):
    return jax.jit(lambda *args: memory.unroll(*args))(*args)


def lived(memory, steps=6):
    """A state in the middle of episodes of different lengths."""
    first = jnp.zeros((steps, BATCH), bool).at[steps - 2, 2].set(True)
    inputs = jnp.asarray(np.random.default_rng(5).standard_normal((steps, BATCH, INPUTS)), jnp.float32)
    _, states = stepped(memory, inputs, memory.initial_state(BATCH), first)
    return jax.tree.map(lambda array: array[-1], states)


def test_a_gru_step_is_equinoxs():
    memory = perturbed(RecurrentMemory.draw(np.random.default_rng(0), "gru", INPUTS, SIZE))
    cell = eqx.nn.GRUCell(INPUTS, SIZE, key=jax.random.key(0))
    cell = eqx.tree_at(
        lambda c: (c.weight_ih, c.weight_hh, c.bias, c.bias_n), cell,
        (memory.gates.weight.T, memory.recurrent.T, memory.gates.bias, memory.candidate_bias),
    )  # fmt: skip
    hidden = lived(memory)["hidden"]
    row, state = memory.step(INPUT[0], {"hidden": hidden}, jnp.zeros(BATCH, bool))
    np.testing.assert_allclose(row, jax.vmap(cell)(INPUT[0], hidden), atol=1e-6)
    assert state["hidden"] is row


def test_an_lstm_step_is_equinoxs():
    memory = perturbed(RecurrentMemory.draw(np.random.default_rng(0), "lstm", INPUTS, SIZE))
    cell = eqx.nn.LSTMCell(INPUTS, SIZE, key=jax.random.key(0))
    cell = eqx.tree_at(
        lambda c: (c.weight_ih, c.weight_hh, c.bias), cell,
        (memory.gates.weight.T, memory.recurrent.T, memory.gates.bias),
    )  # fmt: skip
    state = lived(memory)
    _, after = memory.step(INPUT[0], state, jnp.zeros(BATCH, bool))
    hidden, carried = jax.vmap(cell)(INPUT[0], (state["hidden"], state["cell"]))
    np.testing.assert_allclose(after["hidden"], hidden, atol=1e-6)
    np.testing.assert_allclose(after["cell"], carried, atol=1e-6)


def test_an_lstms_forget_gate_begins_open():
    bias = RecurrentMemory.draw(np.random.default_rng(0), "lstm", INPUTS, SIZE).gates.bias
    np.testing.assert_array_equal(bias, np.repeat([0, 1, 0, 0], SIZE))


def test_reset_zeroes_whole_rows():
    state = {"a": jnp.ones((2, 3)), "b": jnp.ones(2, jnp.int32)}
    after = reset(state, jnp.array([True, False]))
    assert after["a"].tolist() == [[0, 0, 0], [1, 1, 1]] and after["b"].tolist() == [0, 1]


def test_unrolling_equals_stepping_with_resets_inside(memory):
    state = lived(memory)
    rows, states = stepped(memory, INPUT, state, FIRST)
    result, after = unrolled(memory, INPUT, state, FIRST)
    np.testing.assert_allclose(result, rows, atol=2e-6)
    assert set(after) == set(states)
    for name in states:
        assert after[name].dtype == states[name].dtype
        np.testing.assert_allclose(after[name], states[name], atol=2e-6, err_msg=name)


def test_nothing_of_an_episode_reaches_the_next(memory):
    changed = INPUT.at[:5, 0].add(1.0)  # slot 0 begins anew at step 5
    before, _ = unrolled(memory, INPUT, lived(memory), FIRST)
    after, _ = unrolled(memory, changed, memory.initial_state(BATCH), FIRST)
    np.testing.assert_array_equal(before[5:, 0], after[5:, 0])
    assert np.abs(np.asarray(before[:5, 0] - after[:5, 0])).min(axis=1).max() > 0


def test_gradients_flow_through_memory_but_not_through_a_reset(memory):
    def last(inputs):
        return memory.unroll(inputs, memory.initial_state(BATCH), FIRST)[0][7].sum(axis=-1)

    jacobian = np.abs(np.asarray(jax.jit(jax.jacobian(last))(INPUT))).sum(axis=-1)  # [out batch, time, batch]
    assert (jacobian[1, 4:8, 1] > 0).all() and (jacobian[1, :4, 1] == 0).all()  # since its reset at 4
    assert (jacobian[0, 6:8, 0] > 0).all() and (jacobian[0, :6, 0] == 0).all()
    assert jacobian[2, 7, 2] > 0 and jacobian[2, 8:].max() == 0


def test_a_transformer_sees_its_window_and_no_more():
    memory = perturbed(WindowMemory.draw(np.random.default_rng(0), INPUTS, SIZE, depth=1, heads=2, window=WINDOW))

    def last(inputs):
        return memory.unroll(inputs, memory.initial_state(BATCH), jnp.zeros((STEPS, BATCH), bool))[0][-1, 0].sum()

    seen = np.abs(np.asarray(jax.jit(jax.grad(last))(INPUT)))[:, 0].sum(axis=-1)
    assert (seen[-WINDOW:] > 0).all() and (seen[:-WINDOW] == 0).all()


def test_a_transformer_counts_how_much_of_its_window_is_there():
    memory = WindowMemory.draw(np.random.default_rng(0), INPUTS, SIZE, depth=1, heads=2, window=WINDOW)
    _, after = unrolled(memory, INPUT, memory.initial_state(BATCH), FIRST)
    assert after["length"][:, 0].tolist() == [1, 2, 3, 4, 4, 1, 1, 2, 3]
    assert after["length"][:, 2].tolist() == [1, 2, 3, 4, 4, 4, 4, 4, 4]


def test_a_transformer_tells_ages_apart():
    memory = perturbed(WindowMemory.draw(np.random.default_rng(0), INPUTS, SIZE, depth=1, heads=2, window=WINDOW))
    first = jnp.zeros((3, BATCH), bool)
    rows, _ = unrolled(memory, INPUT[:3], memory.initial_state(BATCH), first)
    swapped, _ = unrolled(memory, INPUT[jnp.array([1, 0, 2])], memory.initial_state(BATCH), first)
    assert np.abs(np.asarray(rows[2] - swapped[2])).max() > 1e-3
