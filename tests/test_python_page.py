"""docs/python.md: a notebook of its cells, run in order."""

import json
import re
from pathlib import Path

import pytest

import penstock

PAGE = Path(__file__).resolve().parents[1] / "docs" / "python.md"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_cells_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(40)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cells = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len(cells) == 8
    names: dict = {"__name__": "__main__"}
    printed = []
    for cell in cells:
        exec(compile(cell, "cell", "exec", dont_inherit=True), names)
        printed.append(capsys.readouterr().out)
    assert "step 40/40" in printed[0] and "RunSummary(finished at step 40/40, cats 0." in printed[0]
    assert names["config"].steps == 60 and names["config"].learner.optimizer.learning_rate == 3e-3
    assert "isolation: none for what was given as a Python object (environment SortLetters)" in printed[2]
    assert names["report"].lessons["cats"].prompts == 1
    for cell, environment in zip(printed[4:7], ("Guess", "Product", "JsonlEnvironment"), strict=True):
        assert "step 3/3" in cell and f"(environment {environment})" in cell and "failed" not in cell
    assert len(names["rows"].train_examples()) + len(names["rows"].eval_examples()) == 40
    assert "Update(step 10, reward_mean " in printed[7] and "episode_reward" in printed[7]
    assert isinstance(names["update"], penstock.Update) and names["run"].summary.step == names["update"].step


@pytest.mark.parametrize(("task", "most"), [("SortLetters", 12), ("Guess", 15), ("Product", 10), ("brief", 6)])
def test_a_task_takes_few_lines(task: str, most: int):
    cells = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    (cell,) = [cell for cell in cells if f"class {task}(" in cell or f"def {task}(" in cell]
    lines = [line for line in cell.splitlines() if line.strip()]
    assert len(lines) <= most, f"{task}: {len(lines)} lines"
