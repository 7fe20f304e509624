"""Cuts texts into chunks at the borders of paragraphs, sentences and words, as far as these are of use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

AUTO_TOKENS: Final = 800
AUTO_OVERLAP: Final = 400
FILLED: Final = 0.9
"""How much of a chunk is planned to be used: sizes in tokens are estimated."""
SAMPLE_CHARS: Final = 2**16
SAMPLES: Final = 16
ASCII_CHARS_PER_TOKEN: Final = 5
"""Words in Latin script are estimated so. Other characters are a token each, which is what encoders for English make
of them."""
_PIECE: Final = re.compile(r"[A-Za-z]+|\S")


class ChunkSize(NamedTuple):
    """The size of chunks, and how much of it a chunk shares with the one before, in tokens."""

    max_tokens: int
    overlap: int

    def shown(self) -> dict[str, Any]:
        """The strategy, as OpenAI's API shows it."""
        static = {"max_chunk_size_tokens": self.max_tokens, "chunk_overlap_tokens": self.overlap}
        return {"type": "static", "static": static}


def chunk_size(strategy: Mapping[str, Any] | None, window: int) -> ChunkSize:
    """The size that a `chunking_strategy` asks for, as far as the encoder's window (0: not known) has room for it."""
    static = (strategy or {}).get("static") or {}
    wanted, overlap = static.get("max_chunk_size_tokens", AUTO_TOKENS), static.get("chunk_overlap_tokens")
    most = min(wanted, window) if window else wanted
    return ChunkSize(most, min(AUTO_OVERLAP if overlap is None else overlap, most // 2))


def estimated_tokens(text: str) -> int:
    """How many tokens an encoder for English makes of a text, about."""
    pieces = _PIECE.findall(text)
    return sum(-(-len(piece) // ASCII_CHARS_PER_TOKEN) for piece in pieces)


def chars_per_token(text: str) -> float:
    """Estimated from samples of the text."""
    step = max(1, len(text) // SAMPLES)
    length = min(step, SAMPLE_CHARS // SAMPLES)
    sample = "".join(text[first : first + length] for first in range(0, len(text), step))
    return max(1.0, len(sample) / max(1, estimated_tokens(sample)))


def chunks_of(text: str, size: ChunkSize, *, is_markdown: bool = False) -> list[str]:
    """The chunks of a text, in order. Blocks."""
    density = chars_per_token(text) * FILLED
    most, overlap = max(1, int(size.max_tokens * density)), int(size.overlap * density)
    return _cut(text, most, min(overlap, most - 1), is_markdown=is_markdown)


def halves_of(text: str) -> list[str]:
    """A chunk that the encoder has no room for, in two parts or a few more. Blocks."""
    return _cut(text, max(1, -(-len(text) // 2)), 0, is_markdown=False)


def _cut(text: str, most: int, overlap: int, *, is_markdown: bool) -> list[str]:
    from semantic_text_splitter import MarkdownSplitter, TextSplitter

    splitter = MarkdownSplitter if is_markdown else TextSplitter
    return [chunk for chunk in splitter(most, overlap=overlap).chunks(text) if chunk]
