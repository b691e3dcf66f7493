"""Five questions that people ask of runs, each answered in a real browser, three clicks from the list of all runs."""

import re

import pytest

from tests.dashboard.prepared_runs import DEATH, FLOOR, HACK, write_prepared
from tests.dashboard.visitors import Served, Visitor, expect

pytestmark = [pytest.mark.dashboard, pytest.mark.timeout(120)]
MOST_CLICKS = 3


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    served = Served(write_prepared(tmp_path_factory.mktemp("asked")), tmp_path_factory.mktemp("cache"))
    yield served
    served.end()


class Asker:
    """Begins at all runs, and counts what it clicks."""

    def __init__(self, visitor, runs):
        for run in runs:
            visitor.read(run)
        self._visitor, self.page, self.clicks = visitor, visitor.open("#/", "Runs"), 0

    def click(self, locator):
        self.clicks += 1
        locator.click()
        self._visitor.settled()

    def follow(self, name):
        self.click(self.page.get_by_role("link", name=name, exact=True))

    def reads(self, *words):
        """The answer stands on the page, and was found in few clicks."""
        for each in words:
            expect(self.page.locator("main")).to_contain_text(each)
        assert self.clicks <= MOST_CLICKS


@pytest.fixture
def ask(browser, site):
    visitor = Visitor(browser, site.url)
    yield lambda *runs: Asker(visitor, runs)
    visitor.context.close()
    assert visitor.errors == [] and visitor.abroad == []


def test_which_runs_had_trouble_and_how_good_they_are(ask):
    row = ask("A", "B").page.locator("tr", has_text="1 trouble")
    expect(row).to_have_count(1)
    expect(row).to_contain_text(re.compile(r"^B"))
    expect(row).to_contain_text(re.compile(r"0\.9[5-7]\d.*0\.9"))


def test_a_run_without_trouble_says_so_and_an_averaged_curve_that_it_is(ask):
    asked = ask("A")
    asked.follow("A")
    asked.reads("nothing unusual found")
    loss = asked.page.get_by_role("region", name="Loss", exact=True)
    expect(loss).to_contain_text("each point is the mean of 2 updates")
    expect(loss.get_by_role("button", name="Download Loss as CSV")).to_be_visible()


def test_why_did_run_b_stall_at_update_812(ask):
    asked = ask("B")
    asked.follow("B")
    asked.reads(
        "update 812 took 241 s, others 2.05 s: 240 s of it waiting for a batch", f"rollout-0 had died ({DEATH})"
    )
    asked.follow("Update 812")
    asked.reads("117 times the 2.06 s of the updates around it: 240 s waiting for a batch", f"rollout-0 died: {DEATH}")


def test_which_lessons_rollouts_are_thrown_away_and_why(ask):
    asked = ask("B")
    asked.follow("B")
    asked.reads(
        "tools lost 160 of 200 rollouts (80%), 160 of them with weights too old to train on: sampled by version 3"
    )
    asked.click(asked.page.locator(".sentences").get_by_role("link", name="Ledger"))
    expect(asked.page.locator("section", has_text="Thrown away, and why")).to_contain_text("tools lost 160 of 200")
    asked.reads()


def test_what_did_the_model_write_when_its_reward_jumped(ask):
    asked = ask("B")
    asked.follow("B")
    asked.reads("rose most at update 500: 0.16")
    asked.follow("What was written for cats")
    expect(asked.page.locator("article.answer").first).to_contain_text(HACK)
    asked.reads()


@pytest.mark.parametrize("ticked", [("A", "B"), ("B", "A")])
def test_is_b_better_than_a(ask, ticked):
    """The older run is the first, whichever was ticked first."""
    asked = ask("A", "B")
    for run in ticked:
        asked.click(asked.page.get_by_label(f"Compare {run}", exact=True))
    asked.click(asked.page.locator(".head").get_by_role("link", name="Compare"))
    expect(asked.page.locator("h1")).to_have_text("Is B better than A?")
    expect(asked.page.locator(".verdicts")).to_contain_text(re.compile("yes, B is better than A"))
    expect(asked.page.locator(".caution")).to_contain_text("Only the seed differs")
    asked.reads("B − A", "A better, −", "< 0.001")


def test_which_simulator_is_sick(ask):
    asked = ask("robots")
    asked.follow("robots")
    told = (
        "fleet-1 process 3 (task maze) is the sickest, of the 2 of 16 that had trouble: 3 failures, 0 faults in 4 lives"
    )
    asked.reads(told, FLOOR)
    asked.click(asked.page.locator(".sentences").get_by_role("link", name="Fleet"))
    expect(
        asked.page.get_by_role("region", name="Simulators, the sickest first").locator("tbody tr").first
    ).to_contain_text("fleet-1 process 3")
    expect(asked.page.locator(".wall .bad")).to_have_count(1)
    expect(asked.page.locator(".wall .warn")).to_have_count(1)
    asked.reads("failed 3 times", "Next: fleet-0 process 2", "a fault ends one episode")
    asked.reads(told)
