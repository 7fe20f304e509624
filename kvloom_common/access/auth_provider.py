"""Authentication by another package (docs/how-to/plugins.md): who presents these credentials?

A provider may ask a remote service, and is code of others. So it runs on an event loop of its own, in a thread of its
own: whatever it does, requests that need no answer of it are not delayed. Its answers are kept for a while, and each
has a time limit. A caller about whom there is no answer is not served.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import inspect
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.config import CallersConfig, ConfigError
from kvloom_common.plugins import PluginError, PluginGroup
from kvloom_common.process.access_log import FailureLog, place_of

T = TypeVar("T")

AUTH_PROVIDERS: Final = PluginGroup("kvloom.auth_providers", "auth provider", ())
STANDARD_HEADERS: Final = ("authorization", "x-api-key")
MAX_HEADERS: Final = 16
MAX_CREDENTIAL_CHARS: Final = 16 * 2**10
MAX_ID_CHARS: Final = 256
TIMEOUT_SECONDS: Final = 5.0
"""How long the provider may take for an answer. Then the caller gets a 503 `auth_unavailable`."""
REFUSAL_SECONDS: Final = 5.0
"""How long a refusal is kept at most, so that a new key works soon."""
RETRY_SECONDS: Final = 1.0
_HEADER: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_REFUSALS: Final = frozenset(
    {
        ErrorReason.ERROR_REASON_UNAUTHENTICATED,
        ErrorReason.ERROR_REASON_PERMISSION_DENIED,
        ErrorReason.ERROR_REASON_RATE_LIMITED,
    }
)
"""A provider may answer with one of these instead of naming the caller."""


class Credentials(msgspec.Struct, frozen=True):
    """The credentials that a caller presents, over HTTP or gRPC."""

    headers: Mapping[str, str]
    """By lower-case name: `authorization`, `x-api-key` and those of `AuthProvider.headers`, if they were sent."""
    certificate: str = ""
    """The client's certificate in PEM, which TLS has verified (`tls.client_ca_file`); "" without one."""

    def digest(self) -> bytes:
        content = msgspec.msgpack.encode([sorted(self.headers.items()), self.certificate])
        return hashlib.blake2b(content, digest_size=16).digest()


class AuthProvider(Protocol):
    """A plugin provides this for `[callers.plugin]`."""

    # `headers: tuple[str, ...]` may be left out: names of further headers (gRPC: metadata keys), in lower case.

    async def authenticate(self, credentials: Credentials) -> str:
        """The caller's id, which does not change: callers share neither cached prompts nor names of requests. Raises
        KvloomError (UNAUTHENTICATED, PERMISSION_DENIED, RATE_LIMITED) for a caller who may not call. Any other
        exception counts as a failure of the provider."""
        ...


class CallerVerifier:
    """Asks a provider who a caller is, within bounds."""

    def __init__(
        self,
        name: str,
        provider: AuthProvider,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        kept_seconds: float,
        now: Callable[[], float] = time.monotonic,
        max_kept: int = 10_000,
        max_pending: int = 256,
    ) -> None:
        """Answers of `max_kept` callers are kept, and as many refusals: the oldest are dropped first. Beyond
        `max_pending` questions to the provider at a time callers are told to come back."""
        self.headers: tuple[str, ...] = tuple(dict.fromkeys((*STANDARD_HEADERS, *getattr(provider, "headers", ()))))
        self._name = name
        self._provider = provider
        self._timeout_seconds = timeout_seconds
        self._max_pending = max_pending
        self._lock = threading.Lock()
        """Guards all that follows: the provider's thread has answers, and scrapes of /metrics have threads of their
        own."""
        self._ids = _Kept[str](kept_seconds, now, max_kept)
        self._refusals = _Kept[_Refusal](min(kept_seconds, REFUSAL_SECONDS), now, max_kept)
        self._pending: dict[bytes, concurrent.futures.Future[str]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failures = FailureLog("auth_provider_failed", provider=name)

    async def verify(self, credentials: Credentials) -> str:
        """The caller's id. Raises KvloomError, also when the provider does not answer."""
        known_id, asked = self._known_or_asked(credentials)
        if asked is None:
            return known_id
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await asyncio.shield(asyncio.wrap_future(asked))  # others may wait for the same answer
        except TimeoutError:
            raise self._no_answer() from None

    def verify_in_thread(self, credentials: Credentials) -> str:
        """The same, for a thread without an event loop."""
        known_id, asked = self._known_or_asked(credentials)
        if asked is None:
            return known_id
        try:
            return asked.result(self._timeout_seconds)
        except TimeoutError:
            raise self._no_answer() from None

    async def watch(self) -> None:
        """Close once this is cancelled."""
        try:
            await asyncio.Event().wait()
        finally:
            self.close()

    def close(self) -> None:
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)

    def _known_or_asked(self, credentials: Credentials) -> tuple[str, concurrent.futures.Future[str] | None]:
        """The id, if it is known, or else the answer to come. Raises KvloomError."""
        if len(credentials.certificate) + sum(map(len, credentials.headers.values())) > MAX_CREDENTIAL_CHARS:
            raise KvloomError(ErrorReason.ERROR_REASON_UNAUTHENTICATED, "The credentials are too long.")
        digest = credentials.digest()
        with self._lock:
            if (refusal := self._refusals.get(digest)) is not None:
                raise refusal.error()
            if (known_id := self._ids.get(digest)) is not None:
                return known_id, None
            asked = self._pending.get(digest)
            if asked is None:
                if len(self._pending) >= self._max_pending:
                    raise auth_unavailable()
                asked = self._pending[digest] = concurrent.futures.Future()
                self._loop = self._loop or _loop_in_a_thread(f"auth provider {self._name}")
                asyncio.run_coroutine_threadsafe(self._answer(credentials, digest, asked), self._loop)
        return "", asked

    async def _answer(self, credentials: Credentials, digest: bytes, asked: concurrent.futures.Future[str]) -> None:
        """Runs on the provider's loop."""
        failure: KvloomError | None = None
        known_id = ""
        try:
            async with asyncio.timeout(self._timeout_seconds):
                known_id = _checked_id(await self._provider.authenticate(credentials))
        except KvloomError as error:
            failure = error if error.reason in _REFUSALS else self._failed(error.reason_name)
        except Exception as error:
            failure = self._failed(place_of(error))
        with self._lock:
            del self._pending[digest]
            if failure is None:
                self._ids.put(digest, known_id)
            elif failure.reason in _REFUSALS:
                self._refusals.put(digest, _Refusal.of(failure))
        if failure is None:
            asked.set_result(known_id)
        else:
            asked.set_exception(failure)

    def _failed(self, cause: str) -> KvloomError:
        self._failures.note(cause)
        return auth_unavailable()

    def _no_answer(self) -> KvloomError:
        return self._failed(f"no answer within {self._timeout_seconds:g} s")


class _Refusal(msgspec.Struct, frozen=True):
    """An error that is made again for each caller, since every raise adds to an exception's traceback."""

    reason: int
    message: str
    retry_after_seconds: float

    @classmethod
    def of(cls, error: KvloomError) -> _Refusal:
        return cls(int(error.reason), error.message, error.retry_after_seconds)

    def error(self) -> KvloomError:
        return KvloomError(self.reason, self.message, retry_after_seconds=self.retry_after_seconds)


class _Kept(Generic[T]):
    """The latest answers, by the digest of the credentials."""

    def __init__(self, seconds: float, now: Callable[[], float], max_entries: int) -> None:
        self._seconds = seconds
        self._now = now
        self._max_entries = max_entries
        self._entries: OrderedDict[bytes, tuple[float, T]] = OrderedDict()
        """With the time until which they hold, the oldest first."""

    def get(self, digest: bytes) -> T | None:
        entry = self._entries.get(digest)
        return entry[1] if entry is not None and self._now() < entry[0] else None

    def put(self, digest: bytes, answer: T) -> None:
        self._entries.pop(digest, None)
        self._entries[digest] = (self._now() + self._seconds, answer)
        if len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)


def configured_verifier(config: CallersConfig) -> CallerVerifier | None:
    """None if no provider is configured. Raises ConfigError."""
    if not config.provider:
        return None
    if config.api_keys_file:
        raise ConfigError("callers: provider and api_keys_file exclude each other")
    try:
        provider = _made(config.provider, config.plugin)
    except PluginError as error:
        raise ConfigError(f"callers.provider: {error}") from error
    return CallerVerifier(
        config.provider,
        provider,
        kept_seconds=config.provider_cache_seconds,
    )


def auth_unavailable() -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_AUTH_UNAVAILABLE,
        "Your credentials cannot be checked at the moment.",
        retry_after_seconds=RETRY_SECONDS,
    )


def _made(name: str, settings: Mapping[str, Any]) -> AuthProvider:
    factory = AUTH_PROVIDERS.load(name)
    try:
        provider = factory(settings)
    except Exception as error:
        raise PluginError(f"The auth provider {name!r} cannot be made: {type(error).__name__}: {error}") from error
    if not inspect.iscoroutinefunction(getattr(provider, "authenticate", None)):
        raise PluginError(f"The auth provider {name!r} has no `async def authenticate`.")
    headers: Any = getattr(provider, "headers", ())
    if (
        not isinstance(headers, tuple)
        or len(headers) > MAX_HEADERS
        or not all(isinstance(header, str) and _HEADER.fullmatch(header) for header in headers)
    ):
        raise PluginError(
            f"`headers` of the auth provider {name!r} is not a tuple of at most {MAX_HEADERS} names in lower case."
        )
    return provider


def _checked_id(found: Any) -> str:
    if not isinstance(found, str) or not 0 < len(found) <= MAX_ID_CHARS:
        raise TypeError("no id")
    return found


def _loop_in_a_thread(name: str) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def run() -> None:
        try:
            loop.run_forever()
        finally:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()

    threading.Thread(target=run, name=name, daemon=True).start()
    return loop
