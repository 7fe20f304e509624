"""Works at one background response, from any state in which a process may have left it, to its end."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Final

import msgspec
import structlog

from kvloom_common.database.database import Database
from kvloom_common.trust.on_behalf import RUN
from orchestrator.background import rows
from orchestrator.background.log import DivergedError, ResponseLog, ResponseLogs
from orchestrator.background.rows import RunInputs
from orchestrator.jobs.edges import (
    IDEMPOTENCY_KEY,
    PRIORITY_CLASS,
    RETRIED,
    EdgeAwayError,
    EdgeRefusedError,
    Edges,
    EdgeStream,
)
from orchestrator.jobs.runner import Clock
from orchestrator.metrics import BACKGROUND_ENDED

log = structlog.get_logger()

MAX_RUNS: Final = 64
"""That one process works at. The others are queued."""
MAX_SECONDS: Final = 86_400.0
"""A response that has not ended a day after it was asked for has failed."""
MAX_FAILURES: Final = 5
"""How often a response is begun again whose generation has failed. While no edge takes it, it is tried on."""
FIRST_PAUSE_SECONDS: Final = 0.1
MAX_PAUSE_SECONDS: Final = 5.0
CANCEL_SECONDS: Final = 2.0
PATH: Final = "/v1/responses"
_LAST: Final = ("response.completed", "response.incomplete", "response.failed")
_AGAIN: Final = ("server_error", "rate_limit_exceeded")
"""The codes of failures that another try may not have."""


class ResponseRun:
    """Work (orchestrator/jobs/runner.py) that ends early when the response is cancelled or deleted."""

    def __init__(
        self, database: Database, edges: Edges, logs: ResponseLogs, holder: str, job: Any, clock: Clock
    ) -> None:
        self._clock = clock
        self._database = database
        self._edges = edges
        self._logs = logs
        self._holder = holder
        self._id: str = job.id
        self._tenant: str = job.tenant
        self._key_id: str = job.key_id
        self._expires_at: float = job.created_at + MAX_SECONDS
        self._stopping: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def look(self, now: float) -> None:
        is_open = await rows.status(self._database, self._tenant, self._id) in rows.OPEN
        if (not is_open or now >= self._expires_at) and not self._stopping.done():
            self._stopping.set_result("expired" if is_open else "over")

    async def run(self) -> None:
        run = await self._database.uninterrupted(rows.start(self._database, self._tenant, self._id))
        if run is None:
            return
        events = self._logs[self._id] = ResponseLog(run.num_sent, run.sent_digest, self._save_sent)
        try:
            await self._bring_to_end(run, events)
        finally:
            del self._logs[self._id]
            if not events.is_over:
                events.end(is_lost=True)

    async def _save_sent(self, num_sent: int, digest: bytes) -> bool:
        work = rows.save_sent(self._database, self._holder, self._id, num_sent, digest)
        return await self._database.uninterrupted(work)

    async def _bring_to_end(self, run: RunInputs, events: ResponseLog) -> None:
        generating = asyncio.create_task(self._generate(run, events), name=f"{self._id} generation")
        try:
            await asyncio.wait((generating, self._stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not generating.done():
                generating.cancel()
            await asyncio.wait((generating,))
        if not generating.cancelled():
            last = generating.result()
        elif self._stopping.result() == "expired":
            last = _failed(run, events, "server_error", "The response has not ended within a day.")
        else:
            last = b""
        if not last or not await self._finish(run, events, last):
            events.end()
            work = rows.end(self._database, self._tenant, self._holder, self._id, events.readable)
            await self._database.uninterrupted(work)

    async def _finish(self, run: RunInputs, events: ResponseLog, last: bytes) -> bool:
        """Stores the response, then lets readers have the last event. Returns False if it was cancelled or deleted."""
        response = _response_of(last)
        own = self._database, self._tenant, self._holder
        work = rows.finish(*own, run, response, [*events.events, last], self._clock())
        if not await self._database.uninterrupted(work):
            return False
        events.end(last)
        BACKGROUND_ENDED.labels(response["status"]).inc()
        log.info("background_response_ended", response=self._id, tenant=self._tenant, status=response["status"])
        return True

    async def _generate(self, run: RunInputs, events: ResponseLog) -> bytes:
        """Returns the last event, once it is known."""
        pause, num_failures = FIRST_PAUSE_SECONDS, 0
        while True:
            cause = ""
            try:
                last = await self._attempt(run, events)
                error = _response_of(last).get("error") or {}
                if error.get("code") not in _AGAIN or num_failures == MAX_FAILURES:
                    events.check_end()
                    return last
                num_failures, cause = num_failures + 1, str(error.get("message"))
            except EdgeAwayError as away:
                cause = str(away)
            except EdgeRefusedError as refused:
                cause = str(refused)
                num_failures += refused.answer.status == 500
                if refused.answer.status not in RETRIED or refused.answer.is_final or num_failures > MAX_FAILURES:
                    return _refused(run, events, refused)
            except DivergedError:
                log.exception("background_response_diverged", response=self._id)
                message = "The response was interrupted, and could not be continued as it was begun."
                return _failed(run, events, "server_error", message)
            log.info("background_response_delayed", response=self._id, cause=cause[:200])
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    async def _attempt(self, run: RunInputs, events: ResponseLog) -> bytes:
        """Returns the last event. Raises EdgeAwayError, EdgeRefusedError, DivergedError."""
        named = {"id": self._id, "created_at": run.response["created_at"], "seed": run.seed}
        headers = {
            IDEMPOTENCY_KEY: self._id,
            "x-request-id": self._id,
            RUN: msgspec.json.encode(named).decode(),
            **({PRIORITY_CLASS: run.priority_class} if run.priority_class else {}),
        }
        async with self._edges.stream(self._tenant, self._key_id, PATH, run.body, headers) as stream:
            events.begin_again()
            try:
                async for event in stream.events():
                    if event.partition(b"\n")[0].removeprefix(b"event: ").decode() in _LAST:
                        return event
                    events.add(event)
            except asyncio.CancelledError:
                if self._stopping.done():
                    await _cancel(stream)
                raise
        raise EdgeAwayError("the stream has no last event")


async def _cancel(stream: EdgeStream) -> None:
    with contextlib.suppress(EdgeAwayError, TimeoutError):
        async with asyncio.timeout(CANCEL_SECONDS):
            await stream.cancel()


def _response_of(event: bytes) -> dict[str, Any]:
    return msgspec.json.decode(event.partition(b"\ndata: ")[2])["response"]


def _refused(run: RunInputs, events: ResponseLog, refused: EdgeRefusedError) -> bytes:
    try:
        error = msgspec.json.decode(refused.answer.body)["error"]
        message = str(error["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        message = f"The request was refused with status {refused.answer.status}."
    code = "rate_limit_exceeded" if refused.answer.status == 429 else "invalid_prompt"
    return _failed(run, events, code if refused.answer.status < 500 else "server_error", message)


def _failed(run: RunInputs, events: ResponseLog, code: str, message: str) -> bytes:
    """The last event of a response that no edge has ended."""
    if not events.events:
        events.add(_event("response.created", 0, {**run.response, "output": []}))
    response = {**run.response, "status": "failed", "error": {"code": code, "message": message}, "output": []}
    return _event("response.failed", len(events.events), response)


def _event(name: str, number: int, response: dict[str, Any]) -> bytes:
    data = msgspec.json.encode({"type": name, "sequence_number": number, "response": response})
    return b"event: %b\ndata: %b" % (name.encode(), data)
