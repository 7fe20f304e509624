"""TLS on both sides between the processes of a fabric, with the certificates that a process has at the moment."""

from __future__ import annotations

import asyncio
import os
import ssl
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import structlog

from kvloom_common.trust.certificates import ProcessCertificates, server_name
from kvloom_common.trust.roles import may_call, names_in, roles_of, shown_names
from kvloom_common.trust.secret import SecretError

log = structlog.get_logger()

POLL_SECONDS: Final = 1.0
"""How often the file with the secret is checked for a change."""


class TlsTrust:
    """The common part of the trust by a secret and of that by an identity. Subclasses call `_show`."""

    has_secret = True

    def __init__(self, fabric_id: str, path: Path | None, poll_seconds: float) -> None:
        """With `path`, `watch` reads that file again whenever it changes; it looks every `poll_seconds`."""
        self._fabric_id = fabric_id
        self._path = path
        self._poll_seconds = poll_seconds
        self._seen = _version(path)
        self._certificates: ProcessCertificates

    def _show(self, certificates: ProcessCertificates) -> None:
        self._certificates = certificates
        self._contexts: dict[int, ssl.SSLContext] = {}
        """By protocol, made when one is first needed."""

    def _load(self, path: Path) -> Any:
        """Read the file, for `_use`. Called in a thread. Raises SecretError."""
        raise NotImplementedError

    def _use(self, loaded: Any) -> None:
        raise NotImplementedError

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        shown = self._certificates

        def changed_configuration() -> Any:
            """Called in a thread of gRPC before each handshake. None: nothing has changed."""
            nonlocal shown
            if shown is self._certificates:
                return None
            shown = self._certificates
            return _server_configuration(shown)

        credentials = grpc.dynamic_ssl_server_credentials(
            _server_configuration(shown), changed_configuration, require_client_authentication=True
        )
        return server.add_secure_port(address, credentials)

    def may_call(self, method: str, context: Any) -> bool:
        names = shown_names(context)
        return names is None or may_call(method, roles_of(names, self._fabric_id))

    def may_connect(self, to: str, peer_certificate: Mapping[str, Any] | None) -> bool:
        return may_call(to, roles_of(names_in(peer_certificate), self._fabric_id))

    def open_channel(
        self, address: str, role: str, name: str = "", *, options: Sequence[tuple[str, Any]] = ()
    ) -> grpc.aio.Channel:
        demanded = self.demanded_of(role, name)
        return grpc.aio.secure_channel(address, self.channel_credentials(), options=[*options, demanded])

    def channel_credentials(self) -> grpc.ChannelCredentials:
        found = self._certificates
        return grpc.ssl_channel_credentials(found.authorities, found.key, found.certificate)

    def demanded_of(self, role: str, name: str = "") -> tuple[str, str]:
        """The channel option that accepts only servers of the role, or only the one called `name`."""
        return "grpc.ssl_target_name_override", server_name(self._fabric_id, role, name)

    def server_tls(self) -> ssl.SSLContext:
        context = _tls_context(ssl.PROTOCOL_TLS_SERVER, self._certificates)

        def use_latest(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self._context(ssl.PROTOCOL_TLS_SERVER)

        context.sni_callback = use_latest
        return context

    def client_tls(self) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        """One for all connections, because an HTTP client keeps connections open for each context. Raises OSError."""
        found = self._contexts.get(protocol)
        if found is None:
            found = self._contexts[protocol] = _tls_context(protocol, self._certificates)
        return found

    def server_hostname(self, role: str) -> str:
        return server_name(self._fabric_id, role)

    async def watch(self) -> None:
        reported = ""
        while self._path is not None:
            await asyncio.sleep(self._poll_seconds)
            version = await asyncio.to_thread(_version, self._path)
            if version in (self._seen, None):
                continue
            self._seen = version
            try:
                self._use(await asyncio.to_thread(self._load, self._path))
            except SecretError as error:
                self._seen = None  # the next check tries again
                if str(error) != reported:
                    log.warning("secret_reload_failed", cause=str(error))
                reported = str(error)
            else:
                reported = ""
                log.info("secret_reloaded")
        await asyncio.Event().wait()


def _server_configuration(certificates: ProcessCertificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(certificates.key, certificates.certificate)], root_certificates=certificates.authorities
    )


def _tls_context(protocol: int, certificates: ProcessCertificates) -> ssl.SSLContext:
    """OpenSSL reads certificates from files only; these are never on a disk, unless the system has no memory files."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificates.authorities.decode())
    with _MemoryFile(certificates.key + certificates.certificate) as path:
        context.load_cert_chain(path)
    return context


class _MemoryFile:
    def __init__(self, content: bytes) -> None:
        self._content = content
        self._descriptor = -1

    def __enter__(self) -> str:
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("kvloom certificate", os.MFD_CLOEXEC)
            self._path = f"/proc/self/fd/{self._descriptor}"
        else:
            self._descriptor, self._path = tempfile.mkstemp()
        os.write(self._descriptor, self._content)
        return self._path

    def __exit__(self, *_fault: object) -> None:
        os.close(self._descriptor)
        if not self._path.startswith("/proc/"):
            Path(self._path).unlink()


def _version(path: Path | None) -> tuple[int, int] | None:
    """Changes whenever the file does; None if there is none."""
    try:
        found = path.stat() if path is not None else None
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_ino) if found is not None else None
