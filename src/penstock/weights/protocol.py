"""What every transport of weights implements: a broadcaster beside the learner, a client beside each engine.

What holds for all of them, and is tested for all of them alike:

- A publication is whole or not there. Names, shapes and dtypes are fixed by the first; a later one that differs is
  refused with the names, by the broadcaster and again by the client.
- Versions only grow within one broadcaster. One that was started anew (another *incarnation*) may publish the version
  that its predecessor had; clients find it again, because they remember from which incarnation they fetched.
- `fetch` gives the arrays of exactly the version asked for, verified array by array, or raises. What is damaged is
  fetched again, whole, a few times.
- Publications are named by job: a client takes none of another job, and none that was made with another token.

Not covered: who decides when to fetch, and the swap into an engine.
"""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from penstock.types import WeightSink, WeightSource, WeightVersion


@runtime_checkable
class Broadcaster(WeightSink, Protocol):
    """Where the learner puts new weights, and what serves them. Thread-safe."""

    def latest(self) -> WeightVersion | None:
        """The newest published version; None before the first."""
        ...

    def endpoint(self) -> dict[str, Any]:
        """What a client needs to connect, as JSON values; never the token.

        Always has ``transport``, ``job`` and ``incarnation``.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Numbers of the last publication, and totals, as ``weights/<name>``."""
        ...

    def close(self) -> None:
        """Stops serving and frees what it holds. May be called twice."""
        ...


@runtime_checkable
class WeightClient(WeightSource, Protocol):
    """Where an engine gets weights.

    One thread at a time waits and fetches; `connect` and `close` may come from others.
    """

    @property
    def failure(self) -> str | None:
        """Why the broadcaster could not be reached when it was last asked, in words; None where it answered."""
        ...

    def connect(self, endpoint: Mapping[str, Any]) -> None:
        """From here on speaks to the broadcaster at this endpoint; nothing happens where that is the present one.

        Raises:
            WeightsError: the endpoint is of another transport or job.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Numbers of the last fetch, and totals, as ``weights/<name>``."""
        ...

    def close(self) -> None:
        """Ends every wait; fetched arrays stay valid. May be called twice."""
        ...
