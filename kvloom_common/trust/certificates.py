"""Certificates for TLS between the processes of a fabric.

The fabric's secret determines the key of its certificate authority, so every process that knows the secret can make the
authority's certificate, and one for itself, in memory. Nothing is issued, stored or renewed. A certificate names the
role of its process and, for roles of which clients want a particular process, a digest of its name.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import hmac
from collections.abc import Sequence
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvloom_common.trust.secret import FabricSecret

_CURVE: Final = ec.SECP256R1()
_CURVE_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_FROM: Final = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_UNTIL: Final = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
"""A certificate's key lives in the memory of one process and ends with it. An earlier end would only make the fabric
depend on clocks; what ends an authority is the rotation of the secret."""


@dataclasses.dataclass(frozen=True)
class ProcessCertificates:
    """PEM, as TLS libraries want it."""

    authorities: bytes
    """The certificates of the authorities of all accepted secrets, in PEM."""
    certificate: bytes
    key: bytes = dataclasses.field(repr=False)


def make_certificates(secret: FabricSecret, roles: Sequence[str], name: str) -> ProcessCertificates:
    """The certificates of the process `name` (e.g. a shard's id), which serves in these roles."""
    authorities = [_authority(secret, part) for part in secret.secrets]
    authority, authority_key = authorities[0]
    key = ec.generate_private_key(_CURVE)
    names = [x509.DNSName(server_name(secret.fabric_id, role, of)) for role in roles for of in ("", name)]
    certificate = (
        _builder(_subject(f"{roles[0]}.{secret.fabric_id}"), authority.subject, key.public_key())
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    return ProcessCertificates(
        b"".join(_pem(found) for found, _ in authorities),
        _pem(certificate),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def server_name(fabric_id: str, role: str, name: str = "") -> str:
    """The name that a client demands of a server's certificate: of any process of the role, or of the one called
    `name`."""
    digest = f"p{hashlib.sha256(name.encode()).hexdigest()[:32]}." if name else ""
    return f"{digest}{role}.{fabric_id}.kvloom"


def _authority(secret: FabricSecret, part: bytes) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """The key is a function of `part`; processes make different, equivalent certificates of it."""
    number = int.from_bytes(hmac.digest(part, b"kvloom certificate authority", "sha512"))
    key = ec.derive_private_key(number % (_CURVE_ORDER - 1) + 1, _CURVE)
    public = key.public_key()
    identifier = x509.SubjectKeyIdentifier.from_public_key(public)
    subject = _subject(f"kvloom {secret.fabric_id} {identifier.digest.hex()[:8]}")
    certificate = (
        _builder(subject, subject, public)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate, key


def _builder(subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
    )


def _subject(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
