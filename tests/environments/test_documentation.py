"""The environment in the documentation works as it is printed there."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"


def test_the_environment_of_thirty_lines(capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    environment, trial = blocks[:2]
    assert len(environment.splitlines()) <= 30
    namespace = {"__name__": "documentation"}
    exec(environment + trial, namespace)
    rewards = [reward for group in eval(capsys.readouterr().out) for reward in group]
    assert len(rewards) == 8 and all(0 <= reward <= 1 for reward in rewards)

    context = namespace["ScriptedContext"](
        namespace["Tokenizer"].load("penstock"), lambda prompt, _: prompt.split()[1][::-1]
    )
    groups, _ = namespace["ReverseEnvironment"]().sample(context, 2, 1, namespace["Decoding"](), 0, "eval")
    assert [group.rewards.tolist() for group in groups] == [[pytest.approx(1.0)]] * 2
