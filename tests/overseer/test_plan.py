import pytest

from penstock.overseer.config_loading import load_config
from penstock.overseer.plan import describe_plan
from penstock.types import ConfigError


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ([], " tokens\n"),
        (["inference.model_parallel=2"], "tokens, split over 2 devices\n"),
        (["inference.model_parallel=null"], "tokens, split over all local devices\n"),
    ],
)
def test_the_plan_says_over_how_many_devices_the_engine_is_split(setting, text):
    assert text in describe_plan(load_config("cats", setting))


def test_a_length_that_the_engine_would_refuse_is_refused_before_a_run():
    changes = ["inference.max_seq_len=4096", "learner.row_length=4096"]
    with pytest.raises(ConfigError, match=r"inference.max_seq_len is 4096, .* meant for 2048 tokens"):
        describe_plan(load_config("cats", changes))
