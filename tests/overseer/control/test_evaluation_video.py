"""Films: one frame per observation of one whole episode, whatever the simulator does; what fails is told in a line."""

import os
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import pytest

from penstock.model.control import save_control_policy
from penstock.overseer import FleetRunConfig, evaluate_fleet
from penstock.overseer.control.evaluation import MOST_CUT, film_episodes, film_path
from penstock.overseer.control.policies import make_policy
from penstock.overseer.control.simulators import probe_spaces
from penstock.types import ConfigError
from tests.overseer.test_control_config import build

pytestmark = pytest.mark.timeout(120)

SHOWN = "tests.overseer.simulators:Shown"
GUESS = "tests.overseer.simulators:Guess"


def config_of(id: str, **kwargs: Any) -> FleetRunConfig:
    fleet = {
        "tasks": {"pole": {"id": id, "kwargs": kwargs}},
        "limits": {"backoff_s": 0.02, "step_timeout_s": 1.0},
    }
    return build({"fleet": fleet, "model": {"hidden_sizes": [4]}, "evaluation": {"episodes": 1, "simulators": 1}})


def filmed(into: Path, id: str, **kwargs: Any) -> tuple[tuple[Path, ...], list[str]]:
    """Films, and what was told beside how far they are."""
    config, told = config_of(id, **kwargs), []
    films = film_episodes(make_policy(config, probe_spaces(config)), config, into / "films", told.append)
    return films, [line for line in told if " of episode " not in line]


def check_film(path: Path) -> None:
    """Five steps, and what they began with."""
    frames = imageio.imread(path, plugin="pyav")
    assert frames.shape == (6, 284, 256, 3)
    brightness = frames[:, :256].mean(axis=(1, 2, 3))
    np.testing.assert_allclose(brightness, [0, 40, 80, 120, 160, 200], atol=12)
    assert frames[:, 256:].max() > 200, "words stand below"


def test_an_episode_becomes_a_film_with_a_frame_for_each_observation(tmp_path):
    (path,), told = filmed(tmp_path, SHOWN)
    assert path.name == "pole.mp4" and told == []
    check_film(path)


def test_how_far_a_film_is_is_told_at_once_and_where_it_takes_long(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.overseer.control.evaluation.SLOW_S", 0.0)
    config, told = config_of(SHOWN), []
    film_episodes(make_policy(config, probe_spaces(config)), config, tmp_path, told.append)
    assert told[0].startswith("--video: task 'pole': step 0 of episode 1; ") and len(told) > 5
    assert any("step 3 of episode 2" in line for line in told)


def test_a_film_is_named_after_its_task_without_what_no_file_name_holds(tmp_path):
    assert film_path(tmp_path, "a/b c-1.0") == tmp_path / "a_b_c-1.0.mp4"


def test_a_film_that_is_there_is_kept(tmp_path):
    (tmp_path / "films").mkdir()
    (tmp_path / "films" / "pole.mp4").write_text("mine")
    films, (told,) = filmed(tmp_path, SHOWN)
    assert films == () and "pole.mp4 exists already and is not overwritten" in told
    assert (tmp_path / "films" / "pole.mp4").read_text() == "mine"


def test_a_simulator_that_draws_nothing_is_told(tmp_path):
    films, (told,) = filmed(tmp_path, GUESS)
    assert films == () and told.startswith("--video: task 'pole' was not filmed: ") and "it draws nothing" in told


@pytest.mark.slow
@pytest.mark.parametrize("how", ["die", pytest.param("hang", marks=pytest.mark.slow)])
def test_an_episode_that_was_cut_is_filmed_again(tmp_path, how):
    trouble = tmp_path / "trouble"
    trouble.mkdir()
    (path,), told = filmed(tmp_path, "tests.overseer.simulators:Troubled", folder=str(trouble), how=how)
    assert told == [] and os.listdir(trouble) == ["0"]
    assert os.listdir(path.parent) == ["pole.mp4"], "nothing is left of the one that was cut"
    check_film(path)


@pytest.mark.slow
def test_a_simulator_that_always_hangs_ends_its_film_only(tmp_path):
    trouble = tmp_path / "trouble"
    trouble.mkdir()
    films, (told,) = filmed(tmp_path, "tests.overseer.simulators:Troubled", folder=str(trouble), how="hang", times=99)
    assert films == () and f"faults cut {MOST_CUT} episodes" in told
    assert os.listdir(tmp_path / "films") == [] and len(os.listdir(trouble)) == MOST_CUT


def test_an_evaluation_stands_whatever_becomes_of_its_films(tmp_path, capsys):
    config = config_of(GUESS)
    spaces = probe_spaces(config)
    save_control_policy(tmp_path / "model", make_policy(config, spaces), config.model, spaces)
    told = []
    report = evaluate_fleet(tmp_path / "model", config, video_dir=tmp_path / "films", on_report=told.append)
    assert report.tasks["pole"].episodes == 1 and report.videos == () and told == [report]
    assert "--video: task 'pole' was not filmed: " in capsys.readouterr().err


def test_the_report_is_there_before_the_first_film_and_a_film_in_the_way_before_the_first_episode(tmp_path):
    config = config_of(SHOWN)
    spaces = probe_spaces(config)
    save_control_policy(tmp_path / "model", make_policy(config, spaces), config.model, spaces)
    before: list[bool] = []
    films = tmp_path / "films"
    report = evaluate_fleet(
        tmp_path / "model", config, video_dir=films, on_report=lambda report: before.append(films.exists())
    )
    assert before == [False] and report.videos == (films / "pole.mp4",)
    with pytest.raises(ConfigError, match="exists already"):
        evaluate_fleet(tmp_path / "model", config, video_dir=films, on_report=lambda report: before.append(True))
    assert before == [False]


def test_more_episodes_than_anybody_waits_for_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="n is 1000001: at most 1,000,000 episodes of a task are played"):
        evaluate_fleet(tmp_path / "model", config_of(GUESS), episodes=1_000_001)
