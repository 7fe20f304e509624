"""Piecewise tokenizing: the exact ids of a long text from the ids of its words and paragraphs, mostly from a cache.

A Hugging Face tokenizer first cuts out its added tokens, then cuts the text between them into pre-tokens, and encodes
each pre-token separately. So wherever a cut is certain, the two sides can be encoded separately. `PieceRules` knows
where, and for which tokenizers:

* before a special token that does not absorb whitespace;
* before a space between two visible ASCII characters: every pre-tokenizer of the GPT-2 kind begins a pre-token there,
  whatever else the text holds, because its expression only looks ahead and no alternative of it has a space after
  anything else;
* between a digit and a visible ASCII character, if the tokenizer encodes digits one by one.

Texts that a caller has sent before (system prompts, documents, the conversation so far) are found as blocks of some
2,000 characters; new texts are found as words, and new numbers as digits. The tokenizer itself encodes what is not
found. How long that takes tells what is in a cache, so each caller has one of its own (tokenization_caches.py), and
callers have only the words of the tokenizer's own vocabulary in common (public_pieces.py).
"""

from __future__ import annotations

import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from tokenizers import Tokenizer

from kvloom.text.token_ids import token_array
from kvloom_common.text.public_pieces import NO_PUBLIC_PIECES, PublicPieces

MAX_WORDS: Final = 200_000
MAX_WORD_CHARS: Final = 48
MAX_BLOCK_BYTES: Final = 64 * 2**20
"""The size of all texts and ids together."""
BLOCK_CHARS: Final = 2048
MIN_PIECEWISE_CHARS: Final = 256
"""Shorter texts are encoded whole, which costs no more."""
BLOCKS_PER_TURN: Final = 8
_OVERHEAD_BYTES: Final = 250
"""The memory that a cached block or piece takes besides its text and ids."""

_CUT: Final = re.compile(r"(?<=[!-~]) (?=[!-~])")
_FUSING: Final = re.compile(r"[!-~] ")
_DIGIT_CUT: Final = re.compile(r"(?<=[!-~])(?=[0-9])|(?<=[0-9])(?=[!-~])")
_WORDS_AND_SIGNS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN_SPLIT: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|" + _WORDS_AND_SIGNS % r"\p{N}"
_KNOWN_SPLITS: Final = frozenset(
    (
        # GPT-2; cl100k and Llama 3; Qwen 2
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|" + _WORDS_AND_SIGNS % r"\p{N}{1,3}",
        _QWEN_SPLIT,
    )
)


class PieceRules:
    """Where a tokenizer's texts can be cut. A text is never cut where that is not known to be safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        description: dict[str, Any] = json.loads(tokenizer.to_str())
        added = [token for token in description["added_tokens"] if token["content"]]
        is_plain = not any(token["single_word"] for token in added)
        raw = [token for token in added if not token["normalized"]]
        cuts = [token["content"] for token in raw if token["special"] and not (token["lstrip"] or token["rstrip"])]
        self._special: re.Pattern[str] | None = None
        self._cuts = frozenset(cuts)
        if is_plain and cuts:
            # With all raw tokens, longest first, this finds the same matches as the tokenizer's leftmost-longest
            # search.
            contents: list[str] = sorted((token["content"] for token in raw), key=len, reverse=True)
            self._special = re.compile(f"({'|'.join(map(re.escape, contents))})")
        self.cuts_words = (
            is_plain
            and _is_byte_preserving(description["normalizer"])
            and _cuts_before_spaces(description["pre_tokenizer"])
            and not description["model"].get("dropout")
            and not any(_FUSING.search(token["content"]) or token["lstrip"] or token["rstrip"] for token in added)
        )
        self.cuts_digits = (
            self.cuts_words
            and any(map(_takes_single_digits, _steps(description["pre_tokenizer"])))
            and not any(_DIGIT_CUT.search(token["content"]) for token in added)
        )

    def blocks(self, text: str) -> list[str]:
        """The parts of a text that can be encoded separately: it is cut before special tokens, and between words into
        blocks of about BLOCK_CHARS. Texts with the same beginning have the same first blocks."""
        sections = self._sections(text)
        if not self.cuts_words or len(text) <= BLOCK_CHARS:
            return sections
        return [block for section in sections for block in _word_blocks(section)]

    def _sections(self, text: str) -> list[str]:
        """The text cut before special tokens. Each section but the first begins with one."""
        if self._special is None:
            return [text]
        parts = self._special.split(text)
        found = parts[:1]
        for token, behind in zip(parts[1::2], parts[2::2], strict=True):
            if token in self._cuts:
                found.append(token + behind)
            else:
                found[-1] += token + behind
        return found if found[0] else found[1:]


class CachedBytes:
    """How many bytes several caches take together."""

    __slots__ = ("num_bytes",)

    def __init__(self) -> None:
        self.num_bytes = 0


class PieceCache:
    """The ids of blocks and words that one caller has sent before, packed (kvloom/text/token_ids.py), beside those that
    are public. Not thread-safe: use it on the event loop."""

    __slots__ = (
        "_blocks",
        "_max_bytes",
        "_max_words",
        "_num_bytes",
        "_others",
        "_public",
        "_rules",
        "_total",
        "_words",
    )

    def __init__(
        self,
        rules: PieceRules,
        max_bytes: int = MAX_BLOCK_BYTES,
        max_words: int = MAX_WORDS,
        public: PublicPieces = NO_PUBLIC_PIECES,
        total: CachedBytes | None = None,
    ) -> None:
        """`total` counts the bytes of this cache as well."""
        self._rules = rules
        self._max_bytes = max_bytes
        self._max_words = max_words
        self._public = public
        self._total = total or CachedBytes()
        self._blocks: OrderedDict[str, bytes] = OrderedDict()
        self._num_bytes = 0
        self._words: dict[str, bytes] = {}
        """By word. The space before a word belongs to its ids, and is left out of the key."""
        self._others: dict[str, bytes] = {}
        """Short pieces that begin with no space: the first of a section, and the digits of a number after the first."""

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def fill(self, encoding: TextEncoding, text: str) -> Iterator[None]:
        """Fill in `encoding` for `text`. Yields after every 100 microseconds or so, to let the event loop run."""
        blocks, parts = self._blocks, encoding.parts
        for number, block in enumerate(self._rules.blocks(text), 1):
            known = blocks.get(block)
            if known is not None:
                blocks.move_to_end(block)
                parts.append((block, known, ()))
            elif self._rules.cuts_words:
                parts.append((block, None, self._pieces(block, encoding)))
            else:
                encoding.miss(block)
                parts.append((block, None, (block,)))
            if not number % BLOCKS_PER_TURN:
                yield

    def shrink(self) -> None:
        """Forget all words, and the half of the blocks that was used least recently."""
        self._forget_pieces()
        for _ in range(-(-len(self._blocks) // 2)):
            self._forget_oldest_block()

    def leave(self) -> None:
        """Forget everything, and no longer count for the other caches. A text that is being encoded is not affected."""
        self._add(-self._num_bytes)
        self._total = CachedBytes()
        self._blocks.clear()
        self._words.clear()
        self._others.clear()

    def note(self, block: str, ids: bytes) -> None:
        """Add a block, and evict the least recently used ones if the cache is full."""
        if block in self._blocks:
            return
        self._blocks[block] = ids
        self._add(_size_bytes(block, ids))
        while self._num_bytes > self._max_bytes and self._blocks:
            self._forget_oldest_block()
        if self._num_bytes > self._max_bytes:
            self._forget_pieces()

    def note_piece(self, piece: str, ids: bytes) -> None:
        """Add a word, or another short piece."""
        if len(piece) > MAX_WORD_CHARS:
            return
        if piece[0] != " ":
            self._remember(self._others, piece, ids)
        elif len(piece) > 1 and _is_word(piece):
            self._remember(self._words, piece[1:], ids)

    def _remember(self, pieces: dict[str, bytes], piece: str, ids: bytes) -> None:
        if len(pieces) >= self._max_words:
            self._forget_pieces()  # rare, and the common words return at once
        if piece not in pieces:
            pieces[piece] = ids
            self._add(_size_bytes(piece, ids))

    def _forget_oldest_block(self) -> None:
        block, its_ids = self._blocks.popitem(last=False)
        self._add(-_size_bytes(block, its_ids))

    def _forget_pieces(self) -> None:
        for pieces in (self._words, self._others):
            self._add(-sum(_size_bytes(piece, its_ids) for piece, its_ids in pieces.items()))
            pieces.clear()

    def _add(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._total.num_bytes += num_bytes

    def _pieces(self, block: str, encoding: TextEncoding) -> list[str | bytes]:
        """The ids of known words, and the texts to be encoded, in order."""
        words = block.split(" ")
        known: list[bytes | None] = list(map(self._words.get, words, map(self._public.words.get, words)))  # pyrefly: ignore[bad-assignment]
        known[0] = None  # it has no space before it, so it is not a word
        found: list[str | bytes] = []
        begin, num_words = int(not words[0]), len(words)
        # Known words begin and end with a visible character: there is a cut between two of them.
        while begin < num_words:
            if known[begin] is not None:
                end = _index_of_none(known, begin)
                found.append(b"".join(known[begin:end]))  # pyrefly: ignore[bad-argument-type]  (none is None)
            else:
                end = begin + 1
                while end < num_words and not (
                    _ends_visible(words[end - 1]) and (known[end] is not None or _begins_visible(words[end]))
                ):
                    end += 1
                piece = " ".join(words[begin:end])
                found += self._split_unknown(piece if begin == 0 else " " + piece, encoding)
            begin = end
        return found

    def _split_unknown(self, piece: str, encoding: TextEncoding) -> Iterator[str | bytes]:
        """A piece that is not a known word may still consist of digits, or be the usual beginning of a section."""
        parts = _DIGIT_CUT.split(piece) if self._rules.cuts_digits else [piece]
        known: list[bytes | None] = list(map(self._others.get, parts, map(self._public.others.get, parts)))  # pyrefly: ignore[bad-assignment]
        if piece[0] == " ":
            word = parts[0][1:]
            known[0] = self._words.get(word) or self._public.words.get(word)
        for part, ids in zip(parts, known, strict=True):
            if ids is None:
                encoding.miss(part)
                yield part
            else:
                yield ids


class TextEncoding:
    """A text that is being encoded. The caller encodes `misses` and passes the result to `ids`."""

    def __init__(self, cache: PieceCache) -> None:
        self._cache = cache
        self.parts: list[tuple[str, bytes | None, Sequence[str | bytes]]] = []
        """(block, its ids if they are cached, its pieces)."""
        self.misses: dict[str, None] = {}
        self.num_missing_chars = 0
        self._new: dict[str | bytes, bytes] = {}
        self._found: list[bytes] = []
        self.is_new = False
        """True when a part of it was not in the cache, and now is."""

    def miss(self, piece: str) -> None:
        """Note that a piece must be encoded."""
        if piece not in self.misses:
            self.misses[piece] = None
            self.num_missing_chars += len(piece)

    def ids(self, encoded: Sequence[Sequence[int]]) -> array[int]:
        """All ids of the text, which is added to the cache. `encoded`: the ids of each of the misses."""
        self.take(self.misses, encoded)
        for _ in self.join():
            pass
        return self.joined()

    def take(self, pieces: Iterable[str], encoded: Sequence[Sequence[int]]) -> None:
        """Note the ids of some of the misses."""
        for piece, its_ids in zip(pieces, encoded, strict=True):
            self._new[piece] = packed = token_array(its_ids).tobytes()
            self._cache.note_piece(piece, packed)

    def join(self) -> Iterator[None]:
        """Put the ids of all blocks together, once those of the misses are known, and add the blocks to the cache.
        Yields as `PieceCache.fill` does."""
        new, found = self._new, self._found
        for block, known, pieces in self.parts:
            if known is None:
                self.is_new = True
                # A piece that was not encoded just now is its packed ids already.
                known = b"".join(map(new.get, pieces, pieces))  # pyrefly: ignore[bad-argument-type]
                self._cache.note(block, known)
                if not (len(found) + 1) % BLOCKS_PER_TURN:
                    yield
            found.append(known)

    def joined(self) -> array[int]:
        """All ids of the text, after `join`."""
        return array("I", b"".join(self._found))


def _index_of_none(known: Sequence[bytes | None], begin: int) -> int:
    """The index of the first None from `begin` on; the length if there is none."""
    try:
        return known.index(None, begin)
    except ValueError:
        return len(known)


def _word_blocks(section: str) -> Iterator[str]:
    begin = 0
    while len(section) - begin > BLOCK_CHARS:
        cut = _CUT.search(section, begin + BLOCK_CHARS)
        if cut is None:
            break
        yield section[begin : cut.start()]
        begin = cut.start()
    yield section[begin:]


def _begins_visible(word: str) -> bool:
    return bool(word) and "!" <= word[0] <= "~"


def _ends_visible(word: str) -> bool:
    return bool(word) and "!" <= word[-1] <= "~"


def _is_word(piece: str) -> bool:
    return piece[0] == " " and "!" <= piece[1] <= "~" and "!" <= piece[-1] <= "~" and " " not in piece[1:]


def _size_bytes(block: str, ids: bytes) -> int:
    return len(block) + len(ids) + _OVERHEAD_BYTES


def _is_byte_preserving(normalizer: dict[str, Any] | None) -> bool:
    """True when the normalizer changes no visible ASCII character and no space, and combines no text across one."""
    if normalizer is None:
        return True
    if normalizer["type"] == "Sequence":
        return all(map(_is_byte_preserving, normalizer["normalizers"]))
    return normalizer["type"] == "NFC"


def _steps(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    if pre_tokenizer is None:
        return []
    return pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]


def _cuts_before_spaces(pre_tokenizer: dict[str, Any] | None) -> bool:
    cuts = False
    for step in _steps(pre_tokenizer):
        match step:
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}:
                cuts = cuts or use_regex
            case {"type": "Digits"}:
                pass
            case {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}:
                if expression not in _KNOWN_SPLITS:
                    return False
                cuts = True
            case _:
                return False
    return cuts


def _takes_single_digits(step: dict[str, Any]) -> bool:
    return (step["type"] == "Digits" and step["individual_digits"]) or (
        step["type"] == "Split" and step["pattern"].get("Regex") == _QWEN_SPLIT
    )
