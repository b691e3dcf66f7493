"""The response of a rollout token by token, in numbers."""

import numpy as np
from rich.table import Table
from rich.text import Text

from penstock.dashboard.lookup import StoredRollout
from penstock.dashboard.safe_text import printable
from penstock.dashboard.token_text import TokenText


def token_table(stored: StoredRollout, token_text: TokenText | None) -> Table:
    """One row per response token; positions count from the first token of the prompt.

    Args:
        stored: The rollout.
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
