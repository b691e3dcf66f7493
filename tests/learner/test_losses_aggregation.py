import numpy as np
import pytest

from penstock.learner import sequence_weights


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("token", [1 / 4, 1 / 4]), ("sequence", [1 / 2, 1 / 6]), ("constant", [1 / 8, 1 / 8])],
)
def test_the_golden_weights_of_two_unequal_sequences(aggregation, expected):
    weights = sequence_weights([1, 3], aggregation, max_tokens=4)
    assert weights.dtype == np.float32
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


def test_a_single_token_has_the_whole_weight():
    assert sequence_weights([1], "token", 4).tolist() == [1.0]


def test_a_loss_of_one_everywhere_has_mean_one():
    lengths = [5, 1, 17, 2]
    for aggregation in ("token", "sequence"):
        assert np.dot(sequence_weights(lengths, aggregation, 99), lengths) == pytest.approx(1.0, abs=1e-6)


def test_constant_aggregation_divides_each_sequence_by_its_own_limit():
    np.testing.assert_allclose(sequence_weights([1, 3], "constant", [4, 10]), [1 / 8, 1 / 20], rtol=1e-6)
