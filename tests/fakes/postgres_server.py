"""A real PostgreSQL server for tests, on a Unix socket."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

_USER = "postgres"


def find_postgres() -> Path | None:
    """The directory with initdb and pg_ctl; None if PostgreSQL is not installed."""
    candidates = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    on_path = shutil.which("initdb")
    if on_path is not None:
        candidates.insert(0, Path(on_path).parent)
    return next((folder for folder in candidates if (folder / "pg_ctl").exists()), None)


class PostgresServer:
    """A server that runs. `folder` has its socket."""

    def __init__(self, binaries: Path, folder: Path, as_user: Sequence[str]) -> None:
        """`as_user`: the beginning of command lines that run as the server's user."""
        self.folder = folder
        self._binaries = binaries
        self._as_user = as_user

    def start(self) -> None:
        options = f"-c listen_addresses='' -k {self.folder} -c fsync=off -c max_connections=100"
        self.run("pg_ctl", "start", "-w", "-l", str(self.folder / "log"), "-o", options)

    def kill(self) -> None:
        """It ends at once, as in a crash; the next start recovers its data."""
        processes = self._processes()
        processes[0].send_signal(signal.SIGQUIT)
        psutil.wait_procs(processes, timeout=60.0)

    def freeze(self) -> None:
        """All of its processes stand still until `thaw`."""
        for process in self._processes():
            process.suspend()

    def thaw(self) -> None:
        for process in self._processes():
            process.resume()

    def _processes(self) -> list[psutil.Process]:
        pid = int((self.folder / "data" / "postmaster.pid").read_text().split()[0])
        return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]

    def run(self, program: str, *args: str) -> None:
        command = [*self._as_user, str(self._binaries / program), "-D", str(self.folder / "data"), *args]
        subprocess.run(command, cwd=self.folder, check=True, timeout=60.0, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def postgres_server(binaries: Path) -> Iterator[PostgresServer]:
    """The server runs as the user `postgres` if the tests run as root, because it refuses to run as that."""
    # Not in pytest's temporary directory, which other users cannot enter.
    folder = Path(tempfile.mkdtemp(prefix="kvloom-postgres-"))
    as_user: list[str] = []
    if os.getuid() == 0:
        user = pwd.getpwnam(_USER)
        os.chown(folder, user.pw_uid, user.pw_gid)
        # By a program: what subprocess does to change the user crashes beside gRPC's threads.
        as_user = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    server = PostgresServer(binaries, folder, as_user)
    try:
        server.run("initdb", "--no-sync", "--auth=trust", "--encoding=UTF8", "--locale=C", f"--username={_USER}")
        server.start()
        try:
            yield server
        finally:
            server.kill()
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
