"""`RouterService.Generate`: one request and its streamed answer. To the core driver each call is one more client."""

from __future__ import annotations

import asyncio
import itertools
from typing import Final
from urllib.parse import quote

import grpc

from kvloom.client.router_routes import ADDRESS_KEY, CONTINUES_KEY
from kvloom.errors import KvloomError
from kvloom.guide import GUIDE_FIELD
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FINISH_REASON_CONTENT_FILTER, FINISH_REASON_ERROR
from kvloom.v1.router_service_pb2 import ChoiceDelta, GenerateRequest, GenerateResponse
from router import convert
from router.answers.named_calls import NamedCalls, name_of
from router.caller_scope import TRUSTED, CallerScope, metadata_value, owner_of
from router.core.actions import FleetChanged
from router.core.events import ClientGone, RequestArrived
from router.core.frames import Finish, Start, Step
from router.core_driver import CoreDriver
from router.links.step_outbox import StepOutbox
from router.partial_choices import named_for_callers
from router.request_builder import new_request_id, within_deadline
from router.request_validator import PreparedRequest, RequestValidator, seed_of

EXPLAIN_KEY: Final = "kvloom-explain"
"""The request metadata that asks for the trailers kvloom-shard and kvloom-cached-tokens."""
REQUEST_ID_METADATA: Final = "x-request-id"
"""The request metadata with the caller's own id of the request."""

_numbers = itertools.count(1)

Context = grpc.aio.ServicerContext[GenerateRequest, GenerateResponse]


class GenerateCall:
    """Serves one request: submits it, streams its deltas, and cancels it when the caller disconnects."""

    def __init__(
        self,
        driver: CoreDriver,
        intake: RequestValidator,
        named_calls: NamedCalls,
        context: Context,
        address: str,
        scope: CallerScope = TRUSTED,
    ) -> None:
        """`address` is one where this router listens and no other does."""
        self._scope = scope
        self._driver = driver
        self._intake = intake
        self._named_calls = named_calls
        self._context = context
        self._address = address
        self._client_id = f"generate#{next(_numbers)}"
        self._outbox = StepOutbox()
        self._too_slow = False
        self._is_settled = False
        """The client has resumed the request elsewhere, so nothing may be metered here any more."""
        self._explains = wants_explanation(context)
        self._wake = asyncio.Event()

    async def serve(self, wanted: GenerateRequest) -> None:
        """Raises KvloomError when the request ends in an error, before or after its first token."""
        name = ""
        if wanted.resume_token:
            wanted.request_id = wanted.request_id or new_request_id()
            name = name_of(wanted.request_id, wanted.resume_token, owner_of(self._context))
            self._named_calls.open(name, self._client_id, self._on_settled)
        try:
            if name:
                # This is sent at once because the client waits only briefly for a sign that a router has the request.
                await self._context.send_initial_metadata(owner_metadata(self._address))
            accepted = await self._accept(wanted)
            self._driver.add_client(self._client_id, self)
            try:
                self._driver.dispatch(RequestArrived(accepted.request))
                await self._stream(accepted)
            finally:
                self._leave()
        finally:
            if name:
                self._named_calls.close(name, self._client_id)

    async def _accept(self, wanted: GenerateRequest) -> PreparedRequest:
        try:
            traceparent = metadata_value(self._context, "traceparent")
            client_request_id = metadata_value(self._context, REQUEST_ID_METADATA)
            accepted = await self._intake.accept_generate(
                wanted, self._client_id, traceparent, self._scope, client_request_id
            )
        except KvloomError as error:
            self._driver.request_refused(error)
            raise
        if self._is_settled:
            raise _settled()
        seconds = self._context.time_remaining()
        if seconds is not None:  # then gRPC ends the call, whatever has arrived
            accepted = accepted._replace(request=within_deadline(accepted.request, seconds))
        return accepted

    def _leave(self) -> None:
        self._driver.remove_client(self._client_id)
        self._driver.dispatch(ClientGone(self._client_id))

    def _on_settled(self) -> None:
        self._is_settled = True
        self._leave()
        self._wake.set()

    # -- ClientSink ---------------------------------------------------------------------------------------------------

    def send_step(self, step: Step) -> None:
        if self._too_slow:
            return
        if not self._outbox.add(step):
            self._too_slow = True
            self._driver.dispatch(ClientGone(self._client_id))  # This happens here because the RPC may hang in a write.
        self._wake.set()

    def send_fleet(self, fleet: FleetChanged) -> None:
        """Does nothing: a single request does not depend on the fleet's state."""

    # -- the answer ---------------------------------------------------------------------------------------------------

    async def _stream(self, accepted: PreparedRequest) -> None:
        request = accepted.request
        given_id = self._scope.given_id(request.request_id)
        num_open = len(request.choices)
        has_output = request.has_output
        is_first = True
        while num_open:
            await self._wake.wait()
            self._wake.clear()
            if self._is_settled:
                raise _settled()
            if self._too_slow:
                raise KvloomError(
                    ErrorReason.ERROR_REASON_CLIENT_TOO_SLOW,
                    "The answer was not read fast enough, so it was cancelled.",
                )
            step = self._outbox.take()
            if step is None:
                continue
            num_open -= len(step.finishes)
            has_output = has_output or bool(step.slots)
            error = error_of(step.finishes, has_output, accepted.guide_field)
            if self._explains and step.starts:
                self._explains = False  # Only the first choice to start is explained.
                explain(self._context, step.starts[0])
            deltas = deltas_of(step)
            if deltas and (error is None or step.slots):
                if accepted.output is not None:
                    accepted.output.parse(deltas)
                response = GenerateResponse(request_id=given_id, deltas=deltas)
                if is_first:
                    is_first = False
                    response.seed, response.model = seed_of(request), accepted.chosen_model
                    if request.adapter is not None:
                        response.adapter_checksum = request.adapter.checksum
                await self._context.write(response)
            if error is not None:
                raise error


def _settled() -> KvloomError:
    return KvloomError(ErrorReason.ERROR_REASON_CANCELLED, "The client has resumed this request at another router.")


def owner_metadata(address: str) -> tuple[tuple[str, str], ...]:
    """Returns initial metadata with the address of the router that has the request. It also states that this router can
    resume requests that another one has begun."""
    return ((ADDRESS_KEY, quote(address, safe=":[]")), (CONTINUES_KEY, "1"))


def wants_explanation(context: Context) -> bool:
    return metadata_value(context, EXPLAIN_KEY).lower() in ("1", "true")


def explain(context: Context, start: Start) -> None:
    """Sets trailing metadata that names the shard on which a choice runs."""
    shard_id = quote(start.shard_id, safe="-._~:@")
    trailers = (("kvloom-shard", shard_id), ("kvloom-cached-tokens", str(start.num_cached_tokens)))
    context.set_trailing_metadata(trailers)


def deltas_of(step: Step) -> list[ChoiceDelta]:
    """Returns a step's content by choice; slots are choice indexes."""
    by_index: dict[int, ChoiceDelta] = {}

    def delta_of(index: int) -> ChoiceDelta:
        delta = by_index.get(index)
        if delta is None:
            delta = by_index[index] = ChoiceDelta(index=index)
        return delta

    for start in step.starts:
        delta_of(start.slot).start.CopyFrom(convert.start_to_proto(start))
    position = 0
    for i, (slot, text) in enumerate(zip(step.slots, step.deltas, strict=True)):
        count = step.num_tokens[i] if step.num_tokens else 1
        delta = delta_of(slot)
        delta.text += text  # an answer from the result cache has several entries
        delta.token_ids.extend(step.token_ids[position : position + count])
        position += count
    for slot, entry in step.logprobs:
        delta_of(slot).logprobs.append(convert.logprobs_to_proto(slot, entry))
    for finish in step.finishes:
        delta_of(finish.slot).finish.CopyFrom(convert.finish_to_proto(finish))
    return list(by_index.values())


def error_of(finishes: list[Finish], has_output: bool, guide_field: str = GUIDE_FIELD) -> KvloomError | None:
    """Returns the error for the RPC's status if a choice failed, or if the safety service withheld the whole answer.
    `guide_field` is the field that asked for guided decoding."""
    for finish in finishes:
        if finish.reason == FINISH_REASON_ERROR:
            error = finish.error or KvloomError(ErrorReason.ERROR_REASON_INTERNAL, "The request failed.")
            return named_for_callers(error, guide_field)
        if finish.reason == FINISH_REASON_CONTENT_FILTER and not has_output and finish.error is not None:
            return finish.error
    return None
