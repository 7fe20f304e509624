"""An answer as it is kept: token ids and how each choice ended. Its text follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from kvloom.text.token_ids import pack_token_ids, unpack_token_ids
from kvloom.v1.generation_pb2 import FinishReason
from router.core.actions import CompletedChoice
from router.core.frames import Finish


class StoredChoice(msgspec.Struct, frozen=True, array_like=True):
    packed_token_ids: bytes
    num_chars: int
    """The characters of its text, by which a tokenizer that makes another text of the tokens is noticed."""
    reason: int
    num_cached_tokens: int
    stop_string: str = ""
    num_predicted_tokens: int = 0
    num_accepted_predicted_tokens: int = 0
    embedding: bytes = b""

    @property
    def token_ids(self) -> Sequence[int]:
        return unpack_token_ids(self.packed_token_ids)

    @property
    def finish(self) -> Finish:
        """Its slot is not used."""
        return Finish(
            0,
            FinishReason.ValueType(self.reason),
            num_cached_tokens=self.num_cached_tokens,
            stop_string=self.stop_string,
            num_predicted_tokens=self.num_predicted_tokens,
            num_accepted_predicted_tokens=self.num_accepted_predicted_tokens,
            embedding=self.embedding,
        )


_decoder: Final = msgspec.msgpack.Decoder(list[StoredChoice])


def encode_answer(choices: Sequence[CompletedChoice]) -> bytes:
    """The choices in the order of their indexes."""
    return msgspec.msgpack.encode([_stored(choice) for choice in sorted(choices, key=lambda choice: choice.index)])


def decode_answer(encoded: bytes) -> list[StoredChoice]:
    """Raises msgspec.MsgspecError, ValueError."""
    return _decoder.decode(encoded)


def _stored(choice: CompletedChoice) -> StoredChoice:
    finish = choice.finish
    return StoredChoice(
        pack_token_ids(choice.token_ids),
        choice.num_chars,
        int(finish.reason),
        finish.num_cached_tokens,
        finish.stop_string,
        finish.num_predicted_tokens,
        finish.num_accepted_predicted_tokens,
        finish.embedding,
    )
