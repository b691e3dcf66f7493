"""Problems of the generators of reasoning-gym (extra ``reasoning-gym``), by name and difficulty.

::

    environment: {env_class: penstock.environments.ReasoningGymEnvironment, env_args: {name: leg_counting, level: 0}}

Problems are made when they are first asked for, `config.size` of them; equal questions are one problem, and a stable
hash of the question decides which are held out, so that no question is on both sides, at any level.

Rewards are the generator's own ``score_answer``, of what stands in the last ``<answer>…</answer>``, or of the whole
answer where there is none, in processes of their own with a limit of time. Some of them evaluate what they are given,
as Python or by sympy, so there an answer that is more than a literal, or more than arithmetic and the usual functions,
is not shown to them and earns 0, and so does one on which they raise; ``rewards/score_answers/unscorable`` is the share
of both.

The module loads without the package.
"""

import ast
import dataclasses
import functools
import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from typing_extensions import override

from penstock.environments.base import Scores, Template
from penstock.environments.episode import GroupScoredEnvironment
from penstock.environments.example_environment import Example, hashed_id, split_by_hash
from penstock.environments.reward_process import RewardFunctions
from penstock.types import Completion, ConfigError
from penstock.types.importing import nearest

logger = logging.getLogger(__name__)

REWARD_PROCESSES = 2
REWARD_TIMEOUT_S = 30.0
START_TIMEOUT_S = 180.0
"""Of a reward process: it imports reasoning-gym, which takes seconds alone and far longer on a machine at work."""
_SLOW_S = 10.0


class ReasoningGymEnvironment(GroupScoredEnvironment):
    """Problems of one generator.

    Args:
        name: Of the generator, such as `leg_counting`; with the level it stands on every rollout.
        level: Difficulty by the generator's own curriculum, 0 the easiest; null takes the generator's defaults.
        config: Settings of the generator, over those of the level. Its `size` (500) and `seed` (0), too.
        eval_fraction: Which part of the problems is held out.
        template: How prompts are put to the policy: `auto`, `plain` or `chat`.
        system_prompt: Put before every prompt.

    Raises:
        ConfigError: the package is missing, or has no such generator, level or setting.
    """

    def __init__(
        self,
        name: str,
        level: int | None = None,
        config: dict[str, Any] | None = None,
        eval_fraction: float = 0.1,
        template: Template = "auto",
        system_prompt: str | None = None,
    ) -> None:
        super().__init__(name if level is None else f"{name}-{level}", template, system_prompt)
        if not 0 < eval_fraction < 1:
            raise ConfigError(f"env_args.eval_fraction is {eval_fraction}: it takes a number between 0 and 1")
        self._generator = {"name": name, "level": level, "config": {"seed": 0, **(config or {})}}
        self.eval_fraction = eval_fraction
        dataset_of(**self._generator)  # a mistake in the arguments is found before the run begins
        path = f"{__name__}.{score_answers.__name__}"
        self._rewards = RewardFunctions([path], None, REWARD_PROCESSES, REWARD_TIMEOUT_S, START_TIMEOUT_S)

    @override
    def score_group(self, example: Example, completions: Sequence[Completion]) -> Scores:
        """Calls the generator's ``score_answer`` for each; an answer that a length limit cut earns nothing."""
        n = len(completions)
        return self._rewards.score(
            {
                "completions": [completion.text for completion in completions],
                "finish_reason": [completion.finish_reason for completion in completions],
                "generator": [self._generator] * n,
                "entry": [example.columns["entry"]] * n,
            }
        )

    @override
    def close(self) -> None:
        """Ends the reward processes."""
        self._rewards.close()

    @cached_property
    def _split(self) -> tuple[list[Example], list[Example]]:
        dataset = dataset_of(**self._generator)
        found: dict[str, Example] = {}
        began = time.monotonic()
        for index in range(len(dataset)):
            entry = dataset[index]
            question = str(entry["question"])
            answer = "" if entry["answer"] is None else str(entry["answer"])
            example_id = hashed_id(question)
            shown = {"index": index, "question": question, "literal": _literal(entry)}
            found.setdefault(example_id, Example(example_id, question, answer, {"entry": shown}))
            if time.monotonic() - began > _SLOW_S:
                logger.info(
                    "environment %s: %d of %d problems made in %.0f s: env_args.config.size makes it fewer",
                    self.name, index, len(dataset), time.monotonic() - began,
                )  # fmt: skip
                began = time.monotonic()
        train, held_out = split_by_hash(list(found.values()), self.eval_fraction, lambda example: str(example.prompt))
        if not train or not held_out:
            raise ConfigError(
                f"env_args.name {self._generator['name']!r}: all {len(dataset)} problems are one: raise "
                "env_args.config.size or env_args.level"
            )
        return train, held_out


def dataset_of(name: str, level: int | None, config: Mapping[str, Any]) -> Any:
    """A generator of reasoning-gym.

    Args:
        name: By which it is registered.
        level: Of its curriculum; None: its defaults.
        config: Settings by name, over those of the level.

    Raises:
        ConfigError: the package is missing, or has no such generator, level or setting.
    """
    try:
        from reasoning_gym import factory  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"{__name__}: reasoning-gym cannot be imported ({error}): pip install 'penstock[reasoning-gym]'"
        ) from error
    if name not in factory.DATASETS:
        raise ConfigError(
            f"env_args.name {name!r}: reasoning-gym has no such generator{nearest(name, factory.DATASETS)}; there are "
            + ", ".join(sorted(factory.DATASETS))
        )
    made, config_class = factory.DATASETS[name]
    settings = dict(config)
    if name == "composite" and isinstance(settings.get("datasets"), list):
        from reasoning_gym.composite import DatasetSpec  # pyright: ignore[reportMissingImports]

        settings["datasets"] = [DatasetSpec(**{"config": {}, **each}) for each in settings["datasets"]]
    known = [field.name for field in dataclasses.fields(config_class)]
    for key in settings.keys() - set(known):
        raise ConfigError(
            f"env_args.config.{key}: {name} has no such setting{nearest(key, known)}: it takes {', '.join(known)}"
        )
    begun = config_class() if level is None else _at_level(factory, name, level)
    try:
        return made(dataclasses.replace(begun, **settings))
    except (AssertionError, TypeError, ValueError) as error:  # the generator's own checks
        at = "" if level is None else f" at level {level}"
        raise ConfigError(f"env_args.config {dict(config)} is refused by {name}{at}: {error}") from error


def _at_level(factory: Any, name: str, level: int) -> Any:
    if not factory.has_curriculum(name):
        raise ConfigError(f"env_args.level is {level}: {name} has no levels: set env_args.config in its place")
    curriculum = factory.create_curriculum(name)
    highest = max((len(attribute.levels) for attribute in curriculum.attributes.values()), default=1) - 1
    if not 0 <= level <= highest:
        raise ConfigError(f"env_args.level is {level}: the levels of {name} are 0 to {highest}")
    curriculum.set_global_level(level)
    return curriculum.generate_configuration()


# --- in the reward process --------------------------------------------------------------------------------------------


def score_answers(
    completions: Sequence[str],
    finish_reason: Sequence[str],
    generator: Sequence[Mapping[str, Any]],
    entry: Sequence[Mapping[str, Any]],
    log_metric: Callable[[str, float], None],
) -> list[float]:
    """The generator's own scores; 0 for an answer that was cut, and for one on which its ``score_answer`` raises.

    Args:
        completions: Texts of the answers.
        finish_reason: Of each; ``length`` is cut.
        generator: Arguments of `dataset_of`.
        entry: The problem: its ``index``, ``question``, and all of it as a Python ``literal`` where that is possible.
        log_metric: Takes the share of answers that could not be scored.

    Raises:
        ValueError: the generator makes another problem here than where it was asked.
    """
    from reasoning_gym.utils import extract_answer  # pyright: ignore[reportMissingImports]

    dataset = _cached_dataset(json.dumps(generator[0]))
    problem = _problem(dataset, entry[0])
    source = problem.get("metadata", {}).get("source_dataset", generator[0]["name"])
    rewards, unscorable = [], 0
    for text, reason in zip(completions, finish_reason, strict=True):
        if reason == "length":
            rewards.append(0.0)
            continue
        found = extract_answer(text)
        answer = text.strip() if found is None else found
        try:
            if not runs_nothing(answer, source):
                raise ValueError(f"{answer!r:.200} is not shown to what evaluates it")
            rewards.append(float(dataset.score_answer(answer, problem)))
        except Exception as error:  # it meets what nobody thought of: the answer's fault
            logger.debug("score_answer raised %s: %s", type(error).__name__, error)
            rewards.append(0.0)
            unscorable += 1
    log_metric("unscorable", unscorable / len(rewards))
    return rewards


_AS_PYTHON = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
_BY_SYMPY = {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
"""Generators whose ``score_answer`` evaluates the answer."""
_LITERAL = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.UnaryOp, ast.USub, ast.Load)
_ARITHMETIC = re.compile(r"[\w\s+\-*/^().,=]*", re.ASCII)
_FUNCTIONS = {
    "Abs", "acos", "asin", "atan", "cos", "cosh", "exp", "ln", "log", "pi", "sin", "sinh", "sqrt", "tan", "tanh",
}  # fmt: skip


def runs_nothing(answer: str, source: str) -> bool:
    """Whether an answer is mere data to the ``score_answer`` of a generator, which may evaluate it.

    Args:
        answer: The policy wrote it.
        source: Name of the generator.
    """
    if source in _BY_SYMPY:
        names = re.findall(r"[^\W\d]\w*", answer)  # sympy would call any built-in function
        known = all(len(name) == 1 and name != "_" or name in _FUNCTIONS for name in names)
        return known and _ARITHMETIC.fullmatch(answer) is not None and re.search(r"\.\s*[^\W\d]", answer) is None
    if source not in _AS_PYTHON:
        return True
    try:
        tree = ast.parse(answer, mode="eval")
    except (SyntaxError, ValueError):
        return True  # Python refuses it as well
    except (MemoryError, RecursionError):
        return False
    if isinstance(tree.body, ast.Name):
        return tree.body.id.isupper()  # letters of a puzzle; others may be names of its own
    return all(isinstance(node, _LITERAL) for node in ast.walk(tree))


def _literal(entry: Mapping[str, Any]) -> str | None:
    """The problem as Python writes it, tuples and sets kept, unlike in JSON; None where that says too little."""
    written = repr(entry)
    try:
        return written if ast.literal_eval(written) == entry else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _problem(dataset: Any, entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """The problem as it was asked, or made again where it could not be written."""
    if entry["literal"] is not None:
        return ast.literal_eval(entry["literal"])
    made = dataset[entry["index"]]
    if str(made["question"]) != entry["question"]:
        raise ValueError(
            f"problem {entry['index']} is another one when it is made again: set PYTHONHASHSEED, on which some "
            "generators depend"
        )
    return made


@functools.lru_cache(maxsize=64)
def _cached_dataset(generator: str) -> Any:
    return dataset_of(**json.loads(generator))
