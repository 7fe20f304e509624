"""The vectors of one call's inputs, as they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence, Set
from typing import Any

import msgspec

from edge_http.answers.answer import EdgeAnswer
from edge_http.formatting.response_formatter import ChoiceFinish
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason, LimitsState
from kvloom.v1.generation_pb2 import TokenLogprobs
from kvloom_common.limits.byte_budget import ByteLease


class EmbeddedInputs(EdgeAnswer):
    """Each input is a request of its own; the choices of the base class are the inputs."""

    __slots__ = ("_cache_uses", "_has_room", "_lease", "_limits", "_num_waited", "receipts", "vectors")

    def __init__(self, input_sizes: Sequence[int], lease: ByteLease) -> None:
        """`input_sizes` are the numbers of tokens. `lease` is the vectors' part of the memory of all answers."""
        super().__init__(input_sizes, 1)
        self._lease = lease
        self._limits: LimitsState | None = None
        self._num_waited = 0
        """How many inputs had to wait until as many others had ended."""
        self._has_room = asyncio.Event()
        self._cache_uses: set[int] = set()
        self.receipts: list[bytes] = []
        """The receipts of the inputs, if the request asked for them: JSON, in the order in which they arrived."""
        self.vectors: list[bytes] = [b""] * len(input_sizes)
        """For each input, packed little-endian float32; complete once the answer has ended without an error."""

    async def wait_room(self) -> None:
        """Return when as many inputs have ended as have waited, this one included, or when the answer has ended."""
        self._num_waited += 1
        while self.num_choices - self.num_open < self._num_waited and not self.ended.done():
            self._has_room.clear()
            await self._has_room.wait()

    def fail(self, error: KvloomError) -> None:
        super().fail(error)
        self._has_room.set()

    @property
    def limits(self) -> LimitsState | None:
        return self._limits

    @property
    def cache_uses(self) -> Set[int]:
        return self._cache_uses

    @property
    def _is_visible(self) -> bool:
        return False

    def _add_start(self, index: int) -> None:
        pass

    def _add_tokens(self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        pass

    def _add_finish(self, index: int, finish: ChoiceFinish) -> None:  # noqa: ARG002
        ended = self.finishes.pop(index)
        if ended.HasField("limits"):
            self._limits = ended.limits
        self._cache_uses.add(ended.result_cache)
        vector = ended.embedding
        if not vector:
            self.fail(KvloomError(ErrorReason.ERROR_REASON_INTERNAL, "The engine gave no embedding."))
            return
        try:
            self._lease.take(len(vector) + len(ended.receipt))
        except KvloomError as error:
            self.fail(error)
            return
        self.vectors[index] = vector
        if ended.receipt:
            self.receipts.append(ended.receipt)
        self._has_room.set()

    def receipt_details(self) -> dict[str, Any] | None:
        """The response's field `kvloom`; None if there are no receipts."""
        return {"receipts": [msgspec.Raw(receipt) for receipt in self.receipts]} if self.receipts else None

    def _complete(self) -> None:
        pass
