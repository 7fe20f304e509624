"""One HTTP request and its answer, as Envoy's external processing shows them (docs/how-to/gateway.md).

Protocol 1.0.0 of the Gateway API's endpoint pickers. Envoy sends the body in pieces as they come
(FULL_DUPLEX_STREAMED). They are kept until the endpoint is chosen, and then sent back. Each piece of the answer is sent
back at once. Where Envoy sends no bodies, the engine is chosen by load alone; where it sends no answers, the first
token is taken to come when it was predicted to.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from kvloom.v1 import external_processor_pb2 as ext_proc
from router.core.objectives import Objectives
from tools.gateway.picker import Picker, PickRefusal, Placement, Wish
from tools.gateway.prompts import NO_PROMPT, GatewayPrompt, PromptReader

DESTINATION: Final = "x-gateway-destination-endpoint"
"""The header, and the key of the metadata, with the chosen endpoint and the next one."""
LB_NAMESPACE: Final = "envoy.lb"
SERVED: Final = "x-gateway-destination-endpoint-served"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
OBJECTIVE_HEADERS: Final = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
FAIRNESS_HEADERS: Final = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
TTFT_HEADERS: Final = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
TPOT_HEADERS: Final = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
DROPPED_HEADER: Final = "x-llm-d-request-dropped-reason"
MAX_BODY_BYTES: Final = 32 * 2**20
MAX_ALL_BODIES_BYTES: Final = 512 * 2**20
"""The limit for all requests together for which no endpoint has been chosen yet."""

Responses = list[ext_proc.ProcessingResponse]


class Door(msgspec.Struct):
    """The parts that all exchanges share."""

    picker: Picker
    reader: PromptReader
    count: Callable[[str], None]
    """Called with what has become of a request: see metrics.REQUESTS."""
    observe_seconds: Callable[[float], None]
    """Called with how long a choice took."""
    max_body_bytes: int = MAX_BODY_BYTES
    num_body_bytes: int = 0
    """The bytes of bodies that are kept at the moment."""


class HttpExchange:
    def __init__(self, door: Door) -> None:
        self._door = door
        self._loop = asyncio.get_running_loop()
        self._headers: Mapping[str, str] = {}
        self._subset: Sequence[str] | None = None
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._reads_body = self._sees_answer = True
        """True if Envoy sends the request's body, and the answer's."""
        self._is_stream = False
        self._is_decided = False
        self._placement: Placement | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._num_events = 0
        """Server-sent events of the answer: about as many as it has tokens."""
        self.is_over = False
        """True once Envoy was told to answer by itself: it sends nothing more."""

    async def handle(self, message: ext_proc.ProcessingRequest) -> Responses:
        """Returns what Envoy is told now."""
        kind = message.WhichOneof("request")
        if kind == "response_body":  # the most frequent one first
            return [self._answer_body(message.response_body)]
        if kind == "request_body":
            return await self._request_body(message.request_body)
        if kind == "request_headers":
            return await self._request_headers(message)
        if kind == "response_headers":
            return [self._answer_headers(message)]
        if kind == "request_trailers":
            decided = await self._decide()
            trailers = ext_proc.ProcessingResponse(request_trailers=ext_proc.TrailersResponse())
            return decided if self.is_over else [*decided, *self._forwarded(is_end=False), trailers]
        if kind == "response_trailers":
            return [ext_proc.ProcessingResponse(response_trailers=ext_proc.TrailersResponse())]
        return []

    def close(self) -> None:
        """The exchange is over: the answer has ended, or its client or Envoy has gone."""
        self._take_pieces()
        if self._timer is not None:
            self._timer.cancel()
        placement = self._placement
        if placement is not None and placement.endpoint:
            self._door.picker.end(placement, self._num_events if placement.has_started else 0)

    # -- the request ----------------------------------------------------------------------------------------------

    async def _request_headers(self, message: ext_proc.ProcessingRequest) -> Responses:
        self._headers = {one.key.lower(): _text(one) for one in message.request_headers.headers.headers}
        self._subset = _subset_in(message)
        if message.HasField("protocol_config"):
            self._reads_body = message.protocol_config.request_body_mode == ext_proc.FULL_DUPLEX_STREAMED
            self._sees_answer = message.protocol_config.response_body_mode != ext_proc.NONE
        if message.request_headers.end_of_stream or not self._reads_body:
            return await self._decide()
        return []

    async def _request_body(self, body: ext_proc.HttpBody) -> Responses:
        if self._is_decided:  # there is no more of it: Envoy does not send the body in pieces
            return [ext_proc.ProcessingResponse(request_body=ext_proc.BodyResponse())]
        self._pieces.append(body.body)
        self._num_bytes += len(body.body)
        self._door.num_body_bytes += len(body.body)
        if self._num_bytes > self._door.max_body_bytes:
            return [self._refusal(413, "too_large", f"The body is longer than {self._door.max_body_bytes} bytes.")]
        if self._door.num_body_bytes > MAX_ALL_BODIES_BYTES:
            return [self._refusal(503, "unavailable", "Too many bodies are being read.")]
        if not body.end_of_stream:
            return []
        decided = await self._decide()
        return decided if self.is_over else [*decided, *self._forwarded(is_end=True)]

    def _forwarded(self, *, is_end: bool) -> Responses:
        """The body as it came."""
        pieces = self._take_pieces()
        last = len(pieces) - 1
        return [
            ext_proc.ProcessingResponse(request_body=_piece(piece, is_end=is_end and number == last))
            for number, piece in enumerate(pieces)
        ]

    def _take_pieces(self) -> Sequence[bytes]:
        pieces, self._pieces = self._pieces, []
        self._door.num_body_bytes -= self._num_bytes
        self._num_bytes = 0
        return pieces

    async def _decide(self) -> Responses:
        """Choose the endpoint, or have Envoy answer."""
        if self._is_decided:
            return []
        self._is_decided = True
        began = self._loop.time()
        door, headers = self._door, self._headers
        prompt = NO_PROMPT
        if self._pieces and headers.get("content-type", "").partition(";")[0].strip() in ("application/json", ""):
            try:
                prompt = await door.reader.read(headers.get(":path", "").partition("?")[0], b"".join(self._pieces))
            except ValueError as error:
                return [self._refusal(400, "malformed", f"The body is no JSON object: {error}")]
        self._is_stream = prompt.is_stream
        now = self._loop.time()
        found = door.picker.pick(self._wish(prompt), now)
        door.observe_seconds(now - began + (self._loop.time() - now))
        if found is PickRefusal.UNAVAILABLE:
            return [self._refusal(503, "unavailable", f"{found.value.capitalize()}.")]
        if isinstance(found, PickRefusal):
            return [
                self._refusal(429, "saturated", f"{found.value.capitalize()}.", {DROPPED_HEADER: "rejected-saturated"})
            ]
        door.count("placed")
        self._placement = found
        if not (self._sees_answer and self._is_stream):
            self._timer = self._loop.call_later(found.predicted_ttft_seconds, self._start_unseen)
        destination = ",".join(filter(None, (found.endpoint, found.fallback)))
        response = ext_proc.ProcessingResponse(
            request_headers=ext_proc.HeadersResponse(
                response=ext_proc.CommonResponse(
                    clear_route_cache=True, header_mutation=_with_headers({DESTINATION: destination})
                )
            )
        )
        response.dynamic_metadata.update({LB_NAMESPACE: {DESTINATION: destination}})
        return [response]

    def _wish(self, prompt: GatewayPrompt) -> Wish:
        headers, picker = self._headers, self._door.picker
        ttft, tpot = _milliseconds(headers, TTFT_HEADERS), _milliseconds(headers, TPOT_HEADERS)
        return Wish(
            request_id=headers.get("x-request-id") or uuid.uuid4().hex,
            prompt=prompt,
            tenant=_first(headers, FAIRNESS_HEADERS),
            priority=picker.pool.objectives.get(_first(headers, OBJECTIVE_HEADERS), 0),
            objectives=Objectives(ttft_seconds=ttft, tpot_seconds=tpot) if ttft or tpot else None,
            subset=self._subset,
        )

    def _refusal(
        self, status: int, outcome: str, message: str, headers: Mapping[str, str] | None = None
    ) -> ext_proc.ProcessingResponse:
        """Has Envoy answer, with OpenAI's JSON of errors."""
        self._is_decided = self.is_over = True
        self._take_pieces()
        self._door.count(outcome)
        kind = "invalid_request_error" if status in (400, 413) else "overloaded_error"
        body = msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": outcome}})
        return ext_proc.ProcessingResponse(
            immediate_response=ext_proc.ImmediateResponse(
                status=ext_proc.HttpStatus(code=status),
                headers=_with_headers({"content-type": "application/json", **(headers or {})}),
                body=body,
                details=f"kvloom_{outcome}",
            )
        )

    # -- the answer -----------------------------------------------------------------------------------------------

    def _answer_headers(self, message: ext_proc.ProcessingRequest) -> ext_proc.ProcessingResponse:
        placement = self._placement
        if placement is not None:
            served = _served_in(message)
            self._door.count("served_elsewhere" if served not in ("", placement.endpoint) else "served")
            if served:
                self._door.picker.move(placement, served, self._loop.time())
        return ext_proc.ProcessingResponse(response_headers=ext_proc.HeadersResponse())

    def _answer_body(self, body: ext_proc.HttpBody) -> ext_proc.ProcessingResponse:
        placement = self._placement
        if placement is not None and placement.endpoint:
            if self._is_stream:
                self._num_events += body.body.count(b"data: ")
            if not placement.has_started and body.body:
                self._door.picker.start(placement, self._loop.time(), is_seen=self._is_stream)
            if body.end_of_stream:
                self.close()
        return ext_proc.ProcessingResponse(response_body=_piece(body.body, is_end=body.end_of_stream))

    def _start_unseen(self) -> None:
        if self._placement is not None:
            self._door.picker.start(self._placement, self._loop.time(), is_seen=False)


def _piece(body: bytes, *, is_end: bool) -> ext_proc.BodyResponse:
    streamed = ext_proc.StreamedBodyResponse(body=body, end_of_stream=is_end)
    return ext_proc.BodyResponse(
        response=ext_proc.CommonResponse(body_mutation=ext_proc.BodyMutation(streamed_response=streamed))
    )


def _with_headers(headers: Mapping[str, str]) -> ext_proc.HeaderMutation:
    return ext_proc.HeaderMutation(
        set_headers=[
            ext_proc.HeaderValueOption(
                header=ext_proc.HeaderValue(key=name, raw_value=value.encode()),
                append_action=ext_proc.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
            )
            for name, value in headers.items()
        ]
    )


def _text(header: ext_proc.HeaderValue) -> str:
    return header.raw_value.decode("utf-8", "replace") if header.raw_value else header.value


def _first(headers: Mapping[str, str], names: Sequence[str]) -> str:
    return next((headers[name] for name in names if name in headers), "")


def _milliseconds(headers: Mapping[str, str], names: Sequence[str]) -> float | None:
    """In seconds; None if there is none above 0."""
    try:
        seconds = float(_first(headers, names)) / 1000
    except ValueError:
        return None
    return seconds if 0 < seconds < 86_400 else None


def _subset_in(message: ext_proc.ProcessingRequest) -> Sequence[str] | None:
    """The endpoints among which Envoy wants the choice; None: it does not say."""
    known = message.metadata_context.filter_metadata
    if SUBSET_NAMESPACE not in known or SUBSET not in known[SUBSET_NAMESPACE].fields:
        return None
    value = known[SUBSET_NAMESPACE].fields[SUBSET]
    texts = [one.string_value for one in value.list_value.values] or value.string_value.split(",")
    return [text.strip() for text in texts if text.strip()]


def _served_in(message: ext_proc.ProcessingRequest) -> str:
    """The endpoint that serves the request, as the gateway says in metadata, or Envoy in the attribute
    `upstream.address`; "": neither does."""
    known = message.metadata_context.filter_metadata
    if LB_NAMESPACE in known and SERVED in known[LB_NAMESPACE].fields:
        return known[LB_NAMESPACE].fields[SERVED].string_value
    for attributes in message.attributes.values():
        if "upstream.address" in attributes.fields:
            return attributes.fields["upstream.address"].string_value
    return ""
