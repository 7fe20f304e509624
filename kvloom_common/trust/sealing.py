"""The protection of what is in Redis, by the keys of the fabric's secret: HMAC-SHA256 and AES-256-GCM."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvloom_common.trust.seal import SealError
from kvloom_common.trust.secret import FabricSecret

_KEY_ID_BYTES: Final = 4
_SALT_BYTES: Final = 16
_HEAD_BYTES: Final = _KEY_ID_BYTES + _SALT_BYTES
_NONCE_BYTES: Final = 12
_TAG_BYTES: Final = 16
_MAX_CIPHERS: Final = 256
"""The processes whose entries are read by one process at about the same time."""


class _SignedRecord(msgspec.Struct):
    record: msgspec.Raw
    fabric: str
    key: str
    mac: str


class SecretSealer:
    """Each process encrypts with a key of its own, derived from the fabric's and a random salt, so that its nonces can
    be a counter and never repeat."""

    def __init__(self, secret: FabricSecret) -> None:
        self.replace_secret(secret)

    def replace_secret(self, secret: FabricSecret) -> None:
        """Use another state of the secret from now on."""
        self._fabric_id = secret.fabric_id
        self._signing = secret.keys("registry")
        self._encryption = {bytes.fromhex(name): key for name, key in secret.keys("journal").items()}
        self._ciphers: OrderedDict[bytes, AESGCM] = OrderedDict()
        """By head, which is the key id and the salt: the latest that were used to decrypt."""
        self._head = next(iter(self._encryption)) + os.urandom(_SALT_BYTES)
        self._cipher = self._new_cipher(self._head)
        self._nonces = itertools.count()

    def sign(self, stored_under: str, content: bytes) -> bytes:
        key, secret = next(iter(self._signing.items()))
        return _signed(self._fabric_id, key, record_key(secret, stored_under), content)

    def verified(self, stored_under: str, signed: bytes) -> bytes:
        def key_of(key_id: str) -> bytes | None:
            secret = self._signing.get(key_id)
            return None if secret is None else record_key(secret, stored_under)

        return _verified(self._fabric_id, key_of, signed)

    def encrypt(self, stored_under: str, content: bytes) -> bytes:
        nonce = next(self._nonces).to_bytes(_NONCE_BYTES)
        return self._head + nonce + self._cipher.encrypt(nonce, content, stored_under.encode())

    def decrypted(self, stored_under: str, encrypted: bytes) -> bytes:
        if len(encrypted) < _HEAD_BYTES + _NONCE_BYTES + _TAG_BYTES:
            raise SealError("it is not encrypted")
        cipher = self._cipher_of(bytes(encrypted[:_HEAD_BYTES]))
        nonce = encrypted[_HEAD_BYTES : _HEAD_BYTES + _NONCE_BYTES]
        try:
            return cipher.decrypt(nonce, encrypted[_HEAD_BYTES + _NONCE_BYTES :], stored_under.encode())
        except InvalidTag as error:
            raise SealError("it was altered") from error

    def _cipher_of(self, head: bytes) -> AESGCM:
        found = self._ciphers.get(head)
        if found is None:
            found = self._ciphers[head] = self._new_cipher(head)
            if len(self._ciphers) > _MAX_CIPHERS:
                self._ciphers.popitem(last=False)
        return found

    def _new_cipher(self, head: bytes) -> AESGCM:
        key = self._encryption.get(head[:_KEY_ID_BYTES])
        if key is None:
            raise SealError("it is encrypted with a secret that is not accepted here")
        return AESGCM(hmac.digest(key, head[_KEY_ID_BYTES:], hashlib.sha256))


def record_key(signing_key: bytes, stored_under: str) -> bytes:
    """The key that signs what is stored under this name, and nothing else."""
    return hmac.digest(signing_key, stored_under.encode(), hashlib.sha256)


def _signed(fabric_id: str, key_id: str, key: bytes, content: bytes) -> bytes:
    """`key`: that of the record."""
    mac = hmac.digest(key, content, hashlib.sha256).hex()
    return msgspec.json.encode(_SignedRecord(msgspec.Raw(content), fabric_id, key_id, mac))


def _verified(fabric_id: str, key_of: Callable[[str], bytes | None], signed: bytes) -> bytes:
    """`key_of`: the key of the record, by key id. Raises SealError."""
    try:
        record = msgspec.json.decode(signed, type=_SignedRecord)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SealError("it is not signed") from error
    if record.fabric != fabric_id:
        raise SealError("it belongs to another fabric")
    key = key_of(record.key)
    if key is None:
        raise SealError("it is signed with a secret that is not accepted here")
    content = bytes(record.record)
    if not hmac.compare_digest(hmac.digest(key, content, hashlib.sha256).hex().encode(), record.mac.encode()):
        raise SealError("its signature is wrong")
    return content


class IdentitySealer:
    """That of a service which has no secret: it signs and reads its own records, and nothing else."""

    def __init__(self, fabric_id: str, record_keys: Mapping[str, Mapping[str, bytes]]) -> None:
        """`record_keys`: see ServiceIdentity."""
        self._fabric_id = fabric_id
        self._keys = record_keys

    def replace_keys(self, record_keys: Mapping[str, Mapping[str, bytes]]) -> None:
        """Use others from now on."""
        self._keys = record_keys

    def sign(self, stored_under: str, content: bytes) -> bytes:
        """Raises SealError."""
        key_id, key = next(iter(self._keys_of(stored_under).items()))
        return _signed(self._fabric_id, key_id, key, content)

    def verified(self, stored_under: str, signed: bytes) -> bytes:
        return _verified(self._fabric_id, self._keys_of(stored_under).get, signed)

    def encrypt(self, stored_under: str, content: bytes) -> bytes:
        del content
        raise SealError(f"the identity of this service does not seal {stored_under}")

    def decrypted(self, stored_under: str, encrypted: bytes) -> bytes:
        del encrypted
        raise SealError(f"the identity of this service does not read {stored_under}")

    def _keys_of(self, stored_under: str) -> Mapping[str, bytes]:
        found = self._keys.get(stored_under)
        if not found:
            raise SealError(f"the identity of this service does not sign {stored_under}")
        return found
