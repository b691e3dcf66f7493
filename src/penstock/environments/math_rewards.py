r"""Graders that compare expressions, by math-verify (extra ``math``): ½, ``\frac{1}{2}`` and 0.5 are one answer.

As everywhere, an answer is what `penstock.environments.rewards.final_text` finds; text that is neither boxed nor marked
is none. Where both sides state a number these are compared, by the rules of that module, and math-verify is not asked:
it takes ``18 eggs`` for a product of letters. Its limits of time use signals of the main thread, so name these graders
as ``env_args.reward`` is named, and they run in a process of their own; do not call them from a thread.
"""

from collections.abc import Sequence
from typing import Any

from penstock.environments.rewards import final_text, graded, reference_number, stated_number, text_of
from penstock.types import ConfigError

try:
    from math_verify import LatexExtractionConfig, parse, verify  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ConfigError(
        f"math-verify cannot be imported ({error}): pip install 'penstock[math]', or take a grader of "
        "penstock.environments.rewards"
    ) from error

LIMIT_S = 1
"""For each of: parsing an answer, parsing a reference, comparing them. An answer that takes longer earns nothing."""
_LONGEST_ANSWER = 500


def math_answer(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float]:
    r"""1 where the boxed answer, else the one after ``####``, equals the reference in mathematics, else 0.

    ``36/2``, ``\frac{36}{2}`` and ``2\cdot 9`` are right where 18 is. Two numbers (``18 or 20``) are so where the
    reference has two.

    Args:
        completions: Texts, or lists of messages of which the last counts.
        answer: References: boxed, after ``####``, or all of the text; LaTeX with or without ``$``.
        **columns: ``finish_reason`` is read, everything else ignored.
    """
    pairs = zip(completions, answer, strict=True)
    return graded([_is_right(final_text(text_of(completion)), reference) for completion, reference in pairs], columns)


def _is_right(found: str | None, reference: Any) -> bool:
    if found is None or len(found) > _LONGEST_ANSWER:
        return False
    text = str(reference)
    wanted = final_text(text) or text
    right = reference_number(reference) if isinstance(reference, int | float) else stated_number(wanted)
    mine = stated_number(found)
    if mine is not None and right is not None:
        return mine == right
    gold = _parsed(wanted)
    return bool(gold) and verify(gold, _parsed(found), timeout_seconds=LIMIT_S)


def _parsed(answer: str) -> list[Any]:
    """The expression that a whole text is; math-verify would look for one inside it."""
    plain = answer.strip().strip("$").rstrip(".")
    return parse(rf"\boxed{{{plain}}}", [LatexExtractionConfig()], parsing_timeout=LIMIT_S)
