"""The exact bytes of every token. They make incremental detokenizing independent of a tokenizer's decoder."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any, Final

from tokenizers import Tokenizer

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE: Final = "▁"
_REST_OF_WORD: Final = "##"
MAX_TOKENS: Final = 2**22
"""The tables have an entry per id. The largest vocabularies have a quarter of a million tokens."""


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's map of characters to bytes: printable bytes are represented by themselves, the others by characters from
    U+0100 on (https://github.com/openai/gpt-2, encoder.py, bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


class TokenBytes:
    """Tables by token id, made on first use. The kind of decoder is read from the tokenizer's own description:
    ByteLevel (GPT-2, Llama 3, Qwen, SmolLM), pieces with "▁" for spaces and <0xNN> for bytes (Llama 2, Mistral), or
    words and, with "##" before them, the rest of words (BERT)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def exact(self, token_id: int) -> bytes:
        table = self._exact
        return table[token_id] if token_id < len(table) else b""

    def shown(self, token_id: int) -> bytes:
        return b"" if token_id in self._special_ids else self.exact(token_id)

    @cached_property
    def texts(self) -> list[str | None]:
        """The text of each token; None where its bytes alone are not whole characters."""
        return [_whole_text(self.shown(token_id)) for token_id in range(len(self._exact))]

    @cached_property
    def are_words(self) -> bool:
        """True when tokens are words and parts of words, without the spaces of the text: `exact` has one before each
        word, and only the tokenizer's own decoder knows where there was none."""
        return "WordPiece" in _decoder_kinds(self._decoder)

    @cached_property
    def _decoder(self) -> dict[str, Any] | None:
        """From the tokenizer's description, which takes a second to write for a large one."""
        return json.loads(self._tokenizer.to_str()).get("decoder")

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def _exact(self) -> list[bytes]:
        decoder = self._decoder
        kinds = _decoder_kinds(decoder)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder()
        largest = max(vocabulary.values(), default=-1)
        if largest >= MAX_TOKENS:
            raise ValueError(f"A token has the id {largest}; ids must be below {MAX_TOKENS}.")
        table = [b""] * (largest + 1)
        alphabet = byte_level_alphabet()
        for piece, token_id in vocabulary.items():
            if token_id in added:
                table[token_id] = added[token_id].content.encode()
            elif "ByteLevel" in kinds:
                table[token_id] = _byte_level_bytes(piece, alphabet)
            elif "WordPiece" in kinds:
                table[token_id] = _word_bytes(piece, decoder or {})
            else:
                table[token_id] = _piece_bytes(piece, has_byte_tokens="ByteFallback" in kinds)
        return table


def _decoder_kinds(decoder: dict[str, Any] | None) -> frozenset[str]:
    if decoder is None:
        return frozenset()
    if decoder["type"] == "Sequence":
        return frozenset(inner["type"] for inner in decoder["decoders"])
    return frozenset((decoder["type"],))


def _byte_level_bytes(piece: str, alphabet: dict[str, int]) -> bytes:
    try:
        return bytes(map(alphabet.__getitem__, piece))
    except KeyError:  # not written in the alphabet: the piece represents itself
        return piece.encode()


def _word_bytes(piece: str, decoder: dict[str, Any]) -> bytes:
    prefix = decoder.get("prefix") or _REST_OF_WORD
    return (piece.removeprefix(prefix) if piece.startswith(prefix) else f" {piece}").encode()


def _piece_bytes(piece: str, *, has_byte_tokens: bool) -> bytes:
    match = _BYTE_TOKEN.fullmatch(piece) if has_byte_tokens else None
    if match is not None:
        return bytes.fromhex(match.group(1))
    return piece.replace(_METASPACE, " ").encode()


def _whole_text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
