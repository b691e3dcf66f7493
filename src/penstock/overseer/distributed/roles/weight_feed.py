"""Weights as a rollout worker or the evaluator of a fleet run gets them: from whichever learner lives."""

import threading
from collections.abc import Mapping
from typing import Any

from penstock.overseer.distributed.component import Surroundings
from penstock.overseer.distributed.roles.settings import AnyConfig, Settings
from penstock.types import Stopped, UnreachableError, WeightVersion
from penstock.weights import WeightClient, merged_arrays, open_client


class WeightFeed:
    """Implements `penstock.types.WeightSource` over a client that follows the learner's broadcaster. Thread-safe.

    Args:
        around: Knows the view.
        settings: The run.
        base: All arrays of the policy, as JAX has them. What is fetched gets their dtypes, and those that do not travel
            since they do not train are taken from here.
        in_training: Nothing is there unless the learner trains: a worker begins with the training.
    """

    def __init__(
        self,
        around: Surroundings,
        settings: Settings[AnyConfig],
        base: Mapping[str, Any],
        *,
        in_training: bool = False,
    ) -> None:
        self._around, self._base = around, base
        self._config = settings.config.weights
        self._token = settings.token
        self._in_training = in_training
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._client: WeightClient | None = None

    @property
    def training(self) -> bool:
        """Whether a learner lives that trains."""
        learner = self._around.view.peer("learner-0")
        return learner is not None and bool(learner.address.get("training"))

    @property
    def failure(self) -> str | None:
        """Why the living learner's weights cannot be reached; None where they can, or nobody asked yet."""
        client = self._client
        return None if client is None else client.failure

    def latest(self) -> WeightVersion | None:
        """See `WeightSource.latest`."""
        with self._lock:
            client = self._connected()
            return None if client is None else client.latest()

    def wait_for(self, newer_than: WeightVersion | None, timeout_s: float) -> WeightVersion | None:
        """See `WeightSource.wait_for`; None, too, where there is no learner.

        Raises:
            Stopped: it was closed.
        """
        with self._lock:
            client = self._connected()
            if client is not None:
                return client.wait_for(newer_than, timeout_s)
        if self._closed.wait(timeout_s):
            raise Stopped("the weights were closed")
        return None

    def fetch(self, version: WeightVersion) -> Mapping[str, Any]:
        """See `WeightSource.fetch`.

        Raises:
            UnreachableError: there is no learner at present.
            WeightsError: the version is superseded or unknown, or its arrays do not fit the policy.
        """
        with self._lock:
            client = self._connected()
            if client is None:
                raise UnreachableError("there is no learner to fetch weights from at present")
            return merged_arrays(self._base, client.fetch(version))

    def metrics(self) -> dict[str, float]:
        """The client's, as ``weights/<name>``."""
        client = self._client
        return {} if client is None else client.metrics()

    def close(self) -> None:
        """Ends every wait; fetched arrays stay valid."""
        self._closed.set()
        client = self._client
        if client is not None:
            client.close()

    def _connected(self) -> WeightClient | None:
        if self._closed.is_set():
            raise Stopped("the weights were closed")
        learner = self._around.view.peer("learner-0")
        endpoint = None if learner is None else learner.address.get("weights")
        if endpoint is None or (self._in_training and not self.training):
            return None
        if self._client is None:
            self._client = open_client(endpoint, self._config, self._token, self._around.identity.name)
        else:
            self._client.connect(endpoint)
        return self._client
