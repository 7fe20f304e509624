"""How a client shows who it is: an API key with every RPC, and TLS.

async with Client("kvloom.example:8081", api_key=key, tls=TlsOptions()) as client: ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import grpc.aio

from kvloom.transport.channel_options import CHANNEL_OPTIONS, OpenChannel, open_plain_channel

_AUTHORIZATION: Final = "authorization"


@dataclasses.dataclass(frozen=True, slots=True)
class TlsOptions:
    """Whom a client trusts, and what it shows. The files are in PEM."""

    ca_file: str | Path | None = None
    """The authorities that may have signed the server's certificate. None: the system's."""
    certificate_file: str | Path | None = None
    """The client's own certificate, where the server asks for one; with `key_file`."""
    key_file: str | Path | None = None
    server_name: str = ""
    """The name that the server's certificate must have. Empty: the host of the address."""


def channel_opener(api_key: str = "", tls: TlsOptions | None = None) -> OpenChannel:
    """Opens channels with TLS, if wanted, that send the API key, if there is one, with every RPC. Raises OSError if a
    file cannot be read."""
    open_channel = open_plain_channel if tls is None else _tls_opener(tls)
    if not api_key:
        return open_channel
    return lambda address: cast(grpc.aio.Channel, _KeyedChannel(open_channel(address), api_key))


def _tls_opener(tls: TlsOptions) -> OpenChannel:
    credentials = grpc.ssl_channel_credentials(_read(tls.ca_file), _read(tls.key_file), _read(tls.certificate_file))
    options: list[tuple[str, Any]] = list(CHANNEL_OPTIONS)
    if tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return lambda address: grpc.aio.secure_channel(address, credentials, options=options)


def _read(path: str | Path | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()


class _KeyedChannel:
    """A channel that adds the key to the metadata of each call. gRPC's own call credentials need TLS, and its
    interceptors cost more per call."""

    def __init__(self, channel: grpc.aio.Channel, api_key: str) -> None:
        self._channel = channel
        self._metadata = ((_AUTHORIZATION, f"Bearer {api_key}"),)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    async def __aenter__(self) -> _KeyedChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    def unary_unary(self, *args: Any, **options: Any) -> Callable[..., Any]:
        return self._keyed(self._channel.unary_unary(*args, **options))

    def unary_stream(self, *args: Any, **options: Any) -> Callable[..., Any]:
        return self._keyed(self._channel.unary_stream(*args, **options))

    def stream_stream(self, *args: Any, **options: Any) -> Callable[..., Any]:
        return self._keyed(self._channel.stream_stream(*args, **options))

    def _keyed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def keyed(*args: Any, metadata: Any = None, **options: Any) -> Any:
            return call(*args, metadata=(*self._metadata, *(metadata or ())), **options)

        return keyed
