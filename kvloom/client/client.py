"""The SDK's entry point: answers from a kvloom router, token by token.

    async with Client("127.0.0.1:8081") as client:
        async for delta in client.generate(model="smollm2-135m-instruct", messages=[ChatMessage("user", "Hi")]):
            print(delta.text, end="")

Prompts given as `token_ids` travel over one long-lived stream that all requests of the client share, so no RPC is
opened per request. Prompts given as `text` or `messages` are tokenized by the router, with one `Generate` RPC each.
Resumable requests (`resumable=True`), whose answers outlive their connection, have an RPC each as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Final, Self, Unpack

from kvloom.client.answer import Answer
from kvloom.client.credentials import TlsOptions, channel_opener
from kvloom.client.delta_stream import DeltaStream
from kvloom.client.embedding import (
    MAX_OPEN_EMBEDDINGS,
    Embedding,
    Input,
    Moderation,
    PoolingName,
    embedding_requests,
    moderations,
)
from kvloom.client.generate_request import GenerateOptions, build_request, name_as_option
from kvloom.client.generation import Delta, DeltaBuffer, Finishes
from kvloom.client.option_help import lists_options
from kvloom.client.resumed_call import failover_deltas
from kvloom.client.retries import MAX_RETRIES, retry_pause_seconds
from kvloom.client.router_channels import RouterChannels
from kvloom.enums import CancelOutcome
from kvloom.errors import KvloomError
from kvloom.router_link.cancel_notifier import CancelNotifier
from kvloom.router_link.group import REATTACH_SECONDS, RouterGroup
from kvloom.router_link.link import LinkRequest
from kvloom.router_link.members import NearCellFirst
from kvloom.sampling import draw_seed
from kvloom.transport.channel_options import OpenChannel
from kvloom.v1 import router_service_pb2
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import SequenceFinish

MAX_BUFFERED_TOKENS: Final = 16_384
LEAST_DEADLINE_MS: Final = 1.0
"""A repeated request is sent with this deadline if nothing is left of its own: the router refuses it with a clear
error."""
CONNECT_TIMEOUT_SECONDS: Final = 10.0
NEAR_SECONDS: Final = 1.0
"""How long the first calls wait for a router of the own cell."""


class Client:
    """A connection to one router, or to several that stand in for each other. Use it on one event loop; without one,
    use `SyncClient`.

    Every failure of a request is raised as a `KvloomError`; its `reason` says what went wrong.

        async with Client("10.0.0.1:8081,10.0.0.2:8081") as client:
            async for delta in client.generate(model="smollm2-135m-instruct", text="Once", max_tokens=20):
                print(delta.text, end="")
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        other_cells: str | Sequence[str] = (),
        client_id: str = "",
        reattach_seconds: float = REATTACH_SECONDS,
        connect_timeout_seconds: float = CONNECT_TIMEOUT_SECONDS,
        max_buffered_tokens: int = MAX_BUFFERED_TOKENS,
        max_retries: int = MAX_RETRIES,
        api_key: str = "",
        tls: TlsOptions | None = None,
        open_channel: OpenChannel | None = None,
    ) -> None:
        """Connect to nothing yet: the first call does.

        `address`: host:port of the router. For several, a list, or one string with commas between them.
        `other_cells`: routers of other cells (docs/operate/regions.md), given as `address` is. They have this client's
        requests while no router of its own cell can take them, and continue what a lost cell was answering.
        `client_id`: the client's name in the routers' logs. By default "sdk-" and the process id.
        `reattach_seconds`: how long an answer that has lost its router looks for another router that continues it; a
        resumable one looks for at least 30 seconds. 0: it fails at once.
        `connect_timeout_seconds`: how long a call waits for a router to answer. It does not limit an answer's length.
        `max_buffered_tokens`: how many tokens of one request may wait for its reader. Beyond that the request is
        cancelled, and its reader gets a KvloomError (CLIENT_TOO_SLOW).
        `max_retries`: how often a request is repeated that the fleet could not serve and of which no output has
        arrived, after the pause that the fleet advises (docs/how-to/sdk.md).
        `api_key`: sent with every RPC, for routers that ask for one.
        `tls`: how to use TLS (kvloom/client/credentials.py); None: no TLS.
        `open_channel`: opens a gRPC channel to a router's host:port, for other channel options, instead of `tls` and
        `api_key`.
        """
        self._open_channel = open_channel or channel_opener(api_key, tls)
        self._addresses = _addresses_in(address)
        self._far_addresses = _addresses_in(other_cells)
        self._reattach_seconds = reattach_seconds
        self._client_id = client_id or f"sdk-{os.getpid()}"
        self._connect_timeout_seconds = connect_timeout_seconds
        self._max_buffered_tokens = max_buffered_tokens
        self._max_retries = max_retries
        self._is_closed = False
        self._closing: set[asyncio.Future[None]] = set()
        """Requests that are being cancelled because their reader has left."""
        self._channels: RouterChannels | None = None
        self._cancel_notifier = CancelNotifier(self._open_channel)
        self._link: RouterGroup | None = None
        self._near_until = 0.0
        """Until then, calls wait for a router of the own cell."""

    async def __aenter__(self) -> Self:
        _ = self._routers
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel the running requests and close all connections. `async with` calls it; calling it again is safe."""
        self._is_closed = True
        await asyncio.gather(*self._closing, return_exceptions=True)
        link, self._link = self._link, None
        channels, self._channels = self._channels, None
        if link is not None:
            await link.close()
        await self._cancel_notifier.close()
        if channels is not None:
            await channels.close()

    @lists_options
    def generate(self, **options: Unpack[GenerateOptions]) -> DeltaStream:
        """Generate an answer, or `n` of them, as a stream. Yields a `Delta` for each progress update, in order.

        `model` and one of `messages`, `text` and `token_ids` are required. The last Delta of each choice has its
        `finish_reason`. Leaving the loop (`break`, `return`, an exception) cancels the request at once; see
        `DeltaStream`.

            async for delta in client.generate(model=name, messages=[ChatMessage("user", "Hi")], timeout_seconds=60):
                print(delta.text, end="")

        An answer that loses its connection or its router continues after the last token that the loop has received,
        at another router, or at the same one when it is back. With `resumable=True` nothing is generated again as long
        as only the connection is lost.

        A request that the fleet could not serve is repeated up to `max_retries` times, as long as none of its output
        has arrived.

        Raises KvloomError (INVALID_ARGUMENT) at once for options out of range, and TypeError for unknown ones. While
        iterating, raises the KvloomError of a choice that fails: over the shared stream when all choices have
        finished, by RPC at once. A choice that the safety policy halted finishes with the reason CONTENT_FILTER; a
        prompt that the policy rejected raises CONTENT_FILTERED.
        """
        request = build_request(options)
        if not request.request_id:
            request.request_id = f"req-{uuid.uuid4().hex}"
        if not request.sampling.HasField("seed"):
            request.sampling.seed = draw_seed()
            request.seed_is_drawn = True
        deltas = self._attempts(request)
        return DeltaStream(deltas, request.request_id, request.sampling.seed, max(1, request.n), self._close_soon)

    @lists_options
    async def complete(self, **options: Unpack[GenerateOptions]) -> Answer:
        """Generate an answer, or `n` of them, and return it when it is complete.

            answer = await client.complete(model=name, messages=[ChatMessage("user", "Hi")])
            print(answer.text, answer.finish_reason.name, answer.num_output_tokens)

        Takes the same options as `generate`, and raises the same errors. Cancelling the task cancels the request.
        """
        async with self.generate(**options) as stream:
            return await stream.collect()

    async def embed(
        self,
        inputs: Input | Sequence[Input],
        *,
        model: str,
        pooling: PoolingName | None = None,
        normalize: bool = True,
        timeout_seconds: float = 0.0,
        receipt: bool = False,
    ) -> list[Embedding]:
        """Return the embeddings of a text or of several, each given as a string or as token ids, in their order.

            embeddings = await client.embed(["Looms weave.", "Cats sleep."], model="all-MiniLM-L6-v2")
            print(embeddings[0].vector[:4], embeddings[0].num_prompt_tokens)

        `pooling` says how the hidden states of a text's tokens become one vector: mean, last or cls. By default it is
        what the model was trained for. `normalize`: vectors are scaled to the length 1. `timeout_seconds` is that of
        each input; 0 means the router's default. `receipt`: ask for a signed receipt of each (docs/how-to/receipts.md).

        Retries and failover are those of `generate`. Raises the KvloomError of the first input that fails:
        UNSUPPORTED_PARAMETER for a model that gives no embeddings.
        """
        requests = embedding_requests(model, inputs, pooling, timeout_seconds, normalize=normalize, receipt=receipt)
        room = asyncio.Semaphore(MAX_OPEN_EMBEDDINGS)
        tasks = [asyncio.ensure_future(self._embed_one(request, room)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _embed_one(self, request: router_service_pb2.GenerateRequest, room: asyncio.Semaphore) -> Embedding:
        finish = SequenceFinish()
        async with room, contextlib.aclosing(self._attempts(request)) as deltas:
            async for delta in deltas:
                finish = delta.finish or finish
        return Embedding.of(finish)

    @lists_options
    async def plan(self, **options: Unpack[GenerateOptions]) -> router_service_pb2.PlanResponse:
        """Return where a request with these options would be placed, and the score of every shard. Nothing is placed.

        Raises KvloomError, as `generate` does.
        """
        request = router_service_pb2.PlanRequest(request=build_request(options))
        return await self._routers.call(lambda stub: stub.Plan(request, timeout=self._connect_timeout_seconds))

    async def explain(self, request_id: str = "", *, client_request_id: str = "") -> router_service_pb2.ExplainResponse:
        """Return why a request was placed where it was, and how it ended. It is named by its id, or by the id that its
        caller gave it (`client_request_id`, the x-request-id of HTTP).

        Raises KvloomError (NOT_FOUND) when no router remembers the request.
        """
        request = router_service_pb2.ExplainRequest(request_id=request_id, client_request_id=client_request_id)
        return await self._routers.call(lambda stub: stub.Explain(request, timeout=self._connect_timeout_seconds))

    async def list_models(self) -> list[router_service_pb2.ModelInfo]:
        """Return the models that the fleet serves now. Raises KvloomError when no router answers."""
        request = router_service_pb2.ListModelsRequest()
        answer = await self._routers.call(lambda stub: stub.ListModels(request, timeout=self._connect_timeout_seconds))
        return list(answer.models)

    async def moderate(self, *texts: str) -> list[Moderation]:
        """Return which categories of the safety policy each text belongs to. Nothing is generated.

            (verdict,) = await client.moderate("How do I pick a lock?")
            if verdict:
                print(verdict.categories)

        Raises KvloomError: INVALID_ARGUMENT for too many or too long texts, SAFETY_UNAVAILABLE without the service.
        """
        request = router_service_pb2.ModerateRequest(texts=texts)
        answer = await self._routers.call(lambda stub: stub.Moderate(request, timeout=self._connect_timeout_seconds))
        return moderations(answer)

    async def cancel(self, request_id: str) -> CancelOutcome:
        """Cancel a running request by its id, including one that another client of the same caller started.

        Returns how it ended; only `CancelOutcome.CANCELLED` is true. Raises KvloomError when no router answers.
        """
        request = router_service_pb2.CancelRequest(request_id=request_id)
        answer = await self._routers.call(
            lambda stub: stub.Cancel(request, timeout=self._connect_timeout_seconds),
            lambda answer: answer.found,
            lambda answer: answer.outcome == router_service_pb2.CANCEL_OUTCOME_ALREADY_ENDED,
        )
        if answer.found:
            return CancelOutcome.CANCELLED
        ended = answer.outcome == router_service_pb2.CANCEL_OUTCOME_ALREADY_ENDED
        return CancelOutcome.ALREADY_ENDED if ended else CancelOutcome.NOT_FOUND

    @property
    def _routers(self) -> RouterChannels:
        if self._is_closed:
            raise RuntimeError("The client is closed.")
        if self._channels is None:
            self._channels = RouterChannels(self._addresses, self._open_channel, far_addresses=self._far_addresses)
        return self._channels

    def _close_soon(self, deltas: AsyncGenerator[Delta, None]) -> None:
        """Close the generator of a stream that was left."""
        task = asyncio.ensure_future(deltas.aclose())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _attempts(self, request: router_service_pb2.GenerateRequest) -> AsyncGenerator[Delta, None]:
        """The deltas of the request, which is repeated if it fails before its first one. Every error of the SDK's
        requests leaves through here."""
        request_id, has_output, began_at = request.request_id, False, time.monotonic()
        timeout_seconds = request.timeout_seconds
        deadline_ms = request.objectives.deadline_ms if request.objectives.HasField("deadline_ms") else None
        by_link = request.WhichOneof("input") == "token_ids" and not request.resumable
        for num_retries in itertools.count():
            deltas = self._generate_over_link(request) if by_link else self._generate_by_rpc(request)
            try:
                async for delta in deltas:
                    has_output = True
                    delta.request_id = request_id
                    yield delta
            except KvloomError as error:
                may_retry = not has_output and num_retries < self._max_retries
                pause_seconds = retry_pause_seconds(error, num_retries) if may_retry else None
                left_seconds = timeout_seconds - (time.monotonic() - began_at)
                if pause_seconds is None or (timeout_seconds and pause_seconds >= left_seconds):
                    raise name_as_option(error, request) from None
            else:
                return
            finally:
                await deltas.aclose()
            await asyncio.sleep(pause_seconds)
            if timeout_seconds:
                request.timeout_seconds = left_seconds - pause_seconds
            if deadline_ms is not None:  # the TTFT counts anew, the deadline does not
                left_ms = deadline_ms - (time.monotonic() - began_at) * 1e3
                request.objectives.deadline_ms = max(left_ms, LEAST_DEADLINE_MS)

    async def _generate_by_rpc(self, request: router_service_pb2.GenerateRequest) -> AsyncGenerator[Delta, None]:
        finishes = Finishes(max(1, request.n))
        deltas = failover_deltas(self._routers, request, self._reattach_seconds, self._cancel_notifier)
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
        handle = link.submit(_link_request(request), buffer)
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
            self._link = RouterGroup(
                self._client_id,
                addresses,
                reattach_seconds=self._reattach_seconds,
                tells_refusals=True,
                open_channel=self._open_channel,
            )
            if self._far_addresses:
                self._link.use_cells(NearCellFirst(self._far_addresses), dict.fromkeys(self._far_addresses, ""))
            self._near_until = asyncio.get_running_loop().time() + NEAR_SECONDS
            await self._link.start()
        link = self._link
        await self._near_link(link)
        try:
            async with asyncio.timeout(self._connect_timeout_seconds):
                while not link.connected:
                    if link.refusal is not None:
                        raise link.refusal
                    await link.wait_fleet_change()
        except TimeoutError:
            message = f"No router answers at {', '.join([*self._addresses, *self._far_addresses])}."
            lost = KvloomError(ErrorReason.ERROR_REASON_ROUTER_LOST, message, retry_after_seconds=1.0)
            raise link.residency_refusal() or lost from None
        return link

    async def _near_link(self, link: RouterGroup) -> None:
        """Wait a moment for the routers of the own cell, so that none of the first requests goes to another because
        that has answered sooner."""
        if self._far_addresses and asyncio.get_running_loop().time() < self._near_until:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._near_until):
                    while link.connected_links.keys().isdisjoint(self._addresses):
                        await link.wait_fleet_change()


def _addresses_in(address: str | Sequence[str]) -> list[str]:
    """Those of a list, or of one string with commas between them."""
    return [part.strip() for part in address.split(",")] if isinstance(address, str) else list(address)


def _link_request(request: router_service_pb2.GenerateRequest) -> LinkRequest:
    """The same request over the link, whose prompt travels beside it."""
    submit = router_service_pb2.Submit(request=request)
    submit.request.ClearField("token_ids")
    return LinkRequest(submit, request.token_ids.ids)
