"""Films of training episodes lie in the run directory, and are counted and told."""

import importlib.util
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import pytest

from penstock.overseer import train
from penstock.overseer.control.simulators import filmed_pool, worker_pool
from penstock.rundir import RunDirectory, read_events, read_metrics
from penstock.types import ConfigError
from tests.overseer.test_fleet_training import tiny

CHANGES = {
    "fleet": {
        "tasks": {"guess": {"id": "tests.overseer.simulators:Shown"}},
        "video": {"every_episodes": 4, "fps": 10},
    },
    "evaluation": {"before": False, "episodes": 2},
}


@pytest.mark.slow
def test_training_episodes_are_filmed_whole(run_dir: Path):
    assert train(tiny(CHANGES), run_dir, quiet=True).complete
    paths = sorted((run_dir / "videos").glob("fleet-0.0-0_guess_slot*_episode*_return5.mp4"))
    assert paths and paths == sorted((run_dir / "videos").iterdir())
    frames = imageio.imread(paths[0], plugin="pyav")
    assert frames.shape == (6, 256 + 28, 256, 3)
    np.testing.assert_allclose(frames[:, :256].mean(axis=(1, 2, 3)), [0, 40, 80, 120, 160, 200], atol=6)
    written = [event for event in read_events(run_dir / "events.jsonl") if event["event"] == "film_written"]
    assert sorted(event["path"] for event in written) == [str(path) for path in paths]
    assert [row for row in read_metrics(run_dir / "metrics.jsonl") if "fleet/films" in row]


def test_a_worker_on_a_machine_without_the_run_directory_makes_no_films_nobody_would_find(run_dir: Path):
    config = tiny(CHANGES)
    pool = worker_pool(config, 0, 0, 0, lambda kind, fields: None)
    match = rf"every_episodes is 4, and .* does not have the run directory {run_dir}.*set it to 0, or share"
    with pytest.raises(ConfigError, match=match):
        filmed_pool(pool, config, RunDirectory(run_dir), "rollout-0.0-0", lambda kind, fields: None)
    assert not run_dir.exists()
    without = tiny()
    assert filmed_pool(pool, without, RunDirectory(run_dir), "rollout-0.0-0", lambda kind, fields: None) is None


@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_a_missing_package_is_told_before_training(run_dir: Path, monkeypatch: pytest.MonkeyPatch, runtime: str):
    original = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "av" else original(name, *rest)
    )
    with pytest.raises(ConfigError, match=r"every_episodes = 4 needs av, missing here: pip install 'penstock\[gym\]'"):
        train(tiny({**CHANGES, "runtime": runtime}), run_dir, quiet=True)
