"""POST /beta/litellm_basic_guardrail_api: the safety policy as a guardrail of others, by LiteLLM's generic contract."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
from aiohttp import web

from edge_http.edge import Edge
from edge_http.endpoints.moderations import MAX_CHARS, MAX_TEXTS
from edge_http.formatting.decoding import decode_body
from edge_http.side_call import side_call
from edge_http.wire.body import read_json_body
from edge_http.wire.json_response import json_response
from kvloom.errors import KvloomError, invalid_argument, unsupported
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import ModerateRequest
from kvloom.v1.safety_service_pb2 import CheckWish, Classification
from kvloom_common.text.restored_text import with_placeholders

MAX_NAME_CHARS: Final = 256


class GuardrailOptions(msgspec.Struct):
    """The options of a rule of the other service."""

    guardrails: list[str] = []
    """Rules of the policy that hold only for requests that name them."""


class GuardrailBody(msgspec.Struct, kw_only=True):
    """A call of LiteLLM's generic guardrail API. What it has besides is not used."""

    texts: list[str] = []
    """They are judged one by one, and replaced if something in them is to be hidden."""
    input_type: Literal["request", "response"] = "request"
    """Says if a model is to read the texts, or has written them."""
    images: list[Any] | None = None
    """They are refused, because nothing here judges them."""
    tools: list[Any] | None = None
    """They are judged as JSON, and never replaced. By default there are none."""
    tool_calls: list[Any] | None = None
    """They are judged as JSON, and never replaced. By default there are none."""
    litellm_call_id: str | None = None
    """The name of the request in the log of the safety policy."""
    litellm_trace_id: str | None = None
    """Texts of one trace have the same placeholders for the same text."""
    additional_provider_specific_params: GuardrailOptions | None = None
    """The parameters that the other service is configured to add."""


class GuardrailAction(msgspec.Struct, omit_defaults=True):
    """The judgement."""

    action: Literal["NONE", "BLOCKED", "GUARDRAIL_INTERVENED"]
    blocked_reason: str | None = None
    texts: list[str] | None = None
    """With GUARDRAIL_INTERVENED: the texts with placeholders, in order."""


_DECODER: Final = msgspec.json.Decoder(GuardrailBody)


async def guardrail(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Judge texts as if the key's tenant had sent them here, or got them from here."""
    caller = edge.callers.caller_of(request)
    with edge.admission.admit(caller), edge.admission.bodies.lease(caller) as lease:
        body = decode_body(_DECODER, await read_json_body(request, edge.config, lease))
        if body.images:
            raise unsupported("images: the safety policy judges texts only.", "images")
        fixed = filter(None, (body.tools, body.tool_calls))
        texts = [*body.texts, *(msgspec.json.encode(one).decode() for one in fixed)]
        if len(texts) > MAX_TEXTS or sum(map(len, texts)) > MAX_CHARS:
            message = f"There are at most {MAX_TEXTS} texts, with {MAX_CHARS} characters in all."
            raise KvloomError(ErrorReason.ERROR_REASON_REQUEST_TOO_LARGE, message, field="texts")
        wanted = ModerateRequest(texts=texts, check=_wish(edge, caller, body))
        if not texts:
            return json_response(_shown(GuardrailAction("NONE")))
        async with side_call(edge, request, sum(map(len, texts))):
            answer = await edge.link.moderate(wanted)
    return json_response(_shown(_action(body.texts, list(answer.results))))


def _wish(edge: Edge, caller: str, body: GuardrailBody) -> CheckWish:
    names = body.litellm_call_id or "", body.litellm_trace_id or ""
    if any(len(name) > MAX_NAME_CHARS for name in names):
        raise invalid_argument(f"Ids have at most {MAX_NAME_CHARS} characters.", "litellm_call_id")
    options = body.additional_provider_specific_params or GuardrailOptions()
    return CheckWish(
        tenant=caller,
        conversation=names[1],
        guardrails=edge.callers.guardrails(caller, options.guardrails),
        is_answer=body.input_type == "response",
        request_id=names[0],
    )


def _action(texts: list[str], results: list[Classification]) -> GuardrailAction:
    """`results`: of the texts, and then of what cannot be replaced."""
    for number, result in enumerate(results):
        if result.HasField("finding"):
            return GuardrailAction("BLOCKED", result.finding.message)
        if result.masks and number >= len(texts):
            return GuardrailAction("BLOCKED", "Tools or calls have personal data.")
    if not any(result.masks for result in results):
        return GuardrailAction("NONE")
    shown = [with_placeholders(text, result.masks) for text, result in zip(texts, results, strict=False)]
    return GuardrailAction("GUARDRAIL_INTERVENED", texts=shown)


def _shown(action: GuardrailAction) -> dict[str, Any]:
    return msgspec.to_builtins(action)
