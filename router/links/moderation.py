"""Moderation: which categories of the safety policy texts belong to, for clients over gRPC and for edges."""

from __future__ import annotations

from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import ModerateRequest, ModerateResponse
from kvloom.v1.safety_service_pb2 import ClassifyRequest
from router.links.safety_link import SafetyLink


class ModerationLink:
    """Asks the safety service. Nothing is blocked: the caller learns what the policy says."""

    def __init__(self, safety: SafetyLink | None) -> None:
        """`safety` is None when none is configured."""
        self._safety = safety

    async def moderate(self, request: ModerateRequest) -> ModerateResponse:
        """Raises KvloomError (INVALID_ARGUMENT, SAFETY_UNAVAILABLE, REQUEST_TOO_LARGE)."""
        if not request.texts:
            raise invalid_argument("texts must hold at least one text.", "texts")
        if self._safety is None:
            message = "This fabric has no safety service, which moderations need (docs/operate/safety.md)."
            raise KvloomError(ErrorReason.ERROR_REASON_SAFETY_UNAVAILABLE, message)
        wanted = ClassifyRequest(texts=request.texts)
        if request.HasField("mask"):
            wanted.mask.CopyFrom(request.mask)
        if request.HasField("check"):
            wanted.check.CopyFrom(request.check)
        found = await self._safety.classify(wanted)
        return ModerateResponse(
            results=found.results, categories=found.categories, policy_revision=found.policy_revision
        )
