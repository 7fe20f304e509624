"""From the body of a response to its job, whatever it is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from edge_http.answers.shape import shape_of
from edge_http.edge import Edge
from edge_http.endpoints.file_search import search_headers
from edge_http.endpoints.generation_job import GenerationJob
from edge_http.endpoints.image_inputs import see_item_images
from edge_http.endpoints.masking import NOTHING_HIDDEN, masked
from edge_http.endpoints.moderating import moderation_of
from edge_http.endpoints.shortening import Shortened, shortened
from edge_http.endpoints.stored_input import StoredInput, context_headers
from edge_http.formatting.body_guide import with_calls
from edge_http.formatting.client_tools import left_out_headers, options_of
from edge_http.openai.prompt import chat_prompt
from edge_http.openai.responses.compaction import CompactionSeal, unfolded
from edge_http.openai.responses.context_window import ANSWER_SHARE
from edge_http.openai.responses.file_search import OPTION as FILE_SEARCH
from edge_http.openai.responses.file_search import FileSearch, with_passages
from edge_http.openai.responses.formatter import LEADING
from edge_http.openai.responses.input_items import conversation
from edge_http.openai.responses.parameters import as_chat, echo_of, max_tokens_of, template_options, text_guide
from edge_http.openai.responses.requests import ResponsesBody
from edge_http.openai.responses.steady_formatter import RUN, RunName
from edge_http.openai.responses.tools import tools_of
from edge_http.openai.sampling import chat_sampling, stop_conditions, tier_of
from edge_http.wire.body import digest_of
from edge_http.wire.headers import session_key
from edge_http.wire.request_headers import headers_of
from kvloom.v1.router_service_pb2 import GenerateRequest
from kvloom_common.conversation.call_guide import ToolPlace
from kvloom_common.conversation.model_output import prompted
from kvloom_common.conversation.tool_plan import plan_tools
from kvloom_common.models.served_model import ServedModel


class CompactedInput(msgspec.Struct):
    """The input of a response whose conversation was compacted for it."""

    items: Sequence[msgspec.Raw]
    """All that the model gets."""
    item: dict[str, Any]
    """The compaction, with which the output begins."""


def seal_of(edge: Edge, request: web.BaseRequest) -> CompactionSeal:
    """The seal of the compactions of the request's caller."""
    return CompactionSeal(edge.state_sealer, edge.callers.caller_of(request))


def input_of(
    edge: Edge, request: web.BaseRequest, given: str | Sequence[msgspec.Raw], stored: StoredInput | None
) -> tuple[Sequence[msgspec.Raw], str | Sequence[msgspec.Raw], int]:
    """The items before the input, the input, and how many of its items a compaction has replaced (see `unfolded`).
    Raises KvloomError (INVALID_ARGUMENT)."""
    earlier: Sequence[msgspec.Raw] = () if stored is None else stored.earlier
    items = given if stored is None else stored.input
    return unfolded(earlier, items, seal_of(edge, request).part)


async def response_job(
    edge: Edge,
    request: web.BaseRequest,
    raw: bytes,
    body: ResponsesBody,
    model: ServedModel,
    stored: StoredInput | None = None,
    run: RunName | None = None,
    part: CompactedInput | None = None,
    search: FileSearch | None = None,
) -> GenerationJob:
    """Validate and tokenize a body. `stored`: what it has to do with stored objects. `run`: the background response
    that it is. `part`: what the model gets instead of its input and of what comes before. `search`: what was found in
    files. Raises KvloomError."""
    given = tools_of(body, searches_files=stored is not None)
    is_parallel = bool(body.parallel_tool_calls)
    place = ToolPlace(at="", numbers=given.numbers)
    plan = plan_tools(given.tools, given.choice, is_parallel=is_parallel, model=model.output, place=place)
    guide = with_calls(text_guide(body), plan, "tools")
    shared = as_chat(body)
    sampling, stop = chat_sampling(shared, guide), stop_conditions(shared, max_tokens_of(body))
    context = input_of(edge, request, body.input, stored) if part is None else (part.items, [], 0)
    earlier, instructions = context[0], body.instructions
    if stored is not None and stored.prompt is not None:
        earlier = [*stored.prompt.items, *earlier]
        instructions = stored.prompt.instructions if instructions is None else instructions
    earlier, own, images = await see_item_images(edge, request, earlier, context[1], context[2], model)
    messages, originals = conversation(own, instructions, earlier, context[2]), NOTHING_HIDDEN
    scope, cut = edge.callers.cache_scope_of(request), Shortened(())
    if body.truncation == "auto" and (window := edge.models.window(model.name)):
        room = window - (body.max_output_tokens or int(window * ANSWER_SHARE))
        room -= 0 if images is None else images.num_tokens
        # A background response that is generated again must have the same prompt.
        cut = await shortened(edge, messages, plan.tools, model, room, scope, may_have_summary=run is None)
        messages = cut.messages
    if search is not None:
        messages = with_passages(messages, search.passages)
    if edge.config.masks_prompts:
        named = session_key(request, body.prompt_cache_key)
        messages, originals = await masked(edge, request, messages, body.guardrails, named, sampling)
    for_template, window = template_options(body), edge.models.generation_window(model.name)
    prompt, rendered = await chat_prompt(
        messages, plan.tools, for_template, model.tokenizer, window, "input", scope=scope, images=images
    )
    parser = prompted(plan.parser, rendered)
    echo = echo_of(body, given, model.default_sampling, None if stored is None else stored.echo)
    options = options_of(given.client_tools)
    if part is not None:
        options[LEADING] = [part.item]
    elif run is not None and body.context_management:  # it was compacted when it was begun
        options[LEADING] = [msgspec.json.decode(item) for item in body.input]
    if search is not None:
        options[FILE_SEARCH] = msgspec.to_builtins(search)
    if run is not None:
        options[RUN] = msgspec.to_builtins(run)
        if model.default_sampling is None or not model.default_sampling.HasField("seed"):
            sampling.seed = run.seed
    return GenerationJob(
        operation="chat",
        id_prefix="resp_",
        model=model,
        prompts=[prompt],
        prompt_sizes=[len(prompt.token_ids)],
        asked=headers_of(request),
        wanted=GenerateRequest(
            sampling=sampling,
            stop=stop,
            n=1,
            seed_is_drawn=run is not None,
            session_key=session_key(request, body.prompt_cache_key),
            tier=tier_of(shared),
            guardrails=body.guardrails,
            safety_identifier=body.safety_identifier,
        ),
        max_tokens_field="max_output_tokens",
        stream=bool(body.stream),
        include_usage=False,
        service_tier=body.service_tier or "",
        body_digest=digest_of(raw),
        shape=shape_of("responses", parser, plan.tools, echo=echo, **options),
        headers={**left_out_headers(given.left_out), **search_headers(search), **context_headers(stored)},
        guide_field="" if guide is None else guide.field,
        moderation=None if body.moderation is None else moderation_of(body.moderation, messages),
        originals=originals,
        unsummed=cut.unsummed,
        has_summary=cut.has_summary,
    )
