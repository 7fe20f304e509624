"""The requests that TensorRT-LLM is running. A task for each iterates its RequestOutput and puts the new output into
the OutputBuffer. Everything runs on the event loop that submitted the requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from shard_server.engines.base import EngineRequest, SequenceEnd, SequenceFinishReason, SequenceStart
from shard_server.engines.tensorrt_llm.api import RequestOutput
from shard_server.engines.tensorrt_llm.disaggregation import handoff_of
from shard_server.engines.tensorrt_llm.health import abort
from shard_server.engines.tensorrt_llm.kv_cache.kv_roots import RootLedger
from shard_server.engines.tensorrt_llm.output_buffer import OutputBuffer
from shard_server.engines.tensorrt_llm.requests.request_stream import RequestStream, StreamDelta
from shard_server.engines.tensorrt_llm.stats import InFlight

log = structlog.get_logger()


class RunningRequests:
    """`request_error` is the library's exception type for a failure of one request. `on_progress` is called with the
    loop's time whenever output arrives; `on_request_end` when TensorRT-LLM has ended a request that was not aborted,
    with whether it failed; `on_unexplained` with any other exception that a stream has raised, which ends that request
    and may mean that the engine dies; `on_bug` with an exception of this class itself.
    """

    def __init__(
        self,
        buffer: OutputBuffer,
        in_flight: InFlight,
        roots: RootLedger,
        block_size: int,
        request_error: type[Exception],
        cancel_timeout_seconds: float,
        on_progress: Callable[[float], None],
        on_request_end: Callable[[RequestStream, bool], None],
        on_unexplained: Callable[[RequestStream, Exception], None],
        on_bug: Callable[[BaseException], None],
    ) -> None:
        self._buffer = buffer
        self._in_flight = in_flight
        self._roots = roots
        self._block_size = block_size
        self._request_error = request_error
        self._cancel_timeout_seconds = cancel_timeout_seconds
        self._on_progress = on_progress
        self._on_request_end = on_request_end
        self._on_unexplained = on_unexplained
        self._on_bug = on_bug
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, RequestStream] = {}
        self._pumps: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def add(self, request: EngineRequest, output: RequestOutput) -> None:
        """Start reading `output`, which TensorRT-LLM returned for the request."""
        now = self._loop.time()
        stream = RequestStream(request, output, now)
        self._streams[request.request_id] = stream
        self._in_flight.add(stream, now)
        self._leave_trace(stream)
        pump = self._loop.create_task(self._pump(stream))
        self._pumps[request.request_id] = pump
        pump.add_done_callback(self._on_pump_done)

    def abort(self, request_id: str, reason: SequenceFinishReason, error: str = "") -> None:
        """Abort a request, which ends with this reason once TensorRT-LLM has ended it.

        Requests that have ended or were aborted before are ignored. One whose KV comes from another engine is not
        interrupted before its first token shows that it has come: the other engine would keep the KV until its timeout.
        """
        stream = self._streams.get(request_id)
        if stream is None or stream.pending_end is not None:
            return
        stream.pending_end = SequenceEnd(request_id, reason, error)
        if self._may_get_no_answer(stream):
            abort(stream.output)
            self._cut_off(stream, stream.pending_end)
            return
        stream.cut_off_at = self._loop.time() + self._cancel_timeout_seconds
        stream.aborts_later = stream.request.handoff is not None and not stream.num_tokens
        if not stream.aborts_later:
            abort(stream.output)
        self._buffer.release_waiters()

    def abort_all(self, error: str) -> None:
        for request_id in list(self._streams):
            self.abort(request_id, SequenceFinishReason.ERROR, error)

    def cut_off(self, now: float) -> None:
        """End the aborted requests that TensorRT-LLM has not ended in time."""
        for request_id, stream in list(self._streams.items()):
            if stream.pending_end is not None and now >= stream.cut_off_at:
                log.warning("trtllm_abort_ignored", request_id=request_id)
                if stream.aborts_later:
                    abort(stream.output)
                self._cut_off(stream, stream.pending_end)

    def _may_get_no_answer(self, stream: RequestStream) -> bool:
        """True when TensorRT-LLM may drop an aborted request without a response, as it does with one that it has not
        admitted. A leg of a hand-off that may be running has KV to account for, and is waited for."""
        request = stream.request
        is_leg = request.prefill_only or request.handoff is not None
        return not stream.num_tokens and not (is_leg and self._in_flight.is_admitted(request.request_id))

    def _cut_off(self, stream: RequestStream, end: SequenceEnd) -> None:
        self._pumps[stream.request.request_id].cancel()
        self._end(stream, end)

    def stop(self) -> list[asyncio.Task[None]]:
        """Abort all requests without further output; returns the tasks that are ending."""
        pumps = list(self._pumps.values())
        for stream in self._streams.values():
            abort(stream.output)
        for pump in pumps:
            pump.cancel()
        self._streams.clear()
        return pumps

    # -- one sequence -------------------------------------------------------------------------------------------------

    async def _pump(self, stream: RequestStream) -> None:
        """Read output until the sequence has ended. A stream that has raised is not read again."""
        output, buffer = stream.output, self._buffer
        request_id = stream.request.request_id
        while True:
            while buffer.is_full(request_id) and stream.pending_end is None:
                await buffer.until_taken()
            try:
                await anext(output)
            except StopAsyncIteration:
                end = SequenceEnd(request_id, SequenceFinishReason.ERROR, "its stream ended without a finish")
                self._end(stream, stream.pending_end or end)
                return
            except self._request_error as error:
                if stream.pending_end is None:
                    self._on_request_end(stream, True)
                end = SequenceEnd(request_id, SequenceFinishReason.ERROR, str(error))
                self._end(stream, stream.pending_end or end)
                return
            except Exception as error:
                self._on_unexplained(stream, error)
                end = SequenceEnd(request_id, SequenceFinishReason.ERROR, repr(error))
                self._end(stream, stream.pending_end or end)
                return
            self._on_progress(self._loop.time())
            end = self._take(stream)
            if end is not None:
                if stream.pending_end is None:
                    self._on_request_end(stream, end.reason is SequenceFinishReason.ERROR)
                self._end(stream, end)
                return

    def _take(self, stream: RequestStream) -> SequenceEnd | None:
        """Put a stream's new output into the buffer; returns its end if it has ended."""
        request_id = stream.request.request_id
        output = stream.output
        if stream.pending_end is not None:
            return self._end_of_aborted(stream, stream.pending_end)
        is_first = not stream.num_tokens
        try:
            delta = stream.take(output)
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            abort(output)
            return SequenceEnd(
                request_id, SequenceFinishReason.ERROR, f"TensorRT-LLM's output makes no sense: {error!r}"
            )
        if delta.token_ids:
            self._deliver(stream, delta, is_first=is_first)
        if delta.end is None:
            return None
        if not output.finished:  # a stop token within a step: TensorRT-LLM would continue after it
            abort(output)
        handoff = (
            handoff_of(output) if stream.request.prefill_only and delta.end is SequenceFinishReason.LENGTH else None
        )
        if handoff is None:
            return SequenceEnd(request_id, delta.end, delta.error)
        return SequenceEnd(request_id, delta.end, delta.error, handoff=handoff.to_bytes())

    def _end_of_aborted(self, stream: RequestStream, pending_end: SequenceEnd) -> SequenceEnd | None:
        """The end of a request that was aborted, if TensorRT-LLM has ended it."""
        output = stream.output
        if output.finished:
            handoff = handoff_of(output) if stream.request.prefill_only else None
            if handoff is None:
                return pending_end
            # The abort came too late, and frees nothing: the KV waits to be fetched, or for its timeout.
            return SequenceEnd(pending_end.request_id, SequenceFinishReason.LENGTH, handoff=handoff.to_bytes())
        if stream.aborts_later:
            stream.aborts_later = False
            abort(output)
        return None

    def _deliver(self, stream: RequestStream, delta: StreamDelta, *, is_first: bool) -> None:
        request_id = stream.request.request_id
        if is_first:
            queued_seconds = self._in_flight.admitted_at(request_id, stream.submitted_at) - stream.submitted_at
            self._buffer.add_start(SequenceStart(request_id, stream.output.cached_tokens or 0, queued_seconds))
        self._buffer.add_delta(request_id, delta)
        if not stream.has_root:
            self._leave_trace(stream)

    def _leave_trace(self, stream: RequestStream) -> None:
        """Remember the prompt, so that events of its blocks can be matched to its root. A prompt shorter than a block
        is remembered later."""
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
        self._buffer.add_end(end)

    def _on_pump_done(self, pump: asyncio.Task[None]) -> None:
        if pump.cancelled():
            return
        error = pump.exception()
        if error is not None:
            self._on_bug(error)
