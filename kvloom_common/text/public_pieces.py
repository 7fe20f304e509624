"""The words that the tokenization caches of all callers have in common: those of the tokenizer's own vocabulary.

Everybody knows them, and they never change with what anybody sends, so that finding one tells no caller anything about
another. Everything else that a process remembers of texts is kept for each caller by itself.
"""

from __future__ import annotations

import re
from typing import Final

from tokenizers import Tokenizer

from kvloom.text.token_ids import token_array

MAX_PUBLIC_WORDS: Final = 8192
"""Encoding so many takes about 20 ms."""
_MAX_IDS: Final = 65_536
"""Words are looked for among so many tokens, most frequent ones first."""
_WORD_TOKEN: Final = re.compile("\u0120([!-~]+)")
"""A token of a byte-level vocabulary that is a word of visible ASCII with the space before it."""
_DIGITS: Final = "0123456789"


class PublicPieces:
    """The ids of words (without the space before them, which belongs to the ids) and of digits, packed."""

    __slots__ = ("others", "words")

    def __init__(self) -> None:
        self.words: dict[str, bytes] = {}
        self.others: dict[str, bytes] = {}

    def learn(self, tokenizer: Tokenizer) -> None:
        """Add the most frequent words of a byte-level vocabulary. May run in a thread of its own."""
        tokens = map(tokenizer.id_to_token, range(min(tokenizer.get_vocab_size(with_added_tokens=False), _MAX_IDS)))
        matches = (match for token in tokens if token and (match := _WORD_TOKEN.fullmatch(token)))
        words = [match[1] for match, _ in zip(matches, range(MAX_PUBLIC_WORDS), strict=False)]
        encoded = tokenizer.encode_batch_fast([*(f" {word}" for word in words), *_DIGITS], add_special_tokens=False)
        packed = [token_array(encoding.ids).tobytes() for encoding in encoded]
        self.words.update(zip(words, packed, strict=False))
        self.others.update(zip(_DIGITS, packed[len(words) :], strict=True))


NO_PUBLIC_PIECES: Final = PublicPieces()


def without_own_cache(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, which from now on remembers no text: the library keeps the first 10,000 words that it sees, and
    encodes those faster, whoever sends them."""
    model = tokenizer.model
    if hasattr(model, "_clear_cache"):  # BPE and Unigram; other models have none
        model._clear_cache()
        model._resize_cache(0)
    return tokenizer
