import threading

import numpy as np
import pytest

from penstock.types import WeightsError, WeightVersion
from penstock.weights import InProcessBroadcaster


def arrays(value: float) -> dict[str, np.ndarray]:
    return {"embedding": np.full((4, 2), value, np.float32), "norm": np.full(2, value, np.float32)}


def test_the_bootstrap_version_is_seen_by_a_client_that_has_nothing():
    broadcaster = InProcessBroadcaster()
    assert broadcaster.latest() is None
    assert broadcaster.wait_for(None, timeout_s=0.0) is None
    broadcaster.publish(WeightVersion(0, 0), arrays(1.0))
    assert broadcaster.wait_for(None, timeout_s=0.0) == WeightVersion(0, 0)


def test_arrays_are_handed_over_by_reference():
    broadcaster, published = InProcessBroadcaster(), arrays(1.0)
    broadcaster.publish(WeightVersion(0, 0), published)
    assert broadcaster.fetch(WeightVersion(0, 0))["embedding"] is published["embedding"]


def test_a_request_for_a_superseded_version_gets_no_other_arrays():
    broadcaster = InProcessBroadcaster()
    broadcaster.publish(WeightVersion(0, 0), arrays(1.0))
    broadcaster.publish(WeightVersion(0, 1), arrays(2.0))
    with pytest.raises(WeightsError, match="step=0.*not available"):
        broadcaster.fetch(WeightVersion(0, 0))


@pytest.mark.parametrize("version", [WeightVersion(0, 3), WeightVersion(0, 2)])
def test_a_version_that_is_not_newer_is_refused(version: WeightVersion):
    broadcaster = InProcessBroadcaster()
    broadcaster.publish(WeightVersion(0, 3), arrays(1.0))
    with pytest.raises(WeightsError, match="not newer"):
        broadcaster.publish(version, arrays(2.0))


def test_a_new_lineage_may_fork_at_an_older_step():
    broadcaster = InProcessBroadcaster()
    broadcaster.publish(WeightVersion(0, 3), arrays(1.0))
    broadcaster.publish(WeightVersion(1, 2), arrays(2.0))
    assert broadcaster.latest() == WeightVersion(1, 2)


def test_missing_extra_and_misshaped_arrays_are_refused_by_name():
    broadcaster = InProcessBroadcaster()
    broadcaster.publish(WeightVersion(0, 0), arrays(1.0))
    wrong = {"embedding": np.zeros((4, 3), np.float32), "bias": np.zeros(1, np.float32)}
    with pytest.raises(WeightsError, match=r"missing \['norm'\], extra \['bias'\], changed \[.embedding"):
        broadcaster.publish(WeightVersion(0, 1), wrong)
    assert broadcaster.latest() == WeightVersion(0, 0)


def test_a_waiting_client_wakes_at_the_publication():
    broadcaster, seen = InProcessBroadcaster(), []
    broadcaster.publish(WeightVersion(0, 0), arrays(1.0))
    waiter = threading.Thread(target=lambda: seen.append(broadcaster.wait_for(WeightVersion(0, 0), timeout_s=30)))
    waiter.start()
    broadcaster.publish(WeightVersion(0, 1), arrays(2.0))
    waiter.join(timeout=280)
    assert seen == [WeightVersion(0, 1)]


def test_one_that_is_opened_anew_takes_any_version_and_is_known_by_another_incarnation():
    weights = InProcessBroadcaster()
    weights.publish(WeightVersion(0, 1), {"a": np.zeros(2, np.float32)})
    before = weights.endpoint()
    weights.close()
    weights.reopen()
    assert weights.latest() is None and weights.endpoint() != before
    weights.publish(WeightVersion(0, 1), {"a": np.ones(3, np.float32)})
    np.testing.assert_equal(weights.fetch(WeightVersion(0, 1))["a"], np.ones(3, np.float32))
