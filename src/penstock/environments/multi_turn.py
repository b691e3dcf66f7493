"""Conversations of several turns: the policy speaks, the environment answers, until it is done.

A subclass says what it answers (`respond`), when a conversation is over (`is_done`) and what it is worth (`score`):

::

    class GuessEnvironment(MultiTurnEnvironment):
        def respond(self, conversation):
            return "higher" if int(conversation.text) < int(conversation.example.answer) else "lower"

        def is_done(self, conversation):
            return conversation.text == conversation.example.answer

        def score(self, conversation):
            return 1.0 / conversation.turns if conversation.ending == "done" else 0.0

Each conversation goes at its own pace, in a thread of its own: none waits for a slower one. Where a run is to go the
same way every time (staleness zero, `InferenceContext.ordered`), they go in rounds instead, with all prompts of a round
in one call.

*Tokens.* What the policy said is the next turn's prompt as it was sampled, token by token. What the environment says is
what the chat template writes between two answers (or the text itself, where prompts are plain), encoded once. Where the
template rewrites what was said before (it strips the thoughts of earlier turns, say), the policy sees what the template
shows, and a new sample of the rollout begins with all of that (`penstock.types.Rollout`): what it is trained on is what
it will be served with. Beginnings and ends of an answer that are blank, and that the template strips, are no rewriting.
"""

import inspect
import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from typing_extensions import override

from penstock.environments.base import Prompt, Reference, Template, check_credit, check_reward, content_of
from penstock.environments.episode import EpisodeBuilder, generate_each
from penstock.environments.example_environment import (
    FAILURES,
    Example,
    ExampleEnvironment,
    Failure,
    Outcome,
    Played,
    Task,
    mean_by_name,
)
from penstock.types import (
    Completion,
    Decoding,
    EnvironmentFailure,
    InferenceContext,
    Message,
    PenstockError,
    Rollout,
    TextCodec,
    fold,
)
from penstock.types.errors import errors_of_user_code

logger = logging.getLogger(__name__)

T = TypeVar("T")
Reply = str | Message | Sequence[Message]
"""What an environment says: text (a user's message, or as it is where prompts are plain), or chat messages."""
Ending = Literal["done", "turns", "tokens", "seconds"]
"""Why a conversation is over: the environment said so, or a limit cut it."""
_MARK = "@@what was said@@"
MOST_AT_ONCE = 256
"""Conversations of one call that are under way at the same time."""


@dataclass(slots=True)
class Conversation:
    """One conversation, as an environment sees it. Each is used by one thread at a time.

    Attributes:
        example: The problem.
        messages: What was said so far, the prompt first.
        turns: How often the policy spoke.
        text: What it said last, without special tokens.
        completion: All of that; None where nobody sampled it (a worked solution).
        state: The environment's own.
        ending: Why it is over; None while it is not.
        samples: Contexts that the policy saw; one more each time that the chat template rewrote what was said before.
    """

    example: Example
    messages: list[Message]
    turns: int = 0
    text: str = ""
    completion: Completion | None = None
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    ending: Ending | None = None
    samples: int = 1
    _credits: list[float] = field(default_factory=list[float])

    @classmethod
    def about(cls, example: Example, prompt: Prompt) -> "Conversation":
        """One that begins."""
        begun: Message = {"role": "user", "content": prompt}
        return cls(example, [begun] if isinstance(prompt, str) else list(prompt))

    def credit(self, reward: float) -> None:
        """Adds reward at the policy's latest token, beside what `score` gives in the end."""
        self._credits.append(reward)

    def say(self, text: str, completion: Completion | None = None) -> None:
        """The policy's turn."""
        self.turns, self.text, self.completion = self.turns + 1, text, completion
        self.messages.append({"role": "assistant", "content": text})


class _Attempt:
    """A conversation, and its tokens.

    Args:
        environment: Answers the policy, and scores.
        tokenizer: The policy's, which renders what is told.
        task: The problem that it begins with.
        decoding: Of the whole response, in tokens.
        position: The place of this one in its group.

    Attributes:
        rollout: The finished one.
        failure: Why there is none.
    """

    def __init__(
        self,
        environment: "MultiTurnEnvironment",
        tokenizer: TextCodec,
        task: Task,
        decoding: Decoding,
        position: int,
    ) -> None:
        self.conversation = environment.begin(task.example, task.prompt)
        self.rollout: Rollout | None = None
        self.failure: Failure | None = None
        self._environment, self._tokenizer, self._task, self._decoding = environment, tokenizer, task, decoding
        self._seed = fold(task.seed, "conversation", position)
        self._episode = EpisodeBuilder(task.prompt, task.prompt_tokens, decoding)
        self._plain = isinstance(task.prompt, str)
        self._given = environment.chat_template_kwargs(task.example)
        self._shown = "" if self._plain else tokenizer.render_text(task.prompt, self._given)
        self._began = time.monotonic()

    @property
    def over(self) -> bool:
        """Whether nothing more is asked of the policy."""
        return self.rollout is not None or self.failure is not None

    def question(self) -> tuple[Task, Decoding]:
        """The policy's next turn: prompt and seed, and how to sample."""
        most, room = self._environment.turn_tokens, self._room
        task = replace(self._task, prompt_tokens=self._episode.tokens, seed=fold(self._seed, self.conversation.turns))
        return task, replace(self._decoding, max_output_tokens=room if most is None else min(room, most))

    def take(self, answer: Completion | Failure) -> None:
        """The policy's turn, and what the environment makes of it; an environment's own mistake is its group's."""
        began = time.monotonic()
        try:
            if isinstance(answer, Failure):
                raise answer
            self._episode.say(answer)
            self.conversation.say(answer.text, answer)
            self._go_on(answer)
            self._note_credits()
            if self.conversation.ending is None:
                self._episode.spend("tool_s", time.monotonic() - began)
            else:
                self._finish(began)
        except FAILURES as failure:
            self.failure = failure

    def release(self) -> None:
        """Lets the environment free what the conversation holds; its mistakes there are logged, and cost nothing."""
        try:
            self._asked(self._environment.release)
        except PenstockError as error:
            logger.warning("environment %s: %s", self._environment.name, error)

    @property
    def _room(self) -> int:
        return self._decoding.max_output_tokens - self._episode.grown_tokens

    @property
    def _left_s(self) -> float:
        return self._began + self._environment.max_seconds - time.monotonic()

    def _go_on(self, answer: Completion) -> None:
        conversation, environment = self.conversation, self._environment
        if answer.finish_reason == "length":
            conversation.ending = "tokens"
        elif self._asked(environment.is_done):
            conversation.ending = "done"
        elif conversation.turns >= environment.max_turns:
            conversation.ending = "turns"
        elif self._left_s <= 0:
            conversation.ending = "seconds"
        else:
            reply = self._asked(environment.respond)
            self._note_credits()
            self._hear(reply)

    def _hear(self, reply: Reply) -> None:
        added = messages_of(reply, f"{type(self._environment).__name__}.respond")
        role = "tool" if added[-1]["role"] == "tool" else "user"
        text = _joined(added) if self._plain else self._between(added)
        whole = [*self.conversation.messages, *added]
        if text is None:
            tokens = self._tokenizer.render(whole, chat_template_kwargs=self._given)
            is_short = len(tokens) - len(self._task.prompt_tokens) < self._decoding.max_output_tokens
        else:
            tokens = self._tokenizer.encode(text)
            assert self.conversation.completion is not None  # the policy has spoken
            if not self._plain and len(tokens) and tokens[0] == self.conversation.completion.response_tokens[-1]:
                tokens = tokens[1:]  # the end of the turn, which the policy sampled itself
            is_short = len(tokens) < self._room
        if not is_short:
            self._episode.cut()
            self.conversation.ending = "tokens"
            return
        self.conversation.messages = whole
        if text is None:
            self.conversation.samples += 1
            self._episode.renew(_joined(added), tokens, role)
        else:
            self._episode.hear(text, tokens, role)

    def _between(self, added: Sequence[Message]) -> str | None:
        """What the template writes between the policy's turn and its next; None where it rewrites what was before."""
        before = len(self.conversation.messages)
        whole = [*self.conversation.messages, *added]
        marked = [*whole]
        marked[before - 1] = {**whole[before - 1], "content": _MARK}
        _, mark, told = self._tokenizer.render_text(marked, self._given).partition(_MARK)
        before_it, said = self._shown, self.conversation.text
        self._shown = self._tokenizer.render_text(whole, self._given)
        kept = (f"{before_it}{said}{told}", f"{before_it}{said.strip()}{told}")
        return told if mark and self._shown in kept else None

    def _note_credits(self) -> None:
        credits, self.conversation._credits = self.conversation._credits, []
        for reward in credits:
            self._episode.credit(check_credit(reward, type(self._environment).__name__))

    def _finish(self, began: float) -> None:
        source = f"{type(self._environment).__name__}.score"
        self._episode.credit(check_reward(self._asked(self._environment.score), source))
        self._note_credits()
        by_function = self._environment.rewards_by_function(self.conversation)
        self._episode.spend("reward_s", time.monotonic() - began)
        self.rollout = self._episode.rollout(self._environment.name, self._task.example.example_id, by_function.items())

    def _asked(self, method: Callable[[Conversation], T]) -> T:
        """What a method of the environment says, within what is left of the conversation's time."""
        who = f"{type(self._environment).__name__}.{method.__name__}"
        limit_s = max(self._left_s, _LEAST_S)
        about = f" about {self._task.example.example_id!r}"
        with errors_of_user_code(EnvironmentFailure, f"{who} raised", about=about):
            try:
                answer = within(limit_s, method, self.conversation)
            except GaveNoAnswer as error:
                raise EnvironmentFailure(
                    f"{who} gave no answer{about} within {limit_s:.3g} s: "
                    f"max_seconds is {self._environment.max_seconds:g} for a whole conversation"
                ) from error
        if inspect.iscoroutine(answer):
            answer.close()
            raise EnvironmentFailure(f"{who} is async: write it without, it has a thread of its own")
        return answer


_LEAST_S = 1.0
"""What `score` may take after a conversation whose time is up."""


class GaveNoAnswer(Exception):
    """A function took too long."""


def within(limit_s: float, function: Callable[..., T], *args: Any, **keywords: Any) -> T:
    """What a function returns or raises; one that hangs is left behind in a thread that keeps no process from ending.

    Raises:
        GaveNoAnswer: it takes longer.
    """
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(function(*args, **keywords))
        except (Exception, SystemExit) as error:  # raised where the answer is read
            answer.set_exception(error)
        except BaseException as error:  # such as a task's cancellation, which is its own and would end whoever waits
            answer.set_exception(RuntimeError(repr(error)))

    threading.Thread(target=ask, name=getattr(function, "__name__", "function"), daemon=True).start()
    if not wait([answer], limit_s).done:
        raise GaveNoAnswer(f"no answer within {limit_s:g} s")
    return answer.result()


class MultiTurnEnvironment(ExampleEnvironment):
    """Problems that take a conversation. `max_output_tokens` covers all of it, what the environment says included.

    Args:
        name: Stands on every rollout; None: the name of the class.
        template: How prompts are put to the policy.
        system_prompt: Put before every prompt.
        max_turns: Most turns of the policy.
        max_seconds: Longest time of one conversation. It is looked at between turns; a method of the environment that
            takes longer fails the group.
        turn_tokens: Most tokens of one turn of the policy; None: all that are left. In rounds, turns of different
            length are asked for one length after the other, so give it there.

    Attributes:
        max_turns: As given.
        max_seconds: As given.
        turn_tokens: As given.
    """

    def __init__(
        self,
        name: str | None = None,
        template: Template = "auto",
        system_prompt: str | None = None,
        max_turns: int = 8,
        max_seconds: float = 600.0,
        turn_tokens: int | None = None,
    ) -> None:
        super().__init__(name, template, system_prompt)
        for key, value in (("max_turns", max_turns), ("max_seconds", max_seconds), ("turn_tokens", turn_tokens)):
            if value is not None and value <= 0:
                raise ValueError(f"{key} is {value}: it must be above 0")
        self.max_turns, self.max_seconds, self.turn_tokens = max_turns, max_seconds, turn_tokens

    @abstractmethod
    def respond(self, conversation: Conversation) -> Reply:
        """What the environment says to the policy's latest turn. It may take its time: nobody else waits for it."""

    def is_done(self, conversation: Conversation) -> bool:
        """Whether the conversation is over; asked after every whole turn. By default only limits end it."""
        return False

    @abstractmethod
    def score(self, conversation: Conversation) -> float:
        """What the finished conversation is worth, at its last token; `Conversation.ending` says how it ended."""

    def begin(self, example: Example, prompt: Prompt) -> Conversation:
        """A conversation before anybody has said anything; `Conversation.state` is for the environment to fill."""
        return Conversation.about(example, prompt)

    def release(self, conversation: Conversation) -> None:  # noqa: B027  (a hook: most hold nothing)
        """Frees what a conversation holds, such as a process; asked of each at its end, scored or failed."""

    def stop_strings(self, plain: bool) -> tuple[str, ...]:
        """Texts that end a turn, beside the tokenizer's own tokens; `plain`: prompts go through no chat template."""
        return ()

    def solution(self, example: Example) -> Sequence[str]:
        """What the policy would say, turn by turn, for a supervised warm start; nothing where there is none."""
        return [example.answer] if example.answer else []

    @override
    def play(
        self, inference_ctx: InferenceContext, tasks: Sequence[Task], n_generations: int, decoding: Decoding
    ) -> list[Outcome]:
        plain = all(isinstance(task.prompt, str) for task in tasks)
        stops = self.stop_strings(plain)
        if isinstance(stops, str):  # each of its characters would end a turn
            raise EnvironmentFailure(
                f"{type(self).__name__}.stop_strings returned {stops!r}: give several, ({stops!r},)"
            )
        decoding = replace(decoding, stop_strings=(*decoding.stop_strings, *stops))
        attempts = [
            _Attempt(self, inference_ctx.tokenizer, task, decoding, position)
            for task in tasks
            for position in range(n_generations)
        ]
        try:
            if inference_ctx.ordered:
                _in_rounds(inference_ctx, attempts)
            else:
                _at_own_pace(inference_ctx, attempts)
        finally:
            for attempt in attempts:
                attempt.release()
        groups = [attempts[first : first + n_generations] for first in range(0, len(attempts), n_generations)]
        return [self._outcome(group) for group in groups]

    def numbers(self, conversation: Conversation) -> dict[str, float]:
        """About one finished conversation; metrics are their means. To be extended where there are more."""
        endings = {f"ended_by_{limit}": float(conversation.ending == limit) for limit in ("turns", "tokens", "seconds")}
        samples = {"samples": float(conversation.samples), "rewritten": float(conversation.samples > 1)}
        return {"turns": float(conversation.turns), **samples, **endings}

    def rewards_by_function(self, conversation: Conversation) -> Mapping[str, float]:
        """Of a score that is a sum of several functions, what each gave: stored with the rollout."""
        return {}

    def _outcome(self, group: Sequence[_Attempt]) -> Outcome:
        failures = [attempt.failure for attempt in group if attempt.failure is not None]
        if failures:
            return failures[0]
        rollouts = [attempt.rollout for attempt in group if attempt.rollout is not None]
        return Played(rollouts, mean_by_name([self.numbers(attempt.conversation) for attempt in group]))

    @override
    def references(self, example: Example) -> list[Reference]:
        """Each turn of the `solution`, after what the environment answers to those before."""
        prompt, given = self.shaped(example), self.chat_template_kwargs(example)
        conversation = self.begin(example, prompt)
        found: list[Reference] = []
        earlier: list[str] = []
        turns = self.solution(example)
        for number, said in enumerate(turns, 1):
            shown = prompt if isinstance(prompt, str) else list(conversation.messages)
            ends = not (isinstance(prompt, str) and said.endswith(self.stop_strings(True) or ("\0",)))
            found.append(Reference(shown, said, tuple(earlier), ends, given))
            conversation.say(said)
            if number == len(turns):
                break
            added = messages_of(self.respond(conversation), f"{type(self).__name__}.respond")
            conversation.messages += added
            if isinstance(prompt, str):
                earlier += [said, _joined(added)]
        return found


def _in_rounds(inference_ctx: InferenceContext, attempts: Sequence[_Attempt]) -> None:
    """All turns of a round in as few calls as their lengths allow, in the same order every time."""
    while asking := [attempt for attempt in attempts if not attempt.over]:
        questions = [attempt.question() for attempt in asking]
        for length in sorted({decoding.max_output_tokens for _, decoding in questions}, reverse=True):
            chosen = [i for i, (_, decoding) in enumerate(questions) if decoding.max_output_tokens == length]
            tasks = [questions[i][0] for i in chosen]
            answers = generate_each(inference_ctx, tasks, 1, questions[chosen[0]][1])
            for i, answer in zip(chosen, answers, strict=True):
                asking[i].take(answer if isinstance(answer, Failure) else answer[0])


def _at_own_pace(inference_ctx: InferenceContext, attempts: Sequence[_Attempt]) -> None:
    """Each conversation in a thread of its own."""

    def drive(attempt: _Attempt) -> None:
        while not attempt.over:
            task, decoding = attempt.question()
            (answer,) = generate_each(inference_ctx, [task], 1, decoding)
            attempt.take(answer if isinstance(answer, Failure) else answer[0])

    with ThreadPoolExecutor(min(len(attempts), MOST_AT_ONCE), "conversation") as threads:
        for done in [threads.submit(drive, attempt) for attempt in attempts]:
            done.result()


def messages_of(reply: Reply, source: str) -> list[Message]:
    """What an environment says, as chat messages; `source` is who says it, for the message.

    Raises:
        EnvironmentFailure: it is neither text nor messages with a role and text.
    """
    messages: list[Any] = (
        [{"role": "user", "content": reply}]
        if isinstance(reply, str)
        else [reply]
        if isinstance(reply, Mapping)
        else list(reply)
        if isinstance(reply, Sequence) and not isinstance(reply, bytes)
        else [reply]
    )
    for message in messages or [None]:
        is_message = isinstance(message, Mapping) and isinstance(message.get("content"), str | list)
        if not is_message or message.get("role") not in ("user", "tool", "system"):
            raise EnvironmentFailure(
                f"{source} returned {message!r:.100}: give text, or messages {{'role': 'user' or 'tool', 'content': …}}"
            )
    return messages


def _joined(messages: Sequence[Message]) -> str:
    return "".join(content_of(message) for message in messages)
