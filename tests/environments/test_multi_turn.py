"""Conversations: in rounds and at their own pace, plain and through chat templates, with limits and failures."""

import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.text.test_chat_templates import directory  # noqa: F401  (a fixture)

from penstock.batch import turn as turn_advantages
from penstock.environments import Conversation, Example, MultiTurnEnvironment
from penstock.inference import ScriptedContext
from penstock.text import Tokenizer
from penstock.types import Decoding, EnvironmentFailure, RolloutGroup

WAIT_S = 280.0
WANTED = "7"


class Guess(MultiTurnEnvironment):
    """Guess a number: higher or lower, until it is right."""

    def __init__(self, **limits: Any) -> None:
        super().__init__("guess", **limits)

    def train_examples(self):
        return [Example("seven", "A number?", WANTED)]

    def eval_examples(self):
        return [Example("four", "A number!", "4")]

    def respond(self, conversation: Conversation):
        return " higher " if int(conversation.text) < int(conversation.example.answer) else " lower "

    def is_done(self, conversation: Conversation):
        return conversation.text == conversation.example.answer

    def score(self, conversation: Conversation):
        return 1.0 / conversation.turns if conversation.ending == "done" else 0.0

    def solution(self, example: Example):
        return ["5", example.answer]


def tokenizer() -> Tokenizer:
    return Tokenizer.load("penstock")


def play(environment, answers, n=1, tokens=64, ordered=True, codec=None):
    context = ScriptedContext(codec or tokenizer(), answers, ordered=ordered)
    groups, metrics = environment.sample(context, 1, n, Decoding(max_output_tokens=tokens), 3, "train")
    return groups[0].rollouts, metrics, context


def test_a_whole_conversation_token_by_token():
    (rollout,), metrics, context = play(Guess(), ["5", "9", "7"])
    codec = context.tokenizer
    everything = [*rollout.prompt_tokens, *rollout.response_tokens]
    spans = [everything[turn.start : turn.stop] for turn in rollout.turns]
    assert [token for span in spans for token in span] == everything
    assert [turn.role for turn in rollout.turns] == ["user", "assistant", "user", "assistant", "user", "assistant"]
    assert [codec.decode(span) for span in spans] == ["A number?", "5", " higher ", "9", " lower ", "7"]
    said = [turn.role == "assistant" for turn, span in zip(rollout.turns[1:], spans[1:], strict=True) for _ in span]
    assert rollout.response_mask.tolist() == said
    assert [logprob != 0 for logprob in rollout.response_logprobs] == said
    assert rollout.episode_reward == pytest.approx(1 / 3) and rollout.token_rewards[-1] == pytest.approx(1 / 3)
    prompts = [call.prompts[0].tolist() for call in context.calls]
    assert prompts == [everything[: rollout.turns[turn].start] for turn in (1, 3, 5)], "what was sampled, as it was"
    room = [
        64,
        64 - rollout.turns[3].start + rollout.turns[1].start,
        64 - rollout.turns[5].start + rollout.turns[1].start,
    ]
    assert [call.decoding.max_output_tokens for call in context.calls] == room
    assert metrics == {
        "failed_groups": 0.0, "turns": 3.0, "samples": 1.0, "rewritten": 0.0,
        "ended_by_turns": 0.0, "ended_by_tokens": 0.0, "ended_by_seconds": 0.0,
    }  # fmt: skip


def test_each_conversation_of_a_group_has_its_own_noise_and_each_turn_too():
    _, _, context = play(Guess(turn_tokens=4), ["5", "5", "7", "7"], n=2)
    seeds = [seed for call in context.calls for seed in call.seeds]
    assert [len(call.prompts) for call in context.calls] == [2, 2], "a round is one call"
    assert len(set(seeds)) == 4


def test_turns_of_other_lengths_are_asked_for_apart_in_a_round():
    rollouts, _, context = play(Guess(), ["5", "1", "7", "7"], n=2, tokens=40)
    assert [rollout.episode_reward for rollout in rollouts] == [0.5, 0.5]
    longer, _, context = play(Guess(), ["5", "1111", "7", "7"], n=2, tokens=40)
    lengths = [call.decoding.max_output_tokens for call in context.calls]
    assert [len(call.prompts) for call in context.calls] == [2, 1, 1] and lengths[0] == 40 > lengths[1] > lengths[2]
    assert [rollout.episode_reward for rollout in longer] == [0.5, 0.5]


def test_the_fast_ones_of_a_group_do_not_wait_for_the_slow_one():
    slow, fast, begun = threading.Event(), [], threading.Lock()

    class Paced(Guess):
        def respond(self, conversation):
            with begun:
                first = not fast
                fast.append("began")
            if first:
                assert slow.wait(WAIT_S)
            return " higher "

        def score(self, conversation):
            with begun:
                fast.append("ended")
                if fast.count("ended") == 7:
                    slow.set()  # seven of eight are through before the first was answered once
            return super().score(conversation)

    def answers(text, seed):
        return "7" if "higher" in text else "5"

    rollouts, metrics, _ = play(Paced(), answers, n=8, ordered=False)
    assert fast.count("ended") == 8 and metrics["turns"] == 2.0
    assert [rollout.episode_reward for rollout in rollouts] == [0.5] * 8


def test_rounds_and_own_paces_give_the_same_conversations():
    def answers(text, seed):
        return str(seed % 7 + 1)

    def told(ordered):
        rollouts, _, _ = play(Guess(max_turns=5), answers, n=6, tokens=200, ordered=ordered)
        return [(rollout.response_tokens.tolist(), rollout.episode_reward) for rollout in rollouts]

    assert told(True) == told(False)


@pytest.mark.parametrize(
    ("limits", "tokens", "answers", "ending", "turns", "reason"),
    [
        ({"max_turns": 2}, 64, ["5"], "turns", 2, "stop"),
        ({}, 5, ["5"], "tokens", 1, "length"),
        ({}, 64, ["5" * 70], "tokens", 1, "length"),
        ({"turn_tokens": 3}, 64, ["5555555"], "tokens", 1, "length"),
    ],
    ids=["turns", "no room for what is told", "a long turn", "a turn beyond its own limit"],
)
def test_limits_end_a_conversation(limits, tokens, answers, ending, turns, reason):
    (rollout,), metrics, _ = play(Guess(**limits), answers, tokens=tokens)
    assert metrics["turns"] == turns and metrics[f"ended_by_{ending}"] == 1.0
    assert rollout.finish_reason == reason and rollout.episode_reward == 0.0
    assert len(rollout.response_tokens) <= tokens


def test_a_conversation_whose_time_is_up_ends_between_turns(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("penstock.environments.multi_turn.time.monotonic", lambda: now[0])

    class Slow(Guess):
        def is_done(self, conversation):
            now[0] += 40.0
            return False

    (rollout,), metrics, _ = play(Slow(max_seconds=60.0), ["5"])
    assert metrics["ended_by_seconds"] == 1.0 and metrics["turns"] == 2.0 and rollout.episode_reward == 0.0


@pytest.mark.parametrize("ordered", [True, False])
def test_seconds_of_the_environment_are_of_tools_between_answers_and_of_the_reward_after_the_last(ordered):
    class Slow(Guess):
        def respond(self, conversation):
            time.sleep(0.03)
            return super().respond(conversation)

        def score(self, conversation):
            time.sleep(0.05)
            return super().score(conversation)

    began = time.monotonic()
    (rollout,), _, _ = play(Slow(), ["5", "9", "7"], ordered=ordered)
    took_s = time.monotonic() - began
    assert set(rollout.timings) == {"tool_s", "reward_s"}  # scripted answers take no time
    assert rollout.timings["tool_s"] >= 0.06 and rollout.timings["reward_s"] >= 0.05
    assert rollout.timings["tool_s"] + rollout.timings["reward_s"] <= took_s


def test_an_answer_of_the_environment_that_never_comes_fails_its_group_by_name():
    released = threading.Event()

    class Hangs(Guess):
        def respond(self, conversation):
            released.wait(WAIT_S)
            return ""

    started = time.monotonic()
    message = r"Hangs.respond gave no answer about 'seven' within 1 s: max_seconds is 0.5 for a whole conversation"
    with pytest.raises(EnvironmentFailure, match=message):
        play(Hangs(max_seconds=0.5), ["5"])
    released.set()
    assert time.monotonic() - started < WAIT_S / 2


@pytest.mark.parametrize(
    ("method", "returned", "message"),
    [
        ("respond", 3, "^Wrong.respond returned 3: give text, or messages"),
        ("respond", b"5", "^Wrong.respond returned b'5': give text, or messages"),
        ("respond", [], "respond returned None: give text, or messages"),
        ("respond", {"role": "assistant", "content": "5"}, "respond returned .*: give text, or messages"),
        ("respond", {"role": "user"}, "respond returned .*: give text, or messages"),
        ("respond", {"role": "user", "content": None}, "respond returned .*: give text, or messages"),
        ("score", None, "Wrong.score returned None: it must return a finite number"),
        ("score", float("nan"), "Wrong.score returned nan: it"),
    ],
)
def test_what_is_returned_wrongly_is_said(method, returned, message):
    wrong = type("Wrong", (Guess,), {method: lambda self, conversation: returned})
    with pytest.raises(EnvironmentFailure, match=message):
        play(wrong(), ["5", "7"])


def test_one_stop_string_for_several_is_refused():
    with pytest.raises(EnvironmentFailure, match="Wrong.stop_strings returned 'END': give several"):
        play(type("Wrong", (Guess,), {"stop_strings": lambda self, plain: "END"})(), ["5", "7"])


def test_parts_of_a_message_are_told_as_text():
    said = {"role": "user", "content": [{"type": "text", "text": " hig"}, {"type": "text", "text": "her "}]}
    (rollout,), _, _ = play(type("Parts", (Guess,), {"respond": lambda self, conversation: said})(), ["5", "7"])
    assert [turn.content for turn in rollout.turns] == ["A number?", "5", " higher ", "7"]


@pytest.mark.parametrize("credit", ["0.5", None, float("inf")])
def test_a_credit_that_is_no_number_is_refused(credit):
    class Wrong(Guess):
        def respond(self, conversation):
            conversation.credit(credit)
            return " higher "

    with pytest.raises(EnvironmentFailure, match=r"^Wrong gave credit .*: it must be a finite number$"):
        play(Wrong(), ["5", "7"])


@pytest.mark.parametrize("method", ["respond", "is_done", "score"])
def test_a_method_that_is_async_is_refused(method):
    async def later(self, conversation):
        return True

    later.__name__ = method
    with pytest.raises(EnvironmentFailure, match=f"Wrong.{method} is async: write it without"):
        play(type("Wrong", (Guess,), {method: later})(), ["5", "7"])


@pytest.mark.parametrize("ordered", [True, False])
def test_what_raises_fails_its_own_group_alone(ordered, caplog):
    class Two(Guess):
        def train_examples(self):
            return [Example("seven", "A number?", WANTED), Example("bad", "Bad?", "7")]

        def respond(self, conversation):
            if conversation.example.example_id == "bad":
                raise KeyError("no such thing")
            return super().respond(conversation)

    context = ScriptedContext(tokenizer(), lambda text, seed: "7" if "higher" in text else "5", ordered=ordered)
    groups, metrics = Two().sample(context, 2, 2, Decoding(max_output_tokens=64), 0, "train")
    assert [group.key for group in groups] == ["guess:seven"] and metrics["failed_groups"] == 1.0
    assert "Two.respond raised KeyError about 'bad': 'no such thing'" in caplog.text


def test_credit_is_at_the_turn_that_earned_it():
    class Credits(Guess):
        def respond(self, conversation):
            conversation.credit(0.25)
            return super().respond(conversation)

    (rollout,), _, _ = play(Credits(), ["5", "7"])
    first, last = rollout.turns[1].stop - len(rollout.prompt_tokens) - 1, len(rollout.response_tokens) - 1
    assert dict(enumerate(rollout.token_rewards.tolist()))[first] == 0.25
    assert rollout.token_rewards[last] == 0.5 and rollout.episode_reward == 0.75


def test_credit_that_score_gives_counts_beside_what_it_returns():
    class Credits(Guess):
        def score(self, conversation):
            conversation.credit(0.25)
            return 0.5

    (rollout,), _, _ = play(Credits(), ["5", "7"])
    assert rollout.episode_reward == 0.75 and rollout.token_rewards.tolist()[-1] == 0.75


def test_credits_reach_the_tokens_of_their_turns_as_advantages():
    class Credits(Guess):
        def respond(self, conversation):
            conversation.credit(1.0 if conversation.text == "5" else 0.0)
            return super().respond(conversation)

    environment = Credits()
    group = RolloutGroup("guess:seven", tuple(play(environment, [said, "7"])[0][0] for said in ("5", "2")))
    for rollout, sign in zip(group.rollouts, (1.0, -1.0), strict=True):
        first, second = (turn for turn in rollout.turns if turn.role == "assistant")
        advantages = turn_advantages(group)[group.rollouts.index(rollout)]
        start = len(rollout.prompt_tokens)
        assert set(advantages[first.start - start : first.stop - start].tolist()) == {sign}
        assert not advantages[first.stop - start :].any()  # both were right in the end: score says 0.5 of each
        assert second.stop - start == len(advantages)


def test_the_environments_own_state_is_of_one_conversation():
    class Counts(Guess):
        def respond(self, conversation):
            conversation.state["told"] = conversation.state.get("told", 0) + 1
            return super().respond(conversation)

        def score(self, conversation):
            return conversation.state["told"]

    rollouts, _, _ = play(Counts(turn_tokens=4), ["5", "5", "7", "6", "7"], n=2)
    assert [rollout.episode_reward for rollout in rollouts] == [1.0, 2.0]


# --- chat templates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2.5", "smollm2", "llama3", "qwen3"])
def test_the_tokens_of_a_conversation_are_those_of_its_template(directory, family):  # noqa: F811
    codec = Tokenizer.load(directory(family, eos_token="<|eot_id|>" if family == "llama3" else "<|im_end|>"))
    (rollout,), metrics, _ = play(
        Guess(template="chat", system_prompt="Be brief."), ["5", "7"], tokens=400, codec=codec
    )
    messages = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "A number?"},
        {"role": "assistant", "content": "5"}, {"role": "user", "content": " higher "},
    ]  # fmt: skip
    before_last = rollout.turns[-1].start
    everything = np.concatenate([rollout.prompt_tokens, rollout.response_tokens])
    np.testing.assert_array_equal(everything[:before_last], codec.render(messages))
    assert metrics["rewritten"] == 0.0 and rollout.episode_reward == 0.5
    assert codec.decode(everything[before_last:]) == "7"
    mask, first_told = rollout.response_mask, rollout.turns[2].start - len(rollout.prompt_tokens)
    assert mask[first_told - 1] and not mask[first_told], (
        "the policy ended its turn, and the template wrote what follows"
    )


def test_where_a_template_rewrites_what_was_said_a_new_sample_begins(directory):  # noqa: F811
    """Without thinking, Qwen3 opens an answer with an empty thought and leaves it out of earlier answers."""

    class Quiet(Guess):
        def chat_template_kwargs(self, example):
            return {"enable_thinking": False}

    codec = Tokenizer.load(directory("qwen3"))
    (rollout,), metrics, context = play(Quiet(template="chat"), ["5", "9", "7"], tokens=900, codec=codec)
    assert (metrics["rewritten"], metrics["samples"], metrics["turns"]) == (1.0, 3.0, 3.0)
    shown = codec.decode(context.calls[2].prompts[0], skip_special_tokens=False)
    assert shown.count("<think>\n\n</think>\n\n") == 1, "before the answer that is to come, as the template has it"
    everything = np.concatenate([rollout.prompt_tokens, rollout.response_tokens])
    said = [turn for turn in rollout.turns if turn.role == "assistant"]
    assert rollout.sample_starts == (0, said[0].stop, said[1].stop)
    for start, turn, call in zip(rollout.sample_starts, said, context.calls, strict=True):
        np.testing.assert_array_equal(everything[start : turn.start], call.prompts[0])
    sampled = np.concatenate([np.zeros(len(rollout.prompt_tokens), bool), rollout.response_mask])
    assert np.flatnonzero(sampled).tolist() == [at for turn in said for at in range(turn.start, turn.stop)]
    assert [codec.decode(everything[turn.start : turn.stop]) for turn in said] == ["5", "9", "7"]
    assert not rollout.response_logprobs[~rollout.response_mask].any()


def test_the_room_of_an_answer_is_that_of_its_sample(directory):  # noqa: F811
    """A thought that the template drops frees its tokens for later answers."""

    class Dreamer(Guess):
        def respond(self, conversation):
            return "go on"

        def is_done(self, conversation):
            return False

    codec = Tokenizer.load(directory("forgetful"))
    thought = f"{'hm ' * 60}5"
    (rollout,), metrics, context = play(Dreamer(template="chat", max_turns=3), [thought] * 3, tokens=400, codec=codec)
    assert (metrics["samples"], metrics["ended_by_turns"]) == (3.0, 1.0), "together they are longer than 400 tokens"
    assert len(rollout.response_tokens) > 400 and rollout.finish_reason == "stop"
    lengths = [len(call.prompts[0]) for call in context.calls]
    limits = [call.decoding.max_output_tokens for call in context.calls]
    assert [p + limit for p, limit in zip(lengths, limits, strict=True)] == [lengths[0] + 400] * 3
    assert rollout.longest_sample <= lengths[0] + 400

    class Chatty(Dreamer):
        def respond(self, conversation):
            return "go on " * 25

    (cut,), metrics, context = play(Chatty(template="chat", max_turns=9), [thought] * 9, tokens=400, codec=codec)
    assert (cut.finish_reason, metrics["ended_by_tokens"], metrics["turns"]) == ("length", 1.0, 3.0)
    assert len(cut.sample_starts) == 3 == len(context.calls), "what was never answered begins no sample"


def test_sampled_tokens_are_kept_where_encoding_their_text_would_give_others(directory):  # noqa: F811
    codec = Tokenizer.load(directory("qwen2.5"))

    class Odd(ScriptedContext):
        def _tokens(self, answer, decoding, room):
            """Two tokens of which the text alone would make one: the end of a turn spelled by its letters."""
            spelled = [codec.encode(letter)[0] for letter in "<|im_end|>"]
            return np.array([*codec.encode(answer), *spelled, *codec.stop_token_ids[:1]], np.int32), "stop"

    class Any_(Guess):
        def respond(self, conversation):
            return "go on"

    context = Odd(codec, ["5"])
    groups, _ = Any_(template="chat", max_turns=2).sample(context, 1, 1, Decoding(max_output_tokens=300), 0, "train")
    rollout = groups[0].rollouts[0]
    first = rollout.response_tokens[: rollout.turns[1].stop - rollout.turns[1].start]
    np.testing.assert_array_equal(context.calls[1].prompts[0][len(rollout.prompt_tokens) :][: len(first)], first)
    assert len(first) == 12


def test_a_worked_solution_is_a_turn_after_what_was_said_before_it(directory):  # noqa: F811
    plain = Guess().reference_examples(2, 0)
    assert [(each.response, each.earlier, each.ends) for each in plain] == [
        ("5", (), True), ("7", ("5", " higher "), True)
    ]  # fmt: skip
    chat = Guess(template="chat").reference_examples(2, 0)
    assert [each.response for each in chat] == ["5", "7"]
    assert [message["role"] for message in chat[1].prompt] == ["user", "assistant", "user"]


@pytest.mark.parametrize(("key", "value"), [("max_turns", 0), ("max_seconds", -1.0), ("turn_tokens", 0)])
def test_limits_are_above_nothing(key, value):
    with pytest.raises(ValueError, match=f"{key} is {value}: it must be above 0"):
        Guess(**{key: value})


@pytest.mark.parametrize("ordered", [True, False], ids=["in rounds", "at their own pace"])
def test_every_conversation_is_released_once_at_its_end_scored_or_failed(ordered, caplog):
    released: list[str | None] = []

    class Holding(Guess):
        def release(self, conversation):
            released.append(conversation.ending)
            raise OSError("cannot be closed")

    rollouts, _, _ = play(Holding(), ["7"], n=2, ordered=ordered)
    assert released == ["done", "done"] and [rollout.episode_reward for rollout in rollouts] == [1.0, 1.0]
    assert "Holding.release raised OSError about 'seven': cannot be closed" in caplog.text
    with pytest.raises(EnvironmentFailure, match="invalid literal"):
        play(Holding(), ["x"], ordered=ordered)
    assert released == ["done", "done", None]
