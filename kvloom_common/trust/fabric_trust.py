"""FabricTrust is what one process proves to the others of its fabric, and demands of them.

    trust = load_trust(config, ("shard",), "shard-0")
    service.bind(server, host, port, trust.add_port)            # TLS, with certificates of the fabric on both sides
    channel = trust.open_channel(address, "router", options=OPTIONS)

Without a secret there is no TLS, and registry and journal are stored as they are.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import grpc

from kvloom_common.config import KvloomConfig
from kvloom_common.trust.seal import PLAIN, Sealer
from kvloom_common.trust.secret import ENVIRONMENT_VARIABLE, FabricSecret, SecretError, read_secret


class FabricTrust(Protocol):
    """One process's part in its fabric's secret."""

    @property
    def has_secret(self) -> bool: ...

    @property
    def sealer(self) -> Sealer: ...

    @property
    def caller_key(self) -> bytes:
        """The key for kvloom_common.callers.Callers."""
        ...

    @property
    def cache_key(self) -> bytes:
        """The key for kvloom_common.access.kv_shares.CacheSalts."""
        ...

    @property
    def state_key(self) -> bytes:
        """The key for kvloom_common.trust.state_seal.StateSealer."""
        ...

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """Listen on host:port for processes of this fabric; returns the port. Raises RuntimeError if that fails."""
        ...

    def may_call(self, method: str, context: Any) -> bool:
        """True when the peer of a call that came through `add_port` has a role that may call "SERVICE/METHOD"
        (kvloom_common/trust/roles.py)."""
        ...

    def may_connect(self, to: str, peer_certificate: Mapping[str, Any] | None) -> bool:
        """True when the peer of a connection that came through a listener with `server_tls` has a role that may call
        `to`."""
        ...

    def open_channel(
        self, address: str, role: str, name: str = "", *, options: Sequence[tuple[str, Any]] = ()
    ) -> grpc.aio.Channel:
        """A channel to a process of this fabric: to any of the role, or only to the one called `name`."""
        ...

    def server_tls(self) -> ssl.SSLContext | None:
        """For listeners other than gRPC's; clients need a certificate of this fabric."""
        ...

    def client_tls(self) -> ssl.SSLContext | None: ...

    def server_hostname(self, role: str) -> str | None:
        """The name that a client with `client_tls` demands in the server's certificate."""
        ...

    async def watch(self) -> None:
        """Follow changes of the secret until cancelled."""
        ...


class NoSecret:
    """The trust of a fabric that has no secret: everything is plain. Only for one machine, and for tests."""

    has_secret = False
    sealer: Sealer = PLAIN
    caller_key = b""
    cache_key = b""
    state_key = b""

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        return server.add_insecure_port(address)

    def may_call(self, method: str, context: Any) -> bool:  # noqa: ARG002
        return True

    def may_connect(self, to: str, peer_certificate: Mapping[str, Any] | None) -> bool:  # noqa: ARG002
        return True

    def open_channel(
        self,
        address: str,
        role: str,  # noqa: ARG002
        name: str = "",  # noqa: ARG002
        *,
        options: Sequence[tuple[str, Any]] = (),
    ) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address, options=list(options))

    def server_tls(self) -> None:
        return None

    def client_tls(self) -> None:
        return None

    def server_hostname(self, role: str) -> None:  # noqa: ARG002
        return None

    async def watch(self) -> None:
        await asyncio.Event().wait()


NO_SECRET: Final = NoSecret()


def load_trust(config: KvloomConfig, roles: Sequence[str], name: str) -> FabricTrust:
    """The trust of the process `name`, which serves its fabric in these roles. The secret comes from
    `fabric.secret_file`, which may have the identity of this service instead, else from KVLOOM_FABRIC_SECRET. Raises
    SecretError."""
    path = Path(config.fabric.secret_file) if config.fabric.secret_file else None
    text = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if path is None and not text:
        return NO_SECRET
    # Only here, because a process without a secret needs no cryptography.
    from kvloom_common.trust.identity import read_identity
    from kvloom_common.trust.shared_secret import IdentityTrust, SharedSecret

    if path is not None and (identity := read_identity(path)) is not None:
        if ((identity.role,), identity.name) != (tuple(roles), name):
            message = f"{path} holds the identity of the {identity.role} {identity.name!r}, and this is"
            raise SecretError(f"{message} {' and '.join(roles)} {name!r}")
        return IdentityTrust(identity, path)
    secret = read_secret(path) if path is not None else FabricSecret.parse(text, ENVIRONMENT_VARIABLE)
    return SharedSecret(secret, roles, name, path)
