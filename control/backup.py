"""The command `python -m control.backup back-up|restore`, which `kvloom backup` and `kvloom restore` run."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from control.database.migrate import FOLDER
from control.database.usage_tables import metadata
from control.service.server import FILE_NAME
from kvloom_common.config import KvloomConfig
from kvloom_common.database.backup import ServiceSchema, back_up, restore
from kvloom_common.database.backup_command import BackupRequest, DatabaseCopy, run_backup_command
from kvloom_common.database.database import database_url

SCHEMA: Final = ServiceSchema("control", metadata, FOLDER, "schema_version")


async def perform(config: KvloomConfig, request: BackupRequest) -> DatabaseCopy:
    """Raises what `back_up` and `restore` raise, and ConfigError."""
    url = database_url(config.control.database_url, "control.database_url", Path(config.data_dir) / FILE_NAME)
    path = request.folder / "control.rows"
    if request.copy is None:
        return await back_up(url, SCHEMA, path)
    await restore(url, SCHEMA, path, request.copy, replaces=request.replaces)
    return request.copy


if __name__ == "__main__":
    run_backup_command("control.backup", perform)
