"""Arithmetic expressions, read without evaluating them as code: by a small parser, exact and bounded.

Grammar: sums of products of numbers and parentheses, with ``+ - * /`` and unary minus. No powers, so the size of a
result is bounded by the length of the expression.
"""

import re
from fractions import Fraction

MAX_CHARACTERS = 64
_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d+)?)|([-+*/()]))")


class CalculationError(ValueError):
    """The text is no expression, is too long, or divides by zero."""


def calculate(expression: str) -> Fraction:
    """The exact value of an expression.

    Raises:
        CalculationError: saying what is wrong with it.
    """
    if len(expression) > MAX_CHARACTERS:
        raise CalculationError(f"longer than {MAX_CHARACTERS} characters")
    parser = _Parser(_tokens(expression))
    value = parser.sum()
    if parser.next is not None:
        raise CalculationError(f"unexpected {parser.next!r}")
    return value


def show_number(value: Fraction) -> str:
    """An integer in full, anything else with at most six decimals."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.6f}".rstrip("0").rstrip(".")


def _tokens(expression: str) -> list[str]:
    tokens: list[str] = []
    position = 0
    text = expression.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise CalculationError(f"unexpected {text[position:].lstrip()[:1]!r}")
        tokens.append(match.group(1) or match.group(2))
        position = match.end()
    return tokens


class _Parser:
    """Recursive descent; its depth is bounded by the expression's length."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._position = 0

    @property
    def next(self) -> str | None:
        """The token to be read, or None at the end."""
        return self._tokens[self._position] if self._position < len(self._tokens) else None

    def sum(self) -> Fraction:
        value = self._product()
        while self.next in ("+", "-"):
            value = value + self._product() if self._take() == "+" else value - self._product()
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while self.next in ("*", "/"):
            if self._take() == "*":
                value *= self._factor()
            else:
                divisor = self._factor()
                if divisor == 0:
                    raise CalculationError("division by zero")
                value /= divisor
        return value

    def _factor(self) -> Fraction:
        token = self._take()
        if token == "-":
            return -self._factor()
        if token == "(":
            value = self.sum()
            if self._take() != ")":
                raise CalculationError("a parenthesis is not closed")
            return value
        if not token[0].isdigit():
            raise CalculationError(f"unexpected {token!r}")
        return Fraction(token)

    def _take(self) -> str:
        token = self.next
        if token is None:
            raise CalculationError("the expression ends too early")
        self._position += 1
        return token
