"""The words of texts, as the search by words compares them: without case, accents of compatibility forms and
punctuation. In scripts without spaces between words, each character is one."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import Final

MAX_WORD_CHARS: Final = 64
_NO_SPACES: Final = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD: Final = re.compile(rf"[{_NO_SPACES}]|[^\W_{_NO_SPACES}]+")


def words_of(text: str) -> list[str]:
    found = _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
    return [word[:MAX_WORD_CHARS] for word in found]


class Vocabulary:
    """Numbers words in the order in which they come."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def add(self, words: Iterable[str]) -> list[int]:
        return [self.numbers.setdefault(word, len(self.numbers)) for word in words]

    def known(self, words: Iterable[str]) -> list[int]:
        """Those that are known, each once."""
        return list(dict.fromkeys(self.numbers[word] for word in words if word in self.numbers))
