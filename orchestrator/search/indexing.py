"""Works at one file of a vector store, from any state in which a process may have left it, to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
import structlog

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.database.database import Database
from orchestrator.database.schema import jobs
from orchestrator.files.sealed import TenantContents
from orchestrator.metrics import INDEXED_FILES
from orchestrator.search import extraction
from orchestrator.search.chunking import ChunkSize, chunks_of, halves_of
from orchestrator.search.embedding import MAX_TEXTS, EncoderAwayError, EncoderRefusedError, FabricEncoder
from orchestrator.search.extraction import UnreadableError
from orchestrator.store import objects, vector_chunks, vector_files
from orchestrator.store.vector_files import COMPLETED, FAILED, IN_PROGRESS

log = structlog.get_logger()

MAX_INDEXED: Final = 4
"""Files at which one process works."""
MAX_FILE_BYTES: Final = 32 * 2**20
FIRST_PAUSE_SECONDS: Final = 0.25
MAX_PAUSE_SECONDS: Final = 10.0
MAX_SECONDS: Final = 86_400.0
"""A file that has no vectors after a day has failed."""
SERVER_ERROR: Final = "server_error"
_FOREVER: Final = 0.0


class _Task(NamedTuple):
    """The inputs of the work."""

    name: str
    num_bytes: int
    model: str
    size: ChunkSize


class FileIndexing:
    """Work (orchestrator/jobs/runner.py). It ends when its job is taken away: the file was removed, or its batch was
    cancelled."""

    def __init__(
        self, database: Database, contents: TenantContents, encoder: FabricEncoder, holder: str, job: Any
    ) -> None:
        self._database = database
        self._contents = contents
        self._encoder = encoder
        self._holder = holder
        self._job_id: str = job.id
        self._tenant: str = job.tenant
        self._key_id: str = job.key_id
        self._expires_at: float = job.created_at + MAX_SECONDS
        self._store, self._file = vector_files.store_and_file(job.id)
        self._now = job.created_at
        self._num_bytes = 0

    async def look(self, now: float) -> None:
        self._now = now

    async def run(self) -> None:
        task = await self._database.uninterrupted(self._begin())
        if task is None:
            return
        error = None
        try:
            await self._index(task)
        except UnreadableError as unreadable:
            error = {"code": unreadable.code, "message": str(unreadable)}
        except EncoderRefusedError as refused:
            error = {"code": SERVER_ERROR, "message": f"The encoder {task.model!r} has refused the file: {refused}"}
        except EncoderAwayError:
            error = {"code": SERVER_ERROR, "message": f"The encoder {task.model!r} has given no vectors for a day."}
        if await self._database.uninterrupted(self._end(error)):
            status = FAILED if error else COMPLETED
            INDEXED_FILES.labels(status).inc()
            log.info("file_indexed", store=self._store, file=self._file, tenant=self._tenant, status=status)

    async def _begin(self) -> _Task | None:
        """Deletes what an earlier try has left. None: there is nothing to do any more."""
        async with self._database.writing() as connection:
            store = await objects.find(connection, self._tenant, "vector_store", self._store, _FOREVER)
            file = await objects.find(connection, self._tenant, "file", self._file, _FOREVER)
            own = await vector_files.find(connection, self._store, self._file)
            if store is None or file is None or own is None or own.status != IN_PROGRESS:
                await connection.execute(jobs.delete().where(jobs.c.id == self._job_id))
                return None
            await vector_chunks.drop(connection, self._store, self._file)
            size = ChunkSize(**own.body["chunking"])
            return _Task(file.body["filename"], file.body["bytes"], store.body["embedding_model"], size)

    async def _index(self, task: _Task) -> None:
        """Raises UnreadableError, EncoderAwayError, EncoderRefusedError."""
        if task.num_bytes > MAX_FILE_BYTES:
            message = f"The file has more than {MAX_FILE_BYTES} bytes, which is the most in a vector store."
            raise UnreadableError(extraction.INVALID, message)
        text = await extraction.text_of(task.name, await self._content())
        is_markdown = extraction.is_markdown(task.name)
        chunks = await asyncio.to_thread(chunks_of, text, task.size, is_markdown=is_markdown)
        if not chunks:
            raise UnreadableError(extraction.INVALID, "The file has no text.")
        num_stored = 0
        for first in range(0, len(chunks), MAX_TEXTS):
            done = await self._embedded(task.model, chunks[first : first + MAX_TEXTS])
            await self._database.uninterrupted(self._append(num_stored, done))
            num_stored += len(done)
            self._num_bytes += sum(len(text.encode()) + len(vector) for text, vector in done)

    async def _content(self) -> bytes:
        try:
            return b"".join([piece async for piece in self._contents.read(self._tenant, self._file)])
        except KvloomError as error:
            if error.reason != ErrorReason.ERROR_REASON_NOT_FOUND:
                raise
            raise UnreadableError(extraction.INVALID, error.message) from error

    async def _embedded(self, model: str, texts: Sequence[str]) -> list[tuple[str, bytes]]:
        """The texts with their vectors. A text for which the encoder has no room becomes several. Raises
        EncoderAwayError if there is none for a day, and EncoderRefusedError."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                vectors = await self._encoder.vectors(self._tenant, self._key_id, model, texts, "batch")
                return list(zip(texts, vectors, strict=True))
            except EncoderRefusedError as refused:
                number = refused.too_long
                if number is None or len(texts[number]) < 2:
                    raise
                parts = await asyncio.to_thread(halves_of, texts[number])
                longer = [*texts[:number], *parts, *texts[number + 1 :]]
                half = len(longer) // 2
                if len(longer) > MAX_TEXTS:
                    return [*await self._embedded(model, longer[:half]), *await self._embedded(model, longer[half:])]
                texts = longer
            except EncoderAwayError as away:
                if self._now >= self._expires_at:
                    raise
                log.info("file_indexing_delayed", store=self._store, file=self._file, cause=str(away)[:200])
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE_SECONDS)

    async def _append(self, first: int, done: Sequence[tuple[str, bytes]]) -> None:
        async with self._database.writing() as connection:
            if await self._is_held(connection):
                await vector_chunks.append(connection, self._tenant, self._store, self._file, first, done)

    async def _end(self, error: dict[str, str] | None) -> bool:
        """Returns False if the work was taken away."""
        async with self._database.writing() as connection:
            if not await self._is_held(connection):
                return False
            if error:
                await vector_chunks.drop(connection, self._store, self._file)
            version = await vector_files.next_revision(connection, self._store)
            own = await vector_files.find(connection, self._store, self._file)
            assert own is not None, "a file that is removed takes its job along"
            body, status = {**own.body, "last_error": error}, FAILED if error else COMPLETED
            columns = {"status": status, "version": version, "usage_bytes": 0 if error else self._num_bytes}
            await vector_files.change(connection, self._store, self._file, body, **columns)
            await connection.execute(jobs.delete().where(jobs.c.id == self._job_id))
        return True

    async def _is_held(self, connection: Any) -> bool:
        own = sa.select(jobs.c.id).where(jobs.c.id == self._job_id, jobs.c.holder == self._holder)
        return await connection.scalar(own.with_for_update()) is not None
