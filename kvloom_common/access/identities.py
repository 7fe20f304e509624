"""Who a caller is, where the fabric has tenants: the holder of an API key, of a token, or of a certificate."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import grpc.aio
import structlog

from kvloom_common.access.api_keys import missing_key_error, wrong_key_error
from kvloom_common.access.tenant_follower import TenantFollower
from kvloom_common.access.tenants import Tenants, wrong_identity_error
from kvloom_common.access.tokens import TokenVerifier, is_token
from kvloom_common.config import CertificateConfig, ConfigError, KvloomConfig, load_config
from kvloom_common.process.control_socket import stored_config
from kvloom_common.process.watched_files import WatchedFiles
from kvloom_common.tenancy.principal import Principal
from kvloom_common.tenancy.scopes import SCOPES_OF_ROLE
from kvloom_common.trust.fabric_trust import FabricTrust

log = structlog.get_logger()


class Identities:
    """Its `watch` must run while callers are served."""

    def __init__(self, config: KvloomConfig, own_name: str, trust: FabricTrust) -> None:
        """Raises ConfigError."""
        if config.callers.provider:
            raise ConfigError("callers.provider and control.enabled exclude each other: both say who a caller is")
        control = config.control
        if control.certificates and not config.tls.client_ca_file:
            raise ConfigError("control.certificates needs tls.client_ca_file, by which certificates are verified")
        self.trust = trust
        self._operators = control.operator_organisation
        folder = Path(config.data_dir).expanduser() if config.data_dir else Path.home() / ".kvloom"
        self._config_path = stored_config(folder)
        self._config_file = WatchedFiles([self._config_path])
        self._follower = TenantFollower(config, own_name, trust)
        self.tenants: Tenants = self._follower.tenants
        self._tokens = TokenVerifier(control.issuers) if control.issuers else None
        self._certificates = ClientCertificates(control.certificates) if control.certificates else None

    @property
    def tried(self) -> asyncio.Event:
        """Set once there is a table, or `control` could not be reached."""
        return self._follower.tried

    def control_addresses(self) -> list[str]:
        """Where the control service may be reached, best first."""
        return self._follower.control_addresses()

    @property
    def control_channel(self) -> grpc.aio.Channel | None:
        """To the control service; None while it is away."""
        return self._follower.channel

    def administered_by(self, principal: Principal) -> str | None:
        """The organisation that the holder of a key with the scope admin administers; None: the whole fabric."""
        organisation = principal.tenant.partition("/")[0]
        return None if organisation == self._operators else organisation

    def at_once(self, credential: str, certificate: bytes) -> Principal | None:
        """The caller who presents these; None if `later` must be asked. `certificate`: PEM or DER, verified by TLS; b""
        without one. It counts only for callers without a credential. Raises KvloomError."""
        if credential:
            if self._tokens is None or not is_token(credential):
                return self.tenants.of_credential(credential)
            self.tenants.check_fresh()
            identity = self._tokens.known(credential)
            return None if identity is None else identity.principal(self.tenants)
        if certificate and self._certificates is not None:
            return self._certificates.principal(certificate, self.tenants)
        self.tenants.check_fresh()
        raise missing_key_error()

    async def later(self, credential: str) -> Principal:
        """Verifies as `at_once` does, for a token that has not been verified before."""
        if self._tokens is None:
            raise wrong_key_error()
        return (await self._tokens.verify(credential)).principal(self.tenants)

    async def watch(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follower.watch(), name="tenants")
            tasks.create_task(self._follow_config(), name="operators")
            if self._tokens is not None:
                tasks.create_task(self._tokens.watch(), name="issuers' keys")

    async def _follow_config(self) -> None:
        """`kvloom reload` stores what it was given. The operator's organisation counts at once: an administrator who is
        no operator any more must not stay one until the next restart."""
        await self._config_file.follow("the operator's organisation", self._read_operators, self._use_operators)

    def _read_operators(self) -> str:
        """Raises ConfigError."""
        return load_config(self._config_path).control.operator_organisation

    def _use_operators(self, organisation: str) -> None:
        self._operators = organisation


MAX_KEPT: Final = 4096
"""Certificates whose names are remembered: reading one takes about 20 microseconds."""


class ClientCertificates:
    def __init__(self, configured: Sequence[CertificateConfig]) -> None:
        self._configured = configured
        self._kept: dict[bytes, tuple[CertificateConfig, str, float] | None] = {}

    def principal(self, certificate: bytes, tenants: Tenants) -> Principal:
        """Returns whose certificate (PEM or DER) this is. Raises KvloomError."""
        if certificate not in self._kept:
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            self._kept[certificate] = self._found(certificate)
        found = self._kept[certificate]
        if found is None:
            raise wrong_identity_error()
        config, name, expires_at = found
        scopes = tuple(sorted(SCOPES_OF_ROLE[config.role]))
        return tenants.of_identity(f"cert:{name}", config.tenant, scopes, expires_at, name)

    def _found(self, certificate: bytes) -> tuple[CertificateConfig, str, float] | None:
        """The first entry that fits, the name that it fits by, and when the certificate expires (seconds since
        1970)."""
        uris, common_name, expires_at = contents_of(certificate)
        for config in self._configured:
            if config.common_name and config.common_name == common_name:
                return config, common_name, expires_at
            for uri in uris:
                if config.uri and (uri == config.uri or _begins(config.uri, uri)):
                    return config, uri, expires_at
        return None


def _begins(pattern: str, uri: str) -> bool:
    return pattern.endswith("*") and uri.startswith(pattern[:-1])


def contents_of(certificate: bytes) -> tuple[Sequence[str], str, float]:
    """The URIs of a certificate, the common name of its subject, and when it expires (seconds since 1970); no names if
    it cannot be read."""
    from cryptography import x509  # only where certificates are mapped

    try:
        is_pem = certificate.startswith(b"-----")
        found = x509.load_pem_x509_certificate(certificate) if is_pem else x509.load_der_x509_certificate(certificate)
        names = found.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
        common_name = str(names[0].value) if len(names) == 1 else ""
        expires_at = found.not_valid_after_utc.timestamp()
        try:
            extension = found.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        except x509.ExtensionNotFound:
            return [], common_name, expires_at
        return extension.value.get_values_for_type(x509.UniformResourceIdentifier), common_name, expires_at
    except ValueError:
        log.warning("client_certificate_read_failed")
        return [], "", 0.0
