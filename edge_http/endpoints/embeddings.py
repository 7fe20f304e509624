"""POST /v1/embeddings: vectors of texts."""

from __future__ import annotations

from collections.abc import AsyncIterator

from aiohttp import web

from edge_http.answers.embedded_inputs import EmbeddedInputs
from edge_http.edge import Edge
from edge_http.endpoints.embedding import EmbeddingJob, serve_embedding
from edge_http.formatting.json_bytes import Buffer
from edge_http.openai.embeddings import (
    check_dimensions,
    decode_embeddings,
    input_prompts,
    pooling_of,
    response_pieces,
)
from edge_http.wire.body import digest_of


async def embeddings(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve POST /v1/embeddings."""
    return await serve_embedding(edge, request, _job)


async def _job(edge: Edge, request: web.BaseRequest, raw: bytes) -> EmbeddingJob:
    """Validate and tokenize a body. Raises KvloomError."""
    body = decode_embeddings(raw)
    edge.check_models(request, (body.model,))
    model = edge.find_embedding_model(body.model)
    info = edge.model_info(model.name)
    check_dimensions(body.dimensions, info.embedding_size if info is not None else 0)
    prompts = await input_prompts(body.input, model.tokenizer, edge.window(model.name))

    async def pieces(inputs: EmbeddedInputs, _response_id: str) -> AsyncIterator[Buffer]:
        check_dimensions(body.dimensions, len(inputs.vectors[0]) // 4)
        for piece in response_pieces(inputs.vectors, body, model.name, inputs.num_prompt_tokens):
            yield piece

    return EmbeddingJob("embeddings", "embd-", model, prompts, pooling_of(body), digest_of(raw), pieces)
