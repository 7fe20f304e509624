"""The SDK: answers from a kvloom router, token by token.

    async with Client("127.0.0.1:8081") as client:
        async for delta in client.generate(model="smollm2-135m-instruct", messages=[ChatMessage("user", "Hi")]):
            print(delta.text, end="")

Prompts given as `token_ids` travel over one long-lived stream that all requests of the client share (no RPC is opened
per request). Prompts given as `text` or `messages` are tokenized by the router, with one `Generate` RPC each; so are
resumable ones (`resumable=True`), whose answers outlive their connection.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Final, Self, TypeVar, Unpack

from kvloom.client.generate_request import GenerateOptions, build_request
from kvloom.client.generation import Delta, DeltaBuffer, Finishes
from kvloom.client.resumed_call import carried_deltas
from kvloom.client.router_channels import RouterChannels
from kvloom.errors import KvloomError
from kvloom.router_link.cancel_notifier import CancelNotifier
from kvloom.router_link.group import REATTACH_SECONDS, RouterGroup
from kvloom.router_link.link import LinkRequest
from kvloom.v1 import router_service_pb2
from kvloom.v1.error_reason_pb2 import ErrorReason

MAX_BUFFERED_TOKENS: Final = 16_384
CONNECT_TIMEOUT_SECONDS: Final = 10.0

_Answer = TypeVar("_Answer")


class Client:
    """The way to a router, or to any of several, for use on one event loop. Every failure is a KvloomError."""

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        client_id: str = "",
        reattach_seconds: float = REATTACH_SECONDS,
        connect_timeout_seconds: float = CONNECT_TIMEOUT_SECONDS,
        max_buffered_tokens: int = MAX_BUFFERED_TOKENS,
    ) -> None:
        """`address`: host:port of the router; of several, a list, or with commas between them. `client_id` names this
        client in the routers' logs. An answer that loses its router looks `reattach_seconds` (a resumable one at least
        30) for one that goes on with it; 0: none is looked for. At most `max_buffered_tokens` tokens of a request wait
        for its reader; beyond that it is cancelled."""
        self._addresses = [part.strip() for part in address.split(",")] if isinstance(address, str) else list(address)
        self._reattach_seconds = reattach_seconds
        self._client_id = client_id or f"sdk-{os.getpid()}"
        self._connect_timeout_seconds = connect_timeout_seconds
        self._max_buffered_tokens = max_buffered_tokens
        self._channels: RouterChannels | None = None
        self._lost = CancelNotifier()
        self._link: RouterGroup | None = None

    async def __aenter__(self) -> Self:
        self._channels = RouterChannels(self._addresses)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends what is running. Repeatable."""
        link, self._link = self._link, None
        channels, self._channels = self._channels, None
        if link is not None:
            await link.close()
        await self._lost.close()
        if channels is not None:
            await channels.close()

    def generate(self, **options: Unpack[GenerateOptions]) -> AsyncGenerator[Delta, None]:
        """News of the answer (of all n answers), in order; see GenerateOptions for what may be asked.

        The last Delta of each choice has its `finish`. A choice that the safety policy halted finishes as
        CONTENT_FILTER; a prompt that it refused raises CONTENT_FILTERED. A choice that fails raises its KvloomError:
        over the shared stream when all choices have finished, by RPC at once. Leaving the loop early (`break`,
        `aclose`) cancels the request. Raises KvloomError right away for options out of range.

        An answer whose connection or router is lost goes on behind what the loop has got, at another router or at the
        same when it is back. `resumable=True`: while only the connection is lost nothing is generated again; such a
        request has an RPC of its own.
        """
        request = build_request(options)
        if not request.request_id:
            request.request_id = f"req-{uuid.uuid4().hex}"
        if request.WhichOneof("input") == "token_ids" and not request.resumable:
            return self._generate_over_link(request)
        return self._generate_by_rpc(request)

    async def plan(self, **options: Unpack[GenerateOptions]) -> router_service_pb2.PlanResponse:
        """Where would this request go, and why? Places nothing."""
        request = router_service_pb2.PlanRequest(request=build_request(options))
        return await self._routers.call(lambda stub: stub.Plan(request, timeout=self._connect_timeout_seconds))

    async def explain(self, request_id: str) -> router_service_pb2.ExplainResponse:
        """Why a request went where it went, and how it turned out. Raises KvloomError (NOT_FOUND) when the router does
        not remember it."""
        request = router_service_pb2.ExplainRequest(request_id=request_id)
        return await self._routers.call(lambda stub: stub.Explain(request, timeout=self._connect_timeout_seconds))

    async def list_models(self) -> list[router_service_pb2.ModelInfo]:
        """What the fleet serves now."""
        request = router_service_pb2.ListModelsRequest()
        answer = await self._routers.call(lambda stub: stub.ListModels(request, timeout=self._connect_timeout_seconds))
        return list(answer.models)

    async def cancel(self, request_id: str) -> bool:
        """End a running request, by its id, whoever started it. False when no router runs such a request."""
        request = router_service_pb2.CancelRequest(request_id=request_id)
        answer = await self._routers.call(
            lambda stub: stub.Cancel(request, timeout=self._connect_timeout_seconds), lambda answer: answer.found
        )
        return answer.found

    @property
    def _routers(self) -> RouterChannels:
        if self._channels is None:
            raise RuntimeError("the client is closed: use `async with Client(...)`")
        return self._channels

    async def _generate_by_rpc(self, request: router_service_pb2.GenerateRequest) -> AsyncGenerator[Delta, None]:
        finishes = Finishes(max(1, request.n))
        deltas = carried_deltas(self._routers, request, self._reattach_seconds, self._lost)
        try:
            async for delta in deltas:
                finishes.note(delta)
                yield delta
        finally:
            await deltas.aclose()
        finishes.raise_failure()

    async def _generate_over_link(self, request: router_service_pb2.GenerateRequest) -> AsyncGenerator[Delta, None]:
        num_choices = max(1, request.n)
        link = await self._connected_link()
        buffer = DeltaBuffer(self._max_buffered_tokens)
        handle = link.submit(_link_request(request, num_choices), buffer)
        buffer.on_overflow = lambda: link.cancel(handle)
        finishes = Finishes(num_choices)
        try:
            while not finishes.complete:
                for delta in await buffer.take():
                    finishes.note(delta)
                    yield delta
        finally:
            if not finishes.complete:
                link.cancel(handle)
        finishes.raise_failure()

    async def _connected_link(self) -> RouterGroup:
        if self._link is None:
            addresses = self._routers.addresses
            self._link = RouterGroup(self._client_id, addresses, reattach_seconds=self._reattach_seconds)
            await self._link.start()
        link = self._link
        try:
            async with asyncio.timeout(self._connect_timeout_seconds):
                while not link.connected:
                    await link.wait_fleet_change()
        except TimeoutError:
            message = f"No router answers at {', '.join(self._addresses)}."
            raise KvloomError(ErrorReason.ERROR_REASON_ROUTER_LOST, message, retry_after_seconds=1.0) from None
        return link


def _link_request(request: router_service_pb2.GenerateRequest, num_choices: int) -> LinkRequest:
    ids: Sequence[int] = request.token_ids.ids
    return LinkRequest(
        request_id=request.request_id,
        model=request.model,
        prompt_token_ids=ids,
        prompt_text="",
        sampling=request.sampling,
        stop=request.stop,
        n=num_choices,
        timeout_seconds=request.timeout_seconds,
        session_key=request.session_key,
        tier=request.tier,
    )
