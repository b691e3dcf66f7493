"""Relative paths: a YAML's count from its folder, an override's and a packaged recipe's from the working directory."""

import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from penstock.overseer.config import RunConfig
from penstock.overseer.config_loading import all_keys, load_config, load_recorded_config, named_code
from penstock.overseer.config_loading.loading import PATH_KEYS
from penstock.overseer.control_config import FleetRunConfig
from penstock.rundir import RunDirectory
from penstock.rundir.yaml_documents import dump_yaml

ENVIRONMENT = "curriculum.lessons.words.environment"
LANGUAGE = """
steps: 1
model: {path: models/small, tokenizer: penstock}
curriculum:
  lessons:
    words:
      environment:
        env_class: words.py:Words
        env_args:
          path: [rows/*.jsonl, "s3://bucket/rows.jsonl", /data/rows.jsonl]
          eval_path: ../held_out.jsonl
          prompt_column: path
          reward: rewards.py:score
          graders: [{weight: 1, function: "more/rewards.py:format"}, {path: mine.tasks.Dig}]
replay: {batch_maker: {name: makers.py:Mine}, store: {url: stored}}
weights: {transport: checkpoint, url: "s3://bucket/weights"}
"""
FLEET = """
steps: 1
fleet:
  envs_per_worker: 4
  tasks:
    one: {id: worlds.py:make, kwargs: {level_path: levels/1, callbacks: [{path: mine.tasks.Dig}]}}
    two: {id: CartPole-v1}
    three: {id: "worlds:make"}
learner: {reference_kl: {reference: teacher}}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of recipes beside the working directory."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "words.yaml").write_text(LANGUAGE)
    (folder / "fleet.yaml").write_text(FLEET)
    return folder


def test_paths_of_a_yaml_count_from_its_folder(project):
    for name in ("../project/words.yaml", str(project / "words.yaml")):
        config = load_config(name)
        environment = config.curriculum.lessons["words"].environment
        assert environment.env_class == f"{project}/words.py:Words"
        assert environment.env_args == {
            "path": [f"{project}/rows/*.jsonl", "s3://bucket/rows.jsonl", "/data/rows.jsonl"],
            "eval_path": f"{project.parent}/held_out.jsonl",
            "prompt_column": "path",
            "reward": f"{project}/rewards.py:score",
            "graders": [{"weight": 1, "function": f"{project}/more/rewards.py:format"}, {"path": "mine.tasks.Dig"}],
        }
        assert (config.model.path, config.model.tokenizer) == (f"{project}/models/small", "penstock")
        assert config.replay.batch_maker.name == f"{project}/makers.py:Mine"
        assert config.replay.store.url == f"{project}/stored" and config.weights.url == "s3://bucket/weights"


def test_so_do_an_adapter_s_base_a_loss_of_one_s_own_and_stored_rollouts(project):
    text = LANGUAGE.replace("models/small,", "models/small, base: models/base,").replace(
        "replay: {batch_maker: {name: makers.py:Mine},",
        "learner: {loss: {module: MODULE}}\nreplay: {from_rollouts: run,",
    )
    (project / "own.yaml").write_text(text.replace("MODULE", "losses.py:Mine"))
    config = load_config("../project/own.yaml")
    assert config.model.base == f"{project}/models/base"
    assert config.learner.loss.module == f"{project}/losses.py:Mine"
    assert config.replay.from_rollouts == f"{project}/run"
    (project / "own.yaml").write_text(text.replace("MODULE", "losses.mine:Mine"))
    assert load_config("../project/own.yaml").learner.loss.module == "losses.mine:Mine"


def test_so_do_those_of_a_fleet(project):
    config = load_config("../project/fleet.yaml")
    one, two, three = config.fleet.tasks.values()
    assert (one.id, two.id, three.id) == (f"{project}/worlds.py:make", "CartPole-v1", "worlds:make")
    assert one.kwargs == {"level_path": f"{project}/levels/1", "callbacks": [{"path": "mine.tasks.Dig"}]}
    assert config.learner.reference_kl.reference == f"{project}/teacher"


def test_those_of_an_override_and_of_a_packaged_recipe_count_from_the_working_directory(project):
    config = load_config(
        "../project/words.yaml", [f"{ENVIRONMENT}.env_args.reward=mine.py:score", "model={path: ~/models/large}"]
    )
    assert config.curriculum.lessons["words"].environment.env_args["reward"] == f"{Path.cwd()}/mine.py:score"
    assert config.curriculum.lessons["words"].environment.env_class == f"{project}/words.py:Words"
    assert config.model.path == os.path.expanduser("~/models/large")
    packaged = load_config("gsm8k_smollm2")
    assert packaged.model.path == f"{Path.cwd()}/checkpoints/SmolLM2-135M-Instruct"
    path = packaged.curriculum.lessons["gsm8k"].environment.env_args["path"]
    assert path == f"{Path.cwd()}/examples/data/word_problems.jsonl"


def test_a_resumed_run_means_the_same_from_anywhere(project, tmp_path, monkeypatch):
    config = load_config("../project/words.yaml")
    directory = RunDirectory.create(tmp_path / "run", config.dump())
    monkeypatch.chdir("/")
    assert load_recorded_config(directory, [], trust=False)[0] == config
    assert load_config(directory.config_path) == config


def test_relative_paths_of_a_run_from_before_count_from_the_working_directory(project, tmp_path):
    config = load_config("../project/words.yaml")
    values = config.dump()
    values["model"]["path"] = "models/small"
    directory = RunDirectory.create(tmp_path / "run", values)
    assert load_recorded_config(directory, [], trust=False)[0].model.path == f"{Path.cwd()}/models/small"


def test_what_ray_uploads_is_found_from_the_upload(project):
    upload = ["runtime=ray", "ray.runtime_env={working_dir: .}", "steps=2"]
    config = load_config("../project/words.yaml", upload)
    environment = config.curriculum.lessons["words"].environment
    assert (environment.env_class, environment.env_args["reward"]) == ("words.py:Words", "rewards.py:score")
    assert config.ray.runtime_env == {"working_dir": str(Path.cwd())}
    local = load_config("../project/words.yaml", upload[1:])
    assert local.curriculum.lessons["words"].environment.env_class == f"{project}/words.py:Words"


def test_a_url_of_memory_is_no_path(project):
    assert load_config("../project/words.yaml", ["weights.url=memory:weights"]).weights.url == "memory:weights"


def test_a_dry_run_is_a_recipe_that_means_the_same_in_another_folder(project, tmp_path):
    config = load_config("../project/words.yaml")
    copy = tmp_path / "elsewhere.yaml"
    copy.write_text(dump_yaml(config.dump()))
    assert load_config(copy) == config


@pytest.mark.parametrize("values", ["curriculum: []", "curriculum: {lessons: {a: 3}}", "model: [1]", "ray: 1"])
def test_what_has_another_form_is_left_to_validation(project, values):
    from penstock.types import ConfigError

    (project / "broken.yaml").write_text(f"{LANGUAGE}\n".replace("model:", "seed: 0\n#") + values)
    with pytest.raises(ConfigError):
        load_config(project / "broken.yaml")


def test_the_example_finds_its_files_from_anywhere(project):
    root = Path(__file__).resolve().parents[3]
    config = load_config(root / "examples" / "word_problems.yaml")
    arguments = config.curriculum.lessons["word_problems"].environment.env_args
    assert Path(arguments["path"]).is_file() and Path(arguments["reward"].removesuffix(":reward")).is_file()
    assert config.model.path == str(root / "checkpoints" / "word-problems")


@pytest.mark.parametrize("model", [RunConfig, FleetRunConfig])
def test_every_key_that_may_be_a_path_is_listed(model: type[BaseModel]):
    """By what it is called, or by its type."""
    names = ("path", "url", "tls_cert", "tls_key", "tls_ca", "directory", "reference", "tokenizer",
             "base", "module", "from_rollouts")  # fmt: skip

    def is_path(key: Any) -> bool:
        return key.takes.startswith("path") or key.path.rpartition(".")[2] in names

    assert [key.path for key in all_keys(model) if is_path(key) and key.path not in PATH_KEYS] == []


def test_the_code_that_a_recipe_names_is_said_with_its_file(project):
    (project / "words.py").touch()
    found = {code.key: code.place for code in named_code(load_config("../project/words.yaml").dump())}
    assert found[f"{ENVIRONMENT}.env_class"] == f"{project}/words.py"
