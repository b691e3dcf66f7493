"""Environments with a training and a held-out set of problems: records, splits, drawing, failures, references.

`sample` is written once, here; what happens between prompt and reward is `play`, which `GroupScoredEnvironment` has
for one turn and the calculator for two. One failing problem fails its own group; the others go on.

Splits depend on the problem's own text by a stable hash, never on its position or on Python's salted `hash`, so
they are the same on every machine, and (with `split_by_hash`) adding problems moves no other problem.
"""

import hashlib
import json
import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, SupportsInt, TypeVar, get_args

import numpy as np
from typing_extensions import override

from penstock.environments.base import Environment, Prompt, Reference, Template, shape_prompt
from penstock.types import (
    ConfigError,
    Decoding,
    EnvironmentFailure,
    InferenceContext,
    InvalidRolloutError,
    Mode,
    PenstockError,
    ProblemSet,
    Rollout,
    RolloutGroup,
    TextCodec,
    as_seed,
    fold,
    generator,
)
from penstock.types.errors import errors_of_user_code

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Example:
    """One problem.

    Attributes:
        example_id: Unique within the environment.
        prompt: Plain text or chat messages.
        answer: The reference answer; empty where there is none.
        columns: What else a reward needs to know.

    Raises:
        ConfigError: id or answer are no text, or the prompt is neither text nor messages.
    """

    example_id: str
    prompt: Prompt
    answer: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if not isinstance(self.example_id, str):
            raise ConfigError(f"example_id of an Example is {self.example_id!r:.60}: it must be text, str(…)")
        if not isinstance(self.answer, str):  # a policy says text, and is equal to nothing else
            raise ConfigError(
                f"answer of Example {self.example_id!r:.60} is {self.answer!r:.60}: it must be text, str(…); what "
                "else a reward needs to know is for its columns"
            )
        prompt: Any = self.prompt
        is_chat = isinstance(prompt, Sequence) and all(isinstance(each, Mapping) for each in prompt)
        if not isinstance(prompt, str) and not is_chat:
            raise ConfigError(
                f"prompt of Example {self.example_id!r:.60} is {self.prompt!r:.60}: it must be text or chat messages"
            )


def draw(examples: Sequence[T], n: int, rng: np.random.Generator) -> list[T]:
    """Some examples in random order; none comes again before all have come.

    Args:
        examples: At least one.
        n: How many; may exceed the number of examples.
        rng: Source of the draw; the same state draws the same examples.
    """
    rounds, rest = divmod(n, len(examples))
    order = [index for _ in range(rounds) for index in rng.permutation(len(examples))]
    order.extend(rng.choice(len(examples), rest, replace=False))
    return [examples[index] for index in order]


def stable_unit(text: str) -> float:
    """A number in [0, 1) that depends on the text alone, the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:7], "big") / 2**56


def hashed_id(text: str, seen: Counter[str] | None = None) -> str:
    """An `example_id` that follows from what a problem is; equal ones that were `seen` are told apart by number."""
    identity = f"{int(stable_unit(text) * 2**48):012x}"
    if seen is None:
        return identity
    seen[identity] += 1
    return identity if seen[identity] == 1 else f"{identity}-{seen[identity]}"


def split_by_rank(examples: Sequence[T], eval_fraction: float, identity: Callable[[T], str]) -> tuple[list[T], list[T]]:
    """Splits a fixed list: the given share (at least one) of smallest hash is held out.

    Returns:
        Training and held-out examples, each in the order given.
    """
    held_out = max(1, round(eval_fraction * len(examples)))
    ranked = sorted(range(len(examples)), key=lambda i: (stable_unit(identity(examples[i])), i))
    chosen = set(ranked[:held_out])
    train = [example for i, example in enumerate(examples) if i not in chosen]
    return train, [example for i, example in enumerate(examples) if i in chosen]


def split_by_hash(examples: Sequence[T], eval_fraction: float, identity: Callable[[T], str]) -> tuple[list[T], list[T]]:
    """Splits a list that may grow: held out is what hashes under the fraction.

    Equal identities stay together. Where chance left one side empty, the example nearest to the border changes
    sides with its equals, so that both have at least one unless all identities are equal.

    Returns:
        Training and held-out examples, each in the order given.
    """
    hashes = [stable_unit(identity(example)) for example in examples]
    border = eval_fraction
    if hashes and min(hashes) >= border:
        border = float(np.nextafter(min(hashes), 1.0))
    elif hashes and max(hashes) < border:
        border = max(hashes)
    train = [example for example, value in zip(examples, hashes, strict=True) if value >= border]
    return train, [example for example, value in zip(examples, hashes, strict=True) if value < border]


logger = logging.getLogger(__name__)

Failure = EnvironmentFailure | InvalidRolloutError
PROMPTS_MEASURED = 256
"""Problems of an environment whose prompts are rendered before a run begins."""

FAILURES = (EnvironmentFailure, InvalidRolloutError)
"""The same, for `except`."""


@dataclass(frozen=True, slots=True)
class Played:
    """The rollouts of one problem, with numbers about them.

    Attributes:
        rollouts: One per answer.
        metrics: By name; `sample` gives their means over the problems that have them.
    """

    rollouts: list[Rollout]
    metrics: Mapping[str, float]


Outcome = list[Rollout] | Played | Failure
"""What became of one problem: its rollouts, or why there are none."""


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One problem about to be tried.

    Attributes:
        example: The problem.
        prompt: As it is rendered.
        prompt_tokens: int32 [p].
        seed: Its sampling noise.
    """

    example: Example
    prompt: Prompt
    prompt_tokens: np.ndarray
    seed: int


def _groups(n: int) -> str:
    return "a group" if n == 1 else f"{n} groups"


def mean_by_name(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each metric's mean over the mappings that have it."""
    values: dict[str, list[float]] = {}
    for mapping in metrics:
        for name, value in mapping.items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


class ExampleEnvironment(Environment):
    """Draws from two disjoint lists of problems; one half of those held out is for reports alone.

    A subclass gives all its problems as `examples`, or the two lists by `train_examples` and `eval_examples`.

    Args:
        name: Stands on every rollout; None: the name of the class.
        template: How prompts are put to the policy.
        system_prompt: Put before every prompt.

    Attributes:
        examples: All problems, of the class or of an instance. A part of them is held out, by a stable hash of
            `example_id`: more problems move no other to the other side.
        eval_fraction: How large a part.
        least_reported: Fewer different problems for reports are warned of; 0 where it is known.
    """

    reports_apart: ClassVar[bool] = True
    least_reported: ClassVar[int] = 16
    examples: Sequence[Example] = ()
    eval_fraction: float = 0.1

    def __init__(self, name: str | None = None, template: Template = "auto", system_prompt: str | None = None) -> None:
        super().__init__(name)
        if template not in get_args(Template):
            raise ConfigError(f"template is {template!r}: it must be one of {', '.join(get_args(Template))}")
        self._template: Template = template
        self._system_prompt = system_prompt

    def train_examples(self) -> Sequence[Example]:
        """The training problems; called once. To be replaced together with `eval_examples`, or neither."""
        return self._split[0]

    def eval_examples(self) -> Sequence[Example]:
        """The held-out problems, none of them a training problem; called once.

        One half is for decisions of a run (mode ``eval``) and one for reports (``report``), by a stable hash. A single
        one has to serve both.
        """
        return self._split[1]

    @abstractmethod
    def play(
        self, inference_ctx: InferenceContext, tasks: Sequence[Task], n_generations: int, decoding: Decoding
    ) -> list[Outcome]:
        """Lets the policy answer each task n times, and scores the answers: one outcome per task, in order."""

    def references(self, example: Example) -> list[Reference]:
        """Worked solutions of one problem: its answer. To be replaced where there is more to show."""
        if not example.answer:
            return []
        given = self.chat_template_kwargs(example)
        return [Reference(self.shaped(example), example.answer, chat_template_kwargs=given)]

    def metrics(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Numbers of the environment's own about what was sampled. To be replaced where there are any."""
        return {}

    def chat_template_kwargs(self, example: Example) -> Mapping[str, Any]:
        """What the chat template is given beside the problem's messages, such as `tools`. To be replaced."""
        return {}

    def shaped(self, example: Example) -> Prompt:
        """The problem's prompt as it is rendered."""
        return shape_prompt(example.prompt, self._template, self._system_prompt)

    def sample(
        self,
        inference_ctx: InferenceContext,
        n_examples: int,
        n_generations: int,
        decoding: Decoding,
        prng_key: SupportsInt | np.ndarray,
        mode: Mode,
    ) -> tuple[list[RolloutGroup], dict[str, float]]:
        """See `Environment.sample`. Metrics: ``failed_groups``, those of `Played`, and those of `metrics`."""
        seed = as_seed(prng_key)
        chosen = draw(self._pools[mode], max(0, n_examples), generator(fold(seed, "examples")))
        return self._sample(inference_ctx, chosen, n_generations, decoding, seed)

    @override
    def training_set(self) -> ProblemSet | None:
        if type(self).sample is not ExampleEnvironment.sample:
            return None  # it draws for itself, and must be asked
        return self._training_set

    @override
    def sample_problems(
        self,
        inference_ctx: InferenceContext,
        problems: Sequence[int],
        n_generations: int,
        decoding: Decoding,
        prng_key: SupportsInt | np.ndarray,
    ) -> tuple[list[RolloutGroup], dict[str, float]]:
        examples = self._pools["train"]
        beyond = [number for number in problems if not 0 <= number < len(examples)]
        if beyond:
            raise EnvironmentFailure(
                f"environment {self.name!r} was asked for problem {beyond[0]}, but has {len(examples)}: its data were "
                "changed while the run went on; resume the run"
            )
        chosen = [examples[number] for number in problems]
        return self._sample(inference_ctx, chosen, n_generations, decoding, as_seed(prng_key))

    def _sample(
        self,
        inference_ctx: InferenceContext,
        chosen: Sequence[Example],
        n_generations: int,
        decoding: Decoding,
        seed: int,
    ) -> tuple[list[RolloutGroup], dict[str, float]]:
        tasks = [self._task(inference_ctx, example, fold(seed, "sample", i)) for i, example in enumerate(chosen)]
        outcomes = self.play(inference_ctx, tasks, n_generations, decoding) if tasks else []
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        groups: list[RolloutGroup] = [
            RolloutGroup(
                f"{self.name}:{task.example.example_id}",
                tuple(outcome.rollouts if isinstance(outcome, Played) else outcome),
            )
            for task, outcome in zip(tasks, outcomes, strict=True)
            if not isinstance(outcome, Failure)
        ]
        if failures and not groups:
            raise failures[0]
        for said, times in Counter(map(str, failures)).items():
            logger.warning("environment %s: %s failed: %s", self.name, _groups(times), said)
        noted = mean_by_name([outcome.metrics for outcome in outcomes if isinstance(outcome, Played)])
        return groups, {**noted, "failed_groups": float(len(failures)), **self.metrics(groups)}

    @override
    def reference_examples(self, n: int, prng_key: SupportsInt | np.ndarray) -> list[Reference]:
        rng = generator(fold(as_seed(prng_key), "references"))
        found = [r for example in draw(self._pools["train"], n, rng) for r in self.references(example)]
        if n and not found:
            raise ConfigError(
                f"environment {self.name!r} ({type(self).__name__}) has no reference solutions: "
                "remove learner.warm_start, or give its examples answers"
            )
        return found[:n]

    @override
    def check_prompts(self, tokenizer: TextCodec, most_tokens: int) -> None:
        if type(self).sample is not ExampleEnvironment.sample:
            return
        pool, lengths = self._pools["train"], dict[str, int]()
        for number in range(0, len(pool), -(-len(pool) // PROMPTS_MEASURED)):
            problem = pool[number]
            told = f"environment {self.name!r}: making the prompt of {problem.example_id!r} raised"
            with (
                nullcontext() if number == 0 else suppress(PenstockError),  # a row's own mistake fails its group alone
                errors_of_user_code(ConfigError, told),
            ):
                lengths[problem.example_id] = len(self._rendered(tokenizer, problem)[1])
        long = {example_id: length for example_id, length in lengths.items() if length >= most_tokens}
        if long:
            longest = max(long, key=lambda example_id: long[example_id])
            logger.warning(
                "environment %s: %d of %d prompts looked at have %d tokens or more (the longest, of problem %r, %d) "
                "and leave no room for an answer, so that their groups fail: raise inference.max_seq_len, or drop them",
                self.name, len(long), len(lengths), most_tokens, longest, long[longest],
            )  # fmt: skip

    @cached_property
    def _training_set(self) -> ProblemSet:
        digest = hashlib.sha256()
        for example in self._pools["train"]:
            said = [example.example_id, example.prompt, example.answer]
            digest.update(json.dumps(said, sort_keys=True, default=str).encode())
        return ProblemSet(len(self._pools["train"]), digest.hexdigest()[:32])

    @cached_property
    def _split(self) -> tuple[Sequence[Example], Sequence[Example]]:
        """Problems for training and held-out ones. To be set, or replaced, where both are made at once."""
        if not self.examples:
            raise ConfigError(
                f"environment {self.name!r} ({type(self).__name__}) has no problems: give it "
                "examples = [Example(…), …], or define both train_examples and eval_examples"
            )
        self._check_examples("examples", self.examples)
        if len(self.examples) < 2:
            raise ConfigError(
                f"environment {self.name!r} ({type(self).__name__}) has one example: to hold some out takes two"
            )
        if not 0 < self.eval_fraction < 1:
            raise ConfigError(
                f"environment {self.name!r}: eval_fraction is {self.eval_fraction}: it is a number between 0 and 1"
            )
        return split_by_hash(self.examples, self.eval_fraction, lambda example: example.example_id)

    @cached_property
    def _pools(self) -> dict[Mode, Sequence[Example]]:
        train, held_out = self.train_examples(), self.eval_examples()
        self._check_examples("train_examples()", train)
        self._check_examples("eval_examples()", held_out)
        for mode, examples in (("train", train), ("eval", held_out)):
            if not examples:
                raise ConfigError(f"environment {self.name!r} has no examples for mode {mode!r}")
        shared = {e.example_id for e in train} & {e.example_id for e in held_out}
        if shared:
            raise ConfigError(
                f"environment {self.name!r}: {len(shared)} examples are both for training and held out, "
                f"such as {min(shared)!r}: train_examples and eval_examples must be disjoint"
            )
        deciding, reported = held_out, held_out
        if len(held_out) > 1:
            deciding, reported = split_by_rank(held_out, 0.5, lambda e: f"report {e.example_id}")
        if len(reported) < self.least_reported:
            logger.warning(
                "environment %s: what is reported rests on %d of %d held-out problems (the others are for decisions "
                "of a run), which say little: hold out %d or more, by a larger eval_fraction or more problems",
                self.name, len(reported), len(held_out), 2 * self.least_reported,
            )  # fmt: skip
        return {"train": train, "eval": deciding, "report": reported}

    def _check_examples(self, field: str, examples: Any) -> None:
        if not isinstance(examples, Sequence) or not all(isinstance(each, Example) for each in examples):
            raise ConfigError(
                f"environment {self.name!r} ({type(self).__name__}): {field} must be a list of Example(…), and is "
                f"{examples!r:.60}"
            )
        for example_id, times in Counter(example.example_id for example in examples).items():
            if times > 1:
                raise ConfigError(
                    f"environment {self.name!r} ({type(self).__name__}): {field} has {times} examples with the "
                    f"example_id {example_id!r:.60}: give each an id of its own"
                )

    def _task(self, inference_ctx: InferenceContext, example: Example, seed: int) -> Task:
        return Task(example, *self._rendered(inference_ctx.tokenizer, example), seed)

    def _rendered(self, tokenizer: TextCodec, example: Example) -> tuple[Prompt, np.ndarray]:
        prompt = self.shaped(example)
        return prompt, tokenizer.render(prompt, chat_template_kwargs=self.chat_template_kwargs(example))
