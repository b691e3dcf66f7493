import sys

import pytest

from penstock.batch import (
    BatchMaker,
    BatchMakerConfig,
    DeadlineBatchMaker,
    GrpoBatchMaker,
    RecencyBatchMaker,
    make_batch_maker,
)
from penstock.types import ConfigError

OWN = '''
from penstock.batch import BatchMaker, example_from_rollout


class Latest(BatchMaker):
    """Trains on the newest rollout only."""

    def __init__(self, max_tokens, bonus=0.0):
        self.max_tokens, self.bonus, self.newest = max_tokens, bonus, None

    def add_rollout(self, rollout):
        self.newest = rollout

    def create_batch(self, batch_size):
        if self.newest is None:
            return None
        return [example_from_rollout(self.newest, self.newest.episode_reward + self.bonus, self.max_tokens)]

    def get_batch_metadata(self, batch):
        return {"metrics": {}}


class Unfinished(Latest.__base__):
    def add_rollout(self, rollout): ...


class Stranger: ...


number = 3
'''


def make(config: BatchMakerConfig, **changes) -> BatchMaker:
    arguments = {
        "advantage": "rloo", "max_tokens": 16, "max_samples": 1, "ordered": False, "allow_truncated_sampling": False,
        "seed": 0,
    }  # fmt: skip
    return make_batch_maker(config, **(arguments | changes))


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A package of the user's in the current directory: its makers' dotted path."""
    (tmp_path / "users_makers.py").write_text(OWN)
    (tmp_path / "broken_makers.py").write_text("1 / 0")
    (tmp_path / "hungry_makers.py").write_text("import a_package_nobody_has")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield "users_makers"
    for name in ("users_makers", "broken_makers", "hungry_makers"):
        sys.modules.pop(name, None)


def test_built_in_makers_are_made_by_name():
    assert isinstance(make(BatchMakerConfig()), DeadlineBatchMaker)
    assert isinstance(make(BatchMakerConfig(name="grpo")), GrpoBatchMaker)
    recency = make(BatchMakerConfig(name="recency", unit="rollout"), environment_name="cats")
    assert isinstance(recency, RecencyBatchMaker)
    assert (recency.unit, recency.environment_name) == ("rollout", "cats")


def test_the_config_reaches_the_maker(add):
    recency = make(BatchMakerConfig(name="recency", alpha=1e9), max_samples=-1)
    grpo = make(BatchMakerConfig(name="grpo", retention="all"))
    for maker in (recency, grpo):
        for index in (1, 0):
            add(maker, f"a-0-{index}", step=index)
    assert [e.rollout_ids[0] for _ in range(3) for e in recency.create_batch(1)] == ["a-0-0/0", "a-0-0/1"] * 3
    assert len(grpo.create_batch(4)) == 4


def test_the_grpo_maker_has_its_own_advantage():
    with pytest.raises(ConfigError, match="by rloo, but 'grpo' is asked for: set learner.loss.advantage: rloo"):
        make(BatchMakerConfig(name="grpo"), advantage="grpo")


def test_ones_own_is_made_by_its_path_with_what_its_constructor_names(own, add):
    maker = make(BatchMakerConfig(name=f"{own}:Latest", arguments={"bonus": 0.5}))
    assert (maker.max_tokens, maker.bonus) == (16, 0.5)
    assert maker.create_batch(1) is None
    add(maker, "a-0-0", rewards=(0.0, 1.0))
    (example,) = maker.create_batch(1)
    assert example.rollout_ids == ("a-0-0/1",) and example.advantage.tolist() == [0.0, 1.5]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_package.makers:Latest", "no module named 'no_such_package'"),
        ("users_makers:Lastest", "users_makers has no 'Lastest' .did you mean 'Latest'"),
        ("users_makers:", "is not a path: write package.module.Name or"),
        ("users_makers:Stranger", "is no class derived from penstock.batch.BatchMaker"),
        ("users_makers:number", "3 is no class derived from"),
        ("users_makers:Unfinished", "Unfinished is abstract: define create_batch, get_batch_metadata"),
        ("broken_makers:Latest", "importing broken_makers raised ZeroDivisionError"),
        ("hungry_makers:Latest", "importing hungry_makers needs 'a_package_nobody_has': install it"),
    ],
)
def test_a_path_that_is_no_maker_says_why(own, name, message):
    with pytest.raises(ConfigError, match=f"replay.batch_maker.name '{name}': .*{message}|{message}"):
        make(BatchMakerConfig(name=name))


def test_arguments_that_do_not_fit_say_what_would(own):
    with pytest.raises(ConfigError, match=r"arguments .*'bonsu': 1.* do not fit Latest\(max_tokens, bonus=0.0\)"):
        make(BatchMakerConfig(name=f"{own}:Latest", arguments={"bonsu": 1}))


@pytest.mark.parametrize("raised", [KeyError("path"), SystemExit(3)])
def test_a_constructor_that_raises_is_named(own, monkeypatch, raised):
    def fail(self, max_tokens, bonus=0.0):
        raise raised

    make(BatchMakerConfig(name=f"{own}:Latest"))
    monkeypatch.setattr(sys.modules[own].Latest, "__init__", fail)
    with pytest.raises(ConfigError, match=f"making a Latest raised {type(raised).__name__}: {raised} "):
        make(BatchMakerConfig(name=f"{own}:Latest"))


def test_a_name_is_checked_with_the_config():
    with pytest.raises(ValueError, match="name is 'newest': it must be one of deadline, recency, grpo"):
        BatchMakerConfig(name="newest")
    with pytest.raises(ValueError, match="are for one's own class; 'recency' takes none"):
        BatchMakerConfig(name="recency", arguments={"alpha": 1})
