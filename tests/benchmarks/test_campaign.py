"""Runs that are there are not made again, whatever a killed campaign left; what fails is said and made again."""

import json
import os
import sys
from pathlib import Path

import pytest
from benchmarks.campaign import Cell, Outcomes, go_through, numbers_of, on_core

import penstock
from benchmarks import campaign, learning, staleness

CELLS = [Cell(name, "toy", seed, ("steps=3",)) for seed in (0, 1) for name in ("one", "other")]


def test_what_has_an_outcome_is_not_made_again(tmp_path):
    path, made = tmp_path / "folder" / "outcomes.jsonl", []

    def measure(cell, core):
        made.append(cell)
        return {"value": cell.seed, "core": core}

    go_through(CELLS[:3], measure, path)
    assert made == CELLS[:3]
    found = go_through(CELLS, measure, path, jobs=2)
    assert made == CELLS and [found[cell]["value"] for cell in CELLS] == [0, 0, 1, 1]
    assert len(path.read_text().splitlines()) == 4
    go_through([CELLS[0]._replace(overrides=("steps=4",))], measure, path)
    assert len(made) == 5, "another setting is another run"


def test_a_line_that_was_being_written_counts_as_not_written(tmp_path):
    path = tmp_path / "outcomes.jsonl"
    Outcomes(path).add(CELLS[0], {"value": 1})
    Outcomes(path).add(CELLS[1], {"value": 2})
    path.write_text(path.read_text()[:-9])
    found = Outcomes(path)
    assert CELLS[0] in found and CELLS[1] not in found
    found.add(CELLS[1], {"value": 3})
    assert [json.loads(line)["outcome"]["value"] for line in path.read_text().splitlines()] == [1, 3]
    path.write_text('{"cell": ["torn')
    assert CELLS[0] not in Outcomes(path) and path.read_text() == ""


def test_a_run_that_failed_is_said_at_the_end_and_the_others_are_kept(tmp_path):
    path, broken = tmp_path / "outcomes.jsonl", [True]

    def measure(cell, _core):
        if cell == CELLS[1] and broken:
            raise RuntimeError("it broke")
        return {}

    with pytest.raises(RuntimeError, match="^1 of 4 runs failed, the first: it broke$"):
        go_through(CELLS, measure, path)
    assert [cell in Outcomes(path) for cell in CELLS] == [True, False, True, True]
    broken.clear()
    assert all(cell in go_through(CELLS, measure, path) for cell in CELLS)


def test_a_command_runs_on_its_core_alone_and_its_failure_is_its_last_line():
    core = max(os.sched_getaffinity(0))
    says = "import os; print('first'); print(sorted(os.sched_getaffinity(0)), os.environ['PJRT_NPROC'])"
    assert on_core([sys.executable, "-c", says], core) == f"[{core}] 1"
    with pytest.raises(RuntimeError, match="ValueError: no such thing$"):
        on_core([sys.executable, "-c", "raise ValueError('no such thing')"], core)
    with pytest.raises(RuntimeError, match="no end within 0.5 s"):
        on_core(["sleep", "60"], core, limit_s=0.5)


def test_numbers_are_of_all_updates():
    rows = [
        {"train/optimizer_steps": 2.0, "train/clip_fraction": 0.5, "train/tokens": 10.0, "train/reward_mean": 0.25},
        {"train/optimizer_steps": 1.0, "train/tokens": 5.0},
    ]
    found = numbers_of(rows)
    assert found["train/clip_fraction"] == 0.25 and found["optimizer_steps"] == 1 and found["tokens"] == 15
    assert found["rewards"] == [0.25] and numbers_of([]) == {}


def results(reward: float, training: float = 0.5, steps: float = 2.0) -> dict:
    """An outcome of one lesson with two problems."""

    def stats(mean):
        return {"toy": {
            "lesson_id": "toy", "prompts": ["a", "b"], "rewards": [mean, mean], "groups": 2, "rollouts": 2,
            "reward_mean": mean, "success_rate": mean, "pass_at_k": mean, "response_tokens": 3.0,
            "truncated_fraction": 0.0,
        }}  # fmt: skip

    updates = dict.fromkeys(campaign.MEANS, 0.125) | {
        "optimizer_steps": steps, "tokens": 1000.0, "rewards": [training - 0.25, training + 0.25]
    }  # fmt: skip
    shared = {"training_s": 30.0, "elapsed_s": 40.0, "processor_s": 50.0, "lessons": {"toy": "active"}}
    return {"untrained": stats(0.0), "before": stats(0.0), "after": stats(reward), **shared, "updates": updates}


def test_every_preset_has_its_own_line_and_the_same_marks(monkeypatch, capsys, tmp_path):
    asked = []

    def measure(cell, _core):
        asked.append(cell)
        return results(0.4 if cell.name == "gspo" else 0.9)

    monkeypatch.setattr(campaign, "trained_on_core", measure)
    monkeypatch.setattr(learning, "shared_start", lambda recipe, seed, folder: [f"start={folder.name}"])
    words = [
        "--presets",
        "rloo",
        "gspo",
        "ppo",
        "--seeds",
        "2",
        "--least",
        "0.8",
        "--results",
        str(tmp_path / "o.jsonl"),
    ]
    monkeypatch.setattr(sys, "argv", ["learning", "toy", "steps=9", *words])
    assert learning.main() == 1
    said = capsys.readouterr().out
    assert "gspo\ntoy: learned with 0 of 2 seeds" in said and said.count("2 of 2 seeds pass") == 2
    assert "0.1250" in said and "1,000" in said
    words_of_first = "learner.loss.preset=rloo", "learner.minibatches=2", "steps=9", "start=toy-0"
    assert asked[0] == Cell("rloo", "toy", 0, words_of_first)
    assert "learner.critic.learning_rate=1e-3" in asked[2].overrides
    monkeypatch.setattr(sys, "argv", ["learning", "toy", "learner.epochs=3", *words[:2], "--seeds", "1"])
    assert learning.main() == 0 and "learner.minibatches=2" not in asked[-1].overrides


@pytest.mark.parametrize(
    "words",
    ["--results x.jsonl", "--jobs 2", "--presets all --control", "--presets none",
     "--presets all learner.warm_start.steps=9", "--presets all model.dtype=bfloat16"],
)  # fmt: skip
def test_options_that_cannot_act_are_refused(monkeypatch, words):
    monkeypatch.setattr(sys, "argv", ["learning", "toy", *words.split()])
    with pytest.raises(SystemExit):
        learning.main()


def test_a_warm_start_is_made_once_per_seed_and_all_presets_go_on_from_it(monkeypatch, tmp_path):
    asked, made = [], []

    def measure(cell, _core):
        asked.append(cell)
        return results(0.9)

    def on_core(command, _core):
        made.append(command)
        (Path(command[-1]) / "checkpoints" / "step-0").mkdir(parents=True)

    monkeypatch.setattr(campaign, "trained_on_core", measure)
    monkeypatch.setattr(campaign, "on_core", on_core)
    words = ["--presets", "rloo", "grpo", "--seeds", "2", "--results", str(tmp_path / "o.jsonl")]
    monkeypatch.setattr(sys, "argv", ["learning", "toy", *words])
    assert learning.main() == 0 == learning.main()
    assert [command[5] for command in made] == ["seed=0", "seed=1"] and len(asked) == 4
    start = tmp_path / "o" / "toy-1" / "checkpoints" / "step-0"
    assert {f"model.initial_checkpoint={start}", "learner.warm_start=null"} <= set(asked[3].overrides)


def test_what_is_compared_of_arithmetic_and_what_is_said_takes_its_place(monkeypatch, capsys):
    asked = []

    def measure(cell, _core):
        asked.append(cell)
        return {**results(0.4), "before": results(0.2)["after"]}

    monkeypatch.setattr(campaign, "trained_on_core", measure)
    monkeypatch.setattr(learning, "shared_start", lambda recipe, seed, folder: [])
    monkeypatch.setitem(learning.COMPARED, "toy", learning.COMPARED["arithmetic"]._replace(lessons=("toy",)))
    words = ["learning", "toy", "--presets", "grpo", "--seeds", "1"]
    monkeypatch.setattr(sys, "argv", words)
    assert learning.main() == 0  # 0.2 more, and at least 0.35
    config = penstock.load_config("arithmetic", list(asked[0].overrides))
    assert (config.steps, config.learner.optimizer_steps) == (40, 4)
    assert config.learner.optimizer.frozen == ("embedding", "layers.*")
    for changed in (["--gain", "0.3"], ["--least", "0.5"]):
        monkeypatch.setattr(sys, "argv", [*words, "steps=41", *changed])
        assert learning.main() == 1
    assert penstock.load_config("arithmetic", list(asked[1].overrides)).steps == 41


def test_staleness_is_compared_with_fresh_rollouts_seed_by_seed(monkeypatch, capsys):
    asked = []

    def measure(cell, _core):
        asked.append(cell)
        off = {"S = 8, none": 0.5, "S = 8, mask": 0.01 * (-1) ** cell.seed}.get(cell.name, 0.0)
        return results(0.8 + 0.05 * cell.seed - off, 0.5 - off / 2)

    monkeypatch.setattr(campaign, "trained_on_core", measure)
    monkeypatch.setenv("COLUMNS", "200")
    assert staleness.main(["--budgets", "8", "--corrections", "none", "mask", "--seeds", "4"]) == 0
    said = capsys.readouterr().out
    rows = {name: next(line for line in said.splitlines() if name in line) for name in ("S = 0", "none", "mask")}
    assert "-0.500 [-0.500, -0.500]" in rows["none"] and rows["none"].count("worse") == 2
    assert "+0.000" in rows["mask"] and rows["mask"].count("contains 0") == 2
    assert [cell.name for cell in asked[:3]] == ["S = 0", "S = 8, none", "S = 8, mask"] and asked[3].seed == 1
    assert "replay.staleness_budget=8" in asked[1].overrides
    assert "learner.loss.correction.kind=none" in asked[1].overrides
    with pytest.raises(SystemExit):
        staleness.main(["--seeds", "1"])


def test_cells_of_the_whole_campaign():
    options = staleness.argparse.Namespace(
        budgets=[1, 4, 8], corrections=list(staleness.CORRECTIONS), seeds=5, overrides=[]
    )
    cells = staleness.cells_of(options)
    assert sum(map(len, cells.values())) == 65 and len({cell for each in cells.values() for cell in each}) == 65


def test_every_cell_is_a_valid_configuration():
    options = staleness.argparse.Namespace(budgets=[8], corrections=list(staleness.CORRECTIONS), seeds=2, overrides=[])
    for cell, _ in staleness.cells_of(options).values():
        penstock.load_config(cell.recipe, list(cell.overrides))
    for preset in learning.presets_of(staleness.argparse.Namespace(presets=["all"])):
        cell = learning.cell_of("named_animal", [], preset, 0)
        assert penstock.load_config(cell.recipe, list(cell.overrides)).learner.optimizer_steps == 2
