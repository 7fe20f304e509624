"""Follows collections of objects of a Kubernetes API server: a list, and then its changes."""

from __future__ import annotations

import asyncio
import os
import random
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import structlog
from aiohttp.http import HttpProcessingError

from kvloom.backoff import Backoff
from kvloom_common.config import ConfigError

log = structlog.get_logger()

ACCOUNT_DIR: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod has the token of its service account, and the authority that has signed the server's certificate."""
WATCH_SECONDS: Final = 300
"""The server ends a watch after so long; then everything is listed again."""
SILENT_SECONDS: Final = WATCH_SECONDS + 30
LIST_SECONDS: Final = 30.0
MAX_EVENT_BYTES: Final = 4 * 2**20
MAX_LIST_BYTES: Final = 64 * 2**20
FIRST_PAUSE_SECONDS: Final = 0.5
LONGEST_PAUSE_SECONDS: Final = 30.0

Object = Mapping[str, Any]
OnObjects = Callable[[Sequence[Object]], None]


class KubernetesApi:
    """Use `async with`. Requests have the pod's token, which is read again for each, as it is replaced hourly."""

    def __init__(self, url: str = "", account_dir: Path = ACCOUNT_DIR) -> None:
        """`url`: where the server is reached without credentials, e.g. by `kubectl proxy`; "": as a pod does. Raises
        ConfigError."""
        host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
        if not (url or host):
            raise ConfigError("this is no pod of Kubernetes: give the API's URL")
        self._token_file = None if url else account_dir / "token"
        self._url = url.rstrip("/") or f"https://{host}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}"
        try:
            self._tls = True if url else ssl.create_default_context(cafile=str(account_dir / "ca.crt"))
        except OSError as error:
            raise ConfigError(f"{account_dir}: {error.strerror}") from error

    async def __aenter__(self) -> KubernetesApi:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self._tls))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def follow(self, path: str, selector: Mapping[str, str], use: OnObjects) -> None:
        """Call `use` with all objects of a collection whenever they have changed, until cancelled. `selector` has the
        query's labelSelector or fieldSelector. A collection of a kind that the server does not know is empty. While the
        server cannot be reached, what was last known stays."""
        backoff = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, jitter=lambda: random.uniform(0.5, 1.0))
        while True:
            try:
                objects, version = await self._list(path, selector)
                use(list(objects.values()))
                backoff.num_failures = 0
                async for _ in self._changes(path, selector, objects, version):
                    use(list(objects.values()))
                await asyncio.sleep(FIRST_PAUSE_SECONDS)  # the server may end each watch at once
            except (aiohttp.ClientError, HttpProcessingError, OSError, ValueError) as error:
                log.warning("kubernetes_read_failed", path=path, cause=str(error) or repr(error))
                await asyncio.sleep(backoff.next_seconds())

    async def _list(self, path: str, selector: Mapping[str, str]) -> tuple[dict[str, Object], str]:
        """By name, and the version after which changes follow; "": there is no such collection."""
        timeout = aiohttp.ClientTimeout(total=LIST_SECONDS)
        async with self._session.get(
            self._url + path, params=selector, headers=self._headers(), timeout=timeout
        ) as response:
            if response.status == 404:
                return {}, ""
            response.raise_for_status()
            body = bytearray()
            async for piece in response.content.iter_any():
                body += piece
                if len(body) > MAX_LIST_BYTES:
                    raise ValueError(f"a list is longer than {MAX_LIST_BYTES} bytes")
        found = _decoded(body)
        return {_name(one): one for one in found.get("items", ())}, found["metadata"]["resourceVersion"]

    async def _changes(
        self, path: str, selector: Mapping[str, str], objects: dict[str, Object], version: str
    ) -> AsyncIterator[None]:
        """Apply the changes after that version, and yield after each. Ends when the server does not know what comes
        next."""
        if not version:
            await asyncio.sleep(WATCH_SECONDS)
            return
        params = {**selector, "watch": "1", "resourceVersion": version, "timeoutSeconds": str(WATCH_SECONDS)}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=LIST_SECONDS, sock_read=SILENT_SECONDS)
        async with self._session.get(
            self._url + path, params=params, headers=self._headers(), timeout=timeout
        ) as response:
            response.raise_for_status()
            while line := await response.content.readline(max_line_length=MAX_EVENT_BYTES):
                event = _decoded(line)
                kind, changed = event["type"], event["object"]
                if kind == "ERROR":  # e.g. 410: the version is too old
                    return
                if kind == "DELETED":
                    objects.pop(_name(changed), None)
                else:
                    objects[_name(changed)] = changed
                yield

    def _headers(self) -> dict[str, str]:
        """Raises OSError."""
        return {} if self._token_file is None else {"Authorization": f"Bearer {self._token_file.read_text().strip()}"}


def _decoded(text: bytes | bytearray) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ValueError(f"this is no JSON: {error}") from error


def _name(one: Object) -> str:
    return str(one["metadata"]["name"])
