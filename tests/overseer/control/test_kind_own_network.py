"""Runs that train a network of one's own: trained, replayed, evaluated, resumed; and whose code is imported."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from penstock.learner import ControlLearner
from penstock.overseer import FleetRunConfig, evaluate_fleet, train
from penstock.overseer.config_loading import build_config, load_recorded_config, named_code
from penstock.overseer.control.kind import ControlKind
from penstock.overseer.control.policies import make_policy
from penstock.overseer.control.simulators import probe_spaces
from penstock.overseer.plan import describe_plan
from penstock.overseer.rerun.replay import replay_updates
from penstock.rundir import RunDirectory, read_metrics
from penstock.types import CheckpointError, ConfigError, PenstockError
from tests.overseer.control.test_kind_fleet_resume import TINY
from tests.overseer.test_control_config import build

EXAMPLE = Path(__file__).parents[3] / "examples/own_network.py"


def own(folder: Path, **changes: Any) -> FleetRunConfig:
    """A run of three updates by a copy of the example in a folder."""
    shutil.copy(EXAMPLE, folder / "nets.py")
    model = {"module": f"{folder}/nets.py:Towers", "kwargs": {"width": 6}}
    overseer = {"checkpoint_every": 1, "keep_every": 1}
    return build_config(FleetRunConfig, {**TINY, "steps": 3, "model": model, "overseer": overseer, **changes})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    train(own(folder), folder / "run", quiet=True)
    return folder / "run"


def test_it_is_trained_and_its_updates_can_be_made_again(run: Path):
    first, last = (load_file(run / f"checkpoints/step-{step}/model/model.safetensors") for step in (0, 3))
    assert set(first) == {f"network.{part}.layers.{i}.{name}" for part in ("actor", "critic") for i in range(3)
                          for name in ("weight", "bias")}  # fmt: skip
    assert not any(np.array_equal(first[name], last[name]) for name in first)
    assert all(
        row["train/mismatch_max"] < 1e-5 for row in read_metrics(run / "metrics.jsonl") if "train/mismatch_max" in row
    )
    replayed = replay_updates(run, 2, 3)
    assert [update.step for update in replayed.updates] == [2, 3] and all(u.equal for u in replayed.updates)


def test_it_is_evaluated_by_the_code_that_the_config_names(run: Path):
    config, code = load_recorded_config(RunDirectory(run), [], trust=False, sections=("model",))
    assert isinstance(config, FleetRunConfig)
    assert [(each.key, each.place) for each in code] == [("model.module", f"{run.parent}/nets.py")]
    assert evaluate_fleet(run / "checkpoints/step-3", config).tasks["guess"].episodes == 2
    with pytest.raises(CheckpointError, match="model.module '.*/elsewhere.py:Towers': no file"):
        moved = config.model.model_copy(update={"module": f"{run.parent}/elsewhere.py:Towers"})
        evaluate_fleet(run / "checkpoints/step-3", config.model_copy(update={"model": moved}))


def test_a_resume_goes_on_with_it_where_its_code_has_moved(run: Path, tmp_path: Path):
    config = own(tmp_path, steps=4)
    shutil.copytree(run, tmp_path / "run")
    train(config, tmp_path / "run", resume=True, quiet=True)
    assert (tmp_path / "run/checkpoints/step-4").is_dir()
    spaces, checkpoint = probe_spaces(config), run / "checkpoints/step-3"
    with pytest.raises(
        ConfigError, match=r'^model\.kwargs is {"width": 8}, but .* was trained with .*kwargs={"width":6}'
    ):
        ControlKind(spaces).check_resume(
            own(tmp_path, model={**config.model.model_dump(), "kwargs": {"width": 8}}), checkpoint
        )
    with pytest.raises(ConfigError, match=r"^model\.module is null, .*but .* was trained with model\.module="):
        ControlKind(spaces).check_resume(build_config(FleetRunConfig, TINY), checkpoint)


def test_a_dry_run_says_who_makes_it(tmp_path: Path):
    config = own(tmp_path)
    assert f"# Model: {tmp_path}/nets.py:Towers, 141 parameters" in describe_plan(config)
    assert [each.key for each in named_code(config.dump())][0] == "model.module"


def test_a_warm_up_of_values_needs_the_names_of_its_arrays(tmp_path: Path):
    config = own(tmp_path, learner={"epochs": 1, "minibatches": 1, "value_warmup_updates": 2})
    policy = make_policy(config, probe_spaces(config))
    with pytest.raises(
        ConfigError, match=r"learner\.value_arrays is .*no array of this policy.*network\.critic\.layers"
    ):
        ControlLearner(policy, config.learner, 3)
    ControlLearner(policy, config.learner.model_copy(update={"value_arrays": ("network.critic.*",)}), 3)


@pytest.mark.parametrize(
    ("learner", "words"),
    [
        ({"value_warmup_updates": 2}, r"learner\.value_arrays is .*no array of this policy"),
        ({"burn_in": 2}, r"learner\.burn_in is 2, but the policy has no memory"),
        ({"optimizer": {"frozen": ["encoder.*"]}}, r"learner\.optimizer\.frozen has \['encoder\.\*'\]"),
        ({"reference_kl": {"reference": "/nowhere"}}, r"/nowhere holds no config\.json"),
    ],
)
def test_what_the_learner_would_refuse_is_refused_before_anything_is_written(tmp_path: Path, learner, words):
    config = own(tmp_path, learner={"epochs": 1, "minibatches": 1, **learner})
    with pytest.raises(PenstockError, match=words):
        train(config, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
    with pytest.raises(PenstockError, match=words):
        describe_plan(config)


def test_a_burn_in_is_the_networks_own_affair(tmp_path: Path):
    config = own(tmp_path, learner={"epochs": 1, "minibatches": 1, "burn_in": 2})
    with pytest.raises(ConfigError, match=r"learner\.burn_in is 2, but the policy has no memory"):
        ControlLearner(make_policy(config, probe_spaces(config)), config.learner, 3)
    with pytest.raises(ConfigError, match=r"learner\.burn_in is 2 and model\.memory is none"):
        build({"learner": {"burn_in": 2}})


def test_a_resume_may_name_another_place_of_a_file_and_nothing_else(run: Path, tmp_path: Path):
    def model(**kwargs: Any) -> dict[str, Any]:
        return {"module": f"{tmp_path}/nets.py:Towers", "kwargs": {"width": 6, "steps": [1], **kwargs}}

    checkpoint = tmp_path / "step-3"
    shutil.copytree(run / "checkpoints/step-3", checkpoint)
    form = json.loads((checkpoint / "model/config.json").read_text())
    form["model"] |= model(weights_path="/old/weights.npz")
    (checkpoint / "model/config.json").write_text(json.dumps(form))
    config = own(tmp_path, model=model(weights_path="/new/weights.npz"))
    spaces = probe_spaces(config)
    ControlKind(spaces).check_resume(config, checkpoint)
    for other in ({"weights_path": 3}, {"width": 7, "weights_path": "/new/weights.npz"}, {}):
        with pytest.raises(ConfigError, match=r"^model\.kwargs is .*but .* was trained with"):
            ControlKind(spaces).check_resume(own(tmp_path, model=model(**other)), checkpoint)
