"""Certificates as a public authority would issue them, for tests of TLS with clients."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


class Authority:
    """Issues certificates for 127.0.0.1 and ::1."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self.pem = self._signed(self._name, self._key, is_authority=True)

    def issue(self, name: str, *uris: str, days: tuple[float, float] = (-1.0, 1.0)) -> tuple[bytes, bytes]:
        """A certificate and its key, in PEM. `uris`: further names, such as SPIFFE ids. `days`: from when until when it
        is valid, from now on."""
        key = ec.generate_private_key(ec.SECP256R1())
        key_pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return self._signed(_name(name), key, is_authority=False, uris=uris, days=days), key_pem

    def issue_to(
        self, folder: Path, name: str, *uris: str, days: tuple[float, float] = (-1.0, 1.0)
    ) -> tuple[Path, Path]:
        """Files with a new certificate and its key."""
        certificate, key = self.issue(name, *uris, days=days)
        paths = folder / f"{name}.pem", folder / f"{name}.key"
        for path, content in zip(paths, (certificate, key), strict=True):
            path.write_bytes(content)
        return paths

    def revoking(self, *certificates: bytes) -> bytes:
        """The list of these certificates (PEM) of its own, in PEM."""
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateRevocationListBuilder().issuer_name(self._name)
        builder = builder.last_update(now - _DAY).next_update(now + _DAY)
        for certificate in certificates:
            number = x509.load_pem_x509_certificate(certificate).serial_number
            revoked = x509.RevokedCertificateBuilder().serial_number(number).revocation_date(now).build()
            builder = builder.add_revoked_certificate(revoked)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def _signed(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        *,
        is_authority: bool,
        uris: Sequence[str] = (),
        days: tuple[float, float] = (-1.0, 1.0),
    ) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + days[0] * _DAY)
            .not_valid_after(now + days[1] * _DAY)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName(
                    [
                        *(x509.IPAddress(ipaddress.ip_address(address)) for address in ("127.0.0.1", "::1")),
                        *(x509.UniformResourceIdentifier(uri) for uri in uris),
                    ]
                ),
                critical=False,
            )
        )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
