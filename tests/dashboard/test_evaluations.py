"""`penstock rollouts --eval`: the conversations of evaluations, with the options that training's rollouts have."""

import json
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.dashboard import RolloutsRequest
from penstock.rundir import RunDirectory, write_evaluation
from penstock.types import ConfigError, RolloutBatch, RolloutGroup
from tests.dashboard.sample_run import rollout, write_run


def evaluation(label: str, step: int, **answers: str) -> tuple[list[RolloutBatch], str, int, int]:
    """One answer of each lesson, to version `step`."""
    batches = []
    for lesson, text in answers.items():
        record = rollout(f"{lesson}-x/0", [("user", "Say cat."), ("assistant", text)], float("cat" in text), (step,))
        group_id = f"{label}-{lesson}-0-{step}-0"
        made = record.rollout.with_metadata(record.rollout.metadata, f"{group_id}/0", lesson)
        batches.append(RolloutBatch((RolloutGroup(record.group_key, (made,), group_id),)))
    return batches, label, 0, step


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory) -> Path:
    directory: RunDirectory = write_run(tmp_path_factory.mktemp("evaluated") / "run")
    for said in (
        evaluation("untrained", 0, cats="dog", tools="nothing"),
        evaluation("micro_eval", 1, cats="a cat"),
        evaluation("eval", 2, cats="cat", tools="cat, too"),
    ):
        write_evaluation(directory, *said)
    return directory.path


@pytest.fixture
def answer(evaluated, capsys):
    def ask(*words: str, code: int = 0) -> str:
        assert main(["rollouts", str(evaluated), *words]) == code
        out = capsys.readouterr()
        return out.err if code else out.out

    return ask


def groups(shown: str) -> list[tuple[str, int, dict]]:
    return [(row["group_id"], row["step"], row["states"]) for row in map(json.loads, shown.splitlines())]


def test_the_newest_version_comes_first_and_filters_are_those_of_training(answer):
    assert groups(answer("--eval", "--json")) == [
        ("eval-cats-0-2-0", 2, {"eval": 1}),
        ("eval-tools-0-2-0", 2, {"eval": 1}),
        ("micro_eval-cats-0-1-0", 1, {"micro_eval": 1}),
        ("untrained-cats-0-0-0", 0, {"untrained": 1}),
        ("untrained-tools-0-0-0", 0, {"untrained": 1}),
    ]
    assert [row[0] for row in groups(answer("--eval", "--step", "2", "--lesson", "tools", "--json"))] == [
        "eval-tools-0-2-0"
    ]
    assert len(groups(answer("--eval", "--limit", "1", "--json"))) == 1


def test_the_table_counts_evaluations_only_and_says_what_to_type_next(answer, evaluated):
    shown = answer("--eval", "--limit", "2")
    assert "5 rollouts stored: 2 eval, 2 untrained, 1 micro_eval\n" in shown and "not stored" not in shown
    assert "3 older groups are not shown: --limit 5, --step N, --lesson L\n" in shown
    assert f"penstock rollouts {evaluated} --eval --show eval-cats-0-2-0" in shown


def test_training_is_shown_as_before(answer):
    assert "14 rollouts stored: " in answer()
    assert all(row[0].startswith(("cats-0-", "tools-0-")) for row in groups(answer("--json")))


def test_one_conversation_as_data_and_in_colours(answer):
    shown = answer("--eval", "--show", "eval-cats-0-2-0")
    assert "eval at step 2" in shown and "cat<|im_end|>" in shown and "fate" not in shown
    (row,) = map(json.loads, answer("--eval", "--show", "eval-cats", "--json").splitlines())
    assert (row["turns"][-1]["content"], row["weight_step"], row["uses"]) == ("cat", 2, [])
    assert "add --eval" in answer("--show", "eval-cats-0-2-0", code=2)


def test_queries_and_data_sets(answer, tmp_path):
    query = "select evaluation, avg(episode_reward) as reward from rollouts group by 1 order by 1"
    assert [json.loads(line) for line in answer("--eval", "--sql", query, "--json").splitlines()] == [
        {"evaluation": "eval", "reward": 1.0},
        {"evaluation": "micro_eval", "reward": 1.0},
        {"evaluation": "untrained", "reward": 0.0},
    ]
    both = "select (select count(*) from rollouts) as trained, (select count(*) from evaluations) as evaluated"
    assert json.loads(answer("--sql", both, "--json")) == {"trained": 14, "evaluated": 5}
    out = tmp_path / "said.jsonl"
    assert answer("--eval", "--export", "jsonl", "--step", "0", "--out", str(out)).startswith(
        "2 examples of 2 rollouts"
    )


def test_a_fate_is_refused(answer):
    assert answer("--eval", "--fate", "trained", code=2) == (
        "penstock: --fate does not go with --eval: evaluations are not trained, and have no fate\n"
    )
    with pytest.raises(ConfigError, match="--fate does not go with --eval"):
        _ = RolloutsRequest(Path("run"), fate="trained", eval=True).mode


def test_a_run_without_evaluations_says_so(tmp_path, capsys):
    path = write_run(tmp_path / "run").path
    assert main(["rollouts", str(path), "--eval"]) == 0
    assert "No evaluation yet" in capsys.readouterr().out
