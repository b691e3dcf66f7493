"""A feed follows whichever learner lives, and says what it cannot reach."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from penstock.overseer.control.rollout import FollowedWeights
from penstock.overseer.supervisor.messages import Identity, Membership, Peer
from penstock.types import Stopped, UnreachableError, WeightVersion
from penstock.weights import WeightsConfig, open_broadcaster
from tests.overseer.lonely import Lonely

TOKEN = "a token of sixteen or more"
CONFIG = WeightsConfig(transport="shared_memory")
ARRAYS = {"layer": np.arange(4, dtype=np.float32)}
BASE = {"layer": jnp.zeros(4), "embedding": jnp.full(2, 7.0)}


def learner(endpoint, training=True):
    return Membership(1, 0, (Peer(Identity("learner", 0, 0), {"weights": endpoint, "training": training}),))


@pytest.fixture
def ctx():
    return Lonely("rollout")


@pytest.fixture
def feed(ctx):
    feed = feed_of(ctx, CONFIG)
    yield feed
    feed.close()


def feed_of(ctx, config):
    settings = SimpleNamespace(config=SimpleNamespace(weights=config), token=TOKEN)
    return FollowedWeights(ctx, settings, BASE, in_training=True)


def broadcaster(tmp_path, config=CONFIG):
    return open_broadcaster(config, f"feed-{tmp_path.name}", TOKEN, str(tmp_path))


def test_without_a_learner_that_trains_there_is_nothing_and_that_is_no_failure(feed, ctx, tmp_path):
    assert feed.latest() is None and feed.wait_for(None, 0.0) is None and feed.failure is None
    sender = broadcaster(tmp_path)
    sender.publish(WeightVersion(0, 3), ARRAYS)
    ctx.view = learner(sender.endpoint(), training=False)
    assert feed.latest() is None and feed.failure is None
    with pytest.raises(UnreachableError, match="no learner"):
        feed.fetch(WeightVersion(0, 3))
    ctx.view = learner(sender.endpoint())
    assert feed.latest() == WeightVersion(0, 3)
    assert feed.fetch(WeightVersion(0, 3))["layer"].tolist() == [0, 1, 2, 3]
    sender.close()


@pytest.mark.parametrize("encoding", ["full", "delta"])
def test_what_travelled_as_bfloat16_or_not_at_all_is_the_policys_own_again(ctx, tmp_path, encoding):
    config = WeightsConfig(transport="shared_memory", bfloat16=True, encoding=encoding)
    sender, feed = broadcaster(tmp_path, config), feed_of(ctx, config)
    sender.publish(WeightVersion(0, 1), {"layer": jnp.array([1.0, 1.001, 3.0, -0.1])})
    ctx.view = learner(sender.endpoint())
    fetched = feed.fetch(WeightVersion(0, 1))
    assert {name: array.dtype.name for name, array in fetched.items()} == dict.fromkeys(BASE, "float32")
    assert fetched["layer"].tolist() == [1.0, 1.0, 3.0, -0.10009765625] and fetched["embedding"].tolist() == [7.0, 7.0]
    feed.close()
    sender.close()


def test_what_cannot_be_reached_is_named_until_it_can(feed, ctx, tmp_path):
    gone = broadcaster(tmp_path)
    endpoint = gone.endpoint()
    gone.close()
    ctx.view = learner(endpoint)
    assert feed.latest() is None
    assert feed.failure is not None and "no broadcaster of this job runs on this machine" in feed.failure
    back = broadcaster(tmp_path)
    back.publish(WeightVersion(0, 4), ARRAYS)
    ctx.view = learner(back.endpoint())
    assert feed.wait_for(None, 5.0) == WeightVersion(0, 4) and feed.failure is None
    back.close()


def test_a_closed_feed_ends_waits(feed):
    feed.close()
    with pytest.raises(Stopped):
        feed.latest()
