"""Graders with TRL's signature: ``f(completions, answer, **columns) -> list[float]``, one reward per completion.

Numbers are compared as numbers: ``$1,000.00.`` is 1000. An answer that a length limit cut earns nothing, since
``#### 1`` may have been on its way to ``#### 18``.
"""

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

MARK = "####"
_NUMBER = re.compile(r"(?:(?<![\d)])-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_DECORATION = str.maketrans("", "", "$€£*")


def final_answer(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float]:
    """1 where the number after the last ``####`` of the completion is that of the reference answer, else 0.

    Args:
        completions: Texts, or lists of messages of which the last counts.
        answer: Reference answers: worked solutions that end in ``#### N``, or N alone.
        **columns: ``finish_reason`` is read, everything else ignored.
    """
    found = [final_number(text_of(completion)) for completion in completions]
    wanted = [reference_number(text) for text in answer]
    return _graded(found, wanted, columns)


def last_number(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float]:
    """Like `final_answer`, but takes the last number of the completion, marked by ``####`` or not."""
    found = [numbers[-1] if (numbers := numbers_in(text_of(completion))) else None for completion in completions]
    wanted = [reference_number(text) for text in answer]
    return _graded(found, wanted, columns)


def exact_match(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float]:
    """1 where the completion equals the reference answer, whitespace at both ends apart, else 0."""
    found = [text_of(completion).strip() for completion in completions]
    return _graded(found, [str(text).strip() for text in answer], columns)


def final_number(text: str) -> Decimal | None:
    """The number right after the last ``####``; None where there is no mark or no number."""
    _, mark, rest = text.rpartition(MARK)
    match = _NUMBER.match(rest.translate(_DECORATION).lstrip()) if mark else None
    return _decimal(match.group()) if match else None


def reference_number(answer: Any) -> Decimal | None:
    """The number that a reference answer states: after ``####``, or its last number."""
    text = str(answer)
    if MARK in text:
        return final_number(text)
    numbers = numbers_in(text)
    return numbers[-1] if numbers else None


def numbers_in(text: str) -> list[Decimal]:
    """All numbers of a text, in order, without thousands separators."""
    return [_decimal(found) for found in _NUMBER.findall(text.translate(_DECORATION))]


def text_of(completion: Any) -> str:
    """The text of a completion in either of TRL's forms: a string, or messages of which the last counts."""
    if isinstance(completion, str):
        return completion
    return str(completion[-1].get("content") or "")


def _decimal(digits: str) -> Decimal:
    return Decimal(digits.replace(",", ""))


def _graded(found: Sequence[Any], wanted: Sequence[Any], columns: dict[str, Any]) -> list[float]:
    reasons = columns.get("finish_reason") or ["stop"] * len(found)
    return [
        float(mine is not None and mine == right and reason != "length")
        for mine, right, reason in zip(found, wanted, reasons, strict=True)
    ]
