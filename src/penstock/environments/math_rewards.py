r"""Graders that compare expressions, by math-verify (extra ``math``): ½, ``\frac{1}{2}`` and 0.5 are one answer.

As everywhere, an answer is what `penstock.environments.rewards.final_text` finds; text that is neither boxed nor marked
is none. Where both sides state a number these are compared, by the rules of that module, and math-verify is not asked:
it takes ``18 eggs`` for a product of letters.

The module loads without the package, but then has no grader. Limits of time use signals of the main thread: named as
``env_args.reward`` the grader runs in a process of its own; do not call it from a thread.
"""

from collections.abc import Sequence
from typing import Any

from penstock.environments.rewards import final_text, graded, reference_number, stated_number, text_of
from penstock.types import ConfigError

LIMIT_S = 1
"""For each of: parsing an answer, parsing a reference, comparing them. An answer that takes longer earns nothing."""
_LONGEST_ANSWER = 500


def __getattr__(name: str) -> Any:
    """``math_answer`` is had only with the package, so that a run without it ends before it begins."""
    if name != "math_answer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import math_verify  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"{__name__}.{name}: math-verify cannot be imported ({error}): pip install 'penstock[math]', or take a "
            "grader of penstock.environments.rewards"
        ) from error
    return _math_answer


def __dir__() -> list[str]:
    return [*globals(), "math_answer"]


def _math_answer(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float]:
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


_math_answer.__name__ = _math_answer.__qualname__ = "math_answer"


def _is_right(found: str | None, reference: Any) -> bool:
    if found is None or len(found) > _LONGEST_ANSWER:
        return False
    text = str(reference)
    wanted = final_text(text) or text
    right = reference_number(reference) if isinstance(reference, int | float) else stated_number(wanted)
    mine = stated_number(found)
    if mine is not None and right is not None:
        return mine == right
    from math_verify import verify  # pyright: ignore[reportMissingImports]

    gold = _parsed(wanted)
    return bool(gold) and verify(gold, _parsed(found), timeout_seconds=LIMIT_S)


def _parsed(answer: str) -> list[Any]:
    """The expression that a whole text is; math-verify would look for one inside it.

    By its grammar of LaTeX alone: its other way to read an expression evaluates it as Python, and a model wrote it.
    """
    from math_verify import LatexExtractionConfig, parse  # pyright: ignore[reportMissingImports]

    plain = answer.strip().strip("$").rstrip(".")
    return parse(rf"\boxed{{{plain}}}", [LatexExtractionConfig()], parsing_timeout=LIMIT_S)
