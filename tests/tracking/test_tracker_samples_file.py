import json
import threading

import pytest

from penstock.tracking import JsonlTracker


def read(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_each_conversation_is_a_line_with_its_step(tmp_path):
    tracker = JsonlTracker(tmp_path / "samples.jsonl")
    tracker.log({"train/loss": 1.0}, 3)
    tracker.log_samples(3, [{"reward": 0.5, "turns": [{"role": "user", "content": "Käse\n"}]}, {"reward": 1.0}])
    assert read(tmp_path / "samples.jsonl") == [
        {"step": 3, "reward": 0.5, "turns": [{"role": "user", "content": "Käse\n"}]},
        {"step": 3, "reward": 1.0},
    ]
    tracker.close()


@pytest.mark.parametrize("tail", [b'{"step": 2, "rew', b"x" * 10_000])
def test_a_line_left_unfinished_by_a_crash_is_cut_off_on_reopening(tmp_path, tail):
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b'{"step": 1}\n' + tail)
    tracker = JsonlTracker(path)
    tracker.log_samples(4, [{"reward": 1.0}])
    tracker.close()
    assert read(path) == [{"step": 1}, {"step": 4, "reward": 1.0}]


def test_a_file_of_one_unfinished_line_begins_anew(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b"{" * 9000)
    tracker = JsonlTracker(path)
    tracker.log_samples(0, [{"reward": 1.0}])
    tracker.close()
    assert read(path) == [{"step": 0, "reward": 1.0}]


def test_text_that_is_not_valid_unicode_is_still_written(tmp_path):
    tracker = JsonlTracker(tmp_path / "samples.jsonl")
    tracker.log_samples(0, [{"text": "a\ud800b"}])
    tracker.close()
    assert read(tmp_path / "samples.jsonl") == [{"step": 0, "text": "a\\ud800b"}]


def test_lines_of_several_threads_do_not_mix(tmp_path):
    tracker = JsonlTracker(tmp_path / "samples.jsonl")

    def write(worker: int) -> None:
        for step in range(50):
            tracker.log_samples(step, [{"worker": worker, "text": "x" * 500}] * 3)

    threads = [threading.Thread(target=write, args=(worker,), daemon=True) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    tracker.close()
    samples = read(tmp_path / "samples.jsonl")
    assert len(samples) == 4 * 50 * 3
    for worker in range(4):
        assert [s["step"] for s in samples if s["worker"] == worker] == [step for step in range(50) for _ in "abc"]
