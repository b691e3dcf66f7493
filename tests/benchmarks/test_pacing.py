"""The pacing benchmark in short: paced runs waste nothing and stay even; dropping wastes the slow ones."""

import pytest
from benchmarks.virtual_workers import POLICIES, Generated

from benchmarks import pacing


@pytest.fixture(scope="module")
def reports():
    return {name: pacing.Simulation(name, 2, 1.0, updates=40).run() for name in POLICIES}


@pytest.mark.slow
def test_paced_runs_waste_nothing_and_train_what_was_generated(reports):
    paced = reports["paced"]
    assert paced.waste == 0.0
    assert (paced.slow_trained, paced.reward_trained, paced.tokens_trained) == (
        paced.slow_generated, paced.reward_generated, paced.tokens_generated,
    )  # fmt: skip
    assert paced.slow_generated == 181 / 320 and paced.reached  # the draws of seed 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "paced"])
def test_dropping_alone_wastes_slow_groups_and_flatters_rewards(reports, policy):
    report = reports[policy]
    assert report.waste > 0.2
    assert report.slow_generated == pytest.approx(0.5, abs=0.1)
    assert report.slow_trained < report.slow_generated - 0.1
    assert report.reward_trained > report.reward_generated + 0.05
    assert report.tokens_trained < report.tokens_generated - 10


def test_a_ticket_leads_to_the_same_group_whoever_runs_it():
    first, again = Generated.of("slow", 7), Generated.of("slow", 7)
    assert first == again != Generated.of("slow", 8)
    assert first.seconds == max(first.tokens) / 10


@pytest.mark.slow
def test_the_table_and_the_marks_are_printed(monkeypatch, capsys):
    monkeypatch.setattr(pacing, "WARM_UP", 5)
    assert pacing.main(["--updates", "5", "--budgets", "0,1", "--loads", "1"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("  paced  ") == 2 and printed.count("  drop-only, by recency") == 2
    assert "paced: at most 0.00% of the tokens wasted (mark: under 2%)" in printed
    assert printed.rstrip().endswith("The marks are reached.")


@pytest.mark.slow
def test_a_missed_mark_is_the_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(pacing, "WARM_UP", 5)
    monkeypatch.setattr(pacing, "MOST_WASTE", -1.0)
    assert pacing.main(["--updates", "5", "--budgets", "1", "--loads", "1"]) == 1
    assert "MISSED in 1 of 1 paced runs." in capsys.readouterr().out
