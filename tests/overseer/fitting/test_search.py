"""What would make a run fit, found among changes in their order; and names of shapes."""

import json
import shutil
from dataclasses import replace

import pytest

import penstock
from penstock.model.language.lora import LoraConfig
from penstock.overseer.estimate import estimate_memory
from penstock.overseer.fitting import search
from penstock.overseer.fitting.chips import Chip
from penstock.overseer.fitting.report import FitReport, Phase
from penstock.overseer.fitting.search import (
    candidates,
    fit,
    halves,
    shape_named,
    shorter_rows,
    smallest_change,
    with_adapter,
)
from penstock.types import ConfigError


@pytest.fixture(scope="module")
def config():
    return penstock.load_config(
        "cats",
        ["model.dtype=bfloat16", "learner.remat=products", "learner.micro_batch_rows=4", "inference.max_slots=4",
         "learner.attention=dense",
         "learner.row_length=4096", "inference.max_seq_len=4096"],
    )  # fmt: skip


def test_changes_come_by_what_they_cost_a_run(config):
    changes = [change for change, _ in candidates(config, on_cpu=False, adaptable=True)]
    assert changes[:4] == [
        {"learner.remat": "layer"},
        {"learner.micro_batch_rows": 2},
        {"learner.optimizer.offload": True},
        {"learner.remat": "offload"},
    ]
    assert len(changes) == 3 * 2 * 3 * 3 * 2 - 1
    alone = {"model.lora.rank": 16}
    before = changes[: changes.index(alone)]
    kept = {"learner.remat": "offload", "learner.optimizer.offload": True}
    for gentler in (kept, kept | {"inference.max_slots": 2}, {"inference.max_slots": 1}):
        assert gentler in before  # what changes nothing that is learned
    assert before.index({"inference.max_slots": 2, "learner.remat": "layer"}) < before.index({"inference.max_slots": 1})
    assert not any(alone.items() <= change.items() for change in before)
    here = [change for change, _ in candidates(config, on_cpu=True, adaptable=False)]
    assert not any({"learner.optimizer.offload", "model.lora.rank"} & change.keys() for change in here)
    assert len(here) == 2 * 3 * 3 - 1
    assert halves(8) == [4, 2, 1] and halves(1) == []


def test_rows_are_shortened_first_where_sequences_stay_as_long(config):
    packed = penstock.load_config(config, {"inference.max_seq_len": 1024})
    changes = [change for change, _ in candidates(packed, on_cpu=True, adaptable=False)]
    assert changes.index({"learner.row_length": 2048}) < changes.index({"inference.max_slots": 2})
    shorter = [change for change, _ in shorter_rows(packed)]
    assert shorter[0] == {"learner.row_length": 512, "inference.max_seq_len": 512}
    answers = max(each.sampling_params.max_output_tokens for each in packed.curriculum.lessons.values())
    assert shorter[-1]["inference.max_seq_len"] / 2 <= answers < shorter[-1]["inference.max_seq_len"]


def test_of_several_lengths_of_rows_those_that_are_shorter_stay(config):
    lengths = {"learner.row_lengths": [512, 1024, 4096], "inference.max_seq_len": 2048}
    several = penstock.load_config(config, lengths)
    halved = {"learner.row_length": 2048, "learner.row_lengths": [512, 1024, 2048]}
    assert halved in [change for change, _ in candidates(several, on_cpu=True, adaptable=False)]
    change, run = next(shorter_rows(several))
    assert change == {"learner.row_length": 1024, "learner.row_lengths": [512, 1024], "inference.max_seq_len": 1024}
    assert [shape.length for shape in run.learner.row_shapes] == [512, 1024]
    assert [shape.length for shape in search.of_rows(several, 8192).learner.row_shapes] == [8192]


class Compiler:
    def __init__(self, capacity):
        self.chip = Chip("a chip", "cuda", capacity, 1.0, {"bfloat16": 1.0})


@pytest.fixture
def as_estimated(monkeypatch):
    """A compiler that allots what the formulas say, and a tenth more; counts its runs."""
    tried = []

    def fit_run(run, model, compiler):
        tried.append(run)
        total = round(1.1 * sum(estimate_memory(model, run.inference, run.learner, False).values()))
        phases = (Phase("decode", 1.0, 1.0, 1.0, "memory"),)
        return FitReport("m", "c", compiler.chip.memory_bytes, {"all": total}, (), (4, 64), 1, phases)

    monkeypatch.setattr(search, "fit_run", fit_run)
    return fit_run, tried


def test_models_names_a_training_checkpoint_by_its_folder(config, tmp_path):
    model = tmp_path / "step-3" / "model"
    model.mkdir(parents=True)
    shutil.copy(search.shipped_shapes()["Qwen2.5-0.5B"], model / "config.json")
    asked = [shape_named(str(path), config) for path in (model.parent, model, model / "config.json")]
    assert asked == [shape_named("0.5b", config)] * 3


def test_the_smallest_change_is_found_and_what_cannot_do_is_not_compiled(config, as_estimated):
    fit_run, tried = as_estimated
    config, model = (
        penstock.load_config(config, ["learner.remat=offload", "learner.optimizer.offload=true"]),
        shape_named("0.5b", config),
    )
    enough = fit_run(penstock.load_config(config, {"learner.micro_batch_rows": 1}), model, Compiler(0)).total_bytes
    compiler = Compiler(enough)
    report = fit_run(config, model, compiler)
    assert not report.fits
    tried.clear()
    remedy = smallest_change(config, model, compiler, report)
    assert remedy.changes == ("learner.micro_batch_rows=1",) and remedy.total_bytes == enough
    assert len(tried) <= 2


def test_what_the_formulas_think_too_large_by_another_s_measure_is_compiled_before_a_dearer_change_is_told(
    config, as_estimated, monkeypatch
):
    fit_run, tried = as_estimated

    def half_as_much_again_of_layers(run, model, compiler):
        report = fit_run(run, model, compiler)
        return replace(
            report, parts={"all": round((1.5 if run.learner.remat != "products" else 1) * report.total_bytes)}
        )

    monkeypatch.setattr(search, "fit_run", half_as_much_again_of_layers)
    model, fewer = shape_named("0.5b", config), penstock.load_config(config, {"learner.micro_batch_rows": 2})
    compiler = Compiler(fit_run(fewer, model, Compiler(0)).total_bytes + 10**6)
    report = search.fit_run(config, model, compiler)
    tried.clear()
    assert smallest_change(config, model, compiler, report).changes == ("learner.micro_batch_rows=2",)
    assert tried[0].learner.remat == "layer" and len(tried) > 2, "which made the others look too large"


def test_an_adapter_is_the_change_where_the_model_s_own_state_is_too_large(config, as_estimated):
    fit_run, tried = as_estimated
    config = penstock.load_config(config, {"learner.optimizer.name": "adafactor", "learner.micro_batch_rows": 1})
    model, plain = shape_named("1.5b", config), penstock.load_config(config, {"learner.remat": "offload"})
    beside = with_adapter(model, 16)
    compiler = Compiler(fit_run(plain, beside, Compiler(0)).total_bytes)
    report = fit_run(config, model, compiler)
    tried.clear()
    assert smallest_change(config, model, compiler, report).changes == ()
    found = smallest_change(config, model, compiler, report, adaptable=True)
    assert "--lora 16" in found.changes and found.total_bytes <= compiler.chip.memory_bytes  # the recipe draws its own
    loaded = penstock.load_config(config, {"model.init": None, "model.path": "somewhere"})
    assert "model.lora.rank=16" in smallest_change(loaded, model, compiler, report, adaptable=True).changes


def test_what_the_run_itself_would_refuse_is_no_remedy_and_no_error(config, as_estimated, monkeypatch):
    fit_run, _ = as_estimated
    config = penstock.load_config(config, {"learner.optimizer.name": "adafactor", "learner.micro_batch_rows": 1})
    model, plain = shape_named("1.5b", config), penstock.load_config(config, {"learner.remat": "offload"})
    compiler = Compiler(fit_run(plain, with_adapter(model, 16), Compiler(0)).total_bytes)
    report = fit_run(config, model, compiler)
    refused = []

    def refuses_adapters(run, model, compiler):
        if model.lora is not None:  # as rates of arrays that do not train beside one
            refused.append(run)
            raise ConfigError("learner.optimizer.rates has ['embedding'], which match no array that trains")
        return fit_run(run, model, compiler)

    monkeypatch.setattr(search, "fit_run", refuses_adapters)
    assert smallest_change(config, model, compiler, report, adaptable=True).changes == () and refused


def test_sequences_that_no_engine_would_take_are_refused_before_anything_is_compiled(config):
    with pytest.raises(ConfigError, match="inference.max_seq_len is 4096, but the model is meant for 2048 tokens"):
        fit(config, "cpu")


def test_an_adapter_is_asked_for_where_a_model_may_have_one(config):
    with pytest.raises(ConfigError, match="--lora: model.init draws a model, beside which no adapter trains"):
        fit(config, "cpu", lora=16)
    with pytest.raises(ConfigError, match="^--lora is 0: the rank of an adapter is at least 1$"):
        fit(config, "cpu", ["0.5b"], lora=0)
    policy = config.model.model_copy(update={"init": None, "path": "base", "lora": LoraConfig(rank=4)})
    with pytest.raises(ConfigError, match=r"--lora is 16, and model\.lora says what adapter the run trains: leave one"):
        fit(config.model_copy(update={"model": policy}), "cpu", ["0.5b"], lora=16)


@pytest.mark.parametrize("engine", ["openai", "sglang"])
def test_another_s_engine_is_not_counted_in_silence(config, engine):
    changes = {
        "inference.engine": engine,
        "inference.external": {"urls": ["http://127.0.0.1:8000"], "weights": "none"},
    }
    with pytest.raises(ConfigError, match=f"inference.engine is {engine}: its servers have memory of their own"):
        fit(penstock.load_config(config, changes), "cpu")


def test_shorter_rows_are_the_last_change_and_gentle_ones_go_with_them(config, as_estimated):
    fit_run, tried = as_estimated
    least = {
        "learner.remat": "offload", "learner.optimizer.offload": True, "learner.micro_batch_rows": 1,
        "inference.max_slots": 1,
    }  # fmt: skip
    model, smallest = shape_named("0.5b", config), penstock.load_config(config, least)
    compiler = Compiler(fit_run(smallest, model, Compiler(0)).total_bytes - 1)  # nothing is enough at this length
    report = fit_run(config, model, compiler)
    tried.clear()
    found = smallest_change(config, model, compiler, report)
    assert {"learner.row_length=2048", "inference.max_seq_len=2048"} < set(found.changes)
    assert found.total_bytes <= compiler.chip.memory_bytes and "inference.max_slots=1" not in found.changes


def test_where_nothing_helps_that_is_said(config, as_estimated):
    fit_run, tried = as_estimated
    model, compiler = shape_named("7b", config), Compiler(10**9)
    report = fit_run(config, model, compiler)
    tried.clear()
    assert smallest_change(config, model, compiler, report).changes == () and not tried


def test_shapes_are_named_by_their_end_or_by_a_path(config, tmp_path):
    assert shape_named("qwen2.5-0.5B", config) == shape_named("0.5b", config)
    assert shape_named("0.5b", config).parameter_count == 494_032_768
    assert shape_named("1.5b", config).parameter_count == 1_543_714_304
    file = tmp_path / "config.json"
    file.write_text(json.dumps(shape_named("0.5b", config).to_hugging_face()))
    assert shape_named(str(file), config).hidden_size == shape_named(str(tmp_path), config).hidden_size == 896
    other = tmp_path / "larger.json"  # is read itself, and not the config.json beside it
    other.write_text(json.dumps(shape_named("1.5b", config).to_hugging_face()))
    assert shape_named(str(other), config).hidden_size == 1536
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"^--models names '.*empty': .*config\.json cannot be read.*checkpoint$"):
        shape_named(str(tmp_path / "empty"), config)
    other.write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match=r"^.*larger\.json: model_type is 'gpt2'"):
        shape_named(str(other), config)
    for wrong in ("", "5b", "9b"):  # the second is the end of two
        with pytest.raises(ConfigError, match=r"--models names .*: there are Qwen2.5-0.5B, Qwen2.5-1.5B, Qwen2.5-7B"):
            shape_named(wrong, config)
