r"""Graders with TRL's signature: ``f(completions, answer, **columns) -> list[float]``, one reward per completion.

An answer is what the last ``\boxed{…}`` of a completion holds, else the line after its last ``####``. It has to state
one number, whole: signs, currencies, thousands separators, units, emphasis, LaTeX and what stands left of an ``=`` are
dressing (``$1,000.00.`` is 1000); alternatives (``18 or 20``), expressions (``36/2``, ``18e2``) and multiples (``18k``)
state none. `penstock.environments.math_rewards` compares expressions.

Where an answer is right or wrong, one that a length limit cut earns nothing, since ``#### 1`` may have been on its way
to ``#### 18``. `shaped_answer` is for policies that are hardly ever right: each step towards an answer has its share.
"""

import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

MARK = "####"
_LONGEST_ANSWER = 200
"""Characters: what is longer is no final answer, and patterns need not be fast on it."""


def final_answer(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float]:
    r"""1 where the number in the last ``\boxed{…}``, else after the last ``####``, is that of the reference, else 0.

    Args:
        completions: Texts, or lists of messages of which the last counts.
        answer: Reference answers: worked solutions that end in ``#### N`` or ``\boxed{N}``, or N alone.
        **columns: ``finish_reason`` is read, everything else ignored.
    """
    return _numbers_graded(final_number, completions, answer, columns)


def boxed_answer(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float]:
    r"""Like `final_answer`, for answers in ``\boxed{…}`` alone."""
    return _numbers_graded(lambda text: stated_number(boxed_text(text)), completions, answer, columns)


def marked_answer(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float]:
    """Like `final_answer`, for answers after ``####`` alone; a box may stand there."""
    return _numbers_graded(marked_number, completions, answer, columns)


def last_number(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float]:
    """Like `final_answer`, but where nothing is boxed or marked, the last number of the completion counts."""
    return _numbers_graded(_last_or_final, completions, answer, columns)


def exact_match(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float]:
    """1 where the completion equals the reference answer, whitespace at both ends apart, else 0."""
    found = [text_of(completion).strip() for completion in completions]
    return graded([mine == str(text).strip() for mine, text in zip(found, answer, strict=True)], columns)


def answer_format(completions: Sequence[Any], **columns: Any) -> list[float]:
    """1 where the completion has ``####`` with a number after it and ended by itself, else 0."""
    return graded([marked_number(text_of(completion)) is not None for completion in completions], columns)


def answer_closeness(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float]:
    """`closeness` of the final number, else of the last number; 0 where there is none."""
    rewards: list[float] = []
    for completion, right in zip(completions, answer, strict=True):
        text = text_of(completion)
        numbers, final = numbers_in(text), final_number(text)
        found = final if final is not None else numbers[-1] if numbers else None
        rewards.append(0.0 if found is None else closeness(found, reference_number(right)))
    return rewards


def shaped_answer(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float]:
    """In [0, 1]: 0.1 for ending by itself, 0.2 `answer_format`, 0.3 `answer_closeness`, 0.4 `final_answer`."""
    parts = zip(
        graded([True] * len(completions), columns),
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


def graded(right: Sequence[bool], columns: dict[str, Any]) -> list[float]:
    """1 for what is right and was not cut by a length limit; where nothing is said of that, nothing was cut."""
    reasons = columns.get("finish_reason") or ["stop"] * len(right)
    return [float(won and reason != "length") for won, reason in zip(right, reasons, strict=True)]


def text_of(completion: Any) -> str:
    """The text of a completion in either of TRL's forms: a string, or messages of which the last counts."""
    if isinstance(completion, str):
        return completion
    return str(completion[-1].get("content") or "")


# --- where an answer stands -------------------------------------------------------------------------------------------


def final_text(text: str) -> str | None:
    r"""What the last ``\boxed{…}`` holds, else the line after the last ``####``; None where there is neither."""
    boxed = boxed_text(text)
    return marked_text(text) if boxed is None else boxed


def boxed_text(text: str) -> str | None:
    r"""What the last ``\boxed{…}`` holds; None where there is none, or it is not closed."""
    start = text.rfind(r"\boxed")
    if start < 0 or not (opened := re.compile(r"\\boxed {0,3}\{").match(text, start)):
        return None
    depth = 1
    for brace in re.finditer(r"(?<!\\)[{}]", text[opened.end() :]):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[opened.end() : opened.end() + brace.start()]
    return None


def marked_text(text: str) -> str | None:
    """The first line with something on it after the last ``####``; None where there is no mark."""
    _, mark, rest = text.rpartition(MARK)
    return rest.lstrip().partition("\n")[0].strip() if mark else None


# --- the number that it states ----------------------------------------------------------------------------------------


def final_number(text: str) -> Decimal | None:
    """The number that `final_text` states; None where it states none."""
    return stated_number(final_text(text))


def marked_number(text: str) -> Decimal | None:
    """The number that the line after the last ``####`` states, boxed there or not."""
    line = marked_text(text)
    boxed = boxed_text(line) if line else None
    return stated_number(line if boxed is None else boxed)


def reference_number(answer: Any) -> Decimal | None:
    """The number that a reference answer states: boxed or marked, else alone, else as the last of its words."""
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return Decimal(str(answer)) if math.isfinite(answer) else None
    text = str(answer)
    final = final_text(text)
    if final is not None:
        return stated_number(final)
    alone = stated_number(text)
    return _last_number(text) if alone is None and _WORD.search(text) else alone


def numbers_in(text: str) -> list[Decimal]:
    """All numbers of a text, in order, without thousands separators; those within an expression, too."""
    return [_decimal(found.group()) for found in _SIGNED.finditer(text.translate(_SIGNS | _DECORATION))]


_GROUPED = r"[0-9]{1,3}(?:,[0-9]{2,3}){0,8},[0-9]{3}(?![0-9])"
_DIGITS = rf"(?:(?:{_GROUPED}|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = re.compile(_DIGITS)
_SIGNED = re.compile(rf"(?:(?<![0-9)])-)?{_DIGITS}")
_DECORATION = str.maketrans("", "", "$€£*")
_SIGNS = str.maketrans({"−": "-", "–": "-", "－": "-", "﹣": "-", "＋": "+", "≈": "=", "⁄": "/"})

_LATEX = [
    (re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox) ?\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\\([$%#&_])"), r"\1"),
    (re.compile(r"\^ ?\{?\\circ\}?"), " degrees "),
    (re.compile(r"(?<=[0-9])(?:\{,\}|\\[,!; ]|[\u00a0\u202f\u2009])(?=[0-9]{3})"), ","),
    (re.compile(r"\\(?:[()\[\],;:! ]|quad|qquad|displaystyle)|~"), " "),
    (re.compile(r"\\(?:cdot|times|div)\b"), " * "),
    (re.compile(r"\\(?:approx|simeq)\b"), "="),
]
_TAG = re.compile(r"</?[A-Za-z_][^<>]{0,40}>")
_EMPHASIS = re.compile(r"(?<![\w*])(\*{1,3}|_{1,3}|`{1,3})(?=\S)(.+?)(?<=\S)\1(?![\w*])")
_UNIT_POWER = re.compile(r"(?<=[A-Za-z])(?:\^ ?\{?[23]\}?|[²³])")
_SIGNED_CURRENCY = re.compile(r"(?<=[-+]) ?[$€£¥]")
_CURRENCY = re.compile(r"[$€£¥]|\b(?:USD|US|EUR|GBP|CAD|AUD|INR|Rs)(?![a-z])")

_NOT_BEFORE = {
    "not", "no", "never", "neither", "either", "than", "least", "most", "between", "under", "over", "minus", "plus",
    "isn't", "cannot", "or",
}  # fmt: skip
_NOT_AFTER = {
    "or", "nor", "not", "isn't", "wrong", "plus", "minus", "divided", "multiplied", "squared", "cubed", "halves",
    "factorial", "versus", "vs",
}  # fmt: skip
_MULTIPLES = {
    "k", "K", "M", "B", "bn", "mn", "hundred", "thousand", "million", "billion", "trillion", "dozen", "dozens",
}  # fmt: skip
_UNKNOWNS = {"x", "y", "z", "n", "e", "i", "π", "E", "X", "pi"}
_SUBORDINATE = {"in", "per", "of", "for", "at", "after", "within", "during", "every", "each", "on"}
"""What may lead to a second number of lower standing: 12 eggs in 7 days."""
_EQUAL_STANDING = {"and", "or", "to", "by", "over", "times", "plus", "minus"}
_OPERATOR_NEXT = re.compile(r"\s*(?:[+*^×÷·|&~:\\](?!\s*$)|!|[-/](?![A-Za-z]))")
_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?")
_OUTSIDE = re.compile(r"[<>≤≥≠\\√]")  # comparisons, and LaTeX that is more than dressing

_OPERAND = re.compile(r"\bor\s*$|\\(?!boxed)[a-zA-Z]+[^a-zA-Z\n]*$")  # of an alternative, or of a command as \frac


def stated_number(answer: str | None) -> Decimal | None:
    """The one number that an answer states.

    Args:
        answer: At most a line; None states nothing.

    Returns:
        None for alternatives, expressions, multiples, comparisons, and where there is no number.
    """
    if answer is None or len(answer) > _LONGEST_ANSWER:
        return None
    left, equals, line = _plain(answer).strip("*_` ").rpartition("=")
    if _OUTSIDE.search(left + line) or (equals and left.rstrip().endswith(("!", "="))):
        return None
    first = _NUMBER.search(line)
    if first is None or any(c.isnumeric() and not c.isascii() for c in line):
        return None
    before, after = line[: first.start()], line[first.end() :]
    sign = _sign_before(before)
    if sign is None or _words(before) & _NOT_BEFORE or not re.fullmatch(r"[\w\s.,:;'\"()\[\]{}#?+-]*", before):
        return None
    return sign * _decimal(first.group()) if _is_whole(after) and _stands_alone(after) else None


def _last_or_final(text: str) -> Decimal | None:
    final = final_text(text)
    return _last_number(text) if final is None else stated_number(final)


def _last_number(text: str) -> Decimal | None:
    """The last number of a text; None where it is a part of an expression, or one of two alternatives."""
    last_digit = max(map(text.rfind, "0123456789"))
    if last_digit < 0:
        return None
    plain = _plain(text[max(0, last_digit - _LONGEST_ANSWER) : last_digit + _LONGEST_ANSWER])
    *_, last = _NUMBER.finditer(plain)
    before, after = plain[: last.start()], plain[last.end() :].partition("\n")[0]
    sign = _sign_before(before)
    if sign is None or _OPERAND.search(before) or not _is_whole(after):
        return None
    return sign * _decimal(last.group())


def _plain(text: str) -> str:
    """The text without LaTeX, tags, emphasis, currencies and powers of units; all signs are ASCII."""
    for pattern, plain in _LATEX:
        text = pattern.sub(plain, text)
    text = _EMPHASIS.sub(r" \2 ", _TAG.sub(" ", text.translate(_SIGNS)))
    text = _CURRENCY.sub(" ", _SIGNED_CURRENCY.sub("", text))
    return _UNIT_POWER.sub("", text).replace("{", " ").replace("}", " ")


def _sign_before(before: str) -> int | None:
    """1 or −1, by what stands before a number; None where the number is an operand or a part of a word."""
    body, sign, gap = re.fullmatch(r"(.*?)([-+]?)(\s{0,99})", before, re.DOTALL).groups()  # pyright: ignore[reportOptionalMemberAccess]
    last = body.rstrip()
    if re.search(r"[-+*/^×÷·<>≤≥≠\\√]$|[0-9]:$", last):
        return None
    if sign and (gap or body == last):  # detached, or glued to what is before: a sign only at the beginning
        return (-1 if sign == "-" else 1) if not last or last[-1] in ":=([#" else None
    if sign and re.search(r"[0-9)]$", last):
        return None
    if not sign and not gap and re.search(r"[\w.,]$", body):
        return None
    return -1 if sign == "-" else 1


def _is_whole(after: str) -> bool:
    """Whether what follows a number makes it no operand, multiple or coefficient."""
    if _OPERATOR_NEXT.match(after):
        return False
    word = _WORD.match(after.lstrip(" -/"))
    return word is None or word.group() not in _MULTIPLES | _UNKNOWNS


def _stands_alone(after: str) -> bool:
    """Whether what follows a number takes nothing back and states no second one of equal standing."""
    if _words(after) & _NOT_AFTER:
        return False
    start = 0
    for other in _NUMBER.finditer(after):
        between = after[start : other.start()]
        words = _words(between)
        if words & _EQUAL_STANDING or not words & _SUBORDINATE or re.search(r"[+*/^=,;|&×÷·:]", between):
            return False
        start = other.end()
    return True


def _words(text: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(text)}


def _decimal(digits: str) -> Decimal:
    return Decimal(digits.replace(",", ""))


def _numbers_graded(
    read: Callable[[str], Decimal | None],
    completions: Sequence[Any],
    answer: Sequence[Any],
    columns: dict[str, Any],
) -> list[float]:
    found = [read(text_of(completion)) for completion in completions]
    wanted = [reference_number(right) for right in answer]
    return graded([mine is not None and mine == right for mine, right in zip(found, wanted, strict=True)], columns)
