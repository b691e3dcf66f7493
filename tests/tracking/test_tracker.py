import threading
from concurrent.futures import ThreadPoolExecutor

from penstock.tracking import MultiTracker


class Recording:
    def __init__(self):
        self.calls = []

    def log(self, metrics, step):
        self.calls.append(("log", metrics, step))

    def log_samples(self, step, samples):
        self.calls.append(("log_samples", step, samples))

    def close(self):
        self.calls.append(("close",))


class Broken(Recording):
    def log(self, metrics, step):
        raise ConnectionError(f"no service at step {step}")

    log_samples = log


def test_a_failing_tracker_is_reported_once_counted_always_and_disturbs_no_other():
    first, last = Recording(), Recording()
    reported = []
    tracker = MultiTracker([first, Broken(), last], lambda name, error: reported.append((name, str(error))))
    for step in range(3):
        tracker.log({"train/loss": 1.0}, step)
    tracker.log_samples(3, [{"reward": 1.0}])
    tracker.close()
    assert reported == [("Broken", "no service at step 0")]
    assert tracker.failures == {"Broken": 4}
    assert first.calls == last.calls == [
        ("log", {"train/loss": 1.0}, 0), ("log", {"train/loss": 1.0}, 1), ("log", {"train/loss": 1.0}, 2),
        ("log_samples", 3, [{"reward": 1.0}]), ("close",),
    ]  # fmt: skip


def test_a_service_that_is_down_holds_a_run_up_for_a_tenth_of_its_time(monkeypatch):
    now, tried = [100.0], []

    class Slow(Recording):
        def log(self, metrics, step):
            tried.append(step)
            now[0] += 5.0
            raise TimeoutError("no answer")

        def close(self):
            tried.append("close")

    monkeypatch.setattr("penstock.tracking.tracker.time.monotonic", lambda: now[0])
    other = Recording()
    tracker = MultiTracker([Slow(), other], lambda name, error: None)
    for step in range(60):
        tracker.log({}, step)
        now[0] += 1.0
    tracker.close()
    assert tried == [0, 50, "close"] and tracker.failures == {"Slow": 60}
    assert len(other.calls) == 61


def test_each_tracker_sees_one_call_at_a_time():
    class Exclusive(Recording):
        inside = threading.Lock()

        def log(self, metrics, step):
            assert self.inside.acquire(blocking=False), "two calls at once"
            try:
                threading.Event().wait(0.001)
            finally:
                self.inside.release()

    tracker = MultiTracker([Exclusive()], lambda name, error: None)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda step: tracker.log({}, step), range(40)))
    assert tracker.failures == {}
