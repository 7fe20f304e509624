"""POST /v1/embeddings: vectors of texts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from aiohttp import web

from edge_http.answers.embedded_inputs import EmbeddedInputs
from edge_http.edge import Edge
from edge_http.endpoints.embedding import EmbeddingApi, serve_embedding
from edge_http.endpoints.embedding_body import EmbeddingJob
from edge_http.formatting.json_bytes import Buffer
from edge_http.openai.embeddings import (
    EmbeddingsBody,
    check_dimensions,
    decode_embeddings,
    input_prompts,
    pooling_of,
    response_pieces,
)
from edge_http.wire.request_headers import headers_of
from kvloom.v1.router_service_pb2 import GenerateRequest
from kvloom_common.models.served_model import ServedModel


async def embeddings(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve POST /v1/embeddings."""
    return await serve_embedding(edge, request, _API)


async def _job(edge: Edge, request: web.BaseRequest, body: EmbeddingsBody, model: ServedModel) -> EmbeddingJob:
    """Validate and tokenize a body. Raises KvloomError."""
    info = edge.models.info(model.name)
    check_dimensions(body.dimensions, info.embedding_size if info is not None else 0)
    scope = edge.callers.cache_scope_of(request)
    prompts = await input_prompts(body.input, model.tokenizer, edge.models.window(model.name), scope=scope)

    async def pieces(inputs: EmbeddedInputs, _response_id: str) -> AsyncIterator[Buffer]:
        check_dimensions(body.dimensions, len(inputs.vectors[0]) // 4)
        given = inputs.vectors, body, model.name, inputs.num_prompt_tokens, inputs.receipt_details()
        for piece in response_pieces(*given):
            yield piece

    return EmbeddingJob(
        prompts, pieces, asked=headers_of(request), model=model, wanted=GenerateRequest(pooling=pooling_of(body))
    )


_API: Final[EmbeddingApi[EmbeddingsBody]] = EmbeddingApi(
    name="embeddings",
    id_prefix="embd-",
    use="",
    decode=decode_embeddings,
    make_job=_job,
    user_text=lambda body: body.input if isinstance(body.input, str) else "",
)
