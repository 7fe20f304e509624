"""The contents of files: objects in a directory, or in a store of the S3 protocol, under the ids of their files."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection
from pathlib import Path
from typing import Any, Final

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, from_url

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.config import ConfigError, OrchestratorConfig
from kvloom_common.private_file import make_private_folder

FOLDER: Final = "objects"
_PREFIX: Final = "files"
PIECE_BYTES: Final = 256 * 2**10
ORPHAN_SECONDS: Final = 3600.0
"""Contents without a file that are older than this are of uploads that were broken off, or of deleted files."""
_FAILURES: Final = (BaseError, OSError)


class FileContents:
    """`close` is not needed: nothing is kept open."""

    def __init__(self, config: OrchestratorConfig, data_dir: Path) -> None:
        """Raises ConfigError."""
        self._folder: Path | None = None
        if not config.files_url:
            self._folder = data_dir / FOLDER
            make_private_folder(self._folder)
            self._store: Any = LocalStore(prefix=self._folder)
            return
        try:
            self._store = from_url(config.files_url)
        except (*_FAILURES, ValueError) as error:
            raise ConfigError(f"orchestrator.files_url: {error}") from error

    async def write(self, file_id: str, pieces: AsyncIterable[bytes]) -> None:
        """Stores pieces as they come: all, or none after an exception, which is passed on. Raises KvloomError."""
        failure: BaseException | None = None
        with _failing_as_unavailable():
            # Only closing the writer ends an upload: what was broken off is completed, and deleted.
            async with obstore.open_writer_async(self._store, _path(file_id)) as writer:
                try:
                    async for piece in pieces:
                        await writer.write(piece)
                except Exception as error:
                    failure = error
        if failure is not None:
            await self.delete(file_id)
            raise failure

    async def read(self, file_id: str) -> AsyncIterator[bytes]:
        """The pieces of a content. Raises KvloomError."""
        with _failing_as_unavailable():
            found = await obstore.get_async(self._store, _path(file_id))
            async for piece in found.stream(min_chunk_size=PIECE_BYTES):
                yield bytes(piece)

    async def read_part(self, file_id: str, offset: int, num_bytes: int) -> bytes:
        """Raises KvloomError."""
        with _failing_as_unavailable():
            return bytes(await obstore.get_range_async(self._store, _path(file_id), start=offset, length=num_bytes))

    async def delete(self, file_id: str) -> None:
        """Deletes a content, if there is one. Raises KvloomError."""
        with _failing_as_unavailable(), contextlib.suppress(FileNotFoundError):
            await obstore.delete_async(self._store, _path(file_id))

    async def orphans(self, known: Callable[[Collection[str]], Any]) -> list[str]:
        """The ids of old contents that have no file. `known` returns those ids of some that have one, and is awaited.
        Raises KvloomError."""
        old = datetime.datetime.fromtimestamp(time.time() - ORPHAN_SECONDS, datetime.UTC)
        found: list[str] = []
        with _failing_as_unavailable():
            async for batch in obstore.list(self._store, prefix=_PREFIX):
                ids = [meta["path"].rpartition("/")[2] for meta in batch if meta["last_modified"] < old]
                if ids:
                    found += set(ids) - set(await known(ids))
        return found


@contextlib.contextmanager
def _failing_as_unavailable() -> Any:
    try:
        yield
    except _FAILURES as error:
        is_full = getattr(error, "errno", None) == 28 or "No space left" in str(error)
        what = "has a disk that is full" if is_full else "cannot be used at the moment"
        if isinstance(error, FileNotFoundError):
            message = "The content of this file is lost."
            raise KvloomError(ErrorReason.ERROR_REASON_NOT_FOUND, message) from error
        raise KvloomError(
            ErrorReason.ERROR_REASON_ORCHESTRATOR_UNAVAILABLE, f"The store of files {what}.", retry_after_seconds=1.0
        ) from error


def _path(file_id: str) -> str:
    return f"{_PREFIX}/{file_id}"
