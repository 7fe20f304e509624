"""Clients' certificates that their authorities have revoked, by the lists of `tls.client_crl_file`.

TLS looks at a certificate when a connection begins; so each request asks here, also on connections that are open.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import structlog

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.config import ConfigError

log = structlog.get_logger()

MAX_KEPT: Final = 4096
"""Certificates whose numbers are remembered: reading one takes about 20 microseconds."""
_LIST: Final = re.compile(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", re.DOTALL)
_AUTHORITY: Final = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)

Number = tuple[bytes, int]
"""(the name of the authority, the serial number)."""


def read_lists(content: bytes, authorities: bytes, source: str) -> frozenset[Number]:
    """Return the certificates that the lists (PEM) revoke. A list that is outdated still revokes what it names. Raises
    ConfigError if there is none, or one that no authority (PEM) has signed."""
    from cryptography import x509  # only where there are lists

    try:
        known = [x509.load_pem_x509_certificate(found) for found in _AUTHORITY.findall(authorities)]
        lists = [x509.load_pem_x509_crl(found) for found in _LIST.findall(content)]
        numbers: set[Number] = set()
        for one in lists:
            issuer = one.issuer.public_bytes()
            keys = [authority.public_key() for authority in known if authority.subject.public_bytes() == issuer]
            if not any(one.is_signature_valid(key) for key in keys):  # pyrefly: ignore[bad-argument-type]
                raise ConfigError(f"{source} has a list that no authority of tls.client_ca_file has signed")
            numbers |= {(issuer, revoked.serial_number) for revoked in one}
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{source} has a list of revoked certificates that cannot be read: {error}") from error
    if not lists:
        raise ConfigError(f"{source} has no list of revoked certificates in PEM")
    return frozenset(numbers)


class RevokedCertificates:
    """Those of the lists as they are now."""

    def __init__(self, numbers: frozenset[Number]) -> None:
        self._numbers = numbers
        self._kept: dict[bytes, Number | None] = {}
        self._on_change: list[Callable[[], None]] = []

    def use(self, numbers: frozenset[Number]) -> None:
        self._numbers = numbers
        for callback in self._on_change:
            callback()

    def on_change(self, callback: Callable[[], None]) -> None:
        """`callback` is called when the lists have changed."""
        self._on_change.append(callback)

    def check(self, certificate: bytes) -> None:
        """`certificate`: that of a connection, in PEM or DER; b"": it has none. Raises KvloomError
        (UNAUTHENTICATED)."""
        if not certificate:
            return
        if certificate not in self._kept:
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            self._kept[certificate] = _number_of(certificate)
        number = self._kept[certificate]
        if number is None or number in self._numbers:
            raise KvloomError(ErrorReason.ERROR_REASON_UNAUTHENTICATED, "The client's certificate was revoked.")


def _number_of(certificate: bytes) -> Number | None:
    """None if it cannot be read."""
    from cryptography import x509

    try:
        is_pem = certificate.startswith(b"-----")
        found = x509.load_pem_x509_certificate(certificate) if is_pem else x509.load_der_x509_certificate(certificate)
        return found.issuer.public_bytes(), found.serial_number
    except ValueError:
        log.warning("client_certificate_read_failed")
        return None
