"""Adapters in PEFT's files: read, written, and what is refused; goldens by scripts/make_golden_logits.py."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from penstock.model.language import PolicyConfig, Segments, load_decoder, load_policy, named_arrays, save_decoder
from penstock.model.language.adapter import base_digest
from penstock.model.language.config import ADAPTER, read_shape
from penstock.model.language.hugging_face import save_adapter, with_merged
from penstock.model.language.lora import LoraConfig
from penstock.text import Tokenizer
from penstock.types import CheckpointError, ConfigError

LORA = LoraConfig(rank=3, targets=("q_proj",))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load("penstock")


@pytest.fixture
def copy(golden_root, tmp_path):
    """A writable base with an adapter in it."""

    def make(family="llama"):
        return shutil.copytree(golden_root / family, tmp_path / family) / "adapter"

    return make


def equal(one, other):
    a, b = named_arrays(one), named_arrays(other)
    return a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)


def digest(decoder):
    return base_digest({n: a for n, a in named_arrays(decoder).items() if not n.startswith(ADAPTER)})


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_logits_are_those_of_peft(golden_root, family, states):
    golden = load_file(golden_root / family / "adapter" / "golden.safetensors")
    decoder = load_decoder(golden_root / family / "adapter")
    tokens, logits = jnp.asarray(golden["tokens_3"])[None], golden["logits_3"]
    rows = tokens, jnp.arange(tokens.size)[None], Segments.of(np.ones(tokens.shape))
    np.testing.assert_allclose(decoder.logits(states(decoder, *rows))[0], logits, atol=1e-4)
    merged = with_merged(decoder)
    np.testing.assert_allclose(merged.logits(states(merged, *rows))[0], logits, atol=2e-4)
    base = load_decoder(golden_root / family)
    assert np.abs(base.logits(states(base, *rows))[0] - logits).max() > 0.5


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_written_and_read_again_it_is_the_same(golden_root, tmp_path, tokenizer, family):
    theirs = golden_root / family / "adapter"
    decoder = load_decoder(theirs)
    save_adapter(decoder, tmp_path / "saved", tokenizer, digest(decoder))
    assert equal(load_decoder(tmp_path / "saved"), decoder)
    ours, peft = (load_file(each / "adapter_model.safetensors") for each in (tmp_path / "saved", theirs))
    assert ours.keys() == peft.keys() and all((ours[name] == peft[name]).all() for name in ours)
    written, known = (json.loads((each / "adapter_config.json").read_text()) for each in (tmp_path / "saved", theirs))
    assert written.keys() <= known.keys()  # peft warns of a key that it does not know
    for key in ("r", "lora_alpha", "use_rslora", "peft_type", "bias"):
        assert written[key] == known[key]
    assert set(written["target_modules"]) == {name.rpartition(".")[2] for name in known["target_modules"]}
    assert written["base_model_name_or_path"] == str((golden_root / family).absolute())
    assert (tmp_path / "saved" / "tokenizer.json").is_file()
    assert not (tmp_path / "saved" / "config.json").exists()  # transformers would look for a whole model then


def test_a_base_loads_in_another_dtype_and_is_known_again(golden_root, tmp_path, tokenizer):
    decoder = load_decoder(golden_root / "llama" / "adapter")
    save_adapter(decoder, tmp_path / "saved", tokenizer, digest(decoder))
    narrow = load_decoder(tmp_path / "saved", "bfloat16")
    assert narrow.layers[0].query.dtype == narrow.adapter.query.a.dtype == jnp.bfloat16
    wide = load_decoder(tmp_path / "saved", "bfloat16", adapter_dtype="float32")
    assert wide.layers[0].query.dtype == jnp.bfloat16 and wide.adapter.query.a.dtype == jnp.float32
    assert (wide.adapter.query.a == decoder.adapter.query.a).all()


def test_another_base_of_the_same_shape_is_refused(copy, tmp_path, tokenizer):
    folder = copy()
    decoder = load_decoder(folder)
    save_adapter(decoder, tmp_path / "saved", tokenizer, digest(decoder))
    tensors = load_file(folder.parent / "model.safetensors")
    tensors["model.norm.weight"][0] += 0.5
    save_file(tensors, folder.parent / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"saved was trained beside other weights than those in .*llama: name"):
        load_decoder(tmp_path / "saved")
    assert load_decoder(folder).config.lora is not None  # of peft's nobody knows


def test_the_base_may_lie_elsewhere(copy, tmp_path):
    folder = copy()
    shutil.move(folder, tmp_path / "alone")
    message = r"alone is an adapter of \.\., where no config.json lies: put the base there, or name .* by model.base"
    with pytest.raises(CheckpointError, match=message):
        load_decoder(tmp_path / "alone")
    assert load_decoder(tmp_path / "alone", base=str(tmp_path / "llama")).config.base == str(tmp_path / "llama")
    policy = PolicyConfig(path=str(tmp_path / "alone"), base=str(tmp_path / "llama"))
    (tmp_path / "llama" / "tokenizer.json").write_text("{}")
    assert policy.tokenizer_path == str(tmp_path / "llama")
    with pytest.raises(ConfigError, match=r"model.base is .*, but .*llama is no adapter: leave it out"):
        load_decoder(tmp_path / "llama", base=str(tmp_path / "llama"))


def test_a_policy_begins_beside_a_checkpoint_or_goes_on_with_an_adapter(golden_root, tokenizer, monkeypatch):
    monkeypatch.setattr("penstock.model.language.hugging_face.check_vocabulary", lambda *_: None)
    base = str(golden_root / "llama")
    drawn = load_policy(PolicyConfig(path=base, lora=LORA), 3, tokenizer)
    assert equal(drawn, load_policy(PolicyConfig(path=base, lora=LORA), 3, tokenizer))
    assert not equal(drawn, load_policy(PolicyConfig(path=base, lora=LORA), 4, tokenizer))
    assert not drawn.adapter.query.b.any() and 0.15 < float(jnp.abs(drawn.adapter.query.a).max()) <= 32**-0.5
    found = load_policy(PolicyConfig(path=f"{base}/adapter"), 3, tokenizer)
    assert found.config.lora.rank == 4
    with pytest.raises(ConfigError, match=r"model\.lora\.rank is 3, and the adapter in .* has 4: leave model\.lora"):
        load_policy(PolicyConfig(path=f"{base}/adapter", lora=LORA), 3, tokenizer)
    shape = r"model\.lora\.rank=4 model\.lora\.alpha=12\.0 model\.lora\.targets=\[.*\] model\.lora\.use_rslora=false"
    with pytest.raises(ConfigError, match=rf"rank is 16, .* where only the dtype is to be another \({shape}\), or"):
        load_policy(PolicyConfig(path=f"{base}/adapter", lora=LoraConfig(dtype="bfloat16")), 3, tokenizer)
    with pytest.raises(ConfigError, match=r"lora needs a checkpoint beside which it trains"):
        try:
            PolicyConfig(init={"hidden_size": 32}, lora=LORA)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def test_a_policy_beside_an_adapter_is_not_saved_as_a_model(golden_root, tmp_path, tokenizer):
    with pytest.raises(ConfigError, match="adapter beside its base: save it by save_adapter"):
        save_decoder(load_decoder(golden_root / "llama" / "adapter"), tmp_path / "x", tokenizer)


def changed(**values):
    def change(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def tensors(change):
    def apply(folder):
        path = folder / "adapter_model.safetensors"
        with safe_open(path, "np") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        change(found)
        save_file(found, path)

    return apply


QUERY = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (changed(peft_type="IA3"), "peft_type is 'IA3': only LORA is supported"),
        (changed(use_dora=True), "use_dora is True: that is another adapter than"),
        (changed(rank_pattern={"q_proj": 2}), "rank_pattern is .*: all layers must have the same adapter"),
        (changed(modules_to_save=["lm_head"]), r"modules_to_save is \['lm_head'\]: that is another"),
        (changed(bias="all"), "bias is 'all': that is another"),
        (changed(init_lora_weights="pissa"), "init_lora_weights is 'pissa': that changes the base, too"),
        (changed(target_modules="q.*"), r"target_modules is 'q\.\*': give a list of module names"),
        (
            changed(target_modules=["lm_head"]),
            "adapter_config.json: target_modules has 'lm_head': Input should be 'q_proj'.*: merge it by peft's merge",
        ),
        (changed(lora_alpha=float("inf")), "lora_alpha has inf: Input should be a finite number"),
        (changed(r=0), "adapter_config.json: r has 0: Input should be greater than 0"),
        (changed(r=5), r"has shape \[4, 48\], not \[5, 48\]; .* and 25 more"),
        (changed(target_modules=["q_proj"]), r"down_proj.lora_A.weight is unknown; .* and 21 more"),
        (tensors(lambda t: t.pop(QUERY)), r"does not fit the base in .*llama: .*layers.1.*q_proj.lora_A.* is missing"),
        (tensors(lambda t: t[QUERY].fill(np.nan)), f"{QUERY} holds numbers that are not finite: the file is damaged"),
        (tensors(lambda t: t.update({QUERY: t[QUERY].astype(np.int32)})), f"{QUERY} is stored as I32: only floating"),
        (
            lambda folder: (folder / "adapter_model.safetensors").unlink(),
            "safetensors is missing: save .* in safetensors",
        ),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x"), "model.safetensors cannot be read"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "adapter_config.json is not valid JSON"),
        (lambda folder: (folder.parent / "config.json").unlink(), "where no config.json lies"),
    ],
)
def test_what_does_not_fit_is_named(copy, damage, message):
    folder = copy()
    damage(folder)
    with pytest.raises((CheckpointError, ConfigError), match=message) as caught:
        load_decoder(folder)
    assert "\n" not in str(caught.value)


def test_a_rank_that_a_matrix_does_not_have_is_read_where_someone_has_trained_it(golden_root, copy, tokenizer):
    """PEFT makes pairs of any rank: with 17 here, columns of zeros added to the four of the original."""
    folder = copy()
    changed(r=17, lora_alpha=12 * 17 / 4)(folder)

    def widen(found):
        for name, tensor in found.items():
            axis = 0 if "lora_A" in name else 1
            room = [(0, 13 if own == axis else 0) for own in range(2)]
            found[name] = np.ascontiguousarray(np.pad(tensor, room))

    tensors(widen)(folder)
    original, wide = load_decoder(golden_root / "llama" / "adapter"), load_decoder(folder)
    assert wide.adapter.key.a.shape == (2, 32, 17) and wide.adapter.key.b.shape == (2, 17, 16)
    expected = original.adapter.key.scale * (original.adapter.key.a[0] @ original.adapter.key.b[0])
    found = wide.adapter.key.scale * (wide.adapter.key.a[0] @ wide.adapter.key.b[0])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_the_shape_is_known_without_weights(golden_root):
    shape = read_shape(golden_root / "llama" / "adapter", "bfloat16")
    assert shape.lora == LoraConfig(rank=4, alpha=12, dtype="bfloat16")
    assert shape.parameter_shapes()["adapter.down.a"] == (2, 48, 4)
    assert read_shape(golden_root / "llama", "float32").lora is None
