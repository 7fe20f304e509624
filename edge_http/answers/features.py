"""AnswerFeature is the interface of what adds to answers and is off by default. An edge has one of each that is on, so
that the way of a request names none of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from edge_http.answers.answer import EdgeAnswer
from edge_http.wire.headers import cache_use

if TYPE_CHECKING:
    from edge_http.edge import Edge
    from edge_http.endpoints.generation_job import GenerationJob


class AnswerFeature:
    """Adds nothing: each feature overrides what it needs."""

    def begin(self, edge: Edge, request: web.BaseRequest, job: GenerationJob, answer: EdgeAnswer) -> None:
        """Called before the job is submitted."""

    def headers(self, answer: EdgeAnswer, *, has_ended: bool) -> Mapping[str, str]:  # noqa: ARG002
        """Returns headers of the response. That of a stream is sent at its start, any other one once it `has_ended`."""
        return {}

    def details(self, answer: EdgeAnswer, *, wanted: bool) -> Mapping[str, Any]:  # noqa: ARG002
        """Returns what the field `kvloom` of the answer tells; `wanted`: the client asks for such details."""
        return {}


class CacheUseHeaders(AnswerFeature):
    """Tells if the routers' result cache had the answer."""

    def headers(self, answer: EdgeAnswer, *, has_ended: bool) -> Mapping[str, str]:  # noqa: ARG002
        return cache_use(answer.cache_uses)


class ReceiptDetails(AnswerFeature):
    """Delivers the receipts that routers have signed."""

    def details(self, answer: EdgeAnswer, *, wanted: bool) -> Mapping[str, Any]:  # noqa: ARG002
        receipts = [msgspec.Raw(finish.receipt) for finish in answer.finishes.values() if finish.receipt]
        return {"receipts": receipts} if receipts else {}


def begin_features(
    features: Sequence[AnswerFeature], edge: Edge, request: web.BaseRequest, job: GenerationJob, answer: EdgeAnswer
) -> None:
    """Let each of the features add to the answer."""
    answer.features = features
    for feature in features:
        feature.begin(edge, request, job, answer)
