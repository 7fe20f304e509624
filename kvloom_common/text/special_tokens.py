"""Keeps special tokens in a message's content plain text: a user must not be able to end their own turn.

The tokenizer turns the string "<|im_end|>" into a control token everywhere, including in text that a user typed.
Therefore (1) before the template runs, such strings in contents are broken up by a private-use character that does not
occur in the conversation (`mark`). (2) In the rendered text, the special strings that are still whole come from the
template. They are replaced by aliases that no user can guess, the marks are removed, and the whole text is encoded in
one call by a twin of the tokenizer that knows only the aliases (`AliasedEncoder`). The rest of the twin (normaliser,
pre-tokeniser, model, the tokens' strip flags) equals the original, so that for contents without special strings the
result is the plain encoding, id for id.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from tokenizers import Tokenizer

from kvloom.errors import invalid_argument
from kvloom_common.text.public_pieces import without_own_cache

_PRIVATE_USE: Final = range(0xE000, 0xF900)
_ALIAS_BRACKET: Final = "\U0010fffd"


class SpecialStrings:
    """The strings that the tokenizer parses as special tokens."""

    def __init__(self, strings: Iterable[str]) -> None:
        self._strings = sorted(filter(None, strings), key=len, reverse=True)
        # Longest first: an alternation matches the first that fits, and the tokenizer the longest.
        self._pattern = re.compile("|".join(map(re.escape, self._strings)) if self._strings else r"(?!)")
        self._max_chars = max(map(len, self._strings), default=0)
        firsts = {text[0] for text in self._strings}
        self._first = re.compile(f"[{re.escape(''.join(sorted(firsts)))}]" if firsts else r"(?!)")
        self._prefixes = frozenset(text[:length] for text in self._strings for length in range(1, len(text)))

    @property
    def strings(self) -> Sequence[str]:
        return self._strings

    def mark(self, contents: Sequence[str]) -> tuple[list[str], str]:
        """The contents with every special string broken up by a mark after its first character, and the mark.

        A string that only begins at the end of a content, and might be completed by the template's next text, is broken
        up too. The mark is "" when no string had to be broken up.
        """
        positions = [self._positions(content) for content in contents]
        if not any(positions):
            return list(contents), ""
        mark = _unused_character(contents)
        return [_insert(text, at, mark) for text, at in zip(contents, positions, strict=True)], mark

    def replace(self, text: str, aliases: dict[str, str]) -> str:
        return self._pattern.sub(lambda match: aliases[match.group()], text)

    def _positions(self, content: str) -> list[int]:
        if self._first.search(content) is None:  # true for nearly all contents
            return []
        found: set[int] = set()
        match = self._pattern.search(content)
        while match is not None:
            found.add(match.start() + 1)
            # Search from the next character on: an overlapping string would survive the break of this one.
            match = self._pattern.search(content, match.start() + 1)
        stripped = content.rstrip()  # many templates trim contents
        for text in (content, stripped):
            if self._first.search(text, max(0, len(text) - self._max_chars)) is None:
                continue  # no string begins so close to the end
            for length in range(1, min(self._max_chars, len(text) + 1)):
                if text[len(text) - length :] in self._prefixes:
                    found.add(len(text) - length + 1)
        return sorted(found)


class AliasedEncoder:
    """A twin of a tokenizer that recognises special tokens only by secret aliases. Building it loads the tokenizer once
    more, so it is made when first needed."""

    def __init__(self, tokenizer: Tokenizer, strings: SpecialStrings) -> None:
        self._strings = strings
        self._nonce = secrets.token_hex(8)
        description = json.loads(tokenizer.to_str())
        self._aliases: dict[str, str] = {}
        real_ids: dict[str, int] = {}
        for entry in description["added_tokens"]:
            content = entry["content"]
            if entry["special"] and content:
                self._aliases[content] = f"{_ALIAS_BRACKET}{self._nonce}{len(self._aliases)}{_ALIAS_BRACKET}"
                entry["content"] = self._aliases[content]
            real_ids[entry["content"]] = entry["id"]
        self._twin = without_own_cache(Tokenizer.from_str(json.dumps(description)))
        # The twin renumbers its added tokens where the model's own vocabulary does not contain them.
        self._real_ids = {self._twin.token_to_id(content): real_id for content, real_id in real_ids.items()}
        special_ids = frozenset(real_ids[alias] for alias in self._aliases.values())
        self._spelled_out_ids = special_ids - self._real_ids.keys()
        """Control tokens with their real ids. The twin can only produce them from ordinary text, by its model."""

    def encode(self, text: str, mark: str) -> list[int]:
        """The ids of a rendered text, in which `mark` breaks up the strings that are not special tokens. Raises
        KvloomError (INVALID_ARGUMENT)."""
        aliased = self._strings.replace(text, self._aliases).replace(mark, "")
        ids: list[int] = self._twin.encode_batch_fast([aliased], add_special_tokens=False)[0].ids
        if not self._spelled_out_ids.isdisjoint(ids):
            # This vocabulary has the control token as an ordinary piece, so it cannot be encoded as plain text.
            raise invalid_argument("The content holds a control token of the model.", "messages")
        real_ids = self._real_ids
        return [real_ids.get(token_id, token_id) for token_id in ids]


def texts_in(value: Any) -> list[str]:
    """All strings in a JSON value, keys included, in a fixed order."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for key, child in value.items() for text in (key, *texts_in(child))]
    if isinstance(value, list | tuple):
        return [text for child in value for text in texts_in(child)]
    return []


def with_texts(value: Any, texts: Iterator[str]) -> Any:
    """The value with its strings replaced, in the order of `texts_in`."""
    if isinstance(value, str):
        return next(texts)
    if isinstance(value, Mapping):
        make: Any = type(value)  # a dictionary, or one that a template can also use as text
        return make((next(texts), with_texts(child, texts)) for child in value.values())
    if isinstance(value, list | tuple):
        children = [with_texts(child, texts) for child in value]
        return children if isinstance(value, list) else tuple(children)
    return value


def _insert(text: str, positions: Sequence[int], mark: str) -> str:
    pieces: list[str] = []
    start = 0
    for position in positions:
        pieces.append(text[start:position])
        start = position
    pieces.append(text[start:])
    return mark.join(pieces)


def _unused_character(contents: Sequence[str]) -> str:
    used = set().union(*contents)
    for code in _PRIVATE_USE:
        if chr(code) not in used:
            return chr(code)
    raise invalid_argument("The messages hold every private-use character.", "messages")
