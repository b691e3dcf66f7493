"""One prompt, one answer, one reward: what most environments are made from.

`SingleTurnEnvironment` asks its subclass for two lists of problems and a `score` of one answer;
`GroupScoredEnvironment` for a score of all the answers to one problem at once.
"""

from abc import abstractmethod
from collections.abc import Sequence

from penstock.environments.episode import Episode
from penstock.environments.example_environment import FAILURES, ExampleEnvironment, Failure, Outcome, Task
from penstock.environments.examples import Example
from penstock.environments.validation import check_rewards
from penstock.types import Completion, Decoding, EnvironmentFailure, InferenceContext, PenstockError, Rollout


class GroupScoredEnvironment(ExampleEnvironment):
    """Scores all answers to one problem together."""

    @abstractmethod
    def score_group(self, example: Example, completions: Sequence[Completion]) -> Sequence[float]:
        """One finite reward per completion.

        Raises:
            EnvironmentFailure: the verifier broke; this group fails, and no other.
        """

    def play(
        self, inference_ctx: InferenceContext, tasks: Sequence[Task], n_generations: int, decoding: Decoding
    ) -> list[Outcome]:
        """See `ExampleEnvironment.play`."""
        answered = generate_each(inference_ctx, tasks, n_generations, decoding)
        return [
            completions if isinstance(completions, Failure) else self._finish(task, completions, decoding)
            for task, completions in zip(tasks, answered, strict=True)
        ]

    def _finish(self, task: Task, completions: list[Completion], decoding: Decoding) -> Outcome:
        try:
            rewards = check_rewards(self.score_group(task.example, completions), len(completions), type(self).__name__)
            return [
                self._rollout(task, completion, reward, decoding)
                for completion, reward in zip(completions, rewards, strict=True)
            ]
        except FAILURES as failure:
            return failure
        except PenstockError:
            raise
        except Exception as error:  # an environment's own mistake is a counted failure, not the end of the run
            return EnvironmentFailure(
                f"{type(self).__name__} raised {type(error).__name__} while scoring "
                f"{task.example.example_id!r}: {error}"
            )

    def _rollout(self, task: Task, completion: Completion, reward: float, decoding: Decoding) -> Rollout:
        episode = Episode(task.prompt, task.prompt_tokens, decoding)
        episode.say(completion)
        episode.credit(reward)
        return episode.rollout(self.name, task.example.example_id)


class SingleTurnEnvironment(GroupScoredEnvironment):
    """Scores each answer by itself."""

    @abstractmethod
    def score(self, example: Example, text: str, completion: Completion) -> float:
        """The reward of one answer.

        Args:
            example: The problem.
            text: The answer, without special tokens.
            completion: All of it; ``completion.finish_reason == "length"`` says that the answer was cut.
        """

    def score_group(self, example: Example, completions: Sequence[Completion]) -> Sequence[float]:
        """See `GroupScoredEnvironment.score_group`."""
        return [self.score(example, completion.text, completion) for completion in completions]


def generate_each(
    inference_ctx: InferenceContext, tasks: Sequence[Task], n_generations: int, decoding: Decoding
) -> list[list[Completion] | Failure]:
    """Generates for all tasks at once; where a prompt is refused, one by one, so that only its own group fails."""
    prompts = [task.prompt_tokens for task in tasks]
    seeds = [task.seed for task in tasks]
    try:
        return list(inference_ctx.generate(prompts, n_generations, decoding, seeds))
    except EnvironmentFailure as failure:
        if len(tasks) == 1:
            return [failure]
    return [answer for task in tasks for answer in generate_each(inference_ctx, [task], n_generations, decoding)]
