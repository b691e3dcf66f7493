from collections.abc import Sequence

import numpy as np
import pytest

from penstock.overseer.component import BusyTime
from penstock.overseer.language.rollout import InterruptedEvaluation, PinnedContext, TimedContext
from penstock.types import Completion, Decoding, WeightVersion


def completion(steps: Sequence[int], oldest: int, lineage: int = 1) -> Completion:
    count = len(steps)
    return Completion(
        np.array([1], np.int32), np.zeros(count, np.int32), np.zeros(count, np.float32), np.array(steps, np.int32),
        oldest, lineage, "", "stop",
    )  # fmt: skip


class Servers:
    """Answers with what it is given, and looks at the activity meanwhile."""

    tokenizer, ordered = None, True

    def __init__(self, activity: BusyTime, *completions: Completion) -> None:
        self._activity = activity
        self._completions = completions
        self.working: list[bool] = []

    def generate(self, prompts, n, decoding, seeds) -> list[list[Completion]]:
        self.working.append(self._activity.working)
        return [[each] for each in self._completions]


def ask(context: TimedContext) -> list[list[Completion]]:
    return context.generate([np.array([1], np.int32)], 1, Decoding(), [0])


def test_waiting_for_tokens_is_no_work_and_answers_are_counted():
    activity, answers = BusyTime(), []
    servers = Servers(activity, completion([3], 3))
    context = TimedContext(servers, activity, lambda: answers.append(1))
    with activity.busy():
        assert len(ask(context)) == 1
        assert activity.working
    assert servers.working == [False] and answers == [1] and context.ordered


def test_a_pinned_version_must_have_made_every_token():
    activity = BusyTime()
    context = PinnedContext(Servers(activity), activity)
    context.pin(Servers(activity, completion([3, 3], 3), completion([], 3)), WeightVersion(1, 3))
    assert len(ask(context)) == 2


@pytest.mark.parametrize(
    "other", [completion([3, 4], 3), completion([3], 2), completion([3], 3, lineage=0), completion([4], 4)]
)
def test_a_token_of_another_version_cuts_the_evaluation_short(other: Completion):
    activity = BusyTime()
    context = PinnedContext(Servers(activity), activity)
    context.pin(Servers(activity, completion([3], 3), other), WeightVersion(1, 3))
    with pytest.raises(InterruptedEvaluation, match="where WeightVersion"):
        ask(context)
