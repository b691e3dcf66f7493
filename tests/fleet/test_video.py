"""The encoder's thread: films as they were meant, frames dropped rather than waited for, and failures told."""

import importlib.util
import threading

import av
import numpy as np
import pytest

from penstock.fleet import video as video_module
from penstock.fleet.video import VideoWriter, captioned, require_film_packages
from penstock.types import ConfigError

RED = np.broadcast_to(np.array((230, 10, 10), np.uint8), (20, 31, 3))


@pytest.fixture
def told():
    return []


@pytest.fixture
def make(tmp_path, told):
    writers = []

    def made(**options):
        writers.append(
            VideoWriter(tmp_path / "films", "w0", 25, lambda kind, fields: told.append((kind, fields)), **options)
        )
        return writers[-1]

    yield made
    for writer in writers:
        assert writer.close(10.0)


def read(path):
    with av.open(str(path)) as container:
        rate = container.streams.video[0].average_rate
        return rate, np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


@pytest.fixture
def held(monkeypatch):
    """An encoder that does nothing before it is let go."""
    let_go = threading.Event()
    original = video_module.captioned

    def waiting(picture, words):
        assert let_go.wait(10.0)
        return original(picture, words)

    monkeypatch.setattr(video_module, "captioned", waiting)
    yield let_go
    let_go.set()


def test_a_film_has_its_frames_colours_rate_and_name(make, told, tmp_path):
    writer = make()
    assert writer.begin()
    for brightness in (0, 100, 200):
        assert writer.add(np.full((20, 31, 3), brightness, np.uint8), ("step", "reward"))
    writer.end("first.mp4")
    assert writer.close(10.0)
    assert [path.name for path in (tmp_path / "films").iterdir()] == ["first.mp4"]
    rate, frames = read(tmp_path / "films" / "first.mp4")
    assert rate == 25 and frames.shape == (3, 20 * 9 + 28, 31 * 9 + 1, 3)
    np.testing.assert_allclose(frames[:, :170, :270].mean(axis=(1, 2, 3)), [0, 100, 200], atol=6)
    assert told == [("film_written", {"path": str(tmp_path / "films" / "first.mp4"), "frames": 3, "dropped_frames": 0})]
    assert writer.counts() == {"films": 1, "films_failed": 0, "film_frames": 3, "film_frames_dropped": 0}


def test_a_second_film_waits_until_the_first_is_written(make, held, tmp_path):
    writer = make()
    assert writer.begin() and writer.add(RED, ()) and not writer.begin()
    writer.end("a.mp4")
    assert not writer.begin()
    held.set()
    for _ in range(1000):
        if writer.begin():
            break
        threading.Event().wait(0.005)
    writer.add(RED, ())
    writer.end(None)  # thrown away
    assert writer.close(10.0) and [path.name for path in (tmp_path / "films").iterdir()] == ["a.mp4"]


def test_frames_that_do_not_fit_are_dropped_and_counted_and_nobody_waits(make, held, told, tmp_path):
    writer = make(most_waiting_bytes=5 * RED.nbytes)
    writer.begin()
    taken = [writer.add(RED, ()) for _ in range(100)]
    assert sum(taken) in (5, 6) and taken[:5] == [True] * 5  # one may be in the encoder's hands
    assert writer.waiting_bytes <= 5 * RED.nbytes
    writer.end("short.mp4")
    held.set()
    assert writer.close(10.0)
    assert writer.counts()["film_frames_dropped"] == 100 - sum(taken) == told[0][1]["dropped_frames"]
    assert len(read(tmp_path / "films" / "short.mp4")[1]) == sum(taken) and writer.waiting_bytes == 0


def test_a_film_that_cannot_be_encoded_is_told_and_the_next_one_is_written(make, told, tmp_path, monkeypatch):
    writer = make()
    original = video_module._Encoder.add

    def broken(self, pixels):
        original(self, pixels)
        raise ValueError("the codec stumbled")

    monkeypatch.setattr(video_module._Encoder, "add", broken)
    writer.begin()
    for _ in range(3):
        writer.add(RED, ())
    writer.end("lost.mp4")
    while not writer.begin():
        threading.Event().wait(0.005)
    assert told == [("film_failed", {"worker": "w0", "reason": "ValueError: the codec stumbled"})]
    assert list((tmp_path / "films").iterdir()) == [] and writer.counts()["films_failed"] == 1
    monkeypatch.setattr(video_module._Encoder, "add", original)
    writer.add(RED, ())
    writer.end("found.mp4")
    assert writer.close(10.0) and len(read(tmp_path / "films" / "found.mp4")[1]) == 1


def test_an_unfinished_film_leaves_nothing_whatever_ends_it(make, tmp_path):
    writer = make()
    writer.begin()
    writer.add(RED, ())
    while not writer.counts()["film_frames"]:
        threading.Event().wait(0.005)
    assert list((tmp_path / "films").iterdir()) == [], "nor does a process that is killed here"
    assert writer.close(10.0) and list((tmp_path / "films").iterdir()) == [] and not writer.begin()


def test_words_stand_below_the_picture_which_stays_as_it_is():
    plain, worded = captioned(RED, ()), captioned(RED, ("value 1.5", "reward 2"))
    assert plain.shape == (180, 280, 3) and worded.shape == (208, 280, 3)
    np.testing.assert_array_equal(worded[:180, :279], RED.repeat(9, 0).repeat(9, 1))
    first, second = worded[180:194].max(axis=2) > 128, worded[194:].max(axis=2) > 128
    assert 40 < first.sum() < 1000 and 40 < second.sum() < 1000 and (first != second).any()
    assert captioned(np.zeros((300, 401, 3), np.uint8), ("x",)).shape == (314, 402, 3)


def test_a_missing_package_is_one_error_that_says_how_to_install_it(tmp_path, monkeypatch):
    original = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "av" else original(name))
    with pytest.raises(ConfigError, match=r"needs av, missing here: pip install 'penstock\[gym\]'"):
        require_film_packages("fleet.video.every_episodes = 5")
    with pytest.raises(ConfigError, match="a film needs av"):
        VideoWriter(tmp_path, "w0", 30)
