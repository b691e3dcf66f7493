"""A resume with another language model than the checkpoint's is refused before anything is written."""

import json
import shutil
from pathlib import Path

import pytest

from penstock import train
from penstock.cli import main
from penstock.overseer import RunConfig
from penstock.overseer.kind import check_kept
from penstock.overseer.language.kind import LanguageKind
from penstock.overseer.progress import Progress
from penstock.overseer.rerun.stored_run import StoredRun
from penstock.overseer.training import create_run, open_log
from penstock.types import CheckpointError, ConfigError

from .conftest import tiny


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    train(tiny({"steps": 1, "curriculum": {"eval_frequency": 1000}}), run_dir, quiet=True)
    return run_dir


@pytest.fixture
def checkpoint(trained: Path) -> Path:
    return trained / "checkpoints" / "step-1"


def contents(run_dir: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


def test_the_recorded_model_and_whatever_else_is_changed_may_go_on(checkpoint: Path):
    LanguageKind().check_resume(tiny(), checkpoint)
    LanguageKind().check_resume(tiny({"steps": 9, "seed": 4, "inference": {"max_slots": 3}}), checkpoint)


def test_every_other_value_is_named_with_both_values_and_the_remedy(checkpoint: Path):
    other = tiny({"model": {"init": {"hidden_size": 32, "num_hidden_layers": 2}, "dtype": "bfloat16"}})
    with pytest.raises(ConfigError) as refused:
        LanguageKind().check_resume(other, checkpoint)
    assert str(refused.value) == (
        "model.init.hidden_size is 32, model.init.num_hidden_layers is 2, model.init.head_dim is 16, model.dtype is "
        f'"bfloat16", but {checkpoint} was trained with model.init.hidden_size=16 model.init.num_hidden_layers=1 '
        'model.init.head_dim=8 model.dtype="float32": a resumed run keeps its model; give these values, or begin a '
        "new run"
    )


def test_a_directory_is_compared_where_it_is_still_there(checkpoint: Path, tmp_path: Path):
    there = {"model": {"init": None, "path": str(checkpoint / "model")}}
    LanguageKind().check_resume(tiny(there), checkpoint)
    content = json.loads((checkpoint / "model" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"num_hidden_layers": 3}))
    with pytest.raises(ConfigError) as refused:
        LanguageKind().check_resume(tiny({"model": {"init": None, "path": str(tmp_path)}}), checkpoint)
    assert str(refused.value) == (
        f"{tmp_path}: num_hidden_layers is 3, but {checkpoint} was trained with {tmp_path}: num_hidden_layers=1: a "
        "resumed run keeps its model; leave model.path as it was, or begin a new run"
    )


def test_a_key_s_value_is_the_remedy_beside_a_directory_too(checkpoint: Path):
    path = str(checkpoint / "model")
    with pytest.raises(ConfigError) as refused:
        LanguageKind().check_resume(tiny({"model": {"init": None, "path": path, "lora": {"rank": 2}}}), checkpoint)
    assert str(refused.value).endswith(
        f"but {checkpoint} was trained with model.lora=null: a resumed run keeps its model; give these values, or "
        "begin a new run"
    )


def test_what_the_model_was_made_of_may_have_gone(checkpoint: Path, tmp_path: Path):
    LanguageKind().check_resume(tiny({"model": {"init": None, "path": str(tmp_path / "gone")}}), checkpoint)
    LanguageKind().check_resume(tiny({"model": {"tokenizer": str(tmp_path / "gone")}}), checkpoint)


@pytest.mark.parametrize("key", ["path", "initial_checkpoint"])
def test_a_resume_records_no_other_directory_that_is_not_there(key: str, tmp_path: Path):
    gone, mistyped = str(tmp_path / "gone"), str(tmp_path / "mistyped")
    directory = create_run(tiny({"model": {"init": None, key: gone}}), tmp_path / "run", "tiny")
    open_log(tiny({"model": {"init": None, key: gone}}), directory, Progress("tiny", 3, 1), []).close()
    with pytest.raises(ConfigError, match=rf"^model\.{key} is {mistyped}: .*; leave it as it was \({gone}\)$"):
        open_log(tiny({"model": {"init": None, key: mistyped}}), directory, Progress("tiny", 3, 1), [])
    assert directory.read_config()["model"][key] == gone
    Path(mistyped).mkdir()
    open_log(tiny({"model": {"init": None, key: mistyped}}), directory, Progress("tiny", 3, 1), []).close()
    assert directory.read_config()["model"][key] == mistyped


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dtype": "bfloat16"}, 'model.dtype is "bfloat16", but .* was trained with model.dtype="float32": '),
        ({"lora": {"rank": 2}}, "model.lora is .*, but .* was trained with model.lora=null: "),
    ],
)
def test_what_the_keys_say_is_compared_without_the_directory_too(checkpoint: Path, tmp_path: Path, keys, message):
    gone = {"init": None, "path": str(tmp_path / "gone")}
    with pytest.raises(ConfigError, match=f"^{message}a resumed run keeps its model; give these values, or begin"):
        LanguageKind().check_resume(tiny({"model": gone | keys}), checkpoint)


def test_another_tokenizer_is_refused(checkpoint: Path, tmp_path: Path):
    shutil.copytree(checkpoint / "model", tmp_path / "same")
    LanguageKind().check_resume(tiny({"model": {"tokenizer": str(tmp_path / "same")}}), checkpoint)
    content = (tmp_path / "same" / "tokenizer.json").read_text()
    (tmp_path / "same" / "tokenizer.json").write_text(content + " ")
    with pytest.raises(ConfigError, match=r"^the tokenizer in .*same is another than that of .*step-1: .* leave model"):
        LanguageKind().check_resume(tiny({"model": {"tokenizer": str(tmp_path / "same")}}), checkpoint)


@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_a_resume_with_another_model_changes_nothing(trained: Path, launchers: list[object], runtime: str):
    before = contents(trained)
    other = tiny({"steps": 2, "runtime": runtime, "model": {"init": {"hidden_size": 32}}})
    with pytest.raises(ConfigError, match=r"model.init.hidden_size is 32, .*step-1 .*model.init.hidden_size=16"):
        train(other, trained, resume=True, quiet=True)
    assert contents(trained) == before and launchers == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": {"name": "muon"}}, "optimiser state does not fit"),
        ({"kl": {"coefficient": 0.1, "reference": "initial"}}, "has no reference"),
        ({"loss": {"module": "nowhere.py:Loss"}}, "no file .*nowhere.py"),
    ],
)
def test_what_the_learner_refuses_is_not_what_the_next_resume_goes_on_with(
    trained: Path, tmp_path: Path, changes: dict, message: str
):
    run_dir = shutil.copytree(trained, tmp_path / "run")
    before = (run_dir / "config.yaml").read_bytes()
    with pytest.raises((ConfigError, CheckpointError), match=message):
        train(run_dir=run_dir, resume=True, quiet=True, steps=2, learner=changes)
    assert (run_dir / "config.yaml").read_bytes() == before
    assert train(run_dir=run_dir, resume=True, quiet=True, steps=2).complete


def test_a_checkpoint_of_no_language_model_is_named(tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is not the config of a language model"):
        LanguageKind().check_resume(tiny(), tmp_path)


def test_lists_are_given_as_words_of_the_command_line():
    with pytest.raises(ConfigError, match=r"x.a is \[1, 2\], but here was trained with x.a=\[3\]: "):
        check_kept({"a": [1, 2], "b": 1}, {"a": [3], "b": 1}, Path("here"), lambda name: f"x.{name}")


@pytest.mark.slow
def test_an_adapter_s_run_goes_on_where_its_base_has_moved(trained: Path, tmp_path: Path):
    shutil.copytree(trained / "checkpoints" / "step-1" / "model", tmp_path / "base")

    def beside(base: str, **changes: object) -> RunConfig:
        model = {"init": None, "path": str(tmp_path / base), "lora": {"rank": 2, "targets": ["q_proj"]}}
        return tiny({"steps": 1, "curriculum": {"eval_frequency": 1000}, "model": model, **changes})

    run_dir = tmp_path / "run"
    train(beside("base"), run_dir, quiet=True)
    (tmp_path / "base").rename(tmp_path / "moved")
    checkpoint = run_dir / "checkpoints" / "step-1"
    with pytest.raises(CheckpointError, match=r"is an adapter of .*base, where no config.json lies"):
        train(run_dir=run_dir, resume=True, quiet=True, steps=2)
    LanguageKind().check_resume(beside("moved"), checkpoint)
    summary = train(run_dir=run_dir, resume=True, quiet=True, steps=2, model={"path": str(tmp_path / "moved")})
    assert summary.step == 2
    saved = json.loads((run_dir / "checkpoints" / "step-2" / "model" / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str(tmp_path / "moved")
    assert StoredRun(run_dir).start(checkpoint).checkpoint.step == 1  # which a replay of update 2 begins with


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("model.init.hidden_size=32", "model.init.hidden_size is 32"),
        ("steps=0", "steps is 0, and "),
        ("replay.store.url=/elsewhere", "replay.store.url is /elsewhere, but the rollouts of "),
    ],
)
def test_a_dry_run_of_a_resume_is_refused_as_the_resume_is(trained: Path, change: str, words: str, capsys):
    before, resume = contents(trained), ["train", "--resume", str(trained), change]
    assert main([*resume, "--dry-run"]) == 2
    told = capsys.readouterr().err
    assert words in told and told.count("\n") == 1
    assert contents(trained) == before
    assert main([*resume, "--quiet"]) == 2
    assert capsys.readouterr().err == told
    assert main(["train", "--resume", str(trained), "steps=9", "--dry-run"]) == 0


def test_a_dry_run_of_a_resume_tells_of_the_checkpoint_where_what_the_run_began_with_is_gone(
    checkpoint: Path, tmp_path: Path, capsys
):
    shutil.copytree(checkpoint / "model", tmp_path / "base")
    run_dir = tmp_path / "run"
    model = {"init": None, "path": str(tmp_path / "base")}
    train(tiny({"steps": 1, "curriculum": {"eval_frequency": 1000}, "model": model}), run_dir, quiet=True)
    resume = ["train", "--resume", str(run_dir), "steps=2"]
    capsys.readouterr()
    assert main([*resume, "--dry-run"]) == 0
    there = capsys.readouterr().out
    shutil.rmtree(tmp_path / "base")
    assert main([*resume, "--dry-run"]) == 0
    assert capsys.readouterr().out == there and f"path: {tmp_path / 'base'}" in there
    assert main([*resume, "--quiet"]) == 0
