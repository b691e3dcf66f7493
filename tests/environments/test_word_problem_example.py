"""The word-problem example: its shaped reward, and the script that makes a checkpoint for it."""

from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from penstock.environments import JsonlEnvironment
from penstock.inference import ScriptedContext
from penstock.model.language import load_decoder
from penstock.text import Tokenizer
from penstock.types import Decoding, generator
from penstock.types.importing import load_attribute

ROOT = Path(__file__).parents[2]
DATA = str(ROOT / "examples" / "data" / "word_problems.jsonl")
REWARD = f"{ROOT}/examples/word_problem_reward.py:reward"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    main = load_attribute(f"{ROOT}/scripts/make_word_problem_checkpoint.py:main", "script")
    directory = tmp_path_factory.mktemp("checkpoint")
    for name in ("first", "second"):
        assert main([DATA, str(directory / name)]) == 0
    assert main([DATA + "x", str(directory)]) == 2
    return directory


def test_the_checkpoint_is_a_small_qwen2_and_the_same_at_every_run(checkpoint):
    names = sorted(path.name for path in (checkpoint / "first").iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(names)
    for name in names:
        assert (checkpoint / "first" / name).read_bytes() == (checkpoint / "second" / name).read_bytes()
    decoder, tokenizer = load_decoder(checkpoint / "first"), Tokenizer.load(checkpoint / "first")
    assert decoder.config.model_type == "qwen2" and decoder.config.vocab_size == tokenizer.vocab_size <= 2048
    tokens = tokenizer.render([{"role": "user", "content": "How many eggs does Mara have? 36"}])
    assert tokenizer.decode(tokens, skip_special_tokens=False) == (
        "<|im_start|>user\nHow many eggs does Mara have? 36<|im_end|>\n<|im_start|>assistant\n"
    )


def test_random_answers_differ_in_every_group(checkpoint):
    tokenizer = Tokenizer.load(checkpoint / "first")

    def babble(prompt, seed):
        rng = generator(seed)
        return tokenizer.decode(rng.integers(3, tokenizer.vocab_size, int(rng.integers(5, 60))))

    environment = JsonlEnvironment(DATA, prompt_column="question", template="chat", reward=REWARD)
    context = ScriptedContext(tokenizer, babble)
    groups, metrics = environment.sample(context, 8, 4, Decoding(max_output_tokens=48), 0, "train")
    environment.close()
    rewards = np.array([group.rewards for group in groups])
    assert metrics["failed_groups"] == 0 and (rewards.std(axis=1) > 0.005).all()
    assert rewards.min() >= 0 and rewards.mean() < 0.4


@pytest.mark.parametrize(
    ("text", "ended", "reward"),
    [
        ("It is #### 750", True, 1.0),
        ("It is #### 750", False, 0.5),  # cut: it might have gone on
        ("It is 750", True, 0.5),
        ("#### 7500", True, 0.3 + 0.1 + 0.2 / 2),
        ("no idea", True, 0.2),
        ("", False, 0.0),
    ],
)
def test_each_step_towards_the_answer_has_its_share(text, ended, reward):
    score = load_attribute(REWARD.replace(":reward", ":score"), "reward")
    assert score(text, Decimal(750), ended) == pytest.approx(reward, abs=2e-4)


def test_closeness():
    closeness = load_attribute(REWARD.replace(":reward", ":closeness"), "reward")
    assert closeness(Decimal(99), Decimal(99)) == 1.0
    assert closeness(Decimal(9), Decimal(99)) == closeness(Decimal(99), Decimal(9)) == pytest.approx(0.5)
    assert closeness(Decimal(-5), Decimal(5)) == closeness(Decimal(5), None) == 0.0
    assert 0 < closeness(Decimal("1e500"), Decimal(5)) < 0.05
