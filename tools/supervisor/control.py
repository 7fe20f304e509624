"""The protocol between other commands and a running `kvloom up`: JSON lines over a Unix socket in its run folder.

A connection has one request, `{"restart": ["shard-0", ...]}`. It is answered by lines `{"step": TEXT}` and a last line
`{"done": true}` or `{"error": TEXT}`. Only the owner can access the folder, and thus the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from tools.failures import CommandError

_SOCKET: Final = "control.sock"
_MAX_LINE_BYTES: Final = 64 * 2**10
_REQUEST_SECONDS: Final = 5.0


class Request(msgspec.Struct, forbid_unknown_fields=True):
    restart: list[str]
    """Names and roles. An empty list stands for all processes but Redis."""


class Reply(msgspec.Struct, omit_defaults=True):
    step: str = ""
    error: str = ""
    done: bool = False


Restart = Callable[[Sequence[str], Callable[[str], None]], Awaitable[None]]
"""Called with names and a callback for each step. Raises CommandError."""


@contextlib.asynccontextmanager
async def control_socket(run_dir: Path, restart: Restart) -> AsyncIterator[None]:
    """Listens as long as the context lasts. Its end cancels running requests."""
    tasks: set[asyncio.Task[None]] = set()

    def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(_serve(reader, writer, restart), name="control")
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    path = run_dir / _SOCKET
    path.unlink(missing_ok=True)
    with _short_path(run_dir) as short:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"{short}/{_SOCKET}")
    server = await asyncio.start_unix_server(on_connection, sock=listener, limit=_MAX_LINE_BYTES)
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, restart: Restart) -> None:
    def reply(answer: Reply) -> None:
        if not writer.is_closing():
            writer.write(msgspec.json.encode(answer) + b"\n")

    try:
        async with asyncio.timeout(_REQUEST_SECONDS):
            line = await reader.readline()
        await restart(msgspec.json.decode(line, type=Request).restart, lambda text: reply(Reply(step=text)))
        reply(Reply(done=True))
    except CommandError as error:
        reply(Reply(error=error.message))
    except (msgspec.MsgspecError, ValueError, TimeoutError) as error:
        reply(Reply(error=f"not a request: {error}"))
    except OSError as error:  # too many open files
        reply(Reply(error=f"the fabric cannot do this now: {error}"))
    except asyncio.CancelledError:
        reply(Reply(error="the fabric is being stopped"))
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def request_restart(run_dir: Path, names: Sequence[str], on_step: Callable[[str], None]) -> None:
    """Returns when the restart is complete. Raises CommandError with the reason if it fails."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, _short_path(run_dir) as short:
        try:
            connection.connect(f"{short}/{_SOCKET}")
        except OSError as error:
            raise CommandError(f"the fabric accepts no commands now: {error.strerror}") from error
        connection.sendall(msgspec.json.encode(Request(restart=list(names))) + b"\n")
        with connection.makefile("rb") as lines:
            for line in lines:
                reply = msgspec.json.decode(line, type=Reply)
                if reply.error:
                    raise CommandError(reply.error)
                if reply.done:
                    return
                on_step(reply.step)
    raise CommandError("the fabric stopped before the restart was complete")


@contextlib.contextmanager
def _short_path(directory: Path) -> Iterator[str]:
    """A short alias of a directory, because paths of sockets are limited to about 100 characters."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
