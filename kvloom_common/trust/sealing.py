"""The protection of what is in Redis, by the keys of the fabric's secret: HMAC-SHA256 and AES-256-GCM."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import os
from collections import OrderedDict
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
        mac = _mac(secret, stored_under, content)
        return msgspec.json.encode(_SignedRecord(msgspec.Raw(content), self._fabric_id, key, mac))

    def verified(self, stored_under: str, signed: bytes) -> bytes:
        try:
            record = msgspec.json.decode(signed, type=_SignedRecord)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise SealError("it is not signed") from error
        if record.fabric != self._fabric_id:
            raise SealError("it belongs to another fabric")
        secret = self._signing.get(record.key)
        if secret is None:
            raise SealError("it is signed with a secret that is not accepted here")
        content = bytes(record.record)
        if not hmac.compare_digest(_mac(secret, stored_under, content).encode(), record.mac.encode()):
            raise SealError("its signature is wrong")
        return content

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


def _mac(secret: bytes, stored_under: str, content: bytes) -> str:
    return hmac.digest(secret, stored_under.encode() + b"\0" + content, hashlib.sha256).hex()
