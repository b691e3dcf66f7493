"""Environments and reward functions that a run is given as Python objects."""

import json
import os
from pathlib import Path

import pytest

import penstock
from penstock.cli import main
from penstock.environments import Example, JsonlEnvironment, SingleTurnEnvironment
from penstock.inference import ScriptedContext
from penstock.overseer import RunConfig
from penstock.overseer.config_loading import build_config, named_code
from penstock.overseer.language.given import take_objects
from penstock.rundir import RunDirectory, read_events
from penstock.text import Tokenizer
from penstock.types import ConfigError, Decoding
from tests.overseer.conftest import TINY, merged, tiny
from tests.overseer.test_fleet_training import tiny as tiny_control

NAME = f"object:{__name__}.Vowels"


class Vowels(SingleTurnEnvironment):
    """As in a cell."""

    def __init__(self, wanted: str = "a") -> None:
        super().__init__("vowels")
        self.wanted = wanted
        self.seen: set[int] = set()

    def train_examples(self):
        return [Example(word, f"Say {word}:") for word in ("stone", "river", "cloud")]

    def eval_examples(self):
        return [Example("bread", "Say bread:")]

    def score(self, example, text, completion):
        self.seen.add(os.getpid())
        return min(1.0, text.count(self.wanted) / 2)


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}?", "answer": str(n)}) + "\n" for n in range(20)))
    return str(path)


def of_rows(rows: str) -> RunConfig:
    lesson = {"environment": {"env_class": "penstock.environments.jsonl.JsonlEnvironment", "env_args": {"path": rows}}}
    return tiny({"steps": 1, "curriculum": {"lessons": {"cats": lesson}, "eval_n_examples": 2}})


def two_lessons() -> RunConfig:
    lessons = {"cats": TINY["curriculum"]["lessons"]["cats"], "dogs": TINY["curriculum"]["lessons"]["cats"]}
    return build_config(RunConfig, merged(TINY, {"curriculum": {"lessons": lessons}}))


def test_a_run_plays_in_the_environment_that_it_was_given_and_says_so(run_dir: Path, capsys):
    mine = Vowels("e")
    summary = penstock.train(tiny(), run_dir, environment=mine, steps=1)
    assert summary.complete and summary.step == 1 and mine.seen == {os.getpid()}
    said = "isolation: none for what was given as a Python object (environment Vowels): it runs in this process\n"
    assert said in capsys.readouterr().out
    told = [event for event in read_events(run_dir / "events.jsonl") if event["event"] == "isolation"]
    assert [(event["isolation"], event["objects"]) for event in told] == [("none", ["environment Vowels"])]
    recorded = RunDirectory(run_dir).read_config()
    assert recorded["curriculum"]["lessons"]["cats"]["environment"] == {"env_class": NAME, "env_args": {}}
    assert named_code(recorded) == []  # nothing of it is imported

    with pytest.raises(ConfigError, match=f"^env_class '{NAME}' was given as a Python object, .* by environment=…"):
        penstock.train(run_dir=run_dir, resume=True, steps=2, quiet=True)
    assert main(["train", "--resume", str(run_dir), "steps=2"]) == 2
    assert f"penstock: env_class '{NAME}' was given as a Python object, which no" in capsys.readouterr().err
    checkpoint = run_dir / "checkpoints" / "step-1"
    assert main(["eval", str(checkpoint), "--n", "1"]) == 2
    assert f"env_class '{NAME}' was given as a Python object" in capsys.readouterr().err
    report = penstock.evaluate(checkpoint, tiny(), n=1, environment=Vowels("e"))
    assert report.lessons["cats"].prompts == 1
    with pytest.raises(ConfigError, match="^config cartpole trains a control policy"):
        penstock.evaluate(checkpoint, "cartpole")
    resumed = penstock.train(run_dir=run_dir, resume=True, steps=2, quiet=True, environment=Vowels)
    assert resumed.complete and resumed.step == 2 and resumed.metrics["train/reward_mean"] >= 0
    assert repr(resumed).startswith("RunSummary(finished at step 2/2, cats ") and "\n" not in repr(resumed)


def test_an_environment_without_problems_is_refused_before_anything_is_written(run_dir: Path):
    class Empty(SingleTurnEnvironment):
        def score(self, example, text, completion):
            return 1.0

    with pytest.raises(ConfigError, match=r"^environment 'Empty' \(Empty\) has no problems: give it examples = "):
        penstock.train(tiny(), run_dir, environment=Empty)
    assert not run_dir.exists()


def test_reward_functions_of_a_cell_score_the_rows_of_a_file(run_dir: Path, rows: str, capsys):
    pids = set()

    def longer(completions, log_metric, **columns):
        pids.add(os.getpid())
        log_metric("rows", len(columns["answer"]))
        return [len(text) / 10 for text in completions]

    graded = "penstock.environments.rewards.final_answer"
    summary = penstock.train(of_rows(rows), run_dir, reward=[longer, graded])
    assert summary.complete and pids == {os.getpid()} and not summary.failed_groups
    assert summary.metrics["env/cats/rewards/longer/rows"] == 3.0 and summary.metrics["train/reward_mean"] > 0
    assert "given as a Python object (reward longer): it" in capsys.readouterr().out
    arguments = RunDirectory(run_dir).read_config()["curriculum"]["lessons"]["cats"]["environment"]["env_args"]
    name = f"object:{__name__}.{longer.__qualname__}"
    assert arguments == {"path": rows, "reward": [name, graded]}
    with pytest.raises(ConfigError, match=r"^env_args.reward 'object:.*longer' was given as .* by reward=…"):
        penstock.train(run_dir=run_dir, resume=True, steps=2, quiet=True)


@pytest.mark.parametrize("n", [1, 2])
def test_given_functions_weigh_one_each_whatever_those_weighed_that_they_replace(rows: str, n: int):
    lesson = {"environment": {"env_args": {"reward": ["penstock.environments.rewards.final_answer",
                                                      "penstock.environments.rewards.exact_match"],
                                           "reward_weights": [0.25, 0.5]}}}  # fmt: skip
    config = build_config(RunConfig, merged(of_rows(rows).dump(), {"curriculum": {"lessons": {"cats": lesson}}}))

    def first(completions):
        return [1.0] * len(completions)

    def second(completions):
        return [10.0] * len(completions)

    taken = take_objects(config, None, [first, second][:n])
    groups, _ = taken.environments["cats"].sample(
        ScriptedContext(Tokenizer.load("penstock"), ["4"]), 1, 2, Decoding(), 0, "train"
    )
    assert groups[0].rewards.tolist() == [[1.0, 1.0], [11.0, 11.0]][n - 1]
    arguments = taken.config.curriculum.lessons["cats"].environment.env_args
    assert set(arguments) == {"path", "reward"} and len(arguments["reward"]) == n


@pytest.mark.parametrize("reward", [3, [len, 3], (each for each in [len])])
def test_a_reward_that_is_no_function_is_refused(rows: str, run_dir: Path, reward):
    with pytest.raises(ConfigError, match=r"^reward has .*: give a function, its path .*, or a list of both$"):
        penstock.train(of_rows(rows), run_dir, reward=reward)
    assert not run_dir.exists()


def test_of_several_lessons_it_is_said_which_is_meant(rows: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = two_lessons()
    with pytest.raises(ConfigError, match=r"^environment is one for 2 lessons \(cats, dogs\): say for which, environm"):
        take_objects(config, Vowels(), None)
    with pytest.raises(ConfigError, match="^environment is given for cows: no such lesson; there are cats, dogs$"):
        take_objects(config, {"cows": Vowels()}, None)
    with pytest.raises(
        ConfigError, match="^reward and environment are both given for lesson 'dogs': give the function"
    ):
        take_objects(config, {"dogs": Vowels()}, {"dogs": len})
    taken = take_objects(config, {"dogs": Vowels}, None)
    assert [*taken.environments] == ["dogs"] and taken.words == ("environment Vowels",)
    classes = {name: lesson.environment.env_class for name, lesson in taken.config.curriculum.lessons.items()}
    assert classes == {"cats": "penstock.environments.cats.CatsEnvironment", "dogs": NAME}
    assert take_objects(config, None, None).config == config
    Path("mine.py").write_text("def score(completions):\n    return [0.0] * len(completions)\n")
    named = take_objects(of_rows(rows), None, "mine.py:score")
    arguments = named.config.curriculum.lessons["cats"].environment.env_args
    assert arguments["reward"] == [f"{Path.cwd()}/mine.py:score"] and named.words == ()
    named.environments["cats"].close()
    given = take_objects(of_rows(rows), JsonlEnvironment(rows, reward=lambda completions: [1.0]), None)
    assert given.words == ("environment JsonlEnvironment",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"environment": Vowels}, "^environment Vowels is a Python object, which stays in this process, and runtime is "
                                  "ray: name code that every process can import .*, or set runtime=\"local\"$"),
    ],
)  # fmt: skip
def test_objects_are_refused_under_ray_before_anything_is_written(run_dir: Path, given, message):
    with pytest.raises(ConfigError, match=message):
        penstock.train("cats", run_dir, runtime="ray", **given)
    assert not run_dir.exists()


def test_problems_that_cannot_be_made_are_refused_before_anything_is_written(run_dir: Path):
    class Lost(Vowels):
        def train_examples(self):
            return [Example("stone", Path("no_such_file.txt").read_text())]

    class Five(Vowels):
        def training_set(self):
            return 5

    with pytest.raises(ConfigError, match=r"Lost': making its problems raised FileNotFoundError: .*no_such_file\.txt"):
        penstock.train(tiny(), run_dir, environment=Lost)
    with pytest.raises(ConfigError, match=r"Five': training_set returned 5: it must be a penstock\.types\.ProblemSet"):
        penstock.train(tiny(), run_dir, environment=Five)
    assert not run_dir.exists()


def test_what_cannot_be_given_is_refused(run_dir: Path):
    with pytest.raises(ConfigError, match=r"^run_dir is <class '.*Vowels'>: it must be a path"):
        penstock.train("cats", Vowels)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ConfigError, match=r"^reward is given, and penstock\.\S+\.CatsEnvironment takes none: it scores"
    ):
        penstock.train("cats", run_dir, reward=len)
    with pytest.raises(
        ConfigError, match="^environment is for language policies, and cartpole trains a control policy"
    ):
        penstock.train(tiny_control(), run_dir, recipe="cartpole", environment=Vowels)
    with pytest.raises(
        ConfigError, match=r'^config is missing: give a recipe\'s name, such as penstock.train\("cats"\)'
    ):
        penstock.train()
    with pytest.raises(ConfigError, match="^cats: unknown key lr: did you mean learner.optimizer.learning_rate"):
        penstock.train("cats", run_dir, lr=1e-3)
    for wrong, meant in (
        ("environments", "environment"), ("rewards", "reward"), ("rundir", "run_dir"), ("output_dir", "run_dir"),
        ("async_", "asynchronous"), ("reward_funcs", "reward"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"^unknown argument {wrong}: did you mean {meant}\\?$"):
            penstock.train("cats", **{wrong: "x"})
    assert not run_dir.exists()
