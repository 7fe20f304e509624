"""Ranks passages again by a model of the fabric, which compares them with the question. An edge is asked for it on
behalf of the tenant, so that it is limited and metered as all that the tenant asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec
import structlog

from orchestrator.jobs.edges import EdgeAwayError, Edges
from orchestrator.metrics import RERANKED
from orchestrator.search.embedding import TOO_LONG, error_in

log = structlog.get_logger()

PATH: Final = "/v1/rerank"
MAX_PASSAGES: Final = 50
"""The most passages that are ranked again for one search: the first of the ranking before."""
MAX_CUTS: Final = 3
"""How often passages for which the model has no room are halved."""


class _Result(msgspec.Struct):
    index: int
    relevance_score: float


class _Ranking(msgspec.Struct):
    results: list[_Result]


class FabricReranker:
    """A model that the fabric serves at /v1/rerank."""

    def __init__(self, edges: Edges, model: str, max_seconds: float) -> None:
        """`max_seconds`: how long a search waits for it."""
        self._edges = edges
        self._model = model
        self._max_seconds = max_seconds

    async def scores(self, tenant: str, key_id: str, query: str, passages: Sequence[str]) -> list[float] | None:
        """How relevant each passage is, from 0 to 1; None if the model has not said so in time, or refuses."""
        try:
            async with asyncio.timeout(self._max_seconds):
                cause, found = await self._asked(tenant, key_id, query, passages)
        except TimeoutError:
            cause, found = "timeout", None
        except EdgeAwayError as error:
            cause, found = str(error), None
        if found is None:
            outcome = "late" if cause == "timeout" else "failed"
            log.info("reranking_failed", model=self._model, tenant=tenant, cause=cause[:200])
        else:
            outcome = "done"
        RERANKED.labels(outcome).inc()
        return found

    async def _asked(
        self, tenant: str, key_id: str, query: str, passages: Sequence[str]
    ) -> tuple[str, list[float] | None]:
        """Why there are no scores, and the scores. Raises EdgeAwayError."""
        for _ in range(MAX_CUTS):
            body = msgspec.json.encode({"model": self._model, "query": query, "documents": passages})
            answer = await self._edges.post(tenant, key_id, PATH, body, priority_class="")
            if answer.status == 200:
                scores = [0.0] * len(passages)
                for result in msgspec.json.decode(answer.body, type=_Ranking).results:
                    scores[result.index] = min(1.0, max(0.0, result.relevance_score))
                return "", scores
            error = error_in(answer.body)
            if error.code != TOO_LONG:
                return f"status {answer.status}: {error.message}", None
            half = max(map(len, passages)) // 2
            passages = [passage[:half] or passage[:1] for passage in passages]
        return "the passages are too long for the model", None
