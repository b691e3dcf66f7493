import pytest

from penstock.overseer.config_loading import load_config
from penstock.overseer.plan import describe_plan


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
