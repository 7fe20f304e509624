"""POST /v1/responses: OpenAI's Responses API, without state on the server."""

from __future__ import annotations

from aiohttp import web

from edge_http.answers.shape import shape_of
from edge_http.edge import Edge
from edge_http.endpoints.answering import GenerationJob, generate
from edge_http.openai.guide import BodyGuide
from edge_http.openai.prompt import chat_prompt
from edge_http.openai.responses.input_items import conversation
from edge_http.openai.responses.parameters import as_chat, echo_of, max_tokens_of, template_options, text_guide
from edge_http.openai.responses.requests import decode_responses
from edge_http.openai.responses.tools import tools_of
from edge_http.openai.sampling import chat_sampling, stop_conditions, tier_of
from edge_http.wire.body import digest_of, read_json_body
from edge_http.wire.headers import session_key
from kvloom.conversation.model_output import prompted, show_markers
from kvloom.conversation.tool_plan import plan_tools
from kvloom.errors import invalid_argument


async def responses(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve POST /v1/responses."""
    with edge.admit(edge.callers.caller_of(request)) as permit:
        with edge.bodies.lease(edge.callers.caller_of(request)) as lease:
            raw = await read_json_body(request, edge.config, lease)
            await edge.fair_yield.take(len(raw))
            edge.check_room()
            job = await _job(edge, request, raw)
        return await generate(edge, request, permit, job)


async def _job(edge: Edge, request: web.BaseRequest, raw: bytes) -> GenerationJob:
    """Validate and tokenize a body. Raises KvloomError."""
    body = decode_responses(raw, edge.config.max_messages)
    model = edge.find_model(body.model)
    given = tools_of(body)
    is_parallel = bool(body.parallel_tool_calls)
    plan = plan_tools(given.tools, given.choice, is_parallel=is_parallel, model=model.output, at="")
    guide = text_guide(body)
    if plan.demands_call and guide is not None:
        raise invalid_argument("tool_choice demands a call, which has no room for another form.", guide.field)
    if plan.guide is not None and guide is None:  # an answer of another form has no calls, not even of strict tools
        guide = BodyGuide(plan.guide, "tools")
    shared = as_chat(body)
    sampling, stop = chat_sampling(shared, guide), stop_conditions(shared, max_tokens_of(body))
    messages = conversation(body.input, body.instructions)
    options, window = template_options(body), edge.window(model.name)
    prompt, rendered = await chat_prompt(messages, plan.tools, options, model.tokenizer, window, "input")
    parser = prompted(plan.parser, rendered)
    show_markers(sampling, parser, model.tokenizer)
    return GenerationJob(
        operation="chat",
        id_prefix="resp_",
        model=model,
        prompts=[prompt],
        prompt_sizes=[len(prompt.token_ids)],
        n=1,
        sampling=sampling,
        stop=stop,
        max_tokens_field="max_output_tokens",
        stream=bool(body.stream),
        include_usage=False,
        session_key=session_key(request, body.prompt_cache_key),
        tier=tier_of(shared),
        body_digest=digest_of(raw),
        shape=shape_of("responses", parser, plan.tools, echo=echo_of(body, given)),
        guide_field="" if guide is None else guide.field,
    )
