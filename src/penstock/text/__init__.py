"""Text to tokens and back. No JAX here; transformers is imported only for chat templates and unusual directories."""

from typing import TYPE_CHECKING

from penstock.types.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer, same_tokenizer, vocabulary_size

_EXPORTS = {
    "tokenizer": ["Tokenizer", "same_tokenizer", "vocabulary_size"],
}

__all__ = ["Tokenizer", "same_tokenizer", "vocabulary_size"]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
