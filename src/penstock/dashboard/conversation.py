"""A rollout as a person reads it: its story, then the conversation by turns, each token on the ground of its number.

Tokens that the policy did not sample (the prompt, what a tool or the environment said) have no colour; in the response
they are dim. Where the tokens cannot be decoded, the text of the turns stands without colours, and a note says so. The
response token by token, in numbers, is a table of its own.

Colours are dark letters on pale grounds, so they can be read on a dark terminal and a light one. A log-probability goes
from white (the policy was sure) to deep orange (it was surprised), on a fixed scale, so that two rollouts compare. An
advantage goes from orange through white to blue, which colour-blind readers tell apart, on the range of what is shown.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, Protocol

import numpy as np
from rich.color import Color
from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.style import Style
from rich.table import Table
from rich.text import Text

from penstock.dashboard.groups import state_style
from penstock.dashboard.lookup import BatchUse, StoredRollout
from penstock.dashboard.tokens import TokenText, breaks_within, turns_of
from penstock.text.safe_text import printable
from penstock.types import AnyRollout, Turn

Rgb = tuple[int, int, int]

_INK: Rgb = (16, 16, 16)
_WHITE: Rgb = (244, 244, 244)
_ORANGE: Rgb = (255, 150, 60)
_BLUE: Rgb = (110, 180, 255)
_SURPRISE: tuple[Rgb, ...] = (_WHITE, (255, 232, 150), (255, 190, 95), (250, 130, 85))
_LOWEST_LOGPROB = math.log(1e-3)


class ColorScale(Protocol):
    """From a token's number to its style."""

    def style(self, value: float) -> Style:
        """How to print a token with this number."""
        ...

    def legend(self) -> Text:
        """What the colours mean."""
        ...


@dataclass(frozen=True, slots=True)
class LogprobScale:
    """Log-probabilities from 0 to those of one in a thousand and below."""

    def style(self, value: float) -> Style:
        """Paler where the token was more probable."""
        return _ground(_along(_SURPRISE, value / _LOWEST_LOGPROB))

    def legend(self) -> Text:
        """Probabilities with their colours."""
        text = Text("probability ")
        for probability, label in ((1.0, "1"), (0.5, "0.5"), (0.1, "0.1"), (0.01, "0.01"), (0.001, "≤0.001")):
            text.append(f" {label} ", self.style(math.log(probability)))
        return text


@dataclass(frozen=True, slots=True)
class AdvantageScale:
    """Advantages from −limit to limit.

    Attributes:
        limit: The largest absolute advantage shown.
    """

    limit: float

    @classmethod
    def over(cls, values: Sequence[float]) -> "AdvantageScale":
        """A scale that reaches the largest of them."""
        return cls(max(map(abs, values), default=0.0) or 1.0)

    def style(self, value: float) -> Style:
        """Blue above zero, orange below."""
        return _ground(_along((_WHITE, _BLUE if value > 0 else _ORANGE), abs(value) / self.limit))

    def legend(self) -> Text:
        """Advantages with their colours."""
        text = Text("advantage ")
        for share in (-1.0, -0.5, 0.0, 0.5, 1.0):
            value = share * self.limit
            text.append(f" {value:+.2f} " if value else " 0 ", self.style(value))
        return text


def _along(colors: Sequence[Rgb], share: float) -> Rgb:
    """The colour at a share of the way along some colours."""
    place = min(max(share, 0.0), 1.0) * (len(colors) - 1)
    index = min(int(place), len(colors) - 2)
    rest = place - index
    mixed = [round(a + (b - a) * rest) for a, b in zip(colors[index], colors[index + 1], strict=True)]
    return mixed[0], mixed[1], mixed[2]


def _ground(color: Rgb) -> Style:
    return Style(color=Color.from_rgb(*_INK), bgcolor=Color.from_rgb(*color))


Coloring = Literal["logprob", "advantage", "none"]
"""By which number tokens are coloured."""


@dataclass(frozen=True, slots=True)
class ConversationStyle:
    """How conversations are shown.

    Attributes:
        token_text: Decodes tokens; None shows the text of the turns.
        coloring: By which number.
        scale: Its colours; None shows none.
    """

    token_text: TokenText | None
    coloring: Coloring
    scale: ColorScale | None

    @classmethod
    def of(
        cls, stored: Sequence[StoredRollout], token_text: TokenText | None, coloring: Coloring
    ) -> "ConversationStyle":
        """The style for some rollouts; one scale for all of them."""
        scale: ColorScale | None = None
        if token_text is not None and coloring == "logprob":
            scale = LogprobScale()
        elif token_text is not None and coloring == "advantage":
            known = [rollout.advantages for rollout in stored if rollout.advantages is not None]
            scale = AdvantageScale.over([float(v) for v in np.concatenate(known)]) if known else None
        return cls(token_text, coloring, scale)


def print_conversations(stored: Sequence[StoredRollout], style: ConversationStyle, console: Console) -> None:
    """Prints rollouts; those of one group show their prompt once."""
    if style.scale is not None:
        console.print(style.scale.legend())
        if console.color_system is None or console.no_color:
            console.print("(no colours here: --tokens prints the numbers)", style="dim")
    elif style.coloring == "advantage" and style.token_text is not None:
        console.print("No batch holds this, so it has no advantages yet: shown without colours.", style="magenta")
    for number, rollout in enumerate(stored):
        console.print(conversation(rollout, style, stored[0] if number else None))


def conversation(stored: StoredRollout, style: ConversationStyle, after: StoredRollout | None = None) -> RenderableType:
    """One rollout.

    Args:
        stored: The rollout to show, with its texts and its tokens.
        style: Colours and what is shown beside the text.
        after: A rollout that is shown above it: what both have in common is left out.
    """
    rollout = stored.record.rollout
    prompt = rollout.prompt_tokens
    rows: list[RenderableType] = [header(stored, after)]
    same_prompt = after is not None and np.array_equal(prompt, after.record.rollout.prompt_tokens)
    for turn in _turns(rollout):
        if same_prompt and turn.stop <= len(prompt):
            continue
        rows.append(Rule(_turn_title(turn, rollout), align="left", style="dim"))
        rows.append(_turn_text(turn, stored, style))
    return Group(*rows, Text())


def header(stored: StoredRollout, after: StoredRollout | None = None) -> RenderableType:
    """The story of a rollout, without what it has in common with one that is shown above it."""
    rollout = stored.record.rollout
    title = Text.assemble(
        (printable(stored.rollout_id), "bold"),
        ("   reward ", "dim"), (f"{rollout.episode_reward:.3f}", "bold"),
        ("   advantage ", "dim"), ("–" if stored.advantage is None else f"{stored.advantage:+.3f}", "bold"),
        "   ", (printable(_state_words(stored)), state_style(stored.state)),
    )  # fmt: skip
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    known = set() if after is None else set(_facts(after))
    for name, value in _facts(stored):
        if (name, value) not in known:
            grid.add_row(name, Text(printable(value)))
    return Group(Rule(style="dim"), title, grid)


def _state_words(stored: StoredRollout) -> str:
    return stored.state if stored.fate_step is None else f"{stored.state} at step {stored.fate_step}"


def _facts(stored: StoredRollout) -> Iterator[tuple[str, str]]:
    rollout = stored.record.rollout
    metadata, decoding = rollout.metadata, rollout.decoding
    yield (
        "problem",
        f"lesson {rollout.lesson_id or '–'}, environment {rollout.env_name}, example {rollout.env_example_id}",
    )
    if metadata is not None:
        steps = sorted({metadata.weight_step, rollout.newest_weight_step})
        versions = "–".join(map(str, steps))
        yield "weights", f"version {versions}, lineage {metadata.lineage}"
        yield "made by", f"{metadata.worker_id}, {_moment(metadata.timestamp)}{_seconds(stored)}"
    limits = [f"temperature {decoding.temperature:g}", f"at most {decoding.max_output_tokens} tokens"]
    limits += [f"{name.replace('_', '-')} {value}" for name, value in decoding.truncation.items()]
    limits += [f"stop strings {list(decoding.stop_strings)!r}"] if decoding.stop_strings else []
    yield "decoding", ", ".join(limits)
    yield (
        "response",
        (
            f"{len(rollout.response_tokens)} tokens, {rollout.sampled_tokens} of them sampled; "
            + (f"{len(rollout.sample_starts)} samples; " if len(rollout.sample_starts) > 1 else "")
            + f"ended by {rollout.finish_reason}"
        ),
    )
    if rollout.rewards_by_function:
        given = [f"{name} {'–' if value is None else f'{value:g}'}" for name, value in rollout.rewards_by_function]
        yield "rewards", f"{', '.join(given)}, before weights"
    for use in stored.uses:
        yield "used by", _use_words(use, stored)
    if stored.fate_reason:
        yield "fate", stored.fate_reason


def _use_words(use: BatchUse, stored: StoredRollout) -> str:
    advantage = use.advantage(stored.record.rollout.response_mask)
    words = f"update {use.step}" + (f" of lineage {use.lineage}" if use.lineage else "")
    words += "" if advantage is None else f", advantage {advantage:+.4f}"
    return words + ("" if use.survives else ", rolled back")


def _moment(timestamp: float) -> str:
    try:
        return datetime.fromtimestamp(timestamp, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"at {timestamp:g} s, which is no date"


def _seconds(stored: StoredRollout) -> str:
    times = [f"{name.removesuffix('_s')} {seconds:.2f} s" for name, seconds in stored.record.rollout.timings.items()]
    return f" ({', '.join(times)})" if times else ""


def _turns(rollout: AnyRollout) -> list[Turn]:
    """The turns; spans between them belong to the one that follows. Without any: the prompt and the response."""
    turns, length = turns_of(rollout), len(rollout.prompt_tokens) + len(rollout.response_tokens)
    starts = [0, *(turn.stop for turn in turns)]
    spread = [Turn(t.role, t.content, min(a, t.start), t.stop) for a, t in zip(starts, turns, strict=False)]
    last = spread[-1]
    return [*spread[:-1], Turn(last.role, last.content, last.start, max(length, last.stop))]


def _turn_title(turn: Turn, rollout: AnyRollout) -> Text:
    prompt = len(rollout.prompt_tokens)
    span = slice(max(turn.start - prompt, 0), max(turn.stop - prompt, 0))
    mask = rollout.response_mask[span]
    title = Text(printable(turn.role), style="bold")
    words = [f"{turn.stop - turn.start} tokens"]
    if turn.start in rollout.sample_starts[1:]:
        words.append(f"the context written anew: sample {rollout.sample_starts.index(turn.start) + 1}")
    if mask.any():
        words.append(f"mean logprob {rollout.response_logprobs[span][mask].mean():.2f}")
        if rollout.response_weight_steps is not None:
            steps = rollout.response_weight_steps[span][mask]
            words.append(f"weights {steps.min()}" + ("" if steps.min() == steps.max() else f"–{steps.max()}"))
    return title.append("  " + ", ".join(words), style="not bold dim")


def _turn_text(turn: Turn, stored: StoredRollout, style: ConversationStyle) -> Text:
    rollout = stored.record.rollout
    if style.token_text is None:
        said = turn.content if rollout.turns else "(its text is not stored)"
        return Text(printable(said, newlines=True))
    tokens = np.concatenate([rollout.prompt_tokens, rollout.response_tokens])[turn.start : turn.stop].tolist()
    text = Text()
    prompt = len(rollout.prompt_tokens)
    for piece in style.token_text.pieces(tokens, breaks_within(rollout, turn.start, turn.stop)):
        first, last = turn.start + piece.start - prompt, turn.start + piece.stop - prompt
        _append_piece(text, piece.text, first, last, stored, style)
    return text


def _append_piece(
    text: Text, content: str, first: int, last: int, stored: StoredRollout, style: ConversationStyle
) -> None:
    """Adds the text of response tokens `first` to `last` (negative: of the prompt), with its marks."""
    rollout = stored.record.rollout
    if first < 0:
        text.append(printable(content, newlines=True))
        return
    sampled = bool(rollout.response_mask[first:last].all())
    _append_version(text, rollout, first)
    shown = printable(content, newlines=True).replace("\n", "↵\n" if sampled else "\n")
    values = _values(stored, style.coloring)
    if not sampled:
        text.append(shown, "dim")
    elif style.scale is None or values is None:
        text.append(shown)
    else:
        text.append(shown, style.scale.style(float(values[first:last].mean())))
    reward = float(rollout.token_rewards[first:last].sum())
    if reward:
        text.append(f" ⟨reward {reward:+.2f}⟩", "bold")


def _append_version(text: Text, rollout: AnyRollout, position: int) -> None:
    """Marks where other weights went on sampling."""
    steps = rollout.response_weight_steps
    if steps is None or not rollout.response_mask[position]:
        return
    before = np.flatnonzero(rollout.response_mask[:position])
    if len(before) and steps[before[-1]] != steps[position]:
        text.append(f"⟨weights {steps[position]}⟩", "dim")


def _values(stored: StoredRollout, coloring: Coloring) -> np.ndarray | None:
    return stored.advantages if coloring == "advantage" else stored.record.rollout.response_logprobs


def token_table(stored: StoredRollout, token_text: TokenText | None) -> Table:
    """One row per response token; positions count from the first token of the prompt.

    Args:
        stored: The rollout to show, with its texts and its tokens.
        token_text: Decodes tokens; None leaves the text out.
    """
    rollout = stored.record.rollout
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for title in ("position", "token", "text", "logprob", "advantage", "reward", "weights", "sampled"):
        is_text = title in ("text", "sampled")
        table.add_column(title, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    texts = _texts(stored, token_text)
    advantages, steps = stored.advantages, rollout.response_weight_steps
    for index, token in enumerate(rollout.response_tokens.tolist()):
        sampled, reward = bool(rollout.response_mask[index]), float(rollout.token_rewards[index])
        table.add_row(
            str(len(rollout.prompt_tokens) + index),
            str(token),
            Text(texts[index]),
            f"{rollout.response_logprobs[index]:.4f}" if sampled else "",
            "" if advantages is None or not sampled else f"{advantages[index]:+.4f}",
            f"{reward:+.3f}" if reward else "",
            "" if steps is None or not sampled else str(steps[index]),
            "yes" if sampled else "no",
            style=None if sampled else "dim",
        )
    return table


def _texts(stored: StoredRollout, token_text: TokenText | None) -> list[str]:
    """The text of each token in quotes; of tokens that share a character, which part of it each is."""
    rollout = stored.record.rollout
    if token_text is None:
        return [""] * len(rollout.response_tokens)
    changes = np.flatnonzero(np.diff(rollout.response_mask.astype(np.int8))) + 1
    texts: list[str] = []
    for piece in token_text.pieces(rollout.response_tokens.tolist(), {int(change) for change in changes}):
        parts, quoted = piece.stop - piece.start, f"'{printable(piece.text)}'"
        texts += [quoted] if parts == 1 else [f"{quoted} {part}/{parts}" for part in range(1, parts + 1)]
    return texts
