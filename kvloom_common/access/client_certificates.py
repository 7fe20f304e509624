"""Clients' certificates that are accepted like API keys. TLS has verified them before (`tls.client_ca_file`), when
their connection began, which may last longer than they do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import structlog

from kvloom_common.access.tenants import Tenants, wrong_identity_error
from kvloom_common.config import CertificateConfig
from kvloom_common.tenancy.principal import Principal
from kvloom_common.tenancy.scopes import SCOPES_OF_ROLE

log = structlog.get_logger()

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
