"""A feed follows whichever learner lives, and says what it cannot reach."""

from types import SimpleNamespace

import numpy as np
import pytest

from penstock.overseer.distributed.records import Identity, Peer, View
from penstock.overseer.distributed.roles.weight_feed import WeightFeed
from penstock.types import Stopped, UnreachableError, WeightVersion
from penstock.weights import WeightsConfig, open_broadcaster
from tests.overseer.distributed.roles.lonely import Lonely

TOKEN = "a token of sixteen or more"
CONFIG = WeightsConfig(transport="shared_memory")
ARRAYS = {"layer": np.arange(4, dtype=np.float32)}


def learner(endpoint, training=True):
    return View(1, 0, (Peer(Identity("learner", 0, 0), {"weights": endpoint, "training": training}),))


@pytest.fixture
def around():
    return Lonely("rollout")


@pytest.fixture
def feed(around):
    feed = WeightFeed(around, SimpleNamespace(config=SimpleNamespace(weights=CONFIG), token=TOKEN), in_training=True)
    yield feed
    feed.close()


def broadcaster(tmp_path):
    return open_broadcaster(CONFIG, f"feed-{tmp_path.name}", TOKEN, str(tmp_path))


def test_without_a_learner_that_trains_there_is_nothing_and_that_is_no_failure(feed, around, tmp_path):
    assert feed.latest() is None and feed.wait_for(None, 0.0) is None and feed.failure is None
    sender = broadcaster(tmp_path)
    sender.publish(WeightVersion(0, 3), ARRAYS)
    around.view = learner(sender.endpoint(), training=False)
    assert feed.latest() is None and feed.failure is None
    with pytest.raises(UnreachableError, match="no learner"):
        feed.fetch(WeightVersion(0, 3))
    around.view = learner(sender.endpoint())
    assert feed.latest() == WeightVersion(0, 3)
    assert feed.fetch(WeightVersion(0, 3))["layer"].tolist() == [0, 1, 2, 3]
    sender.close()


def test_what_cannot_be_reached_is_named_until_it_can(feed, around, tmp_path):
    gone = broadcaster(tmp_path)
    endpoint = gone.endpoint()
    gone.close()
    around.view = learner(endpoint)
    assert feed.latest() is None
    assert feed.failure is not None and "no broadcaster of this job runs on this machine" in feed.failure
    back = broadcaster(tmp_path)
    back.publish(WeightVersion(0, 4), ARRAYS)
    around.view = learner(back.endpoint())
    assert feed.wait_for(None, 5.0) == WeightVersion(0, 4) and feed.failure is None
    back.close()


def test_a_closed_feed_ends_waits(feed):
    feed.close()
    with pytest.raises(Stopped):
        feed.latest()
