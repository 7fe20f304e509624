"""POST /v1/completions"""

from __future__ import annotations

from aiohttp import web

from edge_http.edge import Edge
from edge_http.endpoints.generation import GenerationJob, envelope_for, generate, wants_usage
from edge_http.openai.guide import guide_of
from edge_http.openai.prompt import completion_prompts
from edge_http.openai.requests import decode_completion
from edge_http.openai.response_formatters import CompletionFormatter
from edge_http.openai.sampling import completion_max_tokens, completion_sampling, num_choices, stop_conditions, tier_of
from edge_http.wire.body import digest_of, read_json_body
from edge_http.wire.headers import session_key


async def completions(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    with edge.admit() as place:
        job = await _read_job(edge, request)
        envelope = envelope_for(edge, job, "cmpl-")
        return await generate(
            edge, request, place, job, CompletionFormatter(envelope, job.model.tokenizer), envelope.id
        )


async def _read_job(edge: Edge, request: web.BaseRequest) -> GenerationJob:
    """Raises KvloomError."""
    with edge.bodies.lease() as lease:
        raw = await read_json_body(request, edge.config, lease)
        await edge.turns.take(len(raw))
        edge.check_room()
        body = decode_completion(raw)
        model = edge.find_model(body.model)
        n = num_choices(body)
        guide = guide_of(body)
        sampling = completion_sampling(body, guide)
        stop = stop_conditions(body, completion_max_tokens(body))
        key = session_key(request, body.prompt_cache_key)
        return GenerationJob(
            operation="text_completion",
            model=model,
            prompts=await completion_prompts(body, n, model.tokenizer, edge.window(model.name)),
            n=n,
            sampling=sampling,
            stop=stop,
            max_tokens_field="max_tokens",
            stream=bool(body.stream),
            include_usage=wants_usage(body),
            session_key=key,
            tier=tier_of(body),
            body_digest=digest_of(raw),
            guide_field="" if guide is None else guide.field,
        )
