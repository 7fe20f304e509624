"""POST /v1/rerank and POST /v1/score: how similar texts are, by the cosine of their embeddings, or by a cross-encoder,
which reads each pair of them as one text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

from aiohttp import web

from edge_http.answers.embedded_inputs import EmbeddedInputs
from edge_http.edge import Edge
from edge_http.endpoints.embedding import EmbeddingApi, serve_embedding
from edge_http.endpoints.embedding_body import EmbeddingJob
from edge_http.formatting.json_bytes import Buffer, encode_json
from edge_http.offered_models import CROSS_ENCODE
from edge_http.openai.embeddings import pair_prompts, text_prompts
from edge_http.openai.ranking import (
    RerankBody,
    ScoreBody,
    as_list,
    cosine,
    decode_rerank,
    decode_score,
    document_fields,
    document_texts,
    probability,
    rerank_response,
    score_response,
    text_fields,
    unit_vector,
)
from edge_http.wire.fair_yield import LONG_BODY_BYTES
from edge_http.wire.request_headers import headers_of
from kvloom.v1.generation_pb2 import Pooling
from kvloom.v1.router_service_pb2 import GenerateRequest
from kvloom_common.models.served_model import ServedModel

PAIRS_IN_A_ROW: Final = 8
"""How many scores are computed before other streams have their turn: about half a millisecond."""


async def rerank(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve POST /v1/rerank."""
    return await serve_embedding(edge, request, _RERANK)


async def score(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve POST /v1/score."""
    return await serve_embedding(edge, request, _SCORE)


async def _rerank_job(edge: Edge, request: web.BaseRequest, body: RerankBody, model: ServedModel) -> EmbeddingJob:
    """Validate and tokenize a body. Raises KvloomError."""
    texts, fields = [body.query, *document_texts(body)], ["query", *document_fields(body)]
    scope = edge.callers.cache_scope_of(request)
    if _is_cross_encoder(edge, model):
        pairs = [(body.query, text) for text in texts[1:]]

        def ranked(scores: Sequence[float], response_id: str, num_tokens: int) -> dict[str, Any]:
            return rerank_response(body, scores, response_id, model.name, num_tokens)

        return await _pairs_job(edge, request, model, pairs, fields[1:], ranked)
    prompts = await text_prompts(texts, fields, model.tokenizer, edge.models.window(model.name), scope=scope)

    async def pieces(inputs: EmbeddedInputs, response_id: str) -> AsyncIterator[Buffer]:
        query = unit_vector(inputs.vectors[0])
        scores: list[float] = []
        for number, vector in enumerate(inputs.vectors[1:], 1):
            scores.append(cosine(query, unit_vector(vector)))
            if number % PAIRS_IN_A_ROW == 0:
                await edge.admission.fair_yield.take(LONG_BODY_BYTES)
        response = rerank_response(body, scores, response_id, model.name, inputs.num_prompt_tokens)
        yield encode_json(_with_details(response, inputs))

    return EmbeddingJob(
        prompts, pieces, asked=headers_of(request), model=model, wanted=GenerateRequest(pooling=Pooling())
    )


async def _score_job(edge: Edge, request: web.BaseRequest, body: ScoreBody, model: ServedModel) -> EmbeddingJob:
    """Validate and tokenize a body. Raises KvloomError."""
    first, second = as_list(body.text_1), as_list(body.text_2)
    fields = [*text_fields(body.text_1, "text_1"), *text_fields(body.text_2, "text_2")]
    scope = edge.callers.cache_scope_of(request)
    if _is_cross_encoder(edge, model):
        count = max(len(first), len(second))
        pairs = [(first[index % len(first)], second[index % len(second)]) for index in range(count)]
        places = fields[len(first) :] if len(second) == count else fields[: len(first)]

        def scored(scores: Sequence[float], response_id: str, num_tokens: int) -> dict[str, Any]:
            return score_response(scores, response_id, model.name, num_tokens)

        return await _pairs_job(edge, request, model, pairs, places, scored)
    prompts = await text_prompts(
        [*first, *second], fields, model.tokenizer, edge.models.window(model.name), scope=scope
    )

    async def pieces(inputs: EmbeddedInputs, response_id: str) -> AsyncIterator[Buffer]:
        lefts, rights = inputs.vectors[: len(first)], inputs.vectors[len(first) :]
        num_pairs = max(len(lefts), len(rights))
        scores: list[float] = []
        for index in range(num_pairs):
            left, right = lefts[index % len(lefts)], rights[index % len(rights)]
            scores.append(cosine(unit_vector(left), unit_vector(right)))
            if index % PAIRS_IN_A_ROW == PAIRS_IN_A_ROW - 1:
                await edge.admission.fair_yield.take(LONG_BODY_BYTES)
        response = score_response(scores, response_id, model.name, inputs.num_prompt_tokens)
        yield encode_json(_with_details(response, inputs))

    return EmbeddingJob(
        prompts, pieces, asked=headers_of(request), model=model, wanted=GenerateRequest(pooling=Pooling())
    )


def _is_cross_encoder(edge: Edge, model: ServedModel) -> bool:
    info = edge.models.info(model.name)
    return info is not None and CROSS_ENCODE in info.capabilities


async def _pairs_job(
    edge: Edge,
    request: web.BaseRequest,
    model: ServedModel,
    pairs: Sequence[tuple[str, str]],
    fields: Sequence[str],
    respond: Callable[[Sequence[float], str, int], dict[str, Any]],
) -> EmbeddingJob:
    """`respond` makes the response of the scores, its id and the number of tokens. Raises KvloomError."""
    scope = edge.callers.cache_scope_of(request)
    prompts = await pair_prompts(pairs, fields, model.tokenizer, edge.models.window(model.name), scope=scope)

    async def pieces(inputs: EmbeddedInputs, response_id: str) -> AsyncIterator[Buffer]:
        scores = [probability(vector) for vector in inputs.vectors]
        yield encode_json(_with_details(respond(scores, response_id, inputs.num_prompt_tokens), inputs))

    wanted = GenerateRequest(pooling=Pooling())
    return EmbeddingJob(prompts, pieces, asked=headers_of(request), model=model, wanted=wanted)


def _with_details(response: dict[str, Any], inputs: EmbeddedInputs) -> dict[str, Any]:
    details = inputs.receipt_details()
    return response if details is None else {**response, "kvloom": details}


_RERANK: Final[EmbeddingApi[RerankBody]] = EmbeddingApi(
    name="rerank",
    id_prefix="rerank-",
    use="rerank",
    decode=decode_rerank,
    make_job=_rerank_job,
    user_text=lambda body: body.query,
)
_SCORE: Final[EmbeddingApi[ScoreBody]] = EmbeddingApi(
    name="score",
    id_prefix="score-",
    use="score",
    decode=decode_score,
    make_job=_score_job,
    user_text=lambda body: body.text_1 if isinstance(body.text_1, str) else "",
)
