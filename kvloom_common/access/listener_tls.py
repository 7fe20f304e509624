"""TLS for the clients of a listener, HTTP's or gRPC's. The files are read again when they change; open connections keep
what they have."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import grpc
import msgspec

from kvloom_common.access.revoked_certificates import Number, RevokedCertificates, read_lists
from kvloom_common.config import ConfigError, TlsConfig
from kvloom_common.process.watched_files import POLL_SECONDS, WatchedFiles


class TlsFiles(msgspec.Struct, frozen=True):
    """The contents of the files when they were read."""

    certificate: bytes
    """The server's, with intermediate ones, in PEM."""
    key: bytes
    client_ca: bytes | None
    """The authorities whose certificates clients need; None: clients need none."""
    revoked: frozenset[Number] | None
    """Certificates of clients; None: no lists are configured."""
    context: ssl.SSLContext


class ListenerTls:
    """The certificates of one process's listeners for clients."""

    def __init__(self, config: TlsConfig, poll_seconds: float = POLL_SECONDS) -> None:
        """Raises ConfigError if a file cannot be used. `poll_seconds`: the time between two looks at the files."""
        self._config = config
        names = (config.certificate_file, config.key_file, config.client_ca_file, config.client_crl_file)
        self._files = WatchedFiles([Path(name) for name in names if name], poll_seconds)
        self._loaded = _load(config)
        self.revoked = None if self._loaded.revoked is None else RevokedCertificates(self._loaded.revoked)
        """Asked by requests; connections are not refused."""

    def http_context(self) -> ssl.SSLContext:
        """For an HTTP listener, which follows reloads by itself."""
        context = _context(self._config)

        def use_latest(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self._loaded.context

        context.sni_callback = use_latest
        return context

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """Listen on host:port; returns the port. Raises RuntimeError if that fails."""
        shown = self._loaded

        def changed_configuration() -> Any:
            """Called in a thread of gRPC before each handshake. None: nothing has changed."""
            nonlocal shown
            if shown is self._loaded:
                return None
            shown = self._loaded
            return _grpc_configuration(shown)

        credentials = grpc.dynamic_ssl_server_credentials(
            _grpc_configuration(shown),
            changed_configuration,
            require_client_authentication=shown.client_ca is not None,
        )
        return server.add_secure_port(address, credentials)

    async def watch(self) -> None:
        def use(loaded: TlsFiles) -> None:
            self._loaded = loaded
            if self.revoked is not None and loaded.revoked is not None:
                self.revoked.use(loaded.revoked)

        await self._files.follow("TLS certificates", lambda: _load(self._config), use)


def listener_tls(config: TlsConfig) -> ListenerTls | None:
    """None if no certificate is configured. Raises ConfigError."""
    return ListenerTls(config) if config.certificate_file else None


def _grpc_configuration(loaded: TlsFiles) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(loaded.key, loaded.certificate)], root_certificates=loaded.client_ca
    )


def _load(config: TlsConfig) -> TlsFiles:
    certificate, key = _read(config.certificate_file), _read(config.key_file)
    client_ca = _read(config.client_ca_file) if config.client_ca_file else None
    revoked = None
    if client_ca is not None and (file := config.client_crl_file):
        revoked = read_lists(_read(file), client_ca, file)
    return TlsFiles(certificate, key, client_ca, revoked, _context(config))


def _read(name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from error


def _context(config: TlsConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(config.certificate_file, config.key_file, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"{config.certificate_file} and {config.key_file} are no certificate and its key, in PEM and without a "
            f"password: {error}"
        ) from error
    if config.client_ca_file:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(config.client_ca_file)
        except OSError as error:
            raise ConfigError(f"{config.client_ca_file} has no certificates in PEM: {error}") from error
    return context


def _no_password() -> str:
    """Otherwise OpenSSL would ask at the terminal."""
    raise ValueError("the key needs a password")
