import pytest

from penstock.dashboard.findings import (
    findings_page,
    lost_in_words,
    sickest_in_words,
    simulators_of,
    update_in_words,
)
from penstock.dashboard.observation import ObservedRun
from penstock.rundir import EventLog, MetricsLog
from tests.dashboard.prepared_runs import DEATH, STALL, UPDATES, write_prepared
from tests.dashboard.sample_run import write_run


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """By name, all that was written read."""
    folder = write_prepared(tmp_path_factory.mktemp("prepared"))
    runs = {name: ObservedRun(folder / name) for name in ("A", "B", "robots")}
    for run in runs.values():
        run.catch_up()
    yield runs
    for run in runs.values():
        run.close()


def named(run):
    return {each["name"]: each for each in findings_page(run)["findings"]}


def test_a_run_without_trouble_has_no_findings(prepared):
    """Its first update, which compiled, was slow; its reward rose steadily."""
    assert findings_page(prepared["A"]) == {"findings": []}


def test_the_slowest_update_by_where_its_time_went(prepared):
    found = named(prepared["B"])["Slowest"]
    assert found["words"].startswith(f"update {STALL} took 241 s") and found["words"].endswith(
        f"waiting for a batch; rollout-0 had died ({DEATH})"
    )
    assert found["links"] == [[f"Update {STALL}", "update", {"step": STALL}]]


def test_a_rise_of_reward_leads_to_the_lesson_that_rose(prepared):
    """Another lesson has better rewards all the time."""
    written, before, update = named(prepared["B"])["Reward"]["links"]
    assert before == ["before it for cats", "group", {"id": "cats-0-490"}]
    assert written == ["What was written for cats", "group", {"id": "cats-0-500"}] and update[2] == {"step": 500}


def test_what_was_lost_by_lesson_with_its_commonest_reason(prepared):
    assert lost_in_words(prepared["A"]) == []
    (told,) = lost_in_words(prepared["B"])
    assert told.startswith("tools lost 160 of 200 rollouts (80%), 160 of them with weights too old to train on: sampl")


def test_the_sickest_simulator_of_several():
    assert sickest_in_words([]) == ""
    well = {"simulator": "w process 0", "task": "maze", "failures": 0, "faults": 0, "starts": 1, "last": ""}
    assert sickest_in_words([well]) == ""
    sick = {**well, "simulator": "w process 1", "failures": 1, "starts": 2, "last": "boom", "state": "quarantined"}
    told = "w process 1 (task maze) is the sickest: 1 failure, 0 faults in 2 lives, now quarantined; the last: boom"
    assert sickest_in_words([sick, well]) == told
    faulty = {**well, "simulator": "w process 2", "faults": 1}
    assert sickest_in_words([sick, faulty, well]).endswith("the last: boom. Next: w process 2, 0 failures, 1 fault")


def test_a_simulator_that_recovered_is_live_and_its_troubles_are_counted(tmp_path):
    events = EventLog(write_run(tmp_path / "fleet").events_path)
    told = {
        0: ["started", "fault"], 1: ["started", "fault", "failed", "started"], 2: ["started", "failed"],
        3: ["started", "failed", "quarantined"], 4: ["started", "retired"], 5: ["fault"],
    }  # fmt: skip
    for process, kinds in told.items():
        for kind in kinds:
            events.append(f"simulator_{kind}", step=1, worker="w", process=process, task="maze", reason="lava")
    events.close()
    run = ObservedRun(tmp_path / "fleet")
    states = {row["simulator"]: (row["state"], row["faults"], row["failures"]) for row in simulators_of(run)}
    assert states == {
        "w process 0": ("live", 1, 0), "w process 1": ("live", 1, 1), "w process 2": ("failed", 0, 1),
        "w process 3": ("quarantined", 0, 1), "w process 4": ("ended", 0, 0), "w process 5": ("live", 1, 0),
    }  # fmt: skip


def test_an_update_in_words(prepared):
    run = prepared["B"]
    took, died = update_in_words(run, STALL)
    assert took.startswith("It took 241 s, 117 times the 2.06 s") and "240 s waiting for a batch" in took
    assert died == f"rollout-0 died: {DEATH}"
    assert not any(DEATH in words for step in (STALL - 1, STALL + 1) for words in update_in_words(run, step))
    (usual,) = update_in_words(run, 400)
    assert ", as usual: 1.4 s in the learner's update" in usual
    assert update_in_words(run, UPDATES + 5) == ["It was not made: the run got as far as version 1,000."]


def test_a_run_that_died_waiting_says_what_for(tmp_path):
    directory = write_run(tmp_path / "dead")
    metrics = MetricsLog(directory.metrics_path)
    metrics.append(1, {"train/loss": 1.0})
    metrics.close()
    directory.write_status({
        "state": "running", "step": 2, "steps": 10, "pid": 2**22 + 7, "waiting_for": "4 rollouts of cats",
    })  # fmt: skip
    run = ObservedRun(directory.path)
    run.catch_up()
    died, waited = update_in_words(run, 3)
    assert died.startswith("It was not made: the run got as far as version 2: its process") and died.endswith("gone.")
    assert waited == "Last waiting for: 4 rollouts of cats"
    assert update_in_words(run, 1) == []
    run.close()


def test_versions_that_nothing_was_compared_of_are_told(tmp_path):
    directory = write_run(tmp_path / "unchecked")
    metrics = MetricsLog(directory.metrics_path)
    for step, unchecked in enumerate([0, 0, 1, 1, 2], 1):
        metrics.append(step, {"train/parity_unchecked": unchecked})
    metrics.close()
    run = ObservedRun(directory.path)
    run.catch_up()
    found = named(run)["Parity"]
    assert found["words"] == "2 times an engine gave nothing to compare of a version that was trained on"
    assert found["links"] == [["First: update 3", "update", {"step": 3}]]
    run.close()
