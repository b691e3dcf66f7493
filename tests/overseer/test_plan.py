import json
import re

import pytest

from penstock.cli import main
from penstock.overseer import train
from penstock.overseer.config_loading import load_config
from penstock.overseer.plan import check_code, describe_plan
from penstock.types import ConfigError


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ([], " tokens\n"),
        (["inference.model_parallel=2"], "tokens, split over 2 devices\n"),
        (["inference.model_parallel=null"], "tokens, split over all local devices\n"),
    ],
)
def test_the_plan_says_over_how_many_devices_the_engine_is_split(setting, text):
    assert text in describe_plan(load_config("cats", setting))


def test_a_length_that_the_engine_would_refuse_is_refused_before_a_run():
    changes = ["inference.max_seq_len=4096", "learner.row_length=4096"]
    with pytest.raises(ConfigError, match=r"inference.max_seq_len is 4096, .* meant for 2048 tokens"):
        describe_plan(load_config("cats", changes))


@pytest.mark.parametrize(
    ("recipe", "change", "error"),
    [
        (
            "cats",
            "learner.optimizer.frozen=[embeding]",
            r"frozen has \['embeding'\], which match no array: there are emb",
        ),
        (
            "cats",
            'learner.optimizer.rates={"layrs.*": 2}',
            r"rates has \['layrs\.\*'\], which match no array that trains",
        ),
        ("cats", "learner.optimizer.frozen=['*']", "all arrays: nothing would train"),
        ("cartpole", "learner.optimizer.frozen=[trunc]", r"frozen has \['trunc'\], which match no array"),
        (
            "cats",
            "curriculum.lessons.cats.sampling_params.stop_tokens=[382]",
            r"lessons\.cats\.sampling_params\.stop_tokens has 382, but the model's tokens are 0 to 381",
        ),
    ],
)
def test_what_the_model_does_not_have_is_refused_before_a_run(recipe, change, error):
    with pytest.raises(ConfigError, match=error):
        describe_plan(load_config(recipe, [change]))


@pytest.mark.parametrize(
    ("key", "name", "error"),
    [
        ("learner.loss.module", "Scalar", r"Scalar\.loss gave float32 \[\]: it must be float32"),
        ("replay.batch_maker.name", "Scalar", "is no class derived from penstock.batch.BatchMaker"),
        ("curriculum.lessons.cats.environment.env_class", "Scalar", "is not a subclass of"),
        (
            "curriculum.lessons.cats.environment.env_class",
            "Lost",
            "Lost': making its problems raised FileNotFound",
        ),
    ],
)
def test_a_dry_run_tries_what_the_run_would_import(tmp_path, key, name, error, capsys):
    (tmp_path / "own.py").write_text(
        "from pathlib import Path\nfrom penstock.environments import Example, SingleTurnEnvironment\n\n\n"
        "class Scalar:\n    def compute_advantages(self, group):\n        return group.rewards\n\n"
        "    def loss(self, inputs):\n        return inputs.logprobs.sum()\n\n\n"
        "class Lost(SingleTurnEnvironment):\n    def train_examples(self):\n"
        "        return [Example('a', Path('no_such_file').read_text())]\n\n"
        "    def score(self, example, text, completion):\n        return 0.0\n"
    )
    assert main(["train", "cats", f"{key}={tmp_path}/own.py:{name}", "--dry-run"]) == 2
    printed = capsys.readouterr()
    assert re.search(error, printed.err) and printed.err.count("\n") == 1
    assert "# Memory, estimated:" in printed.out  # the plan is told all the same


@pytest.mark.parametrize(
    ("external", "tls_ca", "error"),
    [
        ({"api_key_file": "absent"}, None, "inference.external.api_key_file is .*absent: .*No such file"),
        ({"api_key_file": "empty"}, None, "api_key_file is .*empty: it is empty; write the key there"),
        ({"urls": ["https://127.0.0.1:1"]}, "empty", "inference.tls_ca is .*empty: its certificates cannot be read"),
        (
            {"weights_dir": "empty/weights"},
            None,
            "weights_dir is .*weights, and .*empty is no folder that can be written",
        ),
        (
            {"urls": [], "launch": ["/no/vllm", "{model}"]},
            None,
            "launch cannot be started: there is no program '/no/vllm'",
        ),
    ],
)
def test_what_servers_need_is_looked_for_before_a_run_and_by_its_dry_run(tmp_path, external, tls_ca, error):
    (tmp_path / "empty").touch()
    paths = {key: str(tmp_path / name) for key, name in external.items() if isinstance(name, str)}
    words = [
        "inference.engine=vllm",
        f"inference.external={json.dumps({'urls': ['http://127.0.0.1:1'], **external, **paths})}",
        *([] if tls_ca is None else [f"inference.tls_ca={tmp_path / tls_ca}"]),
    ]
    config = load_config("cats", words)
    with pytest.raises(ConfigError, match=error):
        check_code(config)
    with pytest.raises(ConfigError, match=error):
        train(config, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_what_a_dry_run_made_is_closed(monkeypatch):
    closed = []
    monkeypatch.setattr("penstock.environments.cats.CatsEnvironment.close", lambda self: closed.append(self.name))
    check_code(load_config("cats"))
    assert closed == ["cats"]


def test_a_token_that_the_model_does_not_have_ends_no_answer_and_leaves_nothing(tmp_path):
    config = load_config("cats", ["curriculum.lessons.cats.sampling_params.stop_tokens=[5, 382]"])
    with pytest.raises(ConfigError, match="stop_tokens has 382"):
        train(config, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
