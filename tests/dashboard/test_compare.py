from dataclasses import replace

import numpy as np
import pytest

from penstock.dashboard.compare import Comparison, compare_page, latest
from penstock.dashboard.observation import ObservedRuns
from penstock.dashboard.pages import runs_page
from penstock.rundir.evaluation_rows import write_evaluation
from penstock.types import ConfigError, RolloutBatch, RolloutGroup
from tests.dashboard.prepared_runs import evaluate
from tests.dashboard.sample_run import rollout, write_run


def answers(*rewards):
    return {str(problem): [reward] for problem, reward in enumerate(rewards)}


def test_the_difference_is_b_minus_a_with_problems_as_clusters():
    found = Comparison.of(answers(0, 0, 1, 0, 1), answers(1, 1, 1, 0, 2))
    # Differences 1, 1, 0, 0, 1: mean 0.6, s² 0.3, t(4) 2.776445: half width 2.776445 · √(0.3 / 5) = 0.680087.
    assert found.difference == pytest.approx(0.6)
    assert found.interval.low == pytest.approx(0.6 - 0.680087, abs=1e-6)
    assert found.problems == 5 and found.unpaired == 0 and found.verdict == "unknown"
    assert found.chance == pytest.approx(2 / 8)  # three differ: all up or all down


def test_few_that_all_point_one_way_may_be_chance_where_the_t_interval_is_sure():
    a, b = answers(*[0.0] * 64), answers(*[1.0] * 5, *[0.0] * 59)
    found = Comparison.of(a, b)
    assert found.interval.low > 0 and found.chance == pytest.approx(2 / 32) and found.verdict == "unknown"
    assert Comparison.of(a, answers(*[1.0] * 6, *[0.0] * 58)).verdict == "better"


def test_words_say_how_sure():
    better = Comparison.of(answers(*[0.0] * 20), answers(*[1.0] * 19, 0.5))
    assert better.words("A", "B", "cats").startswith(
        "cats: yes, B is better than A: +0.975 (95% interval +0.923 to +1.027) on 20"
    )
    worse = Comparison.of(answers(*[1.0] * 20), answers(*[0.0] * 19, 0.5))
    assert worse.words("A", "B", "cats").startswith("cats: no, B is worse than A: -0.975")
    unknown = Comparison.of(answers(0, 1, 0, 1), answers(1, 0, 0, 1))
    assert unknown.words("A", "B", "cats").startswith("cats: it cannot be told whether B is better than A: +0.000")
    alike = Comparison.of(answers(0, 1), answers(0, 1))
    assert "no difference was seen" in alike.words("A", "B", "cats") and alike.verdict == "unknown"
    assert "no problem in common" in Comparison.of({"x": [1.0]}, {"y": [1.0]}).words("A", "B", "cats")
    assert "one problem says nothing" in Comparison.of({"x": [1.0]}, {"x": [0.0]}).words("A", "B", "cats")


def test_several_answers_to_a_problem_are_one_draw_and_the_unpaired_are_counted():
    a = {"x": [0.0, 0.0, 0.0], "y": [1.0, 1.0]}
    b = {"x": [1.0, 1.0], "y": [1.0, 1.0], "z": [0.0]}
    found = Comparison.of(a, b)
    assert found.problems == 2 and found.unpaired == 2 and found.difference == pytest.approx(0.5)


def test_equal_policies_are_called_different_at_most_one_time_in_twenty():
    rng = np.random.default_rng(0)
    for rate in (0.02, 0.3):  # where few problems differ Student's t alone errs more often
        wrong = 0
        for _ in range(400):
            shares = rng.beta(20 * rate, 20 * (1 - rate), 40)
            a, b = (answers(*(rng.random(40) < shares).astype(float)) for _ in range(2))
            wrong += Comparison.of(a, b).verdict in ("better", "worse")
        assert wrong / 400 <= 0.05 + 1.96 * (0.05 * 0.95 / 400) ** 0.5


def test_two_runs_by_their_last_evaluations(tmp_path):
    for name, said in (("a", 0.0), ("b", 1.0)):
        directory = write_run(tmp_path / name)
        members = [
            rollout(f"after-cats-0-0-{problem}/0", [("user", "?"), ("assistant", "x")], said) for problem in range(8)
        ]
        held_out = [replace(m.rollout, lesson_id="cats") for m in members]  # pyright: ignore[reportArgumentType]
        groups = [RolloutGroup(f"cats:{m.group_id}", (r,), m.group_id) for m, r in zip(members, held_out, strict=True)]
        write_evaluation(directory, [RolloutBatch(tuple(groups), groups[0].rollouts[0].metadata)], "after", 0, 0)
        directory.write_config({"model": {"tokenizer": None, "path": None}, "seed": len(name) + (name == "b")})
    runs = ObservedRuns(tmp_path)
    for run, unread in zip(runs.all(), (["a", "b"], ["b"]), strict=True):
        assert compare_page(runs, {"a": "a", "b": "b"})["unread"] == unread
        run.catch_up()
        assert not run.problem
    assert [line["held_out"] for line in runs_page(runs)["runs"]] == [
        {"cats (report)": [0.0, 0]}, {"cats (report)": [1.0, 0]},
    ]  # fmt: skip
    page = compare_page(runs, {"a": "a", "b": "b"})
    assert page["chosen"] == {"a": "after-0-0", "b": "after-0-0"} and page["unread"] == []
    (lesson,) = page["lessons"]
    assert lesson["lesson"] == "cats" and lesson["problems"] == 8 and lesson["difference"] == 1.0
    assert lesson["verdict"] == "better" and lesson["chance"] == pytest.approx(2 / 256)
    assert page["settings"] == [["seed", "1", "2"]]
    assert page["same_recipe"] and page["caution"].startswith("Only the seed differs: this is about two policies.")
    assert not compare_page(runs, {"a": "a", "b": "a"})["same_recipe"]  # nothing differs
    runs.find("b").directory.write_config({"model": {"tokenizer": None, "path": None}, "seed": 2, "steps": 3})
    found = compare_page(runs, {"a": "a", "b": "b"})
    assert not found["same_recipe"] and found["caution"].startswith("This is about two policies.")
    with pytest.raises(ConfigError, match="at_b is 'before-0-9': that run has the evaluations after-0-0"):
        compare_page(runs, {"a": "a", "b": "b", "at_b": "before-0-9"})
    runs.__exit__(None, None, None)


def test_policies_of_different_versions_are_called_by_them(tmp_path):
    for name, reward, step in (("a", 0.0, 9), ("b", 1.0, 5), ("c", 1.0, 9)):
        evaluate(write_run(tmp_path / name), reward, step)
    runs = ObservedRuns(tmp_path)
    for run in runs.all():
        run.catch_up()
    said = {b: compare_page(runs, {"a": "a", "b": b})["lessons"][0]["words"] for b in "bc"}
    assert said["b"].startswith("cats: yes, b at version 5 is better than a at version 9: +1.000")
    assert said["c"].startswith("cats: yes, c is better than a: +1.000")
    runs.__exit__(None, None, None)


def of(*names):
    return [{"name": name, "evaluation": name.split("-")[0], "step": int(name.split("-")[2])} for name in names]


@pytest.mark.parametrize(
    ("a", "b", "chosen"),
    [
        (("untrained-0-0", "after-0-9"), ("untrained-0-0", "after-0-7"), ("after-0-9", "after-0-7")),
        # One was killed: both were evaluated in between, on other problems than those of reports.
        (
            ("untrained-0-0", "eval-0-5", "eval-0-8", "after-0-9"),
            ("untrained-0-0", "eval-0-6"),
            ("eval-0-8", "eval-0-6"),
        ),
        (("eval-0-9", "after-0-9"), ("eval-0-9", "after-0-9"), ("after-0-9", "after-0-9")),
        (("untrained-0-0",), ("eval-0-6",), ("untrained-0-0", "eval-0-6")),
        ((), ("eval-0-6",), ("", "eval-0-6")),
    ],
)
def test_without_a_choice_the_last_evaluations_on_the_same_problems_are_compared(a, b, chosen):
    assert latest(of(*a), of(*b)) == chosen
