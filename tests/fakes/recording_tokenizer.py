"""A tokenizer that notes in whose cache it looks for each text."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvloom_common.text.chat_template import ChatTemplate
from kvloom_common.text.tokenizer import ModelTokenizer
from tests.fakes.tiny_tokenizer import CHATML, byte_level_tokenizer


class RecordingTokenizer(ModelTokenizer):
    """`scopes` has those of all texts that were encoded, in order; `num_pieces` how many pieces no cache had."""

    def __init__(self) -> None:
        super().__init__(byte_level_tokenizer(), template=ChatTemplate(CHATML, {}))
        self._caches.learn()  # now, and not in a thread at some time during a test
        self._has_learned = True
        self.scopes: list[str | None] = []
        self.num_pieces = 0

    async def encode(self, text: str, *, scope: str | None = None, add_special_tokens: bool = False) -> array[int]:
        self.scopes.append(scope)
        return await super().encode(text, scope=scope, add_special_tokens=add_special_tokens)

    def _encode_pieces(self, pieces: Sequence[str]) -> list[list[int]]:
        self.num_pieces += len(pieces)
        return super()._encode_pieces(pieces)
