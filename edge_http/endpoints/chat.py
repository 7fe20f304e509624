"""POST /v1/chat/completions"""

from __future__ import annotations

from aiohttp import web

from edge_http.edge import Edge
from edge_http.endpoints.generation import GenerationJob, envelope_for, generate, wants_usage
from edge_http.openai.guide import guide_of
from edge_http.openai.prompt import chat_prompt
from edge_http.openai.requests import decode_chat
from edge_http.openai.response_formatters import ChatFormatter
from edge_http.openai.sampling import chat_max_tokens, chat_sampling, num_choices, stop_conditions, tier_of
from edge_http.wire.body import digest_of, read_json_body
from edge_http.wire.headers import session_key


async def chat_completions(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    with edge.admit() as place:
        job = await _read_job(edge, request)
        envelope = envelope_for(edge, job, "chatcmpl-")
        return await generate(edge, request, place, job, ChatFormatter(envelope, job.model.tokenizer), envelope.id)


async def _read_job(edge: Edge, request: web.BaseRequest) -> GenerationJob:
    """Raises KvloomError."""
    with edge.bodies.lease() as lease:
        raw = await read_json_body(request, edge.config, lease)
        await edge.turns.take(len(raw))
        edge.check_room()
        body = decode_chat(raw, edge.config.max_messages)
        model = edge.find_model(body.model)
        n = num_choices(body)
        guide = guide_of(body)
        sampling = chat_sampling(body, guide)
        max_tokens, max_tokens_field = chat_max_tokens(body)
        stop = stop_conditions(body, max_tokens)
        key = session_key(request, body.prompt_cache_key)
        return GenerationJob(
            operation="chat",
            model=model,
            prompts=[await chat_prompt(body, model.tokenizer, edge.window(model.name))],
            n=n,
            sampling=sampling,
            stop=stop,
            max_tokens_field=max_tokens_field,
            stream=bool(body.stream),
            include_usage=wants_usage(body),
            session_key=key,
            tier=tier_of(body),
            body_digest=digest_of(raw),
            guide_field="" if guide is None else guide.field,
        )
