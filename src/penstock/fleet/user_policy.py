"""Any object that acts, behind a rollout worker: NumPy, JAX, another framework, or a script.

The object has `initial_state(batch)` and `act(observations, state, key)`; this module keeps each slot's state between
calls, resets it where an episode begins, and calls the object in the worker's thread, so that simulators wait for it.
Not covered: acting in the background; an object whose state is not a flat mapping of arrays.
"""

import threading
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from penstock.fleet.steps import ActionBatch, Leaves
from penstock.types import ConfigError, Spaces, WeightsError, WeightVersion, fold

Acted = Any
"""What `act` returns: ``actions``; ``(actions, state)``; ``(actions, logprobs, values)``; or ``(actions, logprobs,
values, state)``. Actions are arrays by leaf name, or one array where there is one leaf. `ControlPolicy.act` fits."""


class ActingPolicy(Protocol):
    """What a user's policy needs.

    With `set_arrays(arrays)` as well, it takes new weights: all of them, or it raises and keeps the old ones.
    """

    def initial_state(self, batch: int) -> Mapping[str, Any] | None:
        """State before an episode's first step: [batch, …] arrays by name; None or empty without memory."""
        ...

    def act(self, observations: Leaves, state: Mapping[str, Any], key: PRNGKeyArray) -> Acted:
        """Chooses actions for a batch.

        Args:
            observations: By leaf name, [batch, …], NumPy.
            state: As `initial_state` gave it, or as `act` returned it for the same slots.
            key: A JAX random key, a new one for every call.
        """
        ...


class DecidedPending:
    """A decision that is there already."""

    def __init__(self, decision: ActionBatch) -> None:
        self._decision = decision

    def done(self) -> bool:
        """True."""
        return True

    def result(self) -> ActionBatch:
        """The decision."""
        return self._decision


class UserPolicyRunner:
    """Decides with a user's object; see the module. One thread decides, any may call `set_weights`."""

    def __init__(
        self,
        policy: ActingPolicy,
        spaces: Spaces,
        num_slots: int,
        seed: int,
        *,
        version: WeightVersion | None = None,
    ) -> None:
        """Makes every slot's first state.

        Args:
            policy: The user's policy object.
            spaces: What it sees and does.
            num_slots: Slots are 0 … num_slots − 1.
            seed: Of the keys that it is given.
            version: Of the weights it has; None: step 0 of the first lineage.

        Raises:
            ConfigError: its state is no mapping of [num_slots, …] arrays.
        """
        self._policy = policy
        self._spaces = spaces
        self._version = self._next_version = version or WeightVersion(0, 0)
        self._telling = threading.Lock()  # what waits and the next version change together
        self._waiting: tuple[WeightVersion, Mapping[str, Any]] | None = None  # the newest that was not taken yet
        self._fresh = _state_arrays(policy.initial_state(num_slots), num_slots, "initial_state")
        self._states = {name: array.copy() for name, array in self._fresh.items()}
        self._key = jax.random.key(fold(seed, "actions") % 2**32)
        self._decisions = 0

    @property
    def version(self) -> WeightVersion:
        """Of the weights that the next decision is made with."""
        return self._next_version

    def set_weights(self, version: WeightVersion, arrays: Mapping[str, Any]) -> None:
        """Hands weights to the object's `set_arrays` before the next decision; of several, the last counts.

        Raises:
            WeightsError: the object has no `set_arrays`.
        """
        if not callable(getattr(self._policy, "set_arrays", None)):
            raise WeightsError(
                f"{type(self._policy).__name__} has no set_arrays(arrays), so it cannot take the weights of version "
                f"{version.step}: add the method, or run it without a learner"
            )
        with self._telling:
            self._waiting, self._next_version = (version, arrays), version

    def decide(self, slots: np.ndarray, observations: Leaves, first: np.ndarray) -> DecidedPending:
        """Decides for n slots, each at most once, before it returns.

        Raises:
            ConfigError: what the object returned has a wrong form; the message names the part.
            WeightsError: its `set_arrays` raised; names object and version. `version` is the old one again, and the
                next decision is made with whatever the object holds.
        """
        self._take_weights()
        seen = {name: array[: len(slots)] for name, array in observations.items()}
        before = {name: array[slots] for name, array in self._states.items()}
        for name, array in before.items():
            array[first] = self._fresh[name][slots[first]]
        key = jax.random.fold_in(self._key, self._decisions % 2**32)
        self._decisions += 1
        own = {name: array.copy() for name, array in before.items()}  # it may work in place
        decision, after = self._read(self._policy.act(seen, own, key), before, len(slots))
        for name, array in after.items():
            self._states[name][slots] = array
        return DecidedPending(decision)

    def _take_weights(self) -> None:
        with self._telling:
            waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        version, arrays = waiting
        try:
            getattr(self._policy, "set_arrays")(arrays)  # noqa: B009 (not part of the protocol)
        except Exception as error:
            with self._telling:
                if self._next_version == version:  # otherwise a newer one came meanwhile, which is next
                    self._next_version = self._version
            raise WeightsError(
                f"{type(self._policy).__name__}.set_arrays raised {type(error).__name__} at the weights of version "
                f"{version.step} (lineage {version.lineage}), so version {self._version.step} stays: {error}"
            ) from error
        self._version = version

    def _read(self, acted: Acted, before: Leaves, n: int) -> tuple[ActionBatch, Leaves]:
        """The decision, and the states after it."""
        actions, logprobs, values, state = _parts(acted)
        unknown = np.full(n, np.nan, np.float32)
        decision = ActionBatch(
            actions=self._actions(actions, n),
            logprobs=unknown if logprobs is None else _row(logprobs, n, "logprobs"),
            values=unknown if values is None else _row(values, n, "values"),
            version=self._version,
            states=before,
        )
        after = _state_arrays(state, n, "act's state")
        if set(after) != set(before):
            raise ConfigError(
                f"act's state has {sorted(after)}, but initial_state has {sorted(before)}: return the same"
            )
        return decision, after

    def _actions(self, actions: Any, n: int) -> Leaves:
        leaves = self._spaces.actions
        named = actions if isinstance(actions, Mapping) else {leaves[0].name: actions}
        if set(named) != {leaf.name for leaf in leaves}:
            raise ConfigError(f"act's actions are {sorted(named)}: they must be {[leaf.name for leaf in leaves]}")
        arrays = {leaf.name: np.asarray(named[leaf.name]).astype(leaf.dtype) for leaf in leaves}
        for leaf in leaves:
            if arrays[leaf.name].shape != (n, *leaf.shape):
                raise ConfigError(
                    f"act's action {leaf.name!r} has shape {list(arrays[leaf.name].shape)}: it must be "
                    f"{[n, *leaf.shape]}"
                )
        return arrays


def _parts(acted: Acted) -> tuple[Any, Any, Any, Any]:
    """Actions, log-probabilities, values and state; None for what was not returned."""
    if not isinstance(acted, tuple):
        return acted, None, None, None
    if len(acted) == 2:
        return acted[0], None, None, acted[1]
    if len(acted) == 3:
        return (*acted, None)
    if len(acted) == 4:
        return acted
    raise ConfigError(
        f"act returned a tuple of {len(acted)}: return actions, (actions, state), (actions, logprobs, values) or "
        "(actions, logprobs, values, state)"
    )


def _row(values: Any, n: int, name: str) -> np.ndarray:
    array = np.asarray(values, np.float32)
    if array.shape != (n,):
        raise ConfigError(f"act's {name} have shape {list(array.shape)}: they must be {[n]}")
    return array


def _state_arrays(state: Any, n: int, name: str) -> dict[str, np.ndarray]:
    if state is None:
        return {}
    if not isinstance(state, Mapping):
        raise ConfigError(f"{name} is a {type(state).__name__}: it must be a mapping of arrays by name, or None")
    arrays = {str(key): np.asarray(value) for key, value in state.items()}
    for key, array in arrays.items():
        if array.ndim == 0 or len(array) != n:
            raise ConfigError(f"{name}[{key!r}] has shape {list(array.shape)}: its first axis must be {n}")
    return arrays
