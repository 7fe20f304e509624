"""The key with which a fabric signs its receipts, and the published keys that verify them.

The private key is a file of mode 0600, 32 bytes in hexadecimal; beside it is the public file, NAME.pub, which the edges
publish. It keeps the keys of earlier times, so that old receipts can still be verified.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from pathlib import Path
from typing import Final

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from kvloom_common.private_file import OTHERS, make_private_folder, open_private_file, write_private_file
from kvloom_common.receipts.key_files import public_path
from kvloom_common.receipts.receipt import Bundle, Receipt, signed_bytes

ALGORITHM: Final = "Ed25519"
_MAX_FILE_BYTES: Final = 2**16


class ReceiptKeyError(Exception):
    """A key cannot be used. The message names its file and the fault, never the key."""


class PublicKey(msgspec.Struct, frozen=True):
    key_id: str
    public_key: str
    """In hexadecimal."""
    algorithm: str = ALGORITHM


class PublicKeys(msgspec.Struct, frozen=True):
    """The keys that are published; the present one comes first."""

    keys: list[PublicKey]


class Signer:
    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = _public(key)

    def sign(self, receipt: Receipt) -> str:
        """The signature, in hexadecimal."""
        return self._key.sign(signed_bytes(receipt)).hex()


def made_or_read(path: Path) -> Signer:
    """The key in the file, which is made if it is missing, by one of several processes. Raises ReceiptKeyError."""
    try:
        make_private_folder(path.parent)
        with os.fdopen(open_private_file(path.with_name(path.name + ".lock"), os.O_WRONLY | os.O_CREAT), "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                write_private_file(path, Ed25519PrivateKey.generate().private_bytes_raw().hex().encode() + b"\n")
            signer = Signer(_read(path))
            _publish(public_path(path), signer.public)
    except OSError as error:
        raise ReceiptKeyError(f"the key of receipts {path} cannot be used: {error.strerror}") from error
    return signer


def read_public_keys(path: Path) -> PublicKeys:
    """Raises ReceiptKeyError."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_MAX_FILE_BYTES), type=PublicKeys)
    except OSError as error:
        raise ReceiptKeyError(f"the published keys {path} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ReceiptKeyError(f"{path} holds no published keys: {error}") from error


def is_signed(bundle: Bundle, keys: PublicKeys) -> bool:
    """True when one of the keys has signed the receipt."""
    for key in keys.keys:
        if key.key_id == bundle.key_id and key.algorithm == ALGORITHM:
            with contextlib.suppress(InvalidSignature, ValueError):
                public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key.public_key))
                public.verify(bytes.fromhex(bundle.signature), signed_bytes(bundle.receipt))
                return True
    return False


def _read(path: Path) -> Ed25519PrivateKey:
    with path.open("rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        content = file.read(_MAX_FILE_BYTES)
    if mode & OTHERS:
        raise ReceiptKeyError(f"other users may read the key of receipts {path}: run `chmod 600 {path}`")
    try:
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(content.decode("ascii").strip()))
    except ValueError:
        raise ReceiptKeyError(f"{path} holds no key of receipts") from None


def _public(key: Ed25519PrivateKey) -> PublicKey:
    public = key.public_key().public_bytes_raw()
    return PublicKey(hashlib.sha256(public).hexdigest()[:16], public.hex())


def _publish(path: Path, key: PublicKey) -> None:
    known = read_public_keys(path).keys if path.exists() else []
    if known and known[0] == key:
        return
    others = [other for other in known if other.key_id != key.key_id]
    write_private_file(path, msgspec.json.encode(PublicKeys([key, *others])))
