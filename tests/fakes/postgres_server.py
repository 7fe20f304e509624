"""A real PostgreSQL server for tests, on a Unix socket."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_USER = "postgres"


def find_postgres() -> Path | None:
    """The directory with initdb and pg_ctl; None if PostgreSQL is not installed."""
    candidates = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    on_path = shutil.which("initdb")
    if on_path is not None:
        candidates.insert(0, Path(on_path).parent)
    return next((folder for folder in candidates if (folder / "pg_ctl").exists()), None)


@contextlib.contextmanager
def postgres_server(binaries: Path) -> Iterator[Path]:
    """Yields the directory of the server's socket. The server runs as the user `postgres` if the tests run as root,
    because it refuses to run as that."""
    # Not in pytest's temporary directory, which other users cannot enter.
    folder = Path(tempfile.mkdtemp(prefix="kvloom-postgres-"))
    as_user: dict[str, Any] = {}
    if os.getuid() == 0:
        user = pwd.getpwnam(_USER)
        os.chown(folder, user.pw_uid, user.pw_gid)
        as_user = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}

    def run(program: str, *args: str) -> None:
        subprocess.run(
            [str(binaries / program), "-D", str(folder / "data"), *args],
            cwd=folder, check=True, timeout=60.0, stdout=subprocess.DEVNULL, **as_user,
        )  # fmt: skip

    try:
        run("initdb", "--no-sync", "--auth=trust", "--encoding=UTF8", "--locale=C", f"--username={_USER}")
        options = f"-c listen_addresses='' -k {folder} -c fsync=off -c max_connections=100"
        run("pg_ctl", "start", "-w", "-l", str(folder / "log"), "-o", options)
        try:
            yield folder
        finally:
            run("pg_ctl", "stop", "-m", "immediate", "-w")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_postgres_database(socket_folder: Path, name: str) -> str:
    """An empty database of this server. Returns its URL, for `control.database_url`."""
    import asyncio

    import asyncpg

    async def make() -> None:
        connection = await asyncpg.connect(host=str(socket_folder), user=_USER, database="postgres")
        try:
            await connection.execute(f'CREATE DATABASE "{name}"')
        finally:
            await connection.close()

    with asyncio.Runner() as runner:
        runner.run(make())
    return f"postgresql://{_USER}@/{name}?host={socket_folder}"
