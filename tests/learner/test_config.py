from typing import get_args

import pytest
from pydantic import ValidationError

from penstock.batch import RowShape
from penstock.learner import CriticConfig, LearnerConfig, LossConfig, OptimizerConfig, WarmStartConfig
from penstock.learner.config import Preset, ProximalSource


@pytest.mark.parametrize(
    ("preset", "advantage", "aggregation", "low", "high", "surrogate", "ratio"),
    [
        ("rloo", "rloo", "token", 0.2, 0.2, "ppo", "token"),
        ("grpo", "grpo", "sequence", 0.2, 0.2, "ppo", "token"),
        ("dr_grpo", "dr_grpo", "constant", 0.2, 0.2, "ppo", "token"),
        ("dapo", "grpo", "token", 0.2, 0.28, "ppo", "token"),
        ("gspo", "grpo", "sequence", 3e-4, 4e-4, "ppo", "sequence"),
        ("cispo", "grpo", "token", 0.2, 4.0, "cispo", "token"),
        ("reinforce_pp", "reinforce_pp", "token", 0.2, 0.2, "ppo", "token"),
        ("ppo", "gae", "token", 0.2, 0.2, "ppo", "token"),
    ],
)
def test_presets_fill_in_the_loss(preset, advantage, aggregation, low, high, surrogate, ratio):
    loss = LossConfig(preset=preset)
    assert (loss.advantage, loss.aggregation) == (advantage, aggregation)
    assert (loss.clip_epsilon_low, loss.clip_epsilon_high) == (low, high)
    assert (loss.surrogate, loss.ratio) == (surrogate, ratio)
    assert (loss.correction.kind, loss.correction.cap, loss.correction.scope) == ("truncate", 2.0, "token")


def test_a_preset_that_is_no_text_is_refused_however_deep_it_is():
    preset: list = []
    for _ in range(3000):
        preset = [preset]
    with pytest.raises(ValidationError, match="preset"):
        LossConfig.model_validate({"preset": preset})


def test_the_default_is_rloo_and_what_is_given_wins_over_the_preset():
    assert LossConfig() == LossConfig(preset="rloo")
    loss = LossConfig(preset="grpo", aggregation="token", clip_epsilon_high=0.5)
    assert (loss.advantage, loss.aggregation, loss.clip_epsilon_high) == ("grpo", "token", 0.5)


def test_no_correction_has_to_be_asked_for_by_name():
    assert LossConfig(correction={"cap": 3.0}).correction.kind == "truncate"
    assert LossConfig(correction={"kind": "none"}).correction.kind == "none"


def test_a_dumped_config_loads_as_itself():
    for fields in ({"warm_start": WarmStartConfig(steps=5)}, {"row_lengths": (64, 256)}):
        config = LearnerConfig(loss=LossConfig(preset="dapo"), **fields)
        assert LearnerConfig.model_validate(config.model_dump(mode="json")) == config


def test_rows_of_several_lengths_have_the_tokens_of_the_longest():
    config = LearnerConfig(row_lengths=[64, 100, 256], micro_batch_rows=2)
    assert config.row_length == 256 and [shape[:2] for shape in config.row_shapes] == [(64, 8), (100, 5), (256, 2)]
    one = LearnerConfig(row_length=256, micro_batch_rows=2)
    assert one.row_shapes == (RowShape(256, 2),) and one == LearnerConfig(
        row_lengths=[], row_length=256, micro_batch_rows=2
    )


def test_rows_for_cudnn_have_room_for_hardly_more_sequences_than_they_hold():
    usual, tight = (LearnerConfig(attention=attention).row_shape(256) for attention in ("auto", "cudnn"))
    assert [usual.room(sequences) for sequences in (1, 9)] == [128, 128]
    assert [tight.room(sequences) for sequences in (0, 1, 8, 9, 16, 17, 128)] == [8, 8, 8, 16, 16, 32, 128]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"row_lengths": [256, 64]}, r"row_lengths is \[256, 64\]: name each length once, the shortest first"),
        ({"row_lengths": [64, 64]}, r"row_lengths is \[64, 64\]: name each length once"),
        (
            {"row_lengths": [64, 256], "row_length": 128},
            "row_length is 128 and the longest of row_lengths 256",
        ),
        ({"optimizer": {"learning_rate": float("inf")}}, "finite number"),
        ({"optimizer": {"weight_decay": float("inf")}}, "finite number"),
        ({"optimizer": {"epsilon": float("inf")}}, "finite number"),
        ({"warm_start": {"steps": 1, "learning_rate": float("inf")}}, "finite number"),
        ({"loss": {"entropy_coefficient": float("inf")}}, "finite number"),
        ({"kl": {"coefficient": float("inf"), "reference": "initial"}}, "finite number"),
        ({"loss": {"preset": "ppo"}, "critic": {"coefficient": float("inf")}}, "finite number"),
        ({"loss": {"preset": "ppo"}, "critic": {"learning_rate": float("inf")}}, "finite number"),
        ({"row_lengths": [1, 64]}, "greater than or equal to 2"),
        ({"row_lengths": ["a"]}, "row_lengths"),
        ({"row_lengths": [2, 4, 6, 8, 10]}, "at most 4"),
        ({"attention": "flash"}, "auto"),
    ],
)
def test_rows_and_attention_that_make_no_sense_are_refused(given, message):
    with pytest.raises(ValidationError, match=message):
        LearnerConfig.model_validate(given)


@pytest.mark.parametrize(
    "given",
    [
        {"preset": "critic"},
        {"kl_beta": 0.1},
        {"entropy_bonus": 0.1},
        {"correction": {"scope": "batch"}},
        {"correction": {"kind": "none", "scope": "sequence"}},
        {"correction": {"veto": 1.0}},
        {"correction": {"kind": "mask", "low": 2.0, "high": 1.0}},
        {"correction": {"kind": "mask", "low": 1.0, "high": 5.0}},
        {"correction": {"kind": "mask", "low": 0.5, "high": 0.9}},
        {"correction": {"cap": 0.9}},
        {"advantage": "vtrace"},
        {"clip_epsilon_low": 0},
        {"clip_epsilon_high": 0},
        {"dual_clip": 1.1},
        {"surrogate": "cispo", "dual_clip": 3.0},
        {"surrogate": "reinforce", "ratio": "sequence"},
        {"entropy_coefficient": -0.1},
        "rloo",
    ],
)
def test_what_is_not_implemented_or_makes_no_sense_is_refused(given):
    with pytest.raises(ValidationError):
        LossConfig.model_validate(given)


def test_the_warm_start_keeps_the_runs_adam_settings():
    run = OptimizerConfig(beta2=0.9, weight_decay=0.1, schedule="linear", learning_rate=1e-5)
    own = WarmStartConfig(steps=100, learning_rate=0.01).optimizer(run)
    assert (own.beta2, own.weight_decay) == (0.9, 0.1)
    assert (own.learning_rate, own.warmup_steps, own.schedule) == (0.01, 5, "cosine")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"clip_epsilon_high": 0.3, "dual_clip": 3.0}, "clip_epsilon_high is 0.3"),
        ({"ratio": "sequence"}, 'ratio is "sequence"'),
    ],
)
def test_what_the_ratio_is_made_of_is_refused_where_an_update_is_one_step_and_allowed_where_it_acts(given, told):
    loss = LossConfig.model_validate(given)
    with pytest.raises(ValidationError, match=rf"loss.{told}.*raise minibatches or epochs"):
        LearnerConfig(loss=loss)
    for more in ({"minibatches": 2}, {"epochs": 2}, {"proximal": "behaviour"}):
        assert LearnerConfig(loss=loss, **more).loss == loss
    assert LearnerConfig(loss=LossConfig(preset="gspo")).loss.ratio == "sequence"


def test_the_proximal_weights_are_recomputed_where_they_are_not_those_of_the_step():
    assert not LearnerConfig().recomputes_proximal
    assert LearnerConfig(proximal="recompute").recomputes_proximal
    assert LearnerConfig(epochs=2).recomputes_proximal and LearnerConfig(epochs=2, minibatches=3).optimizer_steps == 6
    assert not LearnerConfig(minibatches=2, proximal="behaviour").recomputes_proximal


def test_against_the_behaviour_a_correction_or_a_surrogate_without_a_ratio_is_refused():
    with pytest.raises(ValidationError, match=r"loss.correction.veto is 0.0001, which has no effect"):
        LearnerConfig(proximal="behaviour", loss=LossConfig(correction={"veto": 1e-4}))
    with pytest.raises(ValidationError, match="which has no ratio"):
        LearnerConfig(proximal="behaviour", loss=LossConfig(surrogate="reinforce"))


def test_ppo_has_a_value_head_and_keys_of_one_are_refused_where_there_is_none():
    config = LearnerConfig(loss=LossConfig(preset="ppo"), critic=CriticConfig(clip=None, learning_rate=1e-3))
    assert config.has_critic and config.needs_every_sequence
    assert LearnerConfig.model_validate(config.model_dump(mode="json")) == config
    with pytest.raises(ValidationError, match="critic.clip is null, which has no effect: loss.advantage is 'rloo'"):
        LearnerConfig(critic=CriticConfig(clip=None))
    assert not LearnerConfig(loss=LossConfig(preset="ppo", advantage="rloo")).has_critic


@pytest.mark.parametrize("source", get_args(ProximalSource))
@pytest.mark.parametrize("preset", get_args(Preset))
def test_the_presets_are_losses_of_each_token_alone_but_for_sequences(preset, source):
    loss = LossConfig(preset=preset)
    assert loss.each_alone(source) == (preset != "gspo" or source == "current")
    for correction in ({"scope": "sequence"}, {"scope": "sequence_mean"}, {"veto": 1e-3}):
        beside = LossConfig(preset=preset, correction=correction)
        assert beside.each_alone(source) == (source == "behaviour" and preset != "gspo")
    assert not LossConfig(module="a:B").each_alone(source)


def test_the_longest_of_row_lengths_does_not_count_as_given():
    assert LearnerConfig(row_lengths=(64, 128)).model_dump(exclude_unset=True) == {"row_lengths": (64, 128)}
