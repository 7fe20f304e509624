"""The commands by which `kvloom backup` and `kvloom restore` have a service's module do its part, in a process of its
own: only services know their databases. They print a DatabaseCopy as JSON."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from kvloom.errors import KvloomError
from kvloom_common.config import ConfigError, KvloomConfig, load_config
from kvloom_common.database.backup import BackupError, DatabaseCopy
from kvloom_common.database.database import DATABASE_ERRORS, DatabaseInUseError
from kvloom_common.database.opening import MigrationError


class BackupRequest(msgspec.Struct, frozen=True):
    folder: Path
    """The backup's."""
    copy: DatabaseCopy | None
    """The part of the backup's manifest that is to be restored. None: back up."""
    replaces: bool
    """Restoring may replace data."""


def run_backup_command(module: str, perform: Callable[[KvloomConfig, BackupRequest], Awaitable[DatabaseCopy]]) -> None:
    """Failures become a line on stderr and exit status 1."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description="A part of kvloom backup and restore.")
    parser.add_argument("--config", type=Path, help="kvloom.toml or its JSON form")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="the backup")
    parser.add_argument("--restore", help="restore this part of the manifest, in JSON, instead of backing up")
    parser.add_argument("--replace", action="store_true", help="restore over data that is there")
    args = parser.parse_args()
    copy = None if args.restore is None else msgspec.json.decode(args.restore, type=DatabaseCopy)
    try:
        config = load_config(args.config)
        config.data_dir = str(args.data_dir)
        done = asyncio.run(_perform(perform, config, BackupRequest(args.folder, copy, args.replace)))
    except KvloomError as error:
        _fail(error.message)
    except (BackupError, ConfigError, DatabaseInUseError, MigrationError, OSError) as error:
        _fail(str(error))
    except DATABASE_ERRORS as error:
        _fail(f"the database cannot be used: {str(getattr(error, 'orig', None) or error).partition(chr(10))[0]}")
    else:
        sys.stdout.write(msgspec.json.encode(done).decode() + "\n")


async def _perform(
    perform: Callable[[KvloomConfig, BackupRequest], Awaitable[DatabaseCopy]],
    config: KvloomConfig,
    request: BackupRequest,
) -> DatabaseCopy:
    return await perform(config, request)


def _fail(message: str) -> None:
    sys.stderr.write(f"error: {message}\n")
    raise SystemExit(1)
