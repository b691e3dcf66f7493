import pytest

from penstock.curriculum import Curriculum
from penstock.curriculum.config import CurriculumConfig
from penstock.inference import ScriptedContext
from penstock.rollout import RolloutManager
from penstock.text import Tokenizer

CATS = {
    "environment": {"env_class": "penstock.environments.cats.CatsEnvironment"},
    "sampling_params": {"n_generations_per_prompt": 3, "max_output_tokens": 12},
}


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load("penstock")


@pytest.fixture
def curriculum() -> Curriculum:
    return Curriculum(CurriculumConfig.model_validate({"lessons": {"cats": CATS}, "eval_n_examples": 5}))


@pytest.fixture
def manager(curriculum: Curriculum, tokenizer: Tokenizer) -> RolloutManager:
    context = ScriptedContext(tokenizer, ["the cat sat.", "a dog", "nothing"], weight_step=4)
    return RolloutManager(curriculum, context, seed=1, lineage=2, clock=lambda: 99.0)
