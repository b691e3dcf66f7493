import numpy as np

from penstock.types import WeightVersion
from penstock.weights.delta import decode_delta
from penstock.weights.delta_history import DeltaHistory
from penstock.weights.manifest import Manifest, describe

LARGE = 1 << 40


def publication(step: int) -> tuple[Manifest, dict[str, np.ndarray]]:
    array = np.zeros(100_000, np.float32)
    array[:step] = 1.0
    arrays = {"x": array}
    return describe("job", "a" * 32, WeightVersion(0, step), arrays), arrays


def history_up_to(step: int, most: int = 4) -> DeltaHistory:
    history = DeltaHistory(most)
    for each in range(step + 1):
        history.add(*publication(each))
    return history


def test_the_first_publication_has_a_way_to_itself_only():
    history = DeltaHistory()
    assert history.chains() == {}
    assert history.add(*publication(0)) is None
    assert history.chains() == {publication(0)[0].content: ()}


def test_a_client_that_is_two_behind_gets_two_deltas_in_order():
    chain = history_up_to(3).chains()[publication(1)[0].content]
    manifest, arrays = publication(1)
    for delta in chain:
        manifest, arrays = decode_delta(delta.to_bytes(), manifest, arrays, LARGE)
    assert [delta.manifest.version.step for delta in chain] == [2, 3]
    np.testing.assert_array_equal(arrays["x"], publication(3)[1]["x"])


def test_who_is_too_far_behind_gets_none():
    history = history_up_to(5, most=2)
    assert sorted(version.step for version, _ in history.chains()) == [3, 4, 5]


def test_a_delta_that_is_not_smaller_ends_every_chain():
    history = history_up_to(3)
    random = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32).view(np.float32)
    manifest = describe("job", "a" * 32, WeightVersion(0, 4), {"x": random})
    assert history.add(manifest, {"x": random}) is None
    assert history.chains() == {manifest.content: ()}


def test_deltas_that_are_larger_together_are_left_out():
    history = DeltaHistory()
    random = np.random.default_rng(0)
    for step in range(3):
        noise = random.integers(0, 2**20, 100_000, np.uint32)  # a delta of such takes 2.6 of 4 bytes
        arrays = {"x": noise.view(np.float32)}
        history.add(describe("job", "a" * 32, WeightVersion(0, step), arrays), arrays)
    assert sorted(version.step for version, _ in history.chains()) == [1, 2]
