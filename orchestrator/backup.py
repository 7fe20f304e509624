"""The command `python -m orchestrator.backup back-up|restore`, which `kvloom backup` and `kvloom restore` run: the
database, and the contents of files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
from sqlalchemy.engine import URL

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.config import KvloomConfig
from kvloom_common.database.backup import BackupError, ServiceSchema, back_up, restore, rows_in
from kvloom_common.database.backup_command import BackupRequest, DatabaseCopy, run_backup_command
from kvloom_common.database.database import database_url
from kvloom_common.private_file import make_private_folder, replacement
from orchestrator.api.files import KIND
from orchestrator.database.schema import MIGRATIONS, metadata, objects
from orchestrator.files.contents import PIECE_BYTES, FileContents
from orchestrator.service.server import FILE_NAME

SCHEMA: Final = ServiceSchema("orchestrator", metadata, MIGRATIONS, "orchestrator_schema_version")
ROWS: Final = "orchestrator.rows"
FOLDER: Final = "files"
NUM_FURTHER_TURNS: Final = 2


async def perform(config: KvloomConfig, request: BackupRequest) -> DatabaseCopy:
    """Raises what `back_up` and `restore` raise, KvloomError and ConfigError."""
    url = database_url(config.orchestrator.database_url, "orchestrator.database_url", Path(config.data_dir) / FILE_NAME)
    contents = FileContents(config.orchestrator, Path(config.data_dir))
    if request.copy is None:
        return await _back_up(url, contents, request.folder)
    path = request.folder / ROWS
    await restore(url, SCHEMA, path, request.copy, replaces=request.replaces)
    for file_id in _file_ids(path):
        if file_id not in request.copy.lost_files:
            await contents.write(file_id, _pieces(request.folder / FOLDER / file_id))
    return request.copy


async def _back_up(url: URL, contents: FileContents, folder: Path) -> DatabaseCopy:
    """The database is copied first, and then the contents of its files, which never change: what is added meanwhile is
    in neither. What is deleted meanwhile is in neither after another turn; what is still missing then is lost."""
    path, files = folder / ROWS, folder / FOLDER
    make_private_folder(files)
    copy = await back_up(url, SCHEMA, path)
    lost = await _copy_files(contents, _file_ids(path), files)
    for _ in range(NUM_FURTHER_TURNS):
        if not lost:
            break
        copy = await back_up(url, SCHEMA, path)
        lost = await _copy_files(contents, _file_ids(path), files)
    return msgspec.structs.replace(copy, lost_files=lost)


async def _copy_files(contents: FileContents, wanted: Sequence[str], folder: Path) -> list[str]:
    """Copies what is missing, deletes what is not wanted, and returns what there is not. Raises KvloomError."""
    for extra in {path.name for path in folder.iterdir()} - set(wanted):  # noqa: ASYNC240  (a command's own process)
        (folder / extra).unlink()
    return [file_id for file_id in wanted if not await _copied(contents, file_id, folder / file_id)]


def _file_ids(path: Path) -> list[str]:
    return [row["id"] for row in rows_in(path, objects) if row["kind"] == KIND]


async def _copied(contents: FileContents, file_id: str, target: Path) -> bool:
    """Returns False if there is no such content. Raises KvloomError and OSError."""
    if target.exists():  # noqa: ASYNC240
        return True
    try:
        with replacement(target) as file:
            async for piece in contents.read(file_id):
                file.write(piece)
    except KvloomError as error:
        if error.reason == ErrorReason.ERROR_REASON_NOT_FOUND:
            return False
        raise
    return True


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    """Raises BackupError."""
    try:
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                yield piece
    except FileNotFoundError as error:
        raise BackupError(f"{path} is missing from the backup") from error


if __name__ == "__main__":
    run_backup_command("orchestrator.backup", perform)
