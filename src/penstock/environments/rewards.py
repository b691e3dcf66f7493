"""Graders with TRL's signature: ``f(completions, answer, **columns) -> list[float]``, one reward per completion.

Numbers are compared as numbers: ``$1,000.00.`` is 1000. Where an answer is right or wrong, one that a length limit cut
earns nothing, since ``#### 1`` may have been on its way to ``#### 18``. `shaped_answer` is for policies that are
hardly ever right: each step towards an answer has its share.
"""

import math
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


def answer_format(completions: Sequence[Any], **columns: Any) -> list[float]:
    """1 where the completion has ``####`` with a number after it and ended by itself, else 0."""
    found = [final_number(text_of(completion)) for completion in completions]
    return [float(number is not None and ended) for number, ended in zip(found, _ended(found, columns), strict=True)]


def answer_closeness(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float]:
    """`closeness` of the number after the last ``####``, else of the last number; 0 where there is none."""
    rewards: list[float] = []
    for completion, right in zip(completions, answer, strict=True):
        text = text_of(completion)
        numbers, marked = numbers_in(text), final_number(text)
        found = marked if marked is not None else numbers[-1] if numbers else None
        rewards.append(0.0 if found is None else closeness(found, reference_number(right)))
    return rewards


def shaped_answer(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float]:
    """In [0, 1]: 0.1 for ending by itself, 0.2 `answer_format`, 0.3 `answer_closeness`, 0.4 `final_answer`."""
    parts = zip(
        _ended(completions, columns),
        answer_format(completions, **columns),
        answer_closeness(completions, answer),
        final_answer(completions, answer, **columns),
        strict=True,
    )
    return [0.1 * ended + 0.2 * marked + 0.3 * close + 0.4 * right for ended, marked, close, right in parts]


def closeness(found: Decimal, right: Decimal | None) -> float:
    """1 for the right number, ½ for one ten times as large or small, towards 0 farther off and for a wrong sign.

    1 / (1 + |log₁₀(1 + |found|) − log₁₀(1 + |right|)|); beyond 1e30 all numbers are alike.
    """
    if right is None or (found < 0) != (right < 0):
        return 0.0
    magnitudes = [math.log10(1 + min(abs(float(number)), 1e30)) for number in (found, right)]
    return 1 / (1 + abs(magnitudes[0] - magnitudes[1]))


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


def _ended(completions: Sequence[Any], columns: dict[str, Any]) -> list[bool]:
    """Of each, whether no length limit cut it; where nothing is said of that, none did."""
    return [reason != "length" for reason in columns.get("finish_reason") or ["stop"] * len(completions)]


def _graded(found: Sequence[Any], wanted: Sequence[Any], columns: dict[str, Any]) -> list[float]:
    return [
        float(mine is not None and mine == right and ended)
        for mine, right, ended in zip(found, wanted, _ended(found, columns), strict=True)
    ]
