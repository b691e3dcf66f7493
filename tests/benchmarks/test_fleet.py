"""The fleet benchmark at tiny sizes: what it checks can fail, and what it prints are the marks. Nothing is timed."""

import json
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from benchmarks.fleet import __main__ as benchmark
from benchmarks.fleet import actors, alternating, faults, labels, lives, networks, own, running
from benchmarks.fleet.counting import Tally, ThrowingAway, processor_s, rates_during_gaps
from benchmarks.fleet.workloads import WORKLOADS, Simulators
from benchmarks.marks import Marks

from penstock.fleet.accounting import StepAccount
from penstock.fleet.steps import STEP_ROW
from penstock.types import RunFailed

RATES = {"steps_per_s": 3000.0, "resets_per_s": 0.0, "main_cpu": 0.4, "simulators_cpu": 0.3, "batch_slots_mean": 15.5}
ALONE = {"steps_per_s": 5000.0, "step_s": 4e-4, "reset_s": 0.5}


def test_the_workloads_are_the_promised_ones_and_fit_a_fleet():
    promised = {
        "sleep32": (32, 2800, 3200), "sleep64": (64, 5200, 6400), "jitter32": (32, 2700, 3200),
        "sleep72x50": (72, 1300, 1440), "zero": (32, 18_000, None), "cartpole": (128, 40_000, None),
        "crafter": (32, 0.95, None), "ale": (256, 0.85, None), "slow_reset": (32, 31 / 32, None),
    }  # fmt: skip
    found = {name: (one.envs, one.least, one.ideal_steps_per_s) for name, one in WORKLOADS.items()}
    assert found == promised
    for one in WORKLOADS.values():
        assert one.fleet_config().envs_per_worker == one.envs and set(one.peers) <= running.PEERS.keys()
    assert WORKLOADS["sleep32"].simulators[0].kwargs == {"observation_shape": (128, 128, 3), "step_s": 0.01}


@pytest.mark.slow
def test_a_tiny_fleet_is_measured_with_one_slow_simulator_and_its_books_close():
    small = replace(
        WORKLOADS["slow_reset"],
        simulators=(
            Simulators("synthetic", 3, {"observation_shape": (16, 16, 3), "step_s": 0.002}),
            Simulators("synthetic", 1, {"observation_shape": (16, 16, 3), "episode_steps": 20, "reset_s": 0.1}, "slow"),
        ),
        ideal="steps_per_s",
    )
    found = own.measure(small, seconds=0.5, warm_up_s=0.1)
    assert 50 < found["steps_per_s"] < 10_000 and found["resets_per_s"] > 0
    assert 0 < found["main_cpu"] and 1 <= found["batch_slots_mean"] <= 2


def test_a_fleet_is_settled_when_its_slowest_slot_has_made_its_steps():
    tally = Tally(slots=2, settled_steps=3)
    for slots in ([0, 1], [0, 1], [0], [0], [1]):
        assert not tally.everyone.is_set()
        rows = np.zeros(len(slots), STEP_ROW)
        rows["slots"], rows["acted"] = slots, True
        tally(SimpleNamespace(slots=rows["slots"], acted=rows["acted"], first=rows["first"]))
    assert tally.everyone.is_set() and (tally.steps, tally.resets, tally.batches) == (7, 0, 5)


def test_a_worker_that_lost_steps_or_failed_is_no_measurement():
    class Worker:
        failure = None

        def account(self):
            return StepAccount(started=10, sent=6, sent_faults=1, abandoned=3)

    sink = ThrowingAway()
    sink.trainable, sink.faults = 6, 1
    own.check(Worker(), sink, [])
    for name, value in (("trainable", 5), ("faults", 2)):
        other = ThrowingAway()
        other.trainable, other.faults = 6, 1
        setattr(other, name, value)
        with pytest.raises(RunFailed, match="the sink was given"):
            own.check(Worker(), other, [])
    with pytest.raises(RunFailed, match="late"):
        own.check(Worker(), sink, ["worker-0.rollout"])


def test_others_rates_are_apart_by_the_watched_slots_silence():
    moments = [(0.0, 0), (0.1, 10), (2.1, 170), (2.2, 180), (4.2, 340), (4.3, 350)]
    silent, lively = rates_during_gaps(moments, gap_s=1.0)
    assert silent == pytest.approx(80.0) and lively == pytest.approx(100.0)
    with pytest.raises(ValueError, match="measure longer"):
        rates_during_gaps(moments[:2], gap_s=1.0)


def test_the_nature_network_needs_as_many_operations_as_by_hand():
    convolutions = 20 * 20 * 32 * 8 * 8 * 4 + 9 * 9 * 64 * 4 * 4 * 32 + 7 * 7 * 64 * 3 * 3 * 64
    assert networks.nature_flops() == 2 * (convolutions + 7 * 7 * 64 * 512 + 512 * 7)


def test_processor_time_of_a_process_that_is_gone_is_nothing():
    assert processor_s([None, 2**22 + 1]) == 0.0


# --- labels ---------------------------------------------------------------------------------------------------------


def _right(slot=0, number=0, state=1234, noise=77, steps=12, cut=(4,), fault=None):
    """A fragment by the simulator's own rule; `cut` steps end episodes, a faulty one without a last observation."""
    rng = np.random.default_rng(slot)
    actions = rng.integers(0, 4, steps)
    pixels, rewards, finals = [(noise + (state >> 8)) % 256], [], {}
    for step, action in enumerate(actions.tolist()):
        state = (25173 * state + 512 * action + 13849) & 0xFFFF
        rewards.append((state >> 8) / 255)
        pixel = (noise + (state >> 8)) % 256
        if step == fault:
            rewards[-1] = 0.0
        elif step in cut:
            finals[step] = pixel
        if step == fault or step in cut:
            state, noise = int(rng.integers(1 << 16)), int(rng.integers(256))
            pixel = (noise + (state >> 8)) % 256
        pixels.append(pixel)
    ends = np.isin(np.arange(steps), [*cut, -1 if fault is None else fault])
    return labels.Labels(
        f"w-0-{slot}-{number}", slot, np.array(pixels), actions, np.array(rewards, np.float32), np.zeros(steps, bool),
        ends, np.arange(steps) == fault, np.append(True, ends), np.full(steps + 1, 3.0), np.full(steps, 3), finals,
    )  # fmt: skip


def test_right_labels_have_no_problem_whatever_cut_them():
    assert (
        labels.problems([_right(), _right(1, fault=7), _right(2, cut=(), fault=0), _right(3, cut=(0, 11))], True) == []
    )


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("actions", lambda a: np.where(np.arange(len(a)) == 2, (a + 1) % 4, a), "no state explains"),
        ("rewards", lambda a: np.roll(a, 1), "no state explains"),
        ("pixels", lambda a: a + (np.arange(len(a)) == 6), "no state explains"),
        ("terminated", lambda a: np.arange(len(a)) == 4, "terminated"),
        ("faults", lambda a: np.arange(len(a)) == 5, "did not cut"),
        ("truncated", lambda a: np.arange(len(a)) == 6, "an episode begins"),
        ("finals", lambda a: {}, "last observations"),
        ("weight_steps", lambda a: a + 1, "not of the version"),
    ],
)
def test_a_wrong_label_is_noticed(name, change, problem):
    right = _right()
    wrong = replace(right, **{name: change(getattr(right, name))})
    assert any(problem in found for found in labels.problems([wrong], True))


def test_a_step_that_is_missing_between_two_fragments_is_noticed():
    first = _right(cut=())
    second = replace(_right(number=1, state=999, cut=()), pixels=_right(number=1, state=999, cut=()).pixels)
    assert any("does not join on" in found for found in labels.problems([first, second]))
    assert labels.problems([first, replace(second, group_id="w-0-0-2")]) == []


# --- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_simulator_is_killed_in_a_tiny_fleet_and_one_step_says_so(monkeypatch):
    monkeypatch.setattr(faults, "INIT_S", 0.05)
    monkeypatch.setattr(faults, "LEAST_S", 0.2)
    found = faults.inflict("simulator killed", seconds=0.3, envs=3)
    assert found.wrong == () and found.faults == 1 and found.share > 0
    assert found.respawn_s is not None and 0.2 < found.respawn_s < 10  # the back-off, and the rest


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in faults.FAULTS if name != "simulator killed"])
def test_after_every_other_fault_the_books_close_and_nothing_is_mislabelled(name, monkeypatch):
    monkeypatch.setattr(faults, "INIT_S", 0.05)
    monkeypatch.setattr(faults, "LEAST_S", 0.2)
    found = faults.inflict(name, seconds=0.5, envs=3)
    victims = 0 if name in faults.NO_VICTIM else 1
    assert found.wrong == () and found.faults == victims and found.share > 0
    assert (found.respawn_s is not None) == bool(victims)


def test_the_marks_of_a_fault():
    marks = Marks()
    faults.add_marks(marks, faults.Found("simulator killed", 0.95, 1.2, 1, ()))
    faults.add_marks(marks, faults.Found("slow buffer", 0.9, None, 0, ()))
    assert marks.missed == 0 and len(marks.lines) == 5
    faults.add_marks(marks, faults.Found("simulator killed", 0.89, 1.6, 2, ()))
    faults.add_marks(marks, faults.Found("slow buffer", 1.0, None, 1, ("a problem",)))
    assert marks.missed == 4


def _actor_found(share=0.95, noticed_s=0.7, left=(), wrong=(), faults=0):
    found = lives.Lives(16, {"rollout-0.0-0": {0: np.arange(4.0)}}, faults, 3, wrong)
    return actors.ActorFound((100.0, 100.0 * share, 99.0), noticed_s, 4.0, 18, left, found, wrong)


def test_the_marks_of_a_killed_actor():
    marks = Marks()
    faults.add_actor_marks(marks, _actor_found())
    assert marks.missed == 0 and len(marks.lines) == 4
    faults.add_actor_marks(marks, _actor_found(0.89, 1.1, (4711,), ("a problem",), 2))
    assert marks.missed == 4


def test_without_ray_no_actor_is_killed_and_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr(actors, "ray_is_installed", lambda: False)
    marks = Marks()
    faults.run_all(marks, 1.0, ("actor killed",))
    assert capsys.readouterr().out.splitlines()[-1] == "  actor killed: needs Ray, skipped"
    assert marks.lines == []


def test_between_two_fragments_a_slot_steps_evenly():
    ends_s = {"a": {0: np.array([0.0, 1.0, 3.0]), 1: np.array([0.5, 1.5])}, "b": {0: np.array([2.0])}}
    found = lives.Lives(8, ends_s, 0, 0, ())
    # slot 0: half a fragment until 1, half of one until 2; slot 1: all of its second one
    assert found.steps_per_s("a", 0.5, 2.0) == pytest.approx(8 * 2 / 1.5)
    assert found.steps == 6 * 8 and found.every_end_s().tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0]
    assert found.every_end_s("none").tolist() == []


def test_a_fragment_that_is_stored_trained_or_used_twice_is_noticed():
    assert list(lives._wrong_uses(["a", "b", "c"], ["a", "b"], ["a", "b"])) == []
    found = list(lives._wrong_uses(["a", "a", "b"], ["b", "b", "d"], ["a", "a", "b", "d"]))
    assert [problem.split(",")[0] for problem in found] == [
        "a is stored 2 times", "b was trained 2 times", "a is in 2 batches",
        "1 fragments were trained on and are not stored",
    ]  # fmt: skip
    assert "in no batch" in next(lives._wrong_uses(["a"], ["a"], []))


def test_books_that_lack_or_invent_fragments_are_noticed():
    ends_s = {"rollout-0.0-0": {0: np.array([0.0, 1.0, 2.0, 9.0])}}  # the last one is too new to be told
    made = lives.Lives(16, ends_s, 0, 2, ())
    account = {"started": 80, "acting": 4, "sent": 48, "sent_faults": 0, "abandoned": 28}
    ledger = {"started": 3, "waiting": 1, "trained": 2}
    assert list(lives.wrong_books({"account": account, "ledger": ledger}, made)) == []
    for book, change in (
        (account, {"acting": 5}), (account, {"sent": 65, "acting": -13}), (account, {"sent": 47, "abandoned": 29}),
        (account, {"abandoned": 0, "acting": 32}),
        (ledger, {"waiting": 2}), (ledger, {"started": 2, "waiting": 0}), (ledger, {"started": 5, "waiting": 3}),
        (ledger, {"trained": 3, "waiting": 0}),
    ):  # fmt: skip
        wrong = {"account": account, "ledger": ledger}
        wrong["account" if book is account else "ledger"] = book | change
        assert len(list(lives.wrong_books(wrong, made))) == 1, change


# --- the command ----------------------------------------------------------------------------------------------------


def _marks(printed):
    return dict(re.findall(r"^  (.*?) +[\d.]+  at (?:most|least) [\d.e+]+ +(reached|MISSED)$", printed, re.MULTILINE))


def _network(command, limit_s):
    return {"decisions_per_s": 900.0, "network_flops_per_s": 2e10, "product_flops_per_s": 1e11}


def test_every_mark_is_printed_and_a_missed_one_is_the_exit_code(monkeypatch, capsys):
    def measured(workload, seconds, warm_up_s):
        if workload.name == "zero":
            raise running.Failed("no room")
        more = {"others_during": 96.9, "others_otherwise": 100.0} if workload.name == "slow_reset" else {}
        rate = {"ale": 4300.0, "cartpole": 39_999.0, "sleep64": 5200.0}.get(workload.name, 3000.0)
        return RATES | {"steps_per_s": rate} | more

    def compared(workload, seconds, warm_up_s):
        return measured(workload, seconds, warm_up_s) | {"steps_ratio": 0.86, "work_ratio": 0.94}, ALONE

    monkeypatch.setattr(running, "own", measured)
    monkeypatch.setattr(alternating, "compare", compared)
    monkeypatch.setattr(running, "run", _network)
    assert benchmark.main(["--quick"]) == 1
    printed = capsys.readouterr().out
    assert _marks(printed) == {
        "sleep32: steps/s": "reached",
        "sleep64: steps/s": "reached",
        "jitter32: steps/s": "reached",
        "sleep72x50: steps/s": "reached",
        "zero: measured at all (no room)": "MISSED",
        "cartpole: steps/s": "MISSED",
        "crafter: independent work, ratio": "MISSED",
        "ale: independent steps, ratio": "reached",
        "slow_reset: others during reset, ratio": "reached",
    }
    assert "0.938 of the ideal" in printed and "main process   40% of a core" in printed
    assert "0.860 of independent processes' steps, 0.940 of their work" in printed
    assert "penstock                              FAILED: no room" in printed
    assert "RLlib EnvRunners                      not installed: skipped" in printed
    assert (
        "900 decisions/s of 84 x 84 x 4 in batches of 32, 20.0 GFLOP/s, 0.20 of the matrix product's 100.0" in printed
    )
    assert "5,000 steps/s                      step 0.40 ms, reset 500.0 ms" in printed
    assert benchmark.main(["--quick", "--only", "sleep32,ale"]) == 0


def test_peers_play_in_their_rounds_with_their_own_python(monkeypatch, capsys):
    played = []

    def peer(name, python, workload, seconds, warm_up_s):
        played.append((name, python, workload.name))
        if name == "pipes":
            raise running.Failed("a broken pipe")
        return {"steps_per_s": 1600.0, "main_cpu": 1.0}

    monkeypatch.setattr(running, "pythons_of", lambda environments: {"gymnasium": "/g/python", "pipes": "/g/python"})
    monkeypatch.setattr(running, "own", lambda *arguments: RATES)
    monkeypatch.setattr(running, "run", _network)
    monkeypatch.setattr(running, "peer", peer)
    assert benchmark.main(["--only", "sleep32", "--rounds", "3", "--peer-rounds", "2"]) == 0
    once_only = ("gymnasium", "pipes", "gymnasium")  # who failed is not asked again
    assert played == [(name, "/g/python", "sleep32") for name in once_only]
    printed = capsys.readouterr().out
    assert re.search(r"AsyncVectorEnv, no policy +1,600 steps/s +0.500 of the ideal .*\(2 rounds\)", printed)
    assert "pipes and fixed batches               FAILED: a broken pipe" in printed


def test_a_peer_is_told_without_a_ratio_where_there_is_nothing_to_compare_with():
    rounds = benchmark.Rounds(WORKLOADS["ale"])
    rounds.found["gymnasium"].append({"steps_per_s": 100.0})
    assert rounds.ratio("gymnasium") is None
    rounds.found[benchmark.INDEPENDENT].append({"steps_per_s": 400.0})
    assert rounds.ratio("gymnasium") == 0.25


def test_what_a_process_says_last_counts_and_its_failure_is_told():
    code = "import json; print('noise'); print(json.dumps({'x': 1.5}))"
    assert running.run([sys.executable, "-c", code], 30.0) == {"x": 1.5}
    with pytest.raises(running.Failed, match="ValueError: broken"):
        running.run([sys.executable, "-c", "raise ValueError('broken')"], 30.0)
    with pytest.raises(running.Failed, match="longer than 0.1 s"):
        running.run([sys.executable, "-c", "import time; time.sleep(9)"], 0.1)


def test_a_peer_is_run_where_its_modules_are(tmp_path):
    for name, code in (("without", 1), ("with", 0)):
        (tmp_path / name / "bin").mkdir(parents=True)
        python = tmp_path / name / "bin" / "python"
        python.write_text(f"#!/bin/sh\nexit {code}\n")
        python.chmod(0o755)
    found = running.pythons_of([tmp_path / "without", tmp_path / "with"])
    assert found == dict.fromkeys(running.PEERS, str(tmp_path / "with" / "bin" / "python"))
    assert running.pythons_of([tmp_path / "without"]) == {}


def test_every_peer_has_its_script_and_gets_the_workload(monkeypatch):
    given = []
    monkeypatch.setattr(running, "run", lambda command, limit_s: given.append(command))
    for name in running.PEERS:
        running.peer(name, "python", WORKLOADS["sleep32"], 2.0, 0.5)
    for (python, script, words), one in zip(given, running.PEERS.values(), strict=True):
        assert python == "python" and script.endswith(one.script) and running.Path(script).is_file()
        assert json.loads(words)["simulators"] == [
            ["synthetic", {"observation_shape": [128, 128, 3], "step_s": 0.01}, 32]
        ]
