"""API keys of clients, in a file that has their hashes only (`kvloom keys`).

    # name  SHA-256 of the key  date
    alice sha256:9f86d0... 2026-11-24

A name may have several keys, so that a key can be replaced without interruption. The keys are random and long, so a
plain hash protects them: there is no list of likely keys to try.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.config import ConfigError
from kvloom_common.private_file import write_private_file
from kvloom_common.process.watched_files import WatchedFiles

KEY_PREFIX: Final = "kvl-"
"""Lets scanners find keys that were published by mistake."""
_KEY_BYTES: Final = 32
MAX_KEY_CHARS: Final = 256
MAX_FILE_BYTES: Final = 4 * 2**20
MAX_NAME_CHARS: Final = 64
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")
_DATE: Final = re.compile(r"\d{4}-\d{2}-\d{2}")
_HEADING: Final = "# API keys of kvloom: name, SHA-256 of the key, date. `kvloom keys` changes this file.\n"


class ApiKey(msgspec.Struct, frozen=True):
    """One line of the file."""

    name: str
    digest: str
    """SHA-256 of the key, in hexadecimal."""
    created: str = ""
    """A date, YYYY-MM-DD; "" if it is not known."""

    @property
    def key_id(self) -> str:
        """Tells the keys of one name apart."""
        return self.digest[:8]


def check_name(name: str) -> str:
    """Return the name. Raises ValueError if it cannot be that of a key."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name[:MAX_NAME_CHARS]!r} is no name of a key: letters, digits, '.', '_' and '-', at most 64 characters"
        )
    return name


def draw_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def parse_api_keys(text: str, source: str) -> list[ApiKey]:
    """Raises ConfigError, which names the line but does not show it: it may have a key by mistake."""
    found: list[ApiKey] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        digest = _DIGEST.fullmatch(words[1]) if len(words) > 1 else None
        date = words[2] if len(words) > 2 else ""
        if len(words) > 3 or digest is None or not _NAME.fullmatch(words[0]) or (date and not _DATE.fullmatch(date)):
            raise ConfigError(f"{source}, line {number}: expected `name sha256:<64 hexadecimal digits> [date]`")
        found.append(ApiKey(words[0], digest[1], date))
    if len({key.digest for key in found}) < len(found):
        raise ConfigError(f"{source}: two lines have the same key")
    return found


def read_api_keys(path: Path) -> list[ApiKey]:
    """Raises ConfigError."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the file of API keys {path} cannot be read: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"the file of API keys {path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        return parse_api_keys(content.decode(), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"the file of API keys {path} is not UTF-8 text") from error


def write_api_keys(path: Path, keys: Sequence[ApiKey]) -> None:
    """Replace the file, with mode 0600. Comments in it are lost. Raises OSError."""
    lines = [f"{key.name} sha256:{key.digest} {key.created}".rstrip() + "\n" for key in keys]
    write_private_file(path, (_HEADING + "".join(lines)).encode())


class ApiKeys:
    """The keys that are accepted now."""

    def __init__(self, keys: Sequence[ApiKey], path: Path | None = None) -> None:
        """With `path`, `watch` reads the keys again whenever that file changes."""
        self._path = path
        self._files = WatchedFiles([path] if path is not None else [])
        self._names: dict[str, str] = {}
        self._on_change: list[Callable[[], None]] = []
        self._use(keys)

    @classmethod
    def from_file(cls, path: Path) -> ApiKeys:
        """Raises ConfigError."""
        return cls(read_api_keys(path), path)

    @property
    def num_keys(self) -> int:
        return len(self._names)

    def name_of(self, key: str) -> str | None:
        """The name of the key; None if it is not accepted."""
        if not key or len(key) > MAX_KEY_CHARS:
            return None
        digest = digest_of(key)
        for known in self._names.keys() & {digest}:
            if hmac.compare_digest(known, digest):
                return self._names[known]
        return None

    def on_change(self, callback: Callable[[], None]) -> None:
        """`callback` is called when the accepted keys have changed."""
        self._on_change.append(callback)

    def _use(self, keys: Sequence[ApiKey]) -> None:
        self._names = {key.digest: key.name for key in keys}
        for callback in self._on_change:
            callback()

    async def watch(self) -> None:
        path = self._path
        if path is not None:
            await self._files.follow("API keys", lambda: read_api_keys(path), self._use)


def missing_key_error() -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_UNAUTHENTICATED,
        "An API key of this server is needed, as `Authorization: Bearer KEY` or `x-api-key: KEY`.",
    )


def wrong_key_error() -> KvloomError:
    return KvloomError(ErrorReason.ERROR_REASON_UNAUTHENTICATED, "The API key is not valid.")
