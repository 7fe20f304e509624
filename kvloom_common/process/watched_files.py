"""Files that a running process reads again when they change."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Final, Protocol, TypeVar

import structlog

from kvloom.backoff import Backoff
from kvloom_common.config import ConfigError

log = structlog.get_logger()

POLL_SECONDS: Final = 1.0
MAX_RETRY_SECONDS: Final = 60.0

_T = TypeVar("_T")
_Version = tuple[int, int, int]


class Watcher(Protocol):
    async def watch(self) -> None:
        """Follow changes until cancelled."""
        ...


class WatchedFiles:
    """The versions of some files, as of when they were last read."""

    def __init__(self, paths: Sequence[Path], poll_seconds: float = POLL_SECONDS) -> None:
        self._paths = paths
        self._poll_seconds = poll_seconds
        self._seen: list[_Version | None] | None = self._versions()

    async def follow(self, what: str, load: Callable[[], _T], use: Callable[[_T], None]) -> None:
        """Call `load` in a thread when a file has changed, and `use` with the result, until cancelled. A file that is
        missing or malformed (`load` raises ConfigError or OSError) is reported once and tried again at every look; what
        was loaded before stays in use."""
        reported = ""
        while True:
            await asyncio.sleep(self._poll_seconds)
            versions = await asyncio.to_thread(self._versions)
            if versions == self._seen:
                continue
            try:
                loaded = await asyncio.to_thread(load)
            except (ConfigError, OSError) as error:
                self._seen = None
                if str(error) != reported:
                    log.warning("file_reload_failed", content=what, cause=str(error))
                reported = str(error)
                continue
            self._seen, reported = versions, ""
            use(loaded)
            log.info("file_reloaded", content=what)

    def _versions(self) -> list[_Version | None]:
        return [_version(path) for path in self._paths]


@contextlib.asynccontextmanager
async def following(*watchers: Watcher, retry_seconds: float = POLL_SECONDS) -> AsyncIterator[None]:
    """Run the watchers within the block. If one fails (for example because no thread can be started), that is logged,
    the process keeps what it has, and the watcher is run again, at first after `retry_seconds`."""
    tasks = [
        asyncio.create_task(_kept_up(watcher, retry_seconds), name=f"watcher {type(watcher).__name__}")
        for watcher in watchers
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _kept_up(watcher: Watcher, retry_seconds: float) -> None:
    loop = asyncio.get_running_loop()
    backoff = Backoff(retry_seconds, MAX_RETRY_SECONDS, stable_seconds=MAX_RETRY_SECONDS)
    while True:
        started = loop.time()
        try:
            await watcher.watch()
        except Exception:
            log.exception("file_watch_failed", watcher=type(watcher).__name__)
        else:
            return
        await asyncio.sleep(backoff.next_seconds(loop.time() - started))


def _version(path: Path) -> _Version | None:
    """Changes whenever the file does; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
