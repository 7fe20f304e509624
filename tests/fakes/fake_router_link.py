"""A RouterLink without a router: tests script what its sinks receive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from kvloom.errors import KvloomError
from kvloom.router_link.link import LinkRequest, Sink
from kvloom.v1 import generation_pb2
from kvloom.v1.error_reason_pb2 import ErrorReason, LimitsState
from kvloom.v1.generation_pb2 import RequestMoves, SequenceFinish, SequenceStart, TokenLogprobs
from kvloom.v1.router_service_pb2 import (
    ChargeCallRequest,
    ChargeCallResponse,
    FleetState,
    ModelInfo,
    ModerateRequest,
    ModerateResponse,
)
from tests.fakes.fake_safety import CATEGORIES, classify

STOP = generation_pb2.FINISH_REASON_STOP
LENGTH = generation_pb2.FINISH_REASON_LENGTH
CONTENT_FILTER = generation_pb2.FINISH_REASON_CONTENT_FILTER
CANCELLED = generation_pb2.FINISH_REASON_CANCELLED
ERROR = generation_pb2.FINISH_REASON_ERROR


class FakeRequest:
    """A submitted request, whose methods act as the router. As on the real link, a cancelled sink is not called any
    more."""

    def __init__(self, handle: int, request: LinkRequest, sink: Sink) -> None:
        self.handle = handle
        self.request = request
        self.cancelled = asyncio.Event()
        self._sink = sink
        self._num_output_tokens = [0] * request.n
        for choice in request.partial_choices:
            self._num_output_tokens[choice.index] = len(choice.token_ids)
        self._num_cached_tokens = 0
        self._open = {choice.index for choice in request.partial_choices} or set(range(request.n))

    def start(
        self,
        index: int = 0,
        *,
        shard_id: str = "shard-0",
        num_cached_tokens: int = 0,
        queue_time_seconds: float = 0.0,
        prompt_logprobs: Sequence[TokenLogprobs] = (),
        limits: LimitsState | None = None,
        brownout: str = "",
    ) -> None:
        self._num_cached_tokens = num_cached_tokens
        if not self.cancelled.is_set():
            start = SequenceStart(
                shard_id=shard_id,
                num_cached_tokens=num_cached_tokens,
                queue_time_seconds=queue_time_seconds,
                prompt_logprobs=prompt_logprobs,
                limits=limits,
                brownout=brownout,
            )
            self._sink.on_start(index, start)

    def tokens(
        self,
        delta: str,
        index: int = 0,
        *,
        token_ids: Sequence[int] = (65,),
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        self._num_output_tokens[index] += len(token_ids)
        if not self.cancelled.is_set():
            self._sink.on_tokens(index, delta, token_ids, logprobs)

    def finish(
        self,
        reason: generation_pb2.FinishReason.ValueType = STOP,
        index: int = 0,
        *,
        error: KvloomError | None = None,
        stop_string: str = "",
        embedding: bytes = b"",
        limited_by: str = "",
        moves: RequestMoves | None = None,
        **counts: int,
    ) -> None:
        if not self.cancelled.is_set() and index in self._open:
            self._open.discard(index)
            finish = SequenceFinish(
                reason=reason,
                num_prompt_tokens=len(self.request.prompt_token_ids),
                num_cached_tokens=self._num_cached_tokens,
                num_output_tokens=self._num_output_tokens[index],
                error=error.to_proto() if error else None,
                stop_string=stop_string,
                embedding=embedding,
                limited_by=limited_by,
                moves=moves,
                **counts,
            )
            self._sink.on_finish(index, finish)

    def fail(self, reason: ErrorReason.ValueType, message: str = "it failed", index: int = 0, **more: float) -> None:
        self.finish(ERROR, index, error=KvloomError(reason, message, **more))

    def lose(self) -> None:
        """Ends the choices that still run as a closed link does."""
        for index in list(self._open):
            self.fail(ErrorReason.ERROR_REASON_ROUTER_LOST, index=index)


Script = Callable[[FakeRequest], None]


def answer(*deltas: str, reason: generation_pb2.FinishReason.ValueType = STOP, **start: object) -> Script:
    """Returns a script that sends every choice these deltas, one token each, all in one frame, and log-probabilities
    if they are asked for."""

    def play(request: FakeRequest) -> None:
        wants_logprobs = request.request.submit.request.sampling.HasField("logprobs")
        logprobs = [TokenLogprobs(logprob=-0.5)] if wants_logprobs else []
        for index in range(request.request.n):
            request.start(index, **start)
            for delta in deltas:
                request.tokens(delta, index, logprobs=logprobs)
        for index in range(request.request.n):
            request.finish(reason, index)

    return play


class FakeRouterLink:
    """Without a script, tests take submitted requests with `next_request` and drive them by hand."""

    def __init__(self, model: str = "tiny", max_model_len: int = 4096) -> None:
        self.fleet = FleetState(models=[ModelInfo(name=model, num_ready_shards=1, max_model_len=max_model_len)])
        self.connected = True
        self.script: Script | None = None
        self.requests: list[FakeRequest] = []
        self.moderation_error: KvloomError | None = None
        self.charges: list[ChargeCallRequest] = []
        self.charge_error: KvloomError | None = None
        self.limits: LimitsState | None = None
        self.discarded: list[str] = []
        self.overview: dict[str, Any] = {}
        self.asked: list[tuple[str, Any]] = []
        self._by_handle: dict[int, FakeRequest] = {}
        self._submitted: asyncio.Queue[FakeRequest] = asyncio.Queue()
        self._fleet_changed = asyncio.Event()
        self.num_waits = 0
        """How often `wait_fleet_change` was called."""

    def tell(self, fleet: FleetState, *, connected: bool = True) -> None:
        """Changes the state of the fleet or of the connection."""
        self.fleet, self.connected = fleet, connected
        self._fleet_changed.set()
        self._fleet_changed = asyncio.Event()

    async def wait_fleet_change(self) -> None:
        self.num_waits += 1
        await self._fleet_changed.wait()

    def submit(self, request: LinkRequest, sink: Sink) -> int:
        if not self.connected:
            raise KvloomError(ErrorReason.ERROR_REASON_ROUTER_LOST, "The router is gone.", retry_after_seconds=1.0)
        fake = FakeRequest(len(self.requests) + 1, request, sink)
        self.requests.append(fake)
        self._by_handle[fake.handle] = fake
        if self.script is None:
            self._submitted.put_nowait(fake)
        else:
            asyncio.get_running_loop().call_soon(self.script, fake)
        return fake.handle

    def cancel(self, handle: int) -> None:
        if handle in self._by_handle:
            self._by_handle[handle].cancelled.set()

    def discard(self, request_ids: Sequence[str]) -> None:
        self.discarded += request_ids

    async def moderate(self, request: ModerateRequest) -> ModerateResponse:
        """A policy with one rule, as that of FakeSafety."""
        if not self.connected:
            raise KvloomError(ErrorReason.ERROR_REASON_ROUTER_LOST, "The router is gone.", retry_after_seconds=1.0)
        if self.moderation_error is not None:
            raise self.moderation_error
        return ModerateResponse(results=classify(request.texts), categories=CATEGORIES, policy_revision="1")

    async def charge_call(self, request: ChargeCallRequest) -> ChargeCallResponse:
        """Notes it. Refuses it with `charge_error`."""
        self.charges.append(request)
        if self.charge_error is not None and not request.num_more_tokens:
            raise self.charge_error
        return ChargeCallResponse(limits=self.limits)

    async def ask_all(self, method: str, request: Any) -> list[Any]:
        """Answers with `overview`, by method, or fails with it."""
        self.asked.append((method, request))
        answer = self.overview[method]
        if isinstance(answer, KvloomError):
            raise answer
        return [answer]

    async def close(self) -> None:
        self.tell(FleetState(), connected=False)
        for request in self.requests:
            request.lose()

    async def next_request(self) -> FakeRequest:
        async with asyncio.timeout(5):
            return await self._submitted.get()
