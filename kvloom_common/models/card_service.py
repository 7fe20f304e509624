"""ModelCardService: gives cards to the processes that ask, and fetches them from others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import grpc

from kvloom.errors import KvloomError
from kvloom.transport.grpc_errors import abort, from_rpc_error
from kvloom.v1 import model_card_pb2_grpc
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.model_card_pb2 import DESCRIPTOR, GetModelCardRequest, GetModelCardResponse
from kvloom_common.models.model_card import MAX_PACKED_BYTES, ModelCardError, PackedCard

SERVICE_NAME: Final = DESCRIPTOR.services_by_name["ModelCardService"].full_name
CHUNK_BYTES: Final = 2**20
FETCH_TIMEOUT_SECONDS: Final = 60.0
_MAX_SHOWN_CHARS: Final = 128


class ModelCardServicer(model_card_pb2_grpc.ModelCardServiceServicer):
    def __init__(self, find: Callable[[str], PackedCard | None]) -> None:
        """`find` returns the card of a model; None if there is none."""
        self._find = find

    async def GetModelCard(self, request: GetModelCardRequest, context: Any) -> None:
        card = self._find(request.model)
        if card is None or request.checksum not in ("", card.checksum):
            await abort(context, _not_found(request))
        for begin in range(0, len(card.packed), CHUNK_BYTES):
            await context.write(GetModelCardResponse(chunk=card.packed[begin : begin + CHUNK_BYTES]))


async def fetch_card(channel: grpc.aio.Channel, model: str, checksum: str) -> bytes:
    """The packed card of a model from the process at the other end of the channel. Raises KvloomError, and
    ModelCardError if it is too large."""
    request = GetModelCardRequest(model=model, checksum=checksum)
    stub = model_card_pb2_grpc.ModelCardServiceStub(channel)
    packed = bytearray()
    try:
        async for part in stub.GetModelCard(request, timeout=FETCH_TIMEOUT_SECONDS):
            packed += part.chunk
            if len(packed) > MAX_PACKED_BYTES:
                raise ModelCardError(f"the card of {model} has more than {MAX_PACKED_BYTES} bytes")
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    return bytes(packed)


def _not_found(request: GetModelCardRequest) -> KvloomError:
    which = f" with the checksum {request.checksum[:_MAX_SHOWN_CHARS]!r}" if request.checksum else ""
    return KvloomError(
        ErrorReason.ERROR_REASON_MODEL_NOT_FOUND,
        f"This process has no card of the model {request.model[:_MAX_SHOWN_CHARS]!r}{which}.",
        field="model",
    )
