"""The resumable responses of this edge: which callers may find them, how long they are kept, and how much of them."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from edge_http.metrics import EdgeMetrics
from edge_http.resume.commit_gate import CommitCursor, CommitGate
from edge_http.resume.publication import Publication
from edge_http.resume.response_name import ResponseName
from edge_http.resume.resumable_stream import ResumableStream
from edge_http.wire.headers import IDEMPOTENCY_KEY
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.replay.stream_retention import ResumeSettings, StreamRetention


@dataclasses.dataclass(slots=True, eq=False)
class _Job:
    """The task that produces a response."""

    task: asyncio.Task[None]
    cancel: Callable[[KvloomError], None]


class ResumeTable:
    """It lives on the event loop and owns the tasks of its responses."""

    def __init__(self, config: ResumeSettings, metrics: EdgeMetrics) -> None:
        self._config = config
        self._metrics = metrics
        self._retention: StreamRetention[ResumableStream] = StreamRetention(config, self._remove, metrics.on_evicted)
        self._streams: dict[str, ResumableStream] = {}
        self._by_key: dict[tuple[str, str], ResumableStream] = {}
        self._jobs: dict[str, _Job] = {}
        self.publications: dict[str, Publication] = {}
        """By response id; empty without a journal."""
        self._gate: CommitGate[Publication] | None = None
        self._is_encrypted = False
        self._on_removed: Callable[[Publication], None] = lambda _: None
        metrics.watch_resumable(
            lambda: len(self._streams),
            lambda: self._retention.num_unattended,
            lambda: self._retention.num_bytes,
        )

    @property
    def grace_seconds(self) -> float:
        return self._config.grace_seconds

    @property
    def streams(self) -> Mapping[str, ResumableStream]:
        """All responses that can be resumed, by id."""
        return self._streams

    def publish_with(
        self,
        gate: CommitGate[Publication],
        on_removed: Callable[[Publication], None],
        *,
        is_encrypted: bool = False,
    ) -> None:
        """From now on there is a journal. `on_removed` is called with each response that no client may find any
        more."""
        self._gate = gate
        self._is_encrypted = is_encrypted
        self._on_removed = on_removed

    def is_published(self, *, is_hidden: bool = False) -> bool:
        """True when responses go into the journal. `is_hidden`: one with texts that are hidden from models, which a
        journal in clear must not have."""
        return self._gate is not None and (self._is_encrypted or not is_hidden)

    def publish(self, publication: Publication) -> None:
        """Let the journal have a response that was opened, before it begins."""
        stream = publication.stream
        self.publications[stream.name.id] = publication
        if self._gate is not None:
            stream.commit = CommitCursor(self._gate, publication)

    def keep_here(self, response_id: str) -> None:
        """No other edge could continue this response from now on, only replay it once it has ended."""
        publication = self.publications.get(response_id)
        if publication is not None and self._gate is not None:
            publication.keep_here()
            if not publication.is_noted:
                self._gate.note(publication)

    def is_wanted(self, header: bool | None) -> bool:
        """True when a stream is to be resumable, also without an idempotency key. `header` is the client's wish, if it
        sent one."""
        return self._config.grace_seconds > 0 and (self._config.by_default if header is None else header)

    def open(self, name: ResponseName, num_events_before: int = 0) -> ResumableStream:
        """Open a new response, or one that continues behind event `num_events_before`. The caller has to `start` its
        job next."""
        stream = ResumableStream(
            name,
            self._retention.new_log(num_events_before),
            self._config.grace_seconds,
            self._retention.on_left,
            self._on_abandoned,
            self._metrics.on_slow_resumable_client,
        )
        self._streams[name.id] = stream
        self._retention.add(stream)
        if name.idempotency_key:
            self._by_key[name.tenant, name.idempotency_key] = stream
        return stream

    def start(
        self,
        stream: ResumableStream,
        job: Coroutine[Any, Any, None],
        cancel: Callable[[KvloomError], None],
        on_done: Callable[[], None],
    ) -> None:
        """`job` ends once the response has ended; it must not raise. `cancel` makes it end with an error."""
        task = asyncio.create_task(job, name=f"response {stream.name.id}")
        self._jobs[stream.name.id] = _Job(task, cancel)
        task.add_done_callback(lambda _: self._on_job_done(stream, on_done))

    def find(self, response_id: str, caller: bytes) -> ResumableStream | None:
        """Returns None whether there is none or it is another caller's: clients cannot find out which."""
        stream = self._streams.get(response_id)
        if stream is None or not hmac.compare_digest(stream.name.caller, caller):
            return None
        return stream

    def find_by_key(self, tenant: str, idempotency_key: str) -> ResumableStream | None:
        return self._by_key.get((tenant, idempotency_key))

    def forget(self, stream: ResumableStream) -> None:
        """Forget a stream that has ended."""
        self._remove(stream)

    def cancel(self, stream: ResumableStream) -> None:
        """End the response, as its client asked."""
        job = self._jobs.get(stream.name.id)
        if job is not None:
            job.cancel(KvloomError(ErrorReason.ERROR_REASON_CANCELLED, "The request was cancelled."))

    def release(self, response_id: str) -> None:
        """Another edge has taken the response over."""
        stream = self._streams.get(response_id)
        if stream is not None:
            message = "Another server continues this stream."
            self._leave(stream, KvloomError(ErrorReason.ERROR_REASON_STREAM_TAKEN_OVER, message))

    def hand_over(self) -> None:
        """This edge stops, and the journal is complete: other edges can continue the responses that still run."""
        message = "This server is stopping. The stream can be resumed at another one."
        for stream in list(self._streams.values()):
            if stream.name.id in self.publications and not stream.ended:
                self._leave(stream, KvloomError(ErrorReason.ERROR_REASON_DRAINING, message))

    def _leave(self, stream: ResumableStream, error: KvloomError) -> None:
        """Another edge continues the response."""
        stream.break_reader_off(error)
        self.publications.pop(stream.name.id, None)  # the journal must keep it
        self.cancel(stream)
        self._remove(stream)

    async def close(self) -> None:
        """End all responses; those that still run are cancelled in the engine too."""
        tasks = [job.task for job in self._jobs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in list(self._streams.values()):
            self._remove(stream)

    def _on_job_done(self, stream: ResumableStream, on_done: Callable[[], None]) -> None:
        on_done()
        self._jobs.pop(stream.name.id, None)
        if stream.error is not None:
            self._remove(stream)  # refused: the same request may succeed when it is repeated
        else:
            self._retention.on_ended(stream)
            if stream.name.idempotency_key and not stream.has_failed:
                stream.keep_for(max(self._config.grace_seconds, self._config.idempotency_seconds))

    def _on_abandoned(self, stream: ResumableStream) -> None:
        job = self._jobs.get(stream.name.id)
        if job is not None:
            self._metrics.on_expired(stream.num_unclaimed)
            job.cancel(KvloomError(ErrorReason.ERROR_REASON_CANCELLED, "The client did not come back."))
        self._remove(stream)

    def _remove(self, stream: ResumableStream) -> None:
        name = stream.name
        if self._streams.pop(name.id, None) is None:
            return
        self._retention.discard(stream)
        publication = self.publications.pop(name.id, None)
        if publication is not None:
            self._on_removed(publication)
        if self._by_key.get((name.tenant, name.idempotency_key)) is stream:
            del self._by_key[name.tenant, name.idempotency_key]
        stream.close()


def not_kept() -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_NOT_FOUND,
        "There is no such response, or it is no longer kept: only streams begun as resumable can be taken up again, "
        "and only for a limited time.",
    )


def other_request() -> KvloomError:
    message = f"The {IDEMPOTENCY_KEY} was used for another request."
    return KvloomError(ErrorReason.ERROR_REASON_DUPLICATE_REQUEST_ID, message, field=IDEMPOTENCY_KEY)
