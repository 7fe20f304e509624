"""POST /tokenize and POST /detokenize: the tokens of a prompt, and the text of tokens, as the model sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from aiohttp import web

from edge_http.edge import Edge
from edge_http.endpoints.answering import read_prompt_body
from edge_http.endpoints.file_inputs import read_chat_files
from edge_http.endpoints.generation import template_options
from edge_http.endpoints.image_inputs import see_chat_images
from edge_http.endpoints.ownership import owner_of
from edge_http.openai.logprobs import shown_token
from edge_http.openai.messages import chat_messages
from edge_http.openai.prompt import chat_prompt, check_token_ids, text_prompt
from edge_http.openai.tokenization import TokenizeBody, conversation_of, decode_detokenize, decode_tokenize
from edge_http.openai.tools import place_of, tools_of
from edge_http.side_call import side_call
from edge_http.wire.fair_yield import LONG_BODY_BYTES
from edge_http.wire.json_response import json_response
from kvloom_common.conversation.tool_plan import plan_tools
from kvloom_common.models.model_routes import BYTES_PER_TOKEN
from kvloom_common.models.served_model import ServedModel
from kvloom_common.text.prompt_images import FIRST_IMAGE_ID, NO_MARKS

NAMES_IN_A_ROW: Final = 1024
"""How many tokens are named before other requests have their turn: about half a millisecond."""


async def tokenize(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve POST /tokenize."""
    caller = edge.callers.caller_of(request)
    with edge.admission.admit(caller), edge.admission.bodies.lease(caller) as lease:
        raw = await read_prompt_body(edge, request, lease)
        body = decode_tokenize(raw, edge.config.max_messages, edge.fields, request.headers)
        model = edge.models.find_usable(request, body.model)
        window = edge.models.window(model.name)
        async with side_call(edge, request, len(raw)) as call:
            token_ids = await _token_ids(edge, request, body, model, window)
            call.num_tokens = len(token_ids)
        names = await _names(edge, model, token_ids) if body.return_token_strs else None
    return json_response(
        {
            "count": len(token_ids),
            "max_model_len": window,
            "tokens": list(token_ids),
            "token_strs": names,
        }
    )


async def detokenize(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve POST /detokenize."""
    caller = edge.callers.caller_of(request)
    with edge.admission.admit(caller), edge.admission.bodies.lease(caller) as lease:
        body = decode_detokenize(await read_prompt_body(edge, request, lease), edge.fields, request.headers)
        tokenizer = edge.models.find_usable(request, body.model).tokenizer
        check_token_ids(body.tokens, "tokens", tokenizer)
        async with side_call(edge, request, BYTES_PER_TOKEN * len(body.tokens)):
            scope = edge.callers.cache_scope_of(request)
            text = await tokenizer.decode_fairly(body.tokens, scope=scope, skip_special_tokens=False)
    return json_response({"prompt": text})


async def _names(edge: Edge, model: ServedModel, token_ids: Sequence[int]) -> list[str]:
    names: list[str] = []
    for begin in range(0, len(token_ids), NAMES_IN_A_ROW):
        part = token_ids[begin : begin + NAMES_IN_A_ROW]
        names += ["" if each >= FIRST_IMAGE_ID else shown_token(model.tokenizer, each) for each in part]
        await edge.admission.fair_yield.take(LONG_BODY_BYTES)
    return names


async def _token_ids(
    edge: Edge, request: web.BaseRequest, body: TokenizeBody, model: ServedModel, window: int
) -> Sequence[int]:
    """Raises KvloomError."""
    scope = edge.callers.cache_scope_of(request)
    if body.prompt is not None:
        adds = body.add_special_tokens is not False
        prompt = await text_prompt(body.prompt, "prompt", model.tokenizer, window, scope=scope, add_special_tokens=adds)
        return prompt.token_ids
    chat = conversation_of(body)
    if edge.orchestrator is not None:
        await read_chat_files(edge.orchestrator, owner_of(edge, request), chat.messages, edge.fetcher)
    seen = await see_chat_images(edge, request, chat.messages, model)
    given = tools_of(chat)
    plan = plan_tools(
        given.tools, given.choice, is_parallel=given.is_parallel, model=model.output, place=place_of(given)
    )
    prompt, _ = await chat_prompt(
        chat_messages(chat.messages, NO_MARKS if seen is None else seen.marks),
        plan.tools,
        template_options(chat),
        model.tokenizer,
        window,
        scope=scope,
        is_continued=bool(body.continue_final_message),
        images=None if seen is None else seen.images,
    )
    return prompt.token_ids
