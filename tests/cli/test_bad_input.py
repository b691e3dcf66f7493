"""Bad input: exit code 2, exactly one clear line on standard error, no traceback, nothing left behind."""

import json
from pathlib import Path

import pytest
import yaml

from penstock.overseer.config_loading import load_config
from penstock.rundir import RunDirectory
from penstock.text import Tokenizer

CATS = "curriculum.lessons.cats"


def expect_refusal(done, *parts: str) -> None:
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("penstock: ") and done.stdout == ""
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["train", "catz"], ["no recipe named 'catz' (did you mean 'cats'?)", "arithmetic"]),
        (["train", "cats", "stepz=3"], ["cats: unknown key stepz: did you mean steps?"]),
        (
            ["train", "cats", "learner.optimiser.learning_rate=1"],
            ["unknown key learner.optimiser: did you mean learner.optimizer?"],
        ),
        (["train", "cats", "learning_rate=1"], ["unknown key learning_rate"]),
        (["train", "cats", "steps=many"], ["cats: steps is 'many': it must be a whole number"]),
        (["train", "cats", "replay.groups_per_batch=0"], ["replay.groups_per_batch is 0: it must be"]),
        (["train", "cats", "steps.x=1"], [", which has no keys: remove .x from the path"]),
        (["train", "cats", "dogs"], ["'dogs' beside 'cats' is not of the form key=value"]),
        (["train", "cats", "steps=[1"], ["override 'steps=[1'", "not valid YAML"]),
        (["train"], ["the recipe is missing"]),
        (["train", "nowhere/mine.yaml"], ["no file nowhere/mine.yaml"]),
        (["train", "--resume"], ["the run directory is missing; for example: penstock train --resume"]),
        (["train", "--resume", "nowhere"], ["nowhere is not a run directory"]),
        (["eval", "nowhere"], ["nowhere does not exist", "checkpoints/step-<n>"]),
        (["eval", "http://127.0.0.1:9"], ["--recipe is missing", "penstock eval URL --recipe cats"]),
        (["eval", "http://127.0.0.1:9", "--recipe", "cartpole"], ["http://127.0.0.1:9 is a server, and cartpole"]),
        (["serve", "http://127.0.0.1:9"], ["'http://127.0.0.1:9' holds no config.json"]),
        (["eval", "."], [". lies in no run directory", "--recipe"]),
        (["serve", "nowhere", "--token-file", "absent"], ["--token-file absent cannot be read"]),
        (["serve", "nowhere", "token=mysecret12"], ["token on the command line can be read", "--token-file"]),
        (["serve", "nowhere", "--tls-cert", "a.pem"], ["tls_cert and tls_key go together"]),
        (["serve", "nowhere", "--host", "0.0.0.0"], ["'0.0.0.0' can be reached from other machines"]),
        (["trian"], ["No such command 'trian'. Did you mean 'train'?"]),
        (["train", "cats", "--dryrun"], ["No such option: --dryrun", "--dry-run", "penstock train --help"]),
        (["eval"], ["Missing argument 'CHECKPOINT'"]),
        (["eval", "nowhere", "--n", "0"], ["'--n'", "greater than or equal to 1"]),
        (
            ["eval", "nowhere", "--recipe", "cats", "--generations", "4", "--k", "1", "--k", "8"],
            ["k of pass@k is 8, and generations is 4", "ask for more responses"],
        ),
        (["eval", "nowhere", "--recipe", "cats", "--k", "1,4"], ["k of pass@k is 4, and generations is 1"]),
        (["eval", "nowhere", "--recipe", "cats", "--k", "1,four"], ["--k has 'four'", "such as --k 1,4"]),
        (["generate"], ["--recipe is missing", "penstock generate --recipe cats"]),
        (["generate", "http://127.0.0.1:9"], ["--recipe is missing"]),
        (["generate", "nowhere"], ["nowhere does not exist"]),
        (["generate", "nowhere", "--recipe", "cats"], ["'nowhere' holds no config.json"]),
        (["generate", "--recipe", "cartpole"], ["penstock generate is for language policies"]),
        (["generate", "--recipe", "cats", "--out", "a.csv"], ["--out a.csv ends in '.csv'"]),
        (["generate", "--recipe", "cats", "--lesson", "dogs"], ["lesson 'dogs' is not in the recipe"]),
        (["generate", "steps=x", "--recipe", "cats"], ["cats: steps is 'x': it must be a whole number"]),
        (["curriculum", "simulate", "cartpole"], ["cartpole has no curriculum"]),
        (["curriculum", "simulate", "cats", "--success", "cats"], ["'cats' is not of the form LESSON=CURVE"]),
        (["curriculum", "simulate", "cats", "--success", "cats=x"], ["'x' is no learning curve: write 0.3"]),
        (["curriculum", "simulate", "cats", "--success", "dogs=1"], ["lesson 'dogs' is not in the recipe"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value and "=" not in value[0] else None,
)
def test_a_mistake_on_the_command_line(penstock, tmp_path, words, parts):
    expect_refusal(penstock(*words), *parts)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("steps: [1, 2\n", "line 2, column 1: not valid YAML"),
        ("steps: 1\nsteps: 2\n", "line 2, column 1: not valid YAML: the key 'steps' is written twice"),
        ("- steps\n", "is a list: a recipe is a YAML mapping"),
        ("steps: 1\n", "model is missing: add it"),
    ],
)
def test_a_mistake_in_a_recipe(penstock, tmp_path, text, part):
    (tmp_path / "mine.yaml").write_text(text)
    expect_refusal(penstock("train", "mine.yaml"), "mine.yaml", part)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("model.init.vocab_size=10", ["10", "382"]),
        ("model.tokenizer=nowhere", ["/nowhere'", "no such directory"]),
        (
            f"{CATS}.environment.env_class=penstock.environments.cats.CatEnvironment",
            ["CatEnvironment", "CatsEnvironment"],
        ),
        (f"{CATS}.environment.env_class=penstock.nowhere.Cats", ["penstock.nowhere"]),
        (f"{CATS}.environment.env_args={{speices: 3}}", ["speices"]),
    ],
)
def test_a_model_tokenizer_or_environment_that_is_not_there(penstock, tmp_path, override, parts):
    expect_refusal(penstock("train", "cats", override), *parts)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("template", "part"), [(None, "has no chat template"), ("{{ raise_exception('never') }}", "(never)")]
)
def test_a_chat_template_that_cannot_be_used_is_found_before_anything_is_written(penstock, tmp_path, template, part):
    folder = tmp_path / "tokenizer"
    Tokenizer.load("penstock").save(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    asked = [f"model.tokenizer={folder}", f"{CATS}.environment.env_args={{template: chat}}"]
    expect_refusal(penstock("train", "cats", *asked), part)
    assert list(tmp_path.iterdir()) == [folder]


def test_a_server_that_is_not_there_is_named_as_it_was_given(penstock, tmp_path):
    done = penstock("eval", "http://127.0.0.1:9", "--recipe", "cats")
    assert done.returncode == 1 and done.stderr.startswith("penstock: http://127.0.0.1:9/v1/models does not answer: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("token", ["two\nlines", "päss", "a\tb"])
def test_a_token_that_no_header_can_carry_is_refused_and_not_repeated(penstock, tmp_path, token):
    (tmp_path / "token").write_text(token)
    done = penstock("serve", "nowhere", "--token-file", "token")
    expect_refusal(done, "--token-file token holds what no header can carry")
    assert token not in done.stderr
    asked = penstock("generate", "http://127.0.0.1:9", "--recipe", "cats", PENSTOCK_TOKEN=token)
    expect_refusal(asked, "PENSTOCK_TOKEN holds what no header can carry")


def test_a_run_directory_is_never_overwritten(penstock, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    expect_refusal(penstock("train", "cats", "--run-dir", "mine"), "mine exists already", "--resume")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_a_checkpoint_that_is_none(penstock, tmp_path):
    (tmp_path / "empty").mkdir()
    expect_refusal(penstock("eval", "empty", "--recipe", "cats"), "empty", "config.json")
    expect_refusal(penstock("serve", "empty"), "empty", "config.json")


def test_an_unknown_lesson_is_answered_with_the_known_ones(penstock, tmp_path):
    done = penstock("eval", str(tmp_path), "--recipe", "arithmetic", "--lesson", "meduim")
    expect_refusal(done, "lesson 'meduim' is not in the recipe", "medium")


def test_a_model_directory_with_a_broken_config(penstock, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_neox"}))
    done = penstock("train", "cats", "model={path: .}", "--dry-run")
    expect_refusal(done, "gpt_neox")


def test_the_traceback_is_there_for_those_who_ask(penstock_process):
    done = penstock_process("train", "catz", PENSTOCK_TRACEBACK="1")
    assert done.returncode == 2
    assert done.stderr.startswith("Traceback (most recent call last)")
    assert done.stderr.splitlines()[-1].startswith("penstock: no recipe named 'catz'")


def test_a_path_with_an_equals_sign_is_a_path(penstock_process, tmp_path: Path):
    (tmp_path / "a=b.yaml").write_text("steps: x\n")
    expect_refusal(penstock_process("train", "a=b.yaml"), "a=b.yaml: ")


def test_a_change_may_be_longer_than_a_name_of_a_file(penstock):
    described = "x" * 300
    sections = penstock(
        "train", "cats", f"roles={{rollout: {{env: {{NOTE: {described}}}}}}}", "runtime=ray", "--dry-run"
    )
    assert sections.returncode == 0, sections.stderr
    assert described in sections.stdout
    expect_refusal(penstock("generate", f"seed={described}", "--recipe", "cats"), "seed is 'xxx")
    expect_refusal(penstock("status", described), f"{described}/config.yaml is no path", "longer than a file's may be")


@pytest.mark.attack
@pytest.mark.parametrize("recipe", ["cats", "cartpole"])
@pytest.mark.parametrize(
    ("run_dir", "part"),
    [
        ("line\nbreak", "holds characters that cannot be printed: choose another path"),
        ("bytes\udcff", "holds characters that cannot be printed"),
        ("file/run", "file/run cannot be written: Not a directory: choose another place"),
        ("/proc/none/run", "/proc/none/run cannot be written"),
        ("file", "file exists already and is not overwritten"),
    ],
)
def test_a_run_directory_that_cannot_work_is_refused_before_the_run(penstock, tmp_path, recipe, run_dir, part):
    (tmp_path / "file").write_text("")
    expect_refusal(penstock("train", recipe, "--run-dir", run_dir), part)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.attack
def test_what_was_killed_before_its_config_is_no_run_and_says_how_to_begin_one(penstock, tmp_path):
    (tmp_path / "mine" / "rollouts").mkdir(parents=True)
    expect_refusal(
        penstock("train", "--resume", "mine"), "mine is not a run directory", "begin a run there with --run-dir"
    )


@pytest.mark.attack
def test_a_learning_rate_that_is_no_number_is_refused_on_resume(penstock, tmp_path):
    run = RunDirectory.create(tmp_path / "mine", load_config("cats").dump())
    before = sorted(path.name for path in run.path.iterdir())
    done = penstock("train", "--resume", "mine", "learner.optimizer.learning_rate=.nan")
    expect_refusal(done, "learner.optimizer.learning_rate is nan")
    assert sorted(path.name for path in run.path.iterdir()) == before


def test_a_recipe_named_at_a_resume_is_told_where_it_differs(penstock, tmp_path):
    run = RunDirectory.create(tmp_path / "mine", load_config("cats", ["steps=50"]).dump())
    (run.checkpoints / "step-1").mkdir()
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(load_config("cats", ["steps=405", "seed=7"]).dump()))
    done = penstock("train", "own.yaml", "--resume", "mine", "--dry-run", "steps=60")
    assert done.stderr.splitlines() == [
        "own.yaml differs in seed (7; the run has 0): a resume goes on with the run's own config; what is to change is "
        "said as KEY=VALUE"
    ]
    assert done.stdout.startswith("seed: 0\nsteps: 60\n")
    assert penstock("train", "cats", "--resume", "--run-dir", "mine", "--dry-run", "steps=60").stderr == ""
