"""Features of answers that need no more than what routers say at their end. An edge makes one of each that is on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from edge_http.answers.answer import AnswerFeature, EdgeAnswer
from edge_http.wire.headers import cache_use


class CacheUseHeaders(AnswerFeature):
    """Tells if the routers' result cache had the answer."""

    def headers(self, answer: EdgeAnswer, *, has_ended: bool) -> Mapping[str, str]:  # noqa: ARG002
        return cache_use(answer.cache_uses)


class ReceiptDetails(AnswerFeature):
    """Delivers the receipts that routers have signed."""

    def details(self, answer: EdgeAnswer, *, wanted: bool) -> Mapping[str, Any]:  # noqa: ARG002
        receipts = [msgspec.Raw(finish.receipt) for finish in answer.finishes.values() if finish.receipt]
        return {"receipts": receipts} if receipts else {}
