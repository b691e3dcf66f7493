"""Films of a real fleet's episodes: chosen, whole, in the simulator's own colours, and never in the way of steps."""

import re
import time
from pathlib import Path

import numpy as np
import pytest
from tests.fleet.painted import COLOURS, LENGTH
from tests.fleet.test_video import read

from penstock.fleet import FleetConfig, RecordingPool, RolloutWorker, SimulatorPool
from penstock.fleet.config import SimulatorLimits, VideoConfig
from penstock.fleet.steps import ActionBatch
from penstock.types import WeightVersion


class _Valuing:
    """Does nothing in particular, and values an observation at 7.25."""

    version = WeightVersion(0, 0)

    def decide(self, slots, observations, first):
        return self

    def done(self):
        return True

    def __init__(self, slots):
        self._slots = slots

    def result(self):
        n = self._slots
        return ActionBatch(
            {"": np.zeros(n, np.int64)}, np.zeros(n, np.float32), np.full(n, 7.25, np.float32), self.version
        )


class _Fleet:
    """Runs a filmed pool of one batch per turn until something is so."""

    def __init__(self, folder: Path, id: str, slots: int, rows: int, video: VideoConfig, **kwargs):
        self.told = []
        limits = kwargs.pop("limits", SimulatorLimits(backoff_s=0.02))
        config = FleetConfig(
            tasks={"a/b": {"id": f"tests.fleet.painted:{id}", "kwargs": kwargs}}, envs_per_worker=slots,
            envs_per_process=rows, batch_size=rows, video=video, limits=limits,
        )  # fmt: skip
        told = lambda kind, fields: self.told.append((kind, fields))  # noqa: E731
        self.pool = RecordingPool(SimulatorPool(config, "w0", 1, told), video, folder, "w0-0", told)
        self._config, self._rows = config, rows

    def __enter__(self):
        self.pool.start(20.0)
        self.worker = RolloutWorker(self.pool, _Valuing(self._rows), self._config, self.pool.note)
        return self

    def __exit__(self, *error):
        self.pool.close()

    def until(self, reached, timeout_s=15.0):
        deadline_s = time.monotonic() + timeout_s
        while not reached(self.pool.counts()):
            assert time.monotonic() < deadline_s, (self.pool.counts(), self.told)
            self.worker.run_once(0.1)


def check_film(path: Path, first: int = 0, frames: int = LENGTH + 1) -> None:
    rate, pictures = read(path)
    assert rate == 10 and pictures.shape == (frames, 33 * 4 + 28, 65 * 4, 3)
    means = pictures[:, 8:120, 8:250].mean(axis=(1, 2))
    np.testing.assert_allclose(means, COLOURS[first : first + frames], atol=14)
    assert all((words.max(axis=2) > 128).sum() > 60 for words in pictures[:, 132:])  # there is something to read


@pytest.mark.parametrize("id", ["Painted", "Seen"])
def test_an_episode_is_filmed_from_its_first_to_its_last_observation(tmp_path, id):
    video = VideoConfig(every_episodes=5, fps=10)
    with _Fleet(tmp_path / "videos", id, 4, 2, video) as fleet:
        fleet.until(lambda counts: counts["films"] == 2)
    paths = sorted((tmp_path / "videos").iterdir())
    assert len(paths) >= 2
    for path in paths[:2]:
        assert re.fullmatch(r"w0-0_a_b_slot[0-3]_episode\d+_return8\.mp4", path.name)  # raw rewards, 4 × 2.0
        check_film(path)
    assert fleet.pool.counts()["film_frames_dropped"] == 0 and fleet.pool.counts()["films_failed"] == 0
    assert not [kind for kind, _ in fleet.told if kind in ("film_failed", "simulator_failed")]


def test_words_give_step_value_reward_and_return(tmp_path, monkeypatch):
    with _Fleet(tmp_path, "Painted", 1, 1, VideoConfig(every_episodes=1, fps=10)) as fleet:
        added = []
        original = fleet.pool._writer.add
        monkeypatch.setattr(
            fleet.pool._writer, "add", lambda picture, words: added.append(words) or original(picture, words)
        )
        fleet.until(lambda counts: counts["films"] == 1)
    assert added[:5] == [
        ("step 0  value 7.250", "reward 0  return 0"),
        ("step 1  value 7.250", "reward 0.5  return 0.5"),
        ("step 2  value 7.250", "reward 0.5  return 1"),
        ("step 3  value 7.250", "reward 0.5  return 1.5"),
        ("step 4  the end", "reward 0.5  return 2"),
    ]


def test_a_film_ends_after_most_frames_and_the_next_is_chosen_all_the_same(tmp_path):
    with _Fleet(tmp_path, "Painted", 1, 1, VideoConfig(every_episodes=1, fps=10, most_frames=2)) as fleet:
        fleet.until(lambda counts: counts["films"] == 2)
    paths = sorted(tmp_path.glob("*.mp4"))
    assert all("_return0.5.mp4" in path.name for path in paths)  # what was seen of it
    check_film(paths[0], frames=2)


def test_a_simulator_that_fails_to_draw_goes_on_and_is_told_of(tmp_path):
    with _Fleet(tmp_path, "Painted", 2, 2, VideoConfig(every_episodes=1, fps=10), breaks_at=2) as fleet:
        fleet.until(lambda counts: counts["films_failed"] >= 2)
        assert fleet.pool.counts()["restarts"] == 0
    kind, fields = next((kind, fields) for kind, fields in fleet.told if kind == "film_failed")
    assert fields == {"worker": "w0-0", "task": "a/b", "reason": "RuntimeError: the brush is lost"}
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_replaced_meanwhile_is_asked_again(tmp_path):
    limits = SimulatorLimits(restart_interval_s=0.05, backoff_s=0.02)
    with _Fleet(tmp_path, "Painted", 1, 1, VideoConfig(every_episodes=2, fps=10), limits=limits) as fleet:
        fleet.until(lambda counts: counts["films"] >= 3 and any(kind == "simulator_retired" for kind, _ in fleet.told))
    for path in tmp_path.iterdir():
        assert 1 <= len(read(path)[1]) <= LENGTH + 1


def test_what_neither_draws_nor_shows_an_image_is_said_so(tmp_path):
    with _Fleet(tmp_path, "Painted", 1, 1, VideoConfig(every_episodes=1), render_mode=None) as fleet:
        fleet.until(lambda counts: counts["films_failed"] >= 1)
    reasons = [fields["reason"] for kind, fields in fleet.told if kind == "film_failed"]
    assert "draws nothing (render_mode: rgb_array), and no observation is an image" in reasons[0]
