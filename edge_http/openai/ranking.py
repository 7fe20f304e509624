"""The bodies of POST /v1/rerank, in the shape of Cohere and Jina, and of POST /v1/score, in vLLM's. Scores are the
cosine similarities of embeddings."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Mapping, Sequence
from operator import mul
from typing import Any, Final

from edge_http.formatting.body_fields import LENIENT, NO_HEADERS, BodyReader, FieldRules
from edge_http.openai.embeddings import check_num_inputs, shortened
from edge_http.openai.requests import Body, FallbackModels, OpenStruct
from kvloom.errors import invalid_argument


class Document(OpenStruct, kw_only=True):
    text: str


class RerankBody(Body, kw_only=True):
    model: str
    models: FallbackModels = None
    query: str
    documents: list[str | Document]
    top_n: int | None = None
    """How many of the best documents are returned. The default is all."""
    return_documents: bool | None = None
    """If true, the results have the texts of their documents. The default is false."""
    user: str | None = None
    """Without effect."""


class ScoreBody(Body, kw_only=True):
    """The texts of the two fields are compared in pairs; one text is compared with each of the others."""

    model: str
    models: FallbackModels = None
    text_1: str | list[str]
    text_2: str | list[str]
    user: str | None = None
    """Without effect."""


def decode_rerank(raw: bytes, rules: FieldRules = LENIENT, headers: Mapping[str, str] = NO_HEADERS) -> RerankBody:
    """Decode a body. Raises KvloomError (INVALID_ARGUMENT) that names the field."""
    body = _RERANK.read(raw, rules, headers)
    if not body.documents:
        raise invalid_argument("documents must not be empty.", "documents")
    check_num_inputs(len(body.documents), "documents")
    if body.top_n is not None and body.top_n < 1:
        raise invalid_argument("top_n must be at least 1.", "top_n")
    return body


def decode_score(raw: bytes, rules: FieldRules = LENIENT, headers: Mapping[str, str] = NO_HEADERS) -> ScoreBody:
    """Decode a body. Raises KvloomError (INVALID_ARGUMENT) that names the field."""
    body = _SCORE.read(raw, rules, headers)
    for field in ("text_1", "text_2"):
        texts = getattr(body, field)
        if not texts:
            raise invalid_argument(f"{field} must not be empty.", field)
        if isinstance(texts, list):
            check_num_inputs(len(texts), field)
    first, second = as_list(body.text_1), as_list(body.text_2)
    if len(first) != len(second) and 1 not in (len(first), len(second)):
        message = f"text_1 has {len(first)} texts and text_2 {len(second)}: give as many, or one of one of them."
        raise invalid_argument(message, "text_2")
    return body


def document_texts(body: RerankBody) -> list[str]:
    return [document if isinstance(document, str) else document.text for document in body.documents]


def document_fields(body: RerankBody) -> list[str]:
    """The places of the texts in the body."""
    return [
        f"documents[{i}]" if isinstance(document, str) else f"documents[{i}].text"
        for i, document in enumerate(body.documents)
    ]


def as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def text_fields(texts: str | list[str], field: str) -> list[str]:
    """The places of the texts in the body."""
    return [field] if isinstance(texts, str) else [f"{field}[{i}]" for i in range(len(texts))]


def unit_vector(vector: bytes) -> array[float]:
    """An embedding that the engine has scaled to the length 1."""
    return shortened(vector, None, normalize=True)


def cosine(first: array[float], second: array[float]) -> float:
    """The cosine similarity of two vectors of the length 1. Rounding cannot make it leave -1 to 1."""
    return max(-1.0, min(1.0, math.fsum(map(mul, first, second))))


def probability(logit: bytes) -> float:
    """How likely a cross-encoder finds a pair relevant, by its logit."""
    [value] = shortened(logit, None, normalize=False)
    return 1.0 / (1.0 + math.exp(-max(-700.0, value)))


def rerank_response(
    body: RerankBody, scores: Sequence[float], response_id: str, model: str, num_prompt_tokens: int
) -> dict[str, Any]:
    """The best documents first; equal ones in their order."""
    ranking = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: body.top_n]
    texts = document_texts(body) if body.return_documents else None
    results: list[dict[str, Any]] = []
    for index in ranking:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if texts is not None:
            result["document"] = {"text": texts[index]}
        results.append(result)
    return {
        "id": response_id,
        "object": "list",
        "model": model,
        "results": results,
        "usage": {"prompt_tokens": num_prompt_tokens, "total_tokens": num_prompt_tokens},
    }


def score_response(scores: Sequence[float], response_id: str, model: str, num_prompt_tokens: int) -> dict[str, Any]:
    return {
        "id": response_id,
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)],
        "usage": {"prompt_tokens": num_prompt_tokens, "total_tokens": num_prompt_tokens},
    }


_RERANK: Final = BodyReader(RerankBody)
_SCORE: Final = BodyReader(ScoreBody)
