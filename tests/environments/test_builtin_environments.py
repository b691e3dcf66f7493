"""What holds for every environment that ships."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import penstock.environments as environments
from penstock.environments import load_environment
from penstock.environments.base import prompt_text
from penstock.types import EnvironmentSpec, generator

PROBLEMS = str(Path(__file__).parents[2] / "examples" / "data" / "word_problems.jsonl")
SPECS = {
    "cats": ("cats.CatsEnvironment", {}),
    "named": ("cats.CatsEnvironment", {"variant": "named"}),
    "choice": ("multiple_choice.MultipleChoiceEnvironment", {}),
    "calculator": ("calculator.CalculatorEnvironment", {}),
    "digits": ("digits.DigitsEnvironment", {}),
    "easy": ("arithmetic.ArithmeticEnvironment", {"difficulty": "easy"}),
    "medium": ("arithmetic.ArithmeticEnvironment", {"difficulty": "medium"}),
    "hard": ("arithmetic.ArithmeticEnvironment", {"difficulty": "hard"}),
    "jsonl": ("jsonl.JsonlEnvironment", {"path": PROBLEMS, "prompt_column": "question"}),
}


@pytest.fixture(params=SPECS)
def environment(request):
    env_class, env_args = SPECS[request.param]
    made = load_environment(EnvironmentSpec(f"penstock.environments.{env_class}", env_args))
    yield made
    made.close()


def test_problems_are_disjoint_and_their_ids_unique(environment):
    train, held_out = environment.train_examples(), environment.eval_examples()
    ids = [example.example_id for example in [*train, *held_out]]
    assert len(set(ids)) == len(ids) and len(train) > len(held_out) > 0
    assert not {str(e.prompt) for e in train} & {str(e.prompt) for e in held_out}


def test_rewards_of_random_answers_are_between_zero_and_one(environment, policy, decoding):
    def noise(prompt, j, seed):
        rng = generator(seed)
        letters = list("0123456789 ABCD.#=-cat") + ["</calc>", "<calc>", " cat", " dog", "<eos>"]
        return "".join(rng.choice(letters, int(rng.integers(1, 40))))

    for mode in ("train", "eval"):
        groups, _ = environment.sample(policy(noise), 12, 6, decoding, 11, mode)
        rewards = [reward for group in groups for reward in group.rewards]
        assert len(rewards) == 72 and min(rewards) >= 0 and max(rewards) <= 1


def test_reference_solutions_earn_full_reward(environment, policy, decoding):
    few = environment.train_examples()[:12]
    environment.train_examples = lambda: few
    references = environment.reference_examples(48, 1)
    said = {prompt_text(r.prompt) + "".join(r.earlier): r.response + "<eos>" * r.ends for r in references}
    context = policy(lambda conversation, *_: said[conversation])
    groups, _ = environment.sample(context, 8, 1, replace(decoding, max_output_tokens=400), 2, "train")
    assert [group.rewards.tolist() for group in groups] == [[pytest.approx(1.0)]] * 8


def test_a_chat_template_goes_around_every_prompt(policy, decoding):
    made = load_environment(EnvironmentSpec("penstock.environments.cats.CatsEnvironment", {"template": "chat"}))
    context = policy("a cat<eos>")
    groups, _ = made.sample(context, 1, 1, decoding, 0, "train")
    text = context.tokenizer.decode(groups[0].rollouts[0].prompt_tokens)
    assert text.startswith("[user]") and text.endswith("\n[assistant]")
    assert groups[0].rollouts[0].turns[0].content == groups[0].rollouts[0].env_example_id


def test_exported_names():
    for name in environments.__all__:
        assert getattr(environments, name) is not None
    assert sorted(environments.__all__) == environments.__all__
    assert dir(environments) == environments.__all__
    with pytest.raises(AttributeError, match="no attribute 'Dogs'"):
        _ = environments.Dogs


def test_environments_load_without_jax_and_transformers():
    modules = [f"penstock.environments.{path.stem}" for path in Path(environments.__file__).parent.glob("*.py")]
    script = f"import sys, importlib; [importlib.import_module(m) for m in {modules!r}]; "
    script += "print(sorted({'jax', 'transformers', 'pyarrow', 'ray'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=280)
    assert done.stdout.strip() == "[]"
