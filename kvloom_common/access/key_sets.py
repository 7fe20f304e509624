"""The keys with which an OIDC provider signs its tokens, read again while the process runs.

They are read in the background: a token never waits for the provider, unless it names a key that is not known. While
the provider cannot be reached, the last keys stay in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from kvloom_common.access.exposure import is_loopback
from kvloom_common.config import ConfigError, IssuerConfig
from kvloom_common.transport.public_addresses import NoRedirects

log = structlog.get_logger()

MAX_BYTES: Final = 256 * 2**10
MAX_KEYS: Final = 64
FETCH_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = 10.0

PublicKeys = Mapping[str, Any]
"""joserfc's keys by their ids. One without an id has the id "" if it is the only key."""


class IssuerSettings(IssuerConfig):
    leeway_seconds: float = 30.0
    """How much the clocks may differ."""
    refresh_seconds: float = 300.0
    """How often the keys are read again: providers publish a key long before they sign with it."""
    min_refetch_seconds: float = 10.0
    """A token with a key that is not known makes them be read again at once, but not more often than this."""


class KeySetError(Exception):
    """The keys cannot be read. The message says why."""


class KeySet:
    """The keys of one issuer. `watch` must run for them to be read."""

    def __init__(self, config: IssuerSettings) -> None:
        """Raises ConfigError if the URL would send tokens' keys over an open network."""
        self._config = config
        self.keys: PublicKeys = {}
        self._on_change: list[Callable[[], None]] = []
        self._wanted = asyncio.Event()
        """Set when a key is asked for that is not known."""
        self._read = asyncio.Event()
        """Set when they have been read after that."""
        self._read_at = -float("inf")
        """When they were last read, or could not be; on the monotonic clock."""
        if config.jwks_url:
            _check_url(config.jwks_url)

    def on_change(self, callback: Callable[[], None]) -> None:
        """`callback` is called when the keys have changed."""
        self._on_change.append(callback)

    async def find(self, key_id: str, timeout_seconds: float = FETCH_SECONDS) -> Any | None:
        """The key; None if there is none. One that is not known may be new: the keys are then read again, at most every
        `min_refetch_seconds`."""
        found = self.keys.get(key_id)
        if found is None and (self._wanted.is_set() or self._may_read_again()):
            if not self._wanted.is_set():
                self._read.clear()
                self._wanted.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_seconds):
                    await self._read.wait()
            found = self.keys.get(key_id)
        return found

    def _may_read_again(self) -> bool:
        return time.monotonic() - self._read_at >= self._config.min_refetch_seconds

    async def watch(self) -> None:
        reported = ""
        while True:
            try:
                keys = await asyncio.to_thread(read_keys, self._config)
            except KeySetError as error:
                if str(error) != reported:
                    log.warning("issuer_keys_read_failed", issuer=self._config.name, cause=str(error))
                reported = str(error)
            else:
                reported = ""
                if {name: key.thumbprint() for name, key in keys.items()} != {
                    name: key.thumbprint() for name, key in self.keys.items()
                }:
                    self.keys = keys
                    log.info("issuer_keys_read", issuer=self._config.name, num_keys=len(keys))
                    for callback in self._on_change:
                        callback()
            self._read_at = time.monotonic()
            self._wanted.clear()
            self._read.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RETRY_SECONDS if reported else self._config.refresh_seconds):
                    await self._wanted.wait()


def read_keys(config: IssuerConfig) -> PublicKeys:
    """Blocks. Raises KeySetError."""
    try:
        content = _fetched(config.jwks_url) if config.jwks_url else _read(config.jwks_file)
    except (OSError, ValueError) as error:
        raise KeySetError(f"{config.jwks_url or config.jwks_file}: {type(error).__name__}: {error}") from error
    if len(content) > MAX_BYTES:
        raise KeySetError(f"the key set is larger than {MAX_BYTES} bytes")
    return parse_keys(content)


def _read(path: str) -> bytes:
    with Path(path).open("rb") as file:
        return file.read(MAX_BYTES + 1)


def _fetched(url: str) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler(), NoRedirects())
    ends_at = time.monotonic() + FETCH_SECONDS
    with opener.open(url, timeout=FETCH_SECONDS) as response:
        content = b""
        while len(content) <= MAX_BYTES and (part := response.read1(MAX_BYTES)):
            content += part
            if time.monotonic() > ends_at:  # the timeout is that of one read
                raise OSError("it takes too long")
        return content


def parse_keys(content: bytes) -> PublicKeys:
    """The keys that can verify signatures and are no secrets: others could be used to forge tokens. Raises
    KeySetError."""
    from joserfc.jwk import JWKRegistry  # only where tokens are accepted

    try:
        entries = msgspec.json.decode(content)["keys"]
        assert isinstance(entries, list)
    except (msgspec.DecodeError, KeyError, TypeError, AssertionError) as error:
        raise KeySetError("it is no JWK set") from error
    found: dict[str, Any] = {}
    for entry in entries[:MAX_KEYS]:
        if not isinstance(entry, dict) or entry.get("kty") not in ("RSA", "EC", "OKP"):
            continue
        if entry.get("use", "sig") != "sig" or "verify" not in entry.get("key_ops", ("verify",)):
            continue
        try:
            key = JWKRegistry.import_key({name: value for name, value in entry.items() if name not in _PRIVATE})
        except Exception:  # an entry that cannot be used leaves the others as they are
            log.warning("issuer_key_skipped", key_id=str(entry.get("kid"))[:64])
            continue
        found[str(entry.get("kid", ""))] = key
    if len(found) == 1:  # then a token need not say which key it is signed with
        found[""] = next(iter(found.values()))
    else:
        found.pop("", None)
    return found


_PRIVATE: Final = frozenset(("d", "p", "q", "dp", "dq", "qi", "oth", "k"))


def _check_url(url: str) -> None:
    parts = urllib.parse.urlsplit(url)
    is_open = parts.scheme == "http" and is_loopback(parts.hostname or "")
    if not parts.hostname or not (parts.scheme == "https" or is_open):
        raise ConfigError(
            f"control.issuers: jwks_url must be an https URL, or an http one of this machine, not {url!r}"
        )
