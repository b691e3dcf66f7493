"""A shaped reward for word problems whose answers end in ``#### N``, in [0, 1].

Exact grading (`penstock.environments.rewards.final_answer`) gives a small random model nothing to learn from: every
answer is wrong. This reward gives each step towards a right answer a share of its own, so that the answers of one
group differ from the first update on:

=====  =============================================================
0.10   share of readable characters
0.10   the answer ends by itself
0.10   it holds a number
0.20   how close its last number is to the right one
0.10   it has the mark ``####`` with a number after it
0.40   that number is right
=====  =============================================================
"""

from decimal import Decimal

from penstock.environments.rewards import closeness, final_number, numbers_in, reference_number, text_of


def reward(completions, answer, finish_reason, **columns) -> list[float]:
    """TRL's signature; ``answer`` and ``finish_reason`` come from the environment, as do the file's other columns."""
    return [
        score(text_of(completion), reference_number(right), reason == "stop")
        for completion, right, reason in zip(completions, answer, finish_reason, strict=True)
    ]


def score(text: str, right: Decimal | None, ended: bool) -> float:
    """The reward of one answer."""
    numbers, marked = numbers_in(text), final_number(text)
    total = 0.1 * readable_share(text) + 0.1 * ended
    if numbers:
        total += 0.1 + 0.2 * closeness(marked if marked is not None else numbers[-1], right)
    if marked is not None:
        total += 0.1
    if marked is not None and marked == right and ended:  # a cut number is no answer
        total += 0.4
    return total


def readable_share(text: str) -> float:
    """Share of characters that are letters, digits, spaces or ordinary signs."""
    if not text:
        return 0.0
    return sum(c.isascii() and (c.isalnum() or c in " \n.,;:?!'\"$%+-*/=()<>#") for c in text) / len(text)
