import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from penstock.dashboard import find_rollouts
from penstock.dashboard.conversation import ConversationStyle, conversation, print_conversations
from penstock.dashboard.tokens import TokenText
from penstock.types import Rollout, RolloutMetadata, RolloutRecord, Turn
from tests.dashboard.sample_run import TOKENIZER


@pytest.fixture(scope="module")
def text(views) -> TokenText:
    return TokenText.of_run(views.directory)


def shown(views, text, name: str, printed, coloring="logprob", **named) -> str:
    stored = find_rollouts(views, name)
    style = ConversationStyle.of(stored, text, coloring)
    return printed(lambda console: print_conversations(stored, style, console), **named)


def test_the_story_stands_above_the_conversation(views, text, printed):
    lines = shown(views, text, "cats-0-1/0", printed).splitlines()
    assert lines[3] == "cats-0-1/0   reward 0.000   advantage -1.000   trained at step 1"
    facts = {line[:10].strip(): line[10:].strip() for line in lines[4:11]}
    assert facts == {
        "problem": "lesson cats, environment cats_env, example 7",
        "weights": "version 0–1, lineage 0",
        "made by": "worker-0, 1970-01-01 00:16:41 UTC (generate 0.25 s)",
        "decoding": "temperature 1, at most 64 tokens",
        "response": "7 tokens, 7 of them sampled; ended by stop",
        "used by": "update 1, advantage -1.0000",
        "fate": "trained by update 1",
    }


def test_what_each_reward_function_gave_stands_among_the_facts(views, text, printed):
    stored = find_rollouts(views, "cats-0-1/0")[0]
    scored = replace(stored.record.rollout, rewards_by_function=(("right", 0.25), ("brief", None)))
    stored = replace(stored, record=replace(stored.record, rollout=scored))
    style = ConversationStyle.of([stored], text, "logprob")
    said = printed(lambda console: print_conversations([stored], style, console))
    assert "rewards   right 0.25, brief –, before weights" in said


def test_turns_in_order_with_marks_for_reward_and_weights(views, text, printed):
    lines = shown(views, text, "cats-0-1/0", printed).splitlines()[11:]
    assert lines[0].startswith("user  3 tokens ──") and lines[1] == "Say cat."
    assert lines[2].startswith("assistant  7 tokens, mean logprob -2.00, weights 0–1 ──")
    assert lines[3:5] == ["a dog↵", "o⟨weights 1⟩r two<|im_end|>"]
    tools = shown(views, text, "tools-0-0/0", printed)
    heads = [line.split()[0] for line in tools.splitlines() if line.endswith("──") and not line.startswith("──")]
    assert heads == ["system", "user", "assistant", "tool", "assistant"]
    assert "6<|im_end|> ⟨reward +1.00⟩" in tools


def test_members_of_a_group_share_their_prompt_and_their_story(views, text, printed):
    lines = shown(views, text, "cats-0-0", printed).splitlines()
    assert [line.split()[0] for line in lines if line.startswith("cats-0-0/")] == [f"cats-0-0/{i}" for i in range(4)]
    assert sum(line == "Say cat." for line in lines) == 1
    assert sum(line.startswith("problem") for line in lines) == 1
    assert sum(line.startswith("used by") for line in lines) == 4  # none has the first one's advantage
    assert sum(line.startswith("assistant") for line in lines) == 4


def test_sampled_tokens_have_grounds_and_others_are_dim(views, text, printed):
    out = shown(views, text, "tools-0-0/0", printed, colors=True)
    assert "\x1b[2m<result>\x1b[0m\x1b[2m6\x1b[0m\x1b[2m</result>\x1b[0m" in out
    assert "\x1b[38;2;16;16;16;48;2;244;244;2" in out  # dark letters on nearly white: a sure token
    (head, *_) = [line for line in out.splitlines() if "probability" in line]
    assert "≤0.001" in head


def test_colour_by_advantage(views, text, printed):
    out = shown(views, text, "cats-0-0", printed, "advantage", colors=True)
    assert out.splitlines()[0].startswith("advantage") and "-0.80" in out and "+0.80" in out
    assert "48;2;255;150;60mdog" in out  # the worst: all orange
    assert "48;2;160;204;251mcat" in out  # 0.5 of 0.8 of the way to blue


@pytest.mark.parametrize(
    ("name", "coloring", "note"),
    [("cats-0-2/1", "advantage", "No batch holds this"), ("cats-0-2/1", "none", "")],
)
def test_without_numbers_there_are_no_colours(views, text, printed, name, coloring, note):
    out = shown(views, text, name, printed, coloring, colors=True)
    assert "48;2;" not in out and note in out and "cat<|im_end|>" in out


def test_where_there_are_no_colours_numbers_are_offered(views, text, printed):
    assert "--tokens prints the numbers" in shown(views, text, "cats-0-2/1", printed)
    stored = find_rollouts(views, "cats-0-2/1")
    for no_color in (False, True):  # a terminal, under NO_COLOR too
        console = Console(file=(out := io.StringIO()), force_terminal=True, color_system="standard", no_color=no_color)
        print_conversations(stored, ConversationStyle.of(stored, text, "logprob"), console)
        assert ("--tokens prints the numbers" in out.getvalue()) == no_color


def test_nothing_that_a_model_wrote_reaches_the_terminal_or_rich(views, text, printed):
    for spoken in (text, None):
        out = shown(views, spoken, "cats-0-2/0", printed, width=400)
        assert not set(out) & set("\x1b\r\x9b\u202e\u2066\u200b\t")
        assert "\\x1b[2J\\x1b[31mred\\rgone [bold]not bold[/bold] \\u202eesrever" in out and "猫😀" in out


def test_without_a_tokenizer_the_turns_are_shown(views, printed):
    out = shown(views, None, "tools-0-0/0", printed, colors=True)
    assert "<result>6</result>" in out and "48;2;" not in out and "<|im_end|>" not in out


def test_where_the_context_was_written_anew_the_turn_says_so(views, text, printed):
    (stored,) = find_rollouts(views, "tools-0-0/0")
    rollout = stored.record.rollout
    told = next(turn for turn in rollout.turns if turn.role == "tool")
    of_two = replace(stored, record=replace(stored.record, rollout=replace(rollout, sample_starts=(0, told.start))))
    lines = printed(conversation(of_two, ConversationStyle(text, "none", None))).splitlines()
    (title,) = [line for line in lines if line.startswith("tool  ")]
    assert title.startswith(f"tool  {told.stop - told.start} tokens, the context written anew: sample 2 ──")
    assert any("sampled; 2 samples; ended by" in line for line in lines)


def test_a_rollout_without_turns_shows_prompt_and_response(text, printed, views):
    tokens = TOKENIZER.encode("a cat")
    bare = Rollout(
        env_name="e", env_example_id="1", prompt_tokens=tokens, response_tokens=tokens,
        response_logprobs=np.zeros(len(tokens), np.float32), token_rewards=np.zeros(len(tokens), np.float32),
        episode_reward=0.0, metadata=RolloutMetadata("w", 0.0, 0), rollout_id="old/0",
    )  # fmt: skip
    (stored,) = find_rollouts(views, "cats-0-2/1")
    stored = type(stored)(RolloutRecord(bare, "old"), "waiting", None, None, ())
    style = ConversationStyle.of([stored], text, "logprob")
    lines = [line for line in printed(conversation(stored, style)).splitlines() if line == "a cat"]
    assert len(lines) == 2
    without = printed(conversation(stored, ConversationStyle(None, "logprob", None)))
    assert "(its text is not stored)" in without


def test_tokens_between_turns_belong_to_the_next_one(text, views, printed):
    glue, word = TOKENIZER.encode(" and "), TOKENIZER.encode("cat")
    response = np.concatenate([word, glue, word]).astype(np.int32)
    zeros = np.zeros(len(response), np.float32)
    made = Rollout(
        "e", "1", word, response, zeros, zeros, 0.0, RolloutMetadata("w", 0.0, 0), "g/0",
        response_mask=np.array([True] * len(word) + [False] * len(glue) + [True] * len(word)),
        turns=(
            Turn("user", "cat", 0, len(word)),
            Turn("assistant", "cat", len(word), 2 * len(word)),
            Turn("assistant", "cat", 2 * len(word) + len(glue), 3 * len(word) + len(glue)),
        ),
    )  # fmt: skip
    (stored,) = find_rollouts(views, "cats-0-2/1")
    stored = type(stored)(RolloutRecord(made, "g"), "waiting", None, None, ())
    out = printed(conversation(stored, ConversationStyle.of([stored], text, "none")))
    assert [line for line in out.splitlines() if "cat" in line] == ["cat", "cat", " and cat"]


def test_a_console_of_16_colours_prints_too(views, text):
    out = io.StringIO()
    stored = find_rollouts(views, "cats-0-0")
    console = Console(file=out, force_terminal=True, color_system="standard", width=80)
    print_conversations(stored, ConversationStyle.of(stored, text, "logprob"), console)
    assert "dog" in out.getvalue()
