"""Vectors of texts, by an encoder of the fabric. An edge is asked for them on behalf of the tenant, so that they are
limited and metered as all that the tenant asks for."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1.error_reason_pb2 import ErrorReason
from orchestrator.jobs.edges import RETRIED, EdgeAwayError, Edges

PATH: Final = "/v1/embeddings"
MAX_TEXTS: Final = 32
"""The most texts of one request."""
TOO_LONG: Final = "context_length_exceeded"
"""The code of an error that says that there is no room for a text."""
_PLACE: Final = re.compile(r"input\[(\d+)\]")


class EncoderAwayError(Exception):
    """No edge, or no shard, has given vectors. Another try may get some."""


class EncoderRefusedError(Exception):
    """The encoder does not take these texts. `too_long`: the number of a text that it has no room for."""

    def __init__(self, message: str, too_long: int | None = None) -> None:
        super().__init__(message)
        self.too_long = too_long


class _Error(msgspec.Struct):
    message: str = "no reason was given"
    code: str | None = None
    param: str | None = None


class _Refusal(msgspec.Struct):
    error: _Error


class _Entry(msgspec.Struct):
    embedding: str


class _Vectors(msgspec.Struct):
    data: list[_Entry]


class FabricEncoder:
    """The encoders of a fabric, by the names of their models."""

    def __init__(self, edges: Edges) -> None:
        self._edges = edges

    async def vectors(
        self, tenant: str, key_id: str, model: str, texts: Sequence[str], priority_class: str = ""
    ) -> list[bytes]:
        """The vectors of up to MAX_TEXTS texts, as little-endian float32. Raises EncoderAwayError and
        EncoderRefusedError."""
        body: dict[str, Any] = {"model": model, "input": list(texts), "encoding_format": "base64"}
        try:
            answer = await self._edges.post(
                tenant, key_id, PATH, msgspec.json.encode(body), priority_class=priority_class
            )
        except EdgeAwayError as error:
            raise EncoderAwayError(str(error)) from error
        if answer.status == 200:
            return [base64.b64decode(entry.embedding) for entry in msgspec.json.decode(answer.body, type=_Vectors).data]
        error = error_in(answer.body)
        if answer.status in RETRIED and not answer.is_final:
            raise EncoderAwayError(f"status {answer.status}: {error.message}")
        place = _PLACE.fullmatch(error.param or "") if error.code == TOO_LONG else None
        raise EncoderRefusedError(error.message, None if place is None else int(place[1]))

    async def query_vectors(self, tenant: str, key_id: str, model: str, queries: Sequence[str]) -> list[bytes]:
        """Raises KvloomError (INVALID_ARGUMENT, FAILED_PRECONDITION, ORCHESTRATOR_UNAVAILABLE)."""
        try:
            return await self.vectors(tenant, key_id, model, queries)
        except EncoderAwayError as error:
            raise KvloomError(
                ErrorReason.ERROR_REASON_ORCHESTRATOR_UNAVAILABLE,
                f"The encoder {model!r} of this vector store gives no vectors at the moment.",
                retry_after_seconds=1.0,
            ) from error
        except EncoderRefusedError as error:
            if error.too_long is not None:
                raise invalid_argument(f"query: it is too long for the encoder {model!r}.", "query") from error
            message = f"The encoder {model!r} of this vector store takes no query: {error}"
            raise KvloomError(ErrorReason.ERROR_REASON_FAILED_PRECONDITION, message) from error


def error_in(body: bytes) -> _Error:
    """Reads why an edge has refused a request."""
    try:
        return msgspec.json.decode(body, type=_Refusal).error
    except msgspec.MsgspecError:
        return _Error()
