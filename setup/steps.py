"""Remembers which steps of a set-up are done, so that an interrupted one continues, and allows one set-up of a checkout
at a time."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from kvloom_common.private_file import replacement


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Wait until no other set-up works in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up works here: waiting until it has ended")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def fingerprint(*values: object, files: Iterable[Path] = ()) -> str:
    """Differs if one of the values or the contents of one of the files does."""
    digest = hashlib.sha256(repr(values).encode())
    for file in sorted(files):
        digest.update(f"{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()


class Steps:
    """The steps that are done, in a file: each with a value by which it is known whether it must be done again."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._done: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            self._done = json.loads(file.read_text())

    def value_of(self, name: str) -> Any:
        """The value with which it was done last. None: it was not."""
        return self._done.get(name)

    def forget(self) -> None:
        """Do all of them again."""
        self._done = {}
        self._write()

    def run(self, name: str, value: Any, description: str, work: Callable[[], None]) -> None:
        """Do the work unless it was done with this value. Whatever interrupts it, it is not counted as done."""
        if self._done.get(name) == value:
            return
        say(description)
        began = time.monotonic()
        work()
        say(f"{name}: {time.monotonic() - began:.1f} s")
        self._done[name] = value
        self._write()

    def _write(self) -> None:
        with replacement(self._file) as file:
            file.write(json.dumps(self._done).encode())
