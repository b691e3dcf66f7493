"""Text to tokens and back. No JAX here; transformers is imported only for chat templates and unusual directories."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer, same_tokenizer, vocabulary_size

_EXPORTS = {"Tokenizer": "tokenizer", "same_tokenizer": "tokenizer", "vocabulary_size": "tokenizer"}

__all__ = ["Tokenizer", "same_tokenizer", "vocabulary_size"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
