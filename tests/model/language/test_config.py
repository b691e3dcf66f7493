import json
import math
import subprocess
import sys

import pytest
from pydantic import ValidationError

from penstock.model.language.config import InitConfig, ModelConfig, PolicyConfig, YarnScaling
from penstock.types import ConfigError

HUGGING_FACE = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def test_parameter_count_of_the_measured_shape():
    config = ModelConfig(
        model_type="qwen2", vocab_size=8192, hidden_size=256, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, intermediate_size=656, tie_word_embeddings=True,
    )  # fmt: skip
    # by hand: per layer q, o 2·256·256, k, v 2·256·128, biases 512, MLP 3·256·656, norms 512
    assert config.parameter_count == 8192 * 256 + 6 * (131072 + 65536 + 512 + 503808 + 512) + 256
    untied = config.model_copy(update={"tie_word_embeddings": False})
    assert untied.parameter_count - config.parameter_count == 8192 * 256


def test_published_qwen3_shape_has_its_published_size():
    config = ModelConfig(
        model_type="qwen3", vocab_size=151936, hidden_size=1024, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, intermediate_size=3072, tie_word_embeddings=True,
    )  # fmt: skip
    assert config.parameter_count == 596_049_920  # Qwen3-0.6B


def test_defaults_are_those_of_the_format():
    config = ModelConfig.from_hugging_face(HUGGING_FACE)
    assert (config.num_key_value_heads, config.head_dim) == (4, 8)
    assert (config.rope_theta, config.rms_norm_eps, config.tie_word_embeddings) == (10000.0, 1e-6, False)
    assert config.max_position_embeddings == 2048
    for family, longest in {"qwen2": 32768, "qwen3": 32768, "mistral": 131072, "phi3": 4096}.items():
        assert ModelConfig.from_hugging_face(HUGGING_FACE | {"model_type": family}).max_position_embeddings == longest
    assert ModelConfig.from_hugging_face(HUGGING_FACE | {"model_type": "qwen3"}).head_dim == 128


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ],
)
def test_both_forms_of_the_rotary_base_are_read(rope):
    assert ModelConfig.from_hugging_face(HUGGING_FACE | rope).rope_theta == 5e5


@pytest.mark.parametrize("form", ["rope_scaling", "rope_parameters"])
def test_llama3_scaling_is_read_from_both_forms(form):
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 5e5,
    }  # fmt: skip
    config = ModelConfig.from_hugging_face(HUGGING_FACE | {form: scaling})
    assert config.rope_scaling is not None
    assert (config.rope_scaling.factor, config.rope_scaling.original_max_position_embeddings) == (8.0, 8192)
    assert config.rope_theta == 5e5


def test_two_rotations_in_one_file_are_refused_unless_they_are_the_same():
    older = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    plain = {"rope_type": "default", "rope_theta": 5e5}
    with pytest.raises(ConfigError, match="rope_parameters is .*, and rope_scaling .*: keep one of the two"):
        ModelConfig.from_hugging_face(HUGGING_FACE | {"rope_parameters": plain, "rope_scaling": older})
    both = {"rope_parameters": YARN | {"rope_theta": 5e5}, "rope_scaling": older}
    config = ModelConfig.from_hugging_face(HUGGING_FACE | both)
    assert isinstance(config.rope_scaling, YarnScaling) and config.rope_theta == 5e5


def test_a_window_that_the_file_leaves_out_is_the_family_s():
    mistral = HUGGING_FACE | {"model_type": "mistral"}
    assert ModelConfig.from_hugging_face(mistral).windows == (4096, 4096)
    assert ModelConfig.from_hugging_face(mistral | {"sliding_window": None}).windows == (None, None)
    off = {"model_type": "qwen2", "sliding_window": 16}  # which acts where use_sliding_window says so
    assert ModelConfig.from_hugging_face(HUGGING_FACE | off).windows == (None, None)
    with pytest.raises(ConfigError, match="sliding_window is 16"):
        ModelConfig.from_hugging_face(HUGGING_FACE | off | {"use_sliding_window": True})


GEMMA = HUGGING_FACE | {"model_type": "gemma3_text", "num_hidden_layers": 12}


def test_gemma_s_older_files_say_a_pattern_and_leave_much_to_the_family():
    config = ModelConfig.from_hugging_face(GEMMA | {"sliding_window": 7})
    assert config.windows == ((7,) * 5 + (None,)) * 2
    assert (config.rope_theta, config.rope_local_theta, config.query_pre_attn_scalar) == (1e6, 1e4, 256)
    assert (config.head_dim, config.num_key_value_heads, config.tie_word_embeddings) == (256, 4, True)
    assert ModelConfig.from_hugging_face(GEMMA | {"sliding_window_pattern": 2}).windows[:3] == (4096, None, 4096)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0: it is not supported"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu': only gelu_pytorch_tanh"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 layers, num_hidden_layers 12"),
        ({"layer_types": "all"}, "layer_types"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000: .* 10000"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}}, "layers with a window is 'linear'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "rope type is 'linear'"),
    ],
)
def test_what_gemma_s_file_may_not_say(change, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hugging_face(GEMMA | change)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("more", "attention"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
    ],
)
def test_yarn_s_factor_of_attention_is_worked_out(more, attention):
    scaling = ModelConfig.from_hugging_face(HUGGING_FACE | {"rope_scaling": YARN | more}).rope_scaling
    assert isinstance(scaling, YarnScaling)
    assert scaling.attention_factor == pytest.approx(attention)
    assert (scaling.factor, scaling.original_max_position_embeddings, scaling.beta_fast) == (4.0, 512, 32.0)


def test_yarn_s_sequences_may_be_as_long_as_it_stretches_the_context():
    """Files that ask for it often leave `max_position_embeddings` at what the model was trained with."""
    older = HUGGING_FACE | {"max_position_embeddings": 512, "rope_scaling": YARN}
    assert ModelConfig.from_hugging_face(older).longest_sequence == 2048
    assert ModelConfig.from_hugging_face(older | {"max_position_embeddings": 4096}).longest_sequence == 4096
    assert ModelConfig.from_hugging_face(older | {"rope_scaling": None}).longest_sequence == 512
    windowed = older | {"model_type": "mistral", "sliding_window": 512}
    assert set(ModelConfig.from_hugging_face(windowed).windows) == {512}
    assert set(ModelConfig.from_hugging_face(windowed | {"rope_scaling": None}).windows) == {None}


def test_yarn_without_an_original_context_stretches_the_one_there_is():
    older = {"type": "yarn", "factor": 4.0}
    scaling = ModelConfig.from_hugging_face(HUGGING_FACE | {"rope_scaling": older}).rope_scaling
    assert scaling is not None and scaling.original_max_position_embeddings == 2048


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2': supported are llama, qwen2, qwen3, mistral"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "rope type is 'longrope'"),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "yarn", "factor": 4.0}},
            r"rope type is 'yarn': supported are default and llama3 \(yarn is a name of LongRoPE in phi3\)",
        ),
        ({"rope_scaling": YARN | {"factor": 0}}, "yarn.factor is 0: Input should be greater than or equal to 1"),
        ({"rope_scaling": YARN | {"factor": float("inf")}}, "yarn.factor is inf: Input should be a finite number"),
        (
            {"rope_scaling": YARN | {"original_max_position_embeddings": 0}},
            "_embeddings is 0: Input should be greater than 0",
        ),
        ({"rope_theta": float("nan")}, "rope_theta is nan: Input should be a finite number"),
        ({"rope_parameters": {"full_attention": 3}}, "rope_parameters has 3: it must be a section of keys"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false': it must be true or false"),
        ({"head_dim": 0}, "head_dim is 0: Input should be greater than 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0: Input should be greater than 0"),
        ({"rope_scaling": {"type": "yarn"}}, "yarn rope scaling: factor is None: it must be a number"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": "many"}}, "beta_fast is 'many'"),
        ({"rope_scaling": YARN | {"mscale": 1, "mscale_all_dim": -10}}, "mscale_all_dim is -10: it must be positive"),
        (
            {"model_type": "mistral", "sliding_window": 8, "max_position_embeddings": None},
            "max_position_embeddings is None: Input should be a valid integer",
        ),
        (
            {"model_type": "gemma3_text", "sliding_window": None},
            "sliding_window is None, and layer_types names layers that have a window",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_slow": 64}}, "beta_fast must be greater"),
        ({"rope_scaling": YARN, "rope_theta": 1}, r"rope_theta \(1\) must be above 1 with YaRN"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "lacks low_freq_factor, high_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": True},
            r"sliding_window is 512, less than max_position_embeddings \(32768\)",
        ),
        ({"num_attention_heads": 5}, "head_dim is missing and hidden_size .32. is no multiple"),
        ({"num_key_value_heads": 3}, r"^config.json: num_attention_heads \(4\) must be a multiple"),
        ({"head_dim": 7}, r"head_dim \(7\) must be even"),
        ({"vocab_size": "many"}, "config.json: vocab_size: 'many' is no number"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hugging_face(HUGGING_FACE | change)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "mistral", "sliding_window": 2048},
        {"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": False},
    ],
)
def test_a_window_that_never_cuts_is_accepted(change):
    assert ModelConfig.from_hugging_face(HUGGING_FACE | change).model_type == change["model_type"]


def test_a_config_survives_the_way_through_hugging_faces_form(golden, family):
    config = ModelConfig.from_hugging_face(json.loads((golden / "config.json").read_text()))
    assert config.model_type == {"yarn": "qwen2", "window": "mistral"}.get(family, family)
    assert (config.rope_scaling is not None) == (family in ("llama", "yarn"))
    assert config.head_dim == (12 if family in ("qwen3", "gemma3_text") else 8)
    windows = {"gemma3_text": (5, None, 5), "window": (6, 6)}
    assert config.windows == windows.get(family, (None, None))
    assert ModelConfig.from_hugging_face(json.loads(json.dumps(config.to_hugging_face()))) == config


def test_unknown_fields_are_refused():
    with pytest.raises(ValidationError, match="hidden_sizes"):
        InitConfig(hidden_sizes=3)


def test_an_initial_model_takes_what_is_not_given_from_the_rest():
    config = InitConfig(hidden_size=64, num_attention_heads=4).model(vocab_size=382, dtype="bfloat16")
    assert (config.vocab_size, config.head_dim, config.num_key_value_heads) == (382, 16, 4)
    assert config.intermediate_size == 176  # 8/3 · 64 = 170.67, the next multiple of 16
    assert config.dtype == "bfloat16"
    assert InitConfig(vocab_size=400).model(vocab_size=382, dtype="float32").vocab_size == 400


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "phi3", "gemma3_text"])
def test_a_drawn_model_is_the_same_once_it_is_saved(family):
    drawn = InitConfig(model_type=family, num_key_value_heads=2).model(vocab_size=382, dtype="float32")
    file = json.loads(json.dumps(drawn.to_hugging_face()))
    assert ModelConfig.from_hugging_face(file) == drawn
    assert drawn.windows == (None, None)
    # transformers makes Gemma 3's mask of layers with a window even where there is none
    assert family != "gemma3_text" or file["sliding_window"] == file["max_position_embeddings"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 30, "num_attention_heads": 4}, "give head_dim"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "must be a multiple"),
    ],
)
def test_an_initial_model_that_cannot_be_is_refused_at_once(fields, message):
    with pytest.raises(ValidationError, match=message):
        InitConfig(**fields)


def test_a_policy_has_exactly_one_source():
    with pytest.raises(ValidationError, match="exactly one of path and init .neither given"):
        PolicyConfig()
    with pytest.raises(ValidationError, match="path and initial_checkpoint both say"):
        PolicyConfig(path="somewhere", initial_checkpoint="elsewhere")
    assert (
        PolicyConfig(initial_checkpoint="runs/a/checkpoints/step-2").tokenizer_path == "runs/a/checkpoints/step-2/model"
    )
    with pytest.raises(ValidationError, match="exactly one of path and init .both given: init: null leaves"):
        PolicyConfig(path="model", init=InitConfig())


def test_the_tokenizer_is_the_checkpoints_unless_named():
    assert PolicyConfig(path="model").tokenizer_path == "model"
    assert PolicyConfig(path="model", tokenizer="other").tokenizer_path == "other"
    assert PolicyConfig(init=InitConfig()).tokenizer_path == "penstock"


def test_importing_the_config_loads_neither_jax_nor_transformers():
    code = (
        "import sys, penstock.model.language.config as c;"
        "c.PolicyConfig(init=c.InitConfig());"
        "print([m for m in ('jax', 'equinox', 'transformers', 'tokenizers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
