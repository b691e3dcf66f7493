"""What workers tell and the replay buffer gets, added up: steps by life, counters that never fall, the end of lives."""

from dataclasses import replace

import pytest
from tests.fragments_made import a_batch, make_fragment

from penstock.fleet.accounting import StepAccount
from penstock.fleet.manager import CountingSink, FleetReports
from penstock.fleet.pipeline_monitor import PipelineReport
from penstock.fleet.worker import WorkerReport, WorkerStatus
from penstock.types import RolloutMetadata, Stopped


def report(worker: str, incarnation: int, steps: int, sent: int = 0, **gauges: float) -> WorkerReport:
    """Of a worker with all but what it sent in fragments that are not complete."""
    return WorkerReport(
        WorkerStatus(worker, incarnation, "running", None, steps, 0.0),
        StepAccount(started=steps, buffered=steps - sent, sent=sent),
        PipelineReport(steps=steps),
        {f"fleet/{name}": value for name, value in gauges.items()},
    )


def fragment(life: str, number: int, length: int = 4, faults: tuple[int, ...] = ()):
    made = make_fragment(f"{life}-0-{number}", length, faults=faults)
    return made.with_metadata(RolloutMetadata(life.rpartition("-")[0], 1.0, 0))


def test_what_a_killed_worker_delivered_after_its_last_report_is_sent():
    reports = FleetReports(10)
    reports.take("rollout-0", 0, report("rollout-0.0", 0, steps=20, sent=8))
    for number in range(4):
        reports.note_delivery(fragment("rollout-0.0-0", number, faults=(1,) if number == 3 else ()))
    assert reports.account() == StepAccount(started=20, buffered=4, sent=15, sent_faults=1)
    reports.end("rollout-0", 0)
    assert reports.account() == StepAccount(started=20, sent=15, sent_faults=1, abandoned=4)
    reports.note_delivery(fragment("rollout-0.0-0", 4))  # it was on its way when the worker died
    assert reports.account() == StepAccount(started=20, sent=19, sent_faults=1)


def test_a_life_that_ended_abandoned_what_acted_however_much_arrived_after_its_last_report():
    reports = FleetReports(10)
    told = report("rollout-0.0", 0, steps=20, sent=8)
    reports.take("rollout-0", 0, replace(told, account=StepAccount(started=20, acting=3, buffered=9, sent=8)))
    for number in range(10):
        reports.note_delivery(fragment("rollout-0.0-0", number))
    assert reports.account() == StepAccount(started=43, acting=3, sent=40)
    reports.end("rollout-0", 0)
    assert reports.account() == StepAccount(started=43, sent=40, abandoned=3)


def test_lives_are_counted_apart_and_one_that_never_reported_has_sent_what_arrived():
    reports = FleetReports(10)
    reports.take("rollout-0", 0, report("rollout-0.0", 0, steps=8, sent=8))
    reports.end("rollout-0", 0)
    reports.note_delivery(fragment("rollout-0.0-1", 0))
    reports.end("rollout-0", 1)
    assert reports.account() == StepAccount(started=12, sent=12)
    reports.take("rollout-0", 2, report("rollout-0.0", 2, steps=5))
    assert reports.account() == StepAccount(started=17, buffered=5, sent=12)


def test_a_worker_that_had_another_buffer_before_has_sent_what_it_says():
    reports = FleetReports(10)
    reports.take("rollout-0", 0, report("rollout-0.0", 0, steps=100, sent=80))
    reports.note_delivery(fragment("rollout-0.0-0", 20))
    assert reports.account() == StepAccount(started=100, buffered=20, sent=80)


def test_counters_of_workers_that_ended_stay_in_the_sums_and_levels_do_not():
    reports = FleetReports(10)
    told = {"restarts": 2.0, "faults": 3.0, "fragments_dropped": 1.0, "films": 1.0, "live": 4.0, "queue_depth": 2.0}
    reports.take("a", 0, report("a.0", 0, 100, **told))
    reports.take("b", 0, report("b.0", 0, 10, **told))
    both = reports.metrics()
    assert both["fleet/steps_total"] == 110 and both["fleet/restarts"] == 4 and both["fleet/live"] == 8
    reports.end("a", 0)
    reports.end("a", 0)
    after = reports.metrics()
    for name in ("steps_total", "restarts", "faults", "fragments_dropped", "films"):
        assert after[f"fleet/{name}"] == both[f"fleet/{name}"], name
    assert after["fleet/live"] == 4 and after["fleet/queue_depth"] == 2 and after["fleet/workers"] == 1
    reports.take("a", 1, report("a.0", 1, 5, **told))
    assert reports.metrics()["fleet/steps_total"] == 115 and reports.metrics()["fleet/restarts"] == 6
    for name in ("a", "b"):
        reports.end(name, 1 if name == "a" else 0)
    assert reports.metrics()["fleet/steps_total"] == 115 and "fleet/queue_depth" not in reports.metrics()


def test_a_sink_counts_what_was_taken_before_the_buffer_was_closed():
    class Closing:
        left = 2

        def add_batches(self, batches):
            if self.left == 0:
                raise Stopped("closed")
            self.left -= len(batches)

    taken = []
    sink = CountingSink(Closing(), lambda one: taken.append(one.group_id))
    with pytest.raises(Stopped):
        sink.add_batches([a_batch(fragment("w-0", number)) for number in range(3)])
    assert taken == ["w-0-0-0", "w-0-0-1"]
