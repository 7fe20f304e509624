"""Works at one batch, from any state in which a process may have left it, to its end."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
import structlog

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.database.database import Database
from orchestrator.batches import progress
from orchestrator.batches.lines import LineError, LineReader, in_turn, request_body, result_of
from orchestrator.batches.progress import COMPLETED, FAILED, OpenLine
from orchestrator.files.sealed import TenantContents
from orchestrator.jobs.edges import RETRIED, EdgeAwayError, Edges
from orchestrator.jobs.runner import Clock
from orchestrator.metrics import BATCH_LINES
from orchestrator.store.objects import StoredObject, new_file

log = structlog.get_logger()

MAX_FAILURES: Final = 5
"""A line that ends with a 500 so often has failed. All others are tried until the batch expires."""
FIRST_PAUSE_SECONDS: Final = 0.25
MAX_PAUSE_SECONDS: Final = 10.0
FILE_SECONDS: Final = 30 * 86_400.0
_ENDS: Final = {"cancelling": ("cancelled", "batch_cancelled"), "expired": ("expired", "batch_expired")}


class BatchWork:
    """Work (orchestrator/jobs/runner.py) that ends early when the batch is cancelled or expires."""

    def __init__(
        self, database: Database, contents: TenantContents, edges: Edges, job: Any, concurrency: int, clock: Clock
    ) -> None:
        self._database = database
        self._contents = contents
        self._edges = edges
        self._id: str = job.id
        self._tenant: str = job.tenant
        self._key_id: str = job.key_id
        self._concurrency = concurrency
        self._clock = clock
        self._stopping: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._totals = {"input_tokens": 0, "output_tokens": 0}

    async def look(self, now: float) -> None:
        try:
            body = (await progress.read(self._database, self._tenant, self._id)).body
        except KvloomError as error:
            if error.reason != ErrorReason.ERROR_REASON_NOT_FOUND:
                raise
            return  # it was erased, and the job with it
        is_expired = body["expires_at"] <= now and body["status"] == "in_progress"
        if (body["status"] == "cancelling" or is_expired) and not self._stopping.done():
            self._stopping.set_result("expired" if is_expired else "cancelling")

    async def run(self) -> None:
        one = await self._database.uninterrupted(progress.read(self._database, self._tenant, self._id))
        body = one.body
        if body["status"] == "validating":
            body = await self._validate(body)
        if body["status"] == "failed":
            return
        if body["status"] == "in_progress":
            await self._work(body)
        await self._database.uninterrupted(self._finish())

    async def _validate(self, body: dict[str, Any]) -> dict[str, Any]:
        reader = LineReader(body["endpoint"])
        try:
            async for piece in self._contents.read(self._tenant, body["input_file_id"]):
                reader.feed(piece)
                await asyncio.sleep(0)  # others have their turn
        except KvloomError as error:
            if error.reason != ErrorReason.ERROR_REASON_NOT_FOUND:
                raise
            reader.errors.append(LineError(*_LOST, None, "input_file_id"))
        reader.finish()
        if not reader.errors:
            lines = await asyncio.to_thread(in_turn, reader.lines)  # a quarter of a second for the most lines
            work = progress.begin(self._database, self._tenant, self._id, lines, self._clock())
            return await self._database.uninterrupted(work)
        errors = {"object": "list", "data": [error._asdict() for error in reader.errors]}
        failed = {"status": "failed", "failed_at": int(self._clock()), "errors": errors}
        await self._database.uninterrupted(
            progress.finish(self._database, self._tenant, self._id, (), lambda _: failed, self._clock())
        )
        return {**body, **failed}

    async def _work(self, body: dict[str, Any]) -> None:
        """Answer all lines that are open, so many at a time, until there is none or the batch must stop."""
        running: set[asyncio.Task[None]] = set()
        last = progress.BEFORE_FIRST
        try:
            while not self._stopping.done():
                room = self._concurrency - len(running)
                found = progress.open_lines(self._database, self._id, last, room)
                for line in await self._database.uninterrupted(found):
                    last = line
                    running.add(asyncio.create_task(self._answer(body, line), name=f"{self._id} {line.line}"))
                if not running:
                    return
                await asyncio.wait((*running, self._stopping), return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in running if task.done()]:
                    running.discard(task)
                    task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _answer(self, body: dict[str, Any], line: OpenLine) -> None:
        path = body["endpoint"]
        try:
            part = line.offset, line.num_bytes
            raw = await self._contents.read_part(self._tenant, body["input_file_id"], *part)
        except KvloomError as error:
            if error.reason != ErrorReason.ERROR_REASON_NOT_FOUND:
                raise
            await self._end(line, FAILED, None, {"code": _LOST[0], "message": _LOST[1]})
            return
        wanted, key = request_body(raw, path), f"{self._id}.{line.line}"
        pause, num_failures = FIRST_PAUSE_SECONDS, 0
        while True:
            try:
                answer = await self._edges.post(self._tenant, self._key_id, path, wanted, key)
            except EdgeAwayError as error:
                log.info("batch_line_delayed", batch=self._id, line=line.line, cause=str(error))
            else:
                num_failures += answer.status == 500
                if answer.status not in RETRIED or answer.is_final or num_failures >= MAX_FAILURES:
                    break
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)
        response = {"status_code": answer.status, "request_id": answer.request_id, "body": msgspec.Raw(answer.body)}
        await self._end(line, COMPLETED if answer.status == 200 else FAILED, response, None)

    async def _end(self, line: OpenLine, state: str, response: Any, error: Any) -> None:
        result = result_of(self._id, line.line, line.custom_id, response, error)
        work = progress.end_line(self._database, self._tenant, self._id, line.line, state, result)
        if await self._database.uninterrupted(work):
            BATCH_LINES.labels(state).inc()

    async def _finish(self) -> None:
        why = self._stopping.result() if self._stopping.done() else ""
        now = self._clock()

        def finalizing(body: dict[str, Any]) -> dict[str, Any] | None:
            if why or body["status"] != "in_progress":
                return None
            return {"status": "finalizing", "finalizing_at": int(now)}

        body = await progress.update(self._database, self._tenant, self._id, finalizing)
        if body["status"] == "cancelling":
            why = why or "cancelling"
        status, code = _ENDS.get(why, ("completed", ""))
        if code:
            await self._end_open_lines(code)
        created, files = now, []
        ends: dict[str, Any] = {"status": status, f"{status}_at": int(now)}
        seconds = (body.get("output_expires_after") or {}).get("seconds", FILE_SECONDS)
        for state, name in ((COMPLETED, "output"), (FAILED, "error")):
            file = await self._write(state, name, created, created + seconds)
            if file is not None:
                files.append(file)
                ends[f"{name}_file_id"] = file.id
        total = sum(self._totals.values())
        ends["usage"] = {
            **self._totals,
            "total_tokens": total,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        await progress.finish(self._database, self._tenant, self._id, files, lambda _: ends, now)
        log.info("batch_ended", batch=self._id, tenant=self._tenant, status=status)

    async def _end_open_lines(self, code: str) -> None:
        error = {"code": code, "message": f"The line was not processed: the batch {_WORDS[code]}."}
        while lines := await progress.open_lines(self._database, self._id, progress.BEFORE_FIRST, 200):
            for line in lines:
                result = result_of(self._id, line.line, line.custom_id, None, error)
                await progress.end_line(self._database, self._tenant, self._id, line.line, FAILED, result)

    async def _write(self, state: str, name: str, now: float, expires_at: float) -> StoredObject | None:
        """The output or the error file, under an id that is always the same; None if there is nothing to write."""
        digest = hashlib.sha256(f"{self._id} {name}".encode()).hexdigest()[:48]
        file_id = self._contents.id_prefix("file-") + digest
        num_bytes = 0

        async def pieces() -> AsyncIterator[bytes]:
            nonlocal num_bytes
            async for result in progress.results(self._database, self._tenant, self._id, state):
                num_bytes += len(result) + 1
                self._count_usage(result)
                yield result + b"\n"

        await self._contents.write(self._tenant, file_id, pieces())
        if not num_bytes:
            await self._contents.delete(file_id)
            return None
        return new_file(f"{self._id}_{name}.jsonl", "batch_output", num_bytes, now, expires_at, file_id)

    def _count_usage(self, result: bytes) -> None:
        try:
            usage = msgspec.json.decode(result, type=_Result).response.body.usage
        except msgspec.MsgspecError:
            return
        self._totals["input_tokens"] += usage.input_tokens or usage.prompt_tokens
        self._totals["output_tokens"] += usage.output_tokens or usage.completion_tokens


_LOST: Final = ("input_file_lost", "The input file was deleted.")
_WORDS: Final = {"batch_cancelled": "was cancelled", "batch_expired": "has expired"}


class _Usage(msgspec.Struct):
    input_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    completion_tokens: int = 0


class _Body(msgspec.Struct):
    usage: _Usage


class _Response(msgspec.Struct):
    body: _Body


class _Result(msgspec.Struct):
    response: _Response
