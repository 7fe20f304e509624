"""The sequences that TensorRT-LLM works on: a task for each iterates its RequestOutput and puts the news into the
outbox. All on the event loop that submitted them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from shard_server.engines.base import EngineRequest, FinishReason, SequenceEnd, SequenceStart
from shard_server.engines.tensorrt_llm.api import RequestOutput
from shard_server.engines.tensorrt_llm.health import abort
from shard_server.engines.tensorrt_llm.kv_cache.kv_roots import RootLedger
from shard_server.engines.tensorrt_llm.outbox import Outbox
from shard_server.engines.tensorrt_llm.requests.request_stream import RequestStream, StreamDelta
from shard_server.engines.tensorrt_llm.stats import InFlight

log = structlog.get_logger()


class LiveSequences:
    """`request_error` is what a request's own failure is raised as; `on_progress` is called with the loop's time when
    anything came, `on_death` with what else a stream raised: the engine is dying then."""

    def __init__(
        self,
        outbox: Outbox,
        in_flight: InFlight,
        roots: RootLedger,
        block_size: int,
        request_error: type[Exception],
        cancel_timeout_seconds: float,
        on_progress: Callable[[float], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._outbox = outbox
        self._in_flight = in_flight
        self._roots = roots
        self._block_size = block_size
        self._request_error = request_error
        self._cancel_timeout_seconds = cancel_timeout_seconds
        self._on_progress = on_progress
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, RequestStream] = {}
        self._pumps: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def follow(self, request: EngineRequest, output: RequestOutput) -> None:
        """`output` is what TensorRT-LLM returned for it."""
        now = self._loop.time()
        stream = RequestStream(request, output, now)
        self._streams[request.request_id] = stream
        self._in_flight.add(stream, now)
        self._leave_trace(stream)
        pump = self._loop.create_task(self._pump(stream))
        self._pumps[request.request_id] = pump
        pump.add_done_callback(self._on_pump_done)

    def let_go(self, request_id: str, reason: FinishReason, error: str = "") -> None:
        """Abort one; it ends like this once TensorRT-LLM has ended it. Nothing happens to one that has ended, or has
        been let go of before."""
        stream = self._streams.get(request_id)
        if stream is None or stream.cancelling_sequences is not None:
            return
        stream.cancelling_sequences = SequenceEnd(request_id, reason, error)
        stream.cut_off_at = self._loop.time() + self._cancel_timeout_seconds
        abort(stream.output)
        self._outbox.release_waiters()

    def let_all_go(self, error: str) -> None:
        for request_id in list(self._streams):
            self.let_go(request_id, FinishReason.ERROR, error)

    def cut_off(self, now: float) -> None:
        """End those that TensorRT-LLM should have ended by now."""
        for request_id, stream in list(self._streams.items()):
            if stream.cancelling_sequences is not None and now >= stream.cut_off_at:
                log.warning("TensorRT-LLM does not end an aborted request; cut off", request_id=request_id)
                self._pumps[request_id].cancel()
                self._end(stream, stream.cancelling_sequences)

    def stop(self) -> list[asyncio.Task[None]]:
        """Abort everything without an output; returns the tasks that are ending."""
        pumps = list(self._pumps.values())
        for stream in self._streams.values():
            abort(stream.output)
        for pump in pumps:
            pump.cancel()
        self._streams.clear()
        return pumps

    # -- one sequence -------------------------------------------------------------------------------------------------

    async def _pump(self, stream: RequestStream) -> None:
        """Until the sequence has ended. A stream that has raised is never asked again."""
        output, outbox = stream.output, self._outbox
        request_id = stream.request.request_id
        while True:
            while outbox.is_full(request_id) and stream.cancelling_sequences is None:
                await outbox.until_taken()
            try:
                await anext(output)
            except StopAsyncIteration:
                self._end(stream, SequenceEnd(request_id, FinishReason.ERROR, "its stream ended without a finish"))
                return
            except self._request_error as error:
                self._end(stream, SequenceEnd(request_id, FinishReason.ERROR, str(error)))
                return
            self._on_progress(self._loop.time())
            end = self._take(stream)
            if end is not None:
                self._end(stream, end)
                return

    def _take(self, stream: RequestStream) -> SequenceEnd | None:
        """Put a stream's news into the outbox; its end, if it has come."""
        request_id = stream.request.request_id
        output = stream.output
        if stream.cancelling_sequences is not None:
            return stream.cancelling_sequences if output.finished else None
        is_first = not stream.num_tokens
        try:
            news = stream.take(output)
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            abort(output)
            return SequenceEnd(request_id, FinishReason.ERROR, f"TensorRT-LLM's output makes no sense: {error!r}")
        if news.token_ids:
            self._deliver(stream, news, is_first=is_first)
        if news.end is None:
            return None
        if not output.finished:  # a stop token in the middle of a step, behind which it would go on
            abort(output)
        return SequenceEnd(request_id, news.end, news.error)

    def _deliver(self, stream: RequestStream, news: StreamDelta, *, is_first: bool) -> None:
        request_id = stream.request.request_id
        if is_first:
            queued_seconds = self._in_flight.admitted_at(request_id, stream.submitted_at) - stream.submitted_at
            self._outbox.add_start(SequenceStart(request_id, stream.output.cached_tokens or 0, queued_seconds))
        self._outbox.add_news(request_id, news)
        if not stream.has_root:
            self._leave_trace(stream)

    def _leave_trace(self, stream: RequestStream) -> None:
        """So that its blocks' events can be ascribed to its root; a prompt shorter than a block does it later."""
        if stream.num_context_tokens >= self._block_size:
            stream.has_root = True
            request = stream.request
            generated = stream.output.outputs[0].token_ids
            self._roots.remember([*request.prompt_token_ids, *request.output_token_ids, *generated], request.root_hash)

    def _end(self, stream: RequestStream, end: SequenceEnd) -> None:
        request_id = stream.request.request_id
        if self._streams.pop(request_id, None) is None:
            return
        self._pumps.pop(request_id, None)
        self._in_flight.remove(request_id, self._loop.time())
        self._outbox.add_end(stream.cancelling_sequences or end)

    def _on_pump_done(self, pump: asyncio.Task[None]) -> None:
        if pump.cancelled():
            return
        error = pump.exception()
        if error is not None:
            self._on_death(error)
