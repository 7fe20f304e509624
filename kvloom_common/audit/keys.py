"""The keys with which excerpts are encrypted: one for each tenant, user (`safety_identifier`) and day, in a file of its
own. Removing keys forgets what they have encrypted, so that the log itself never changes."""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvloom_common.private_file import make_private_folder, open_private_file, write_once

_KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12
_NAME_CHARS: Final = 32
_DAY_CHARS: Final = 10
_SUFFIX: Final = ".key"


class Retention(NamedTuple):
    """How many days excerpts can be read; 0: until they are erased."""

    days: int = 0
    by_tenant: Mapping[str, int] = MappingProxyType({})
    """Those of tenants with other ones."""

    def __bool__(self) -> bool:
        return bool(self.days or any(self.by_tenant.values()))


class AuditKeys:
    """The keys in one directory, which only this user can read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def seal(self, text: str, tenant: str, day: datetime.date, user: str = "") -> str:
        """Encrypt a text with the key of its tenant, user and day, which is made if there is none. Raises OSError."""
        nonce = os.urandom(_NONCE_BYTES)
        key = self._made_or_read(self._path(tenant, day, user))
        sealed = AESGCM(key).encrypt(nonce, text.encode(), _about(tenant, day, user))
        return base64.b64encode(nonce + sealed).decode()

    def open(self, sealed: str, tenant: str, day: datetime.date, user: str = "") -> str | None:
        """Return the text; None if its key is gone, or is not the one. Raises OSError."""
        for owner in dict.fromkeys((user, "")):  # older versions had one key for all users of a tenant
            try:
                key, raw = self._path(tenant, day, owner).read_bytes(), base64.b64decode(sealed, validate=True)
                opened = AESGCM(key).decrypt(raw[:_NONCE_BYTES], raw[_NONCE_BYTES:], _about(tenant, day, owner))
            except (FileNotFoundError, InvalidTag, ValueError):
                continue
            return opened.decode(errors="replace")
        return None

    def erase(self, tenant: str, user: str | None = None) -> int:
        """Destroy all keys of a tenant, or of one of its users. Returns how many there were. Raises OSError."""
        begin = _name(tenant) if user is None else f"{_name(tenant)}-{_name(user)}"
        return sum(map(_removed, self._directory.glob(f"{begin}-*{_SUFFIX}")))

    def expire(self, today: datetime.date, retention: Retention) -> int:
        """Destroy the keys of days that are too long ago. Returns how many there were. Raises OSError."""
        oldest = {_name(tenant): _first_day(today, days) for tenant, days in retention.by_tenant.items()}
        usual = _first_day(today, retention.days)
        old = [
            path
            for path in self._directory.glob(f"*-*{_SUFFIX}")
            if path.stem[-_DAY_CHARS:] < oldest.get(path.stem[:_NAME_CHARS], usual)
        ]
        return sum(map(_removed, old))

    def _path(self, tenant: str, day: datetime.date, user: str) -> Path:
        whose = f"{_name(tenant)}-{_name(user)}" if user else _name(tenant)
        return self._directory / f"{whose}-{day}{_SUFFIX}"

    def _made_or_read(self, path: Path) -> bytes:
        with contextlib.suppress(FileNotFoundError):
            return path.read_bytes()
        make_private_folder(self._directory)
        write_once(path, os.urandom(_KEY_BYTES))  # or another service's, which was faster
        return path.read_bytes()


def _first_day(today: datetime.date, days: int) -> str:
    """The first day whose keys stay."""
    return str(today - datetime.timedelta(days=days)) if days else ""


def _removed(path: Path) -> int:
    """Overwrites the key first, as far as the file system does that in place."""
    with contextlib.suppress(FileNotFoundError):
        with os.fdopen(open_private_file(path, os.O_WRONLY), "wb") as file:
            file.write(bytes(_KEY_BYTES))
        path.unlink()
    return 1


def _name(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:_NAME_CHARS]


def _about(tenant: str, day: datetime.date, user: str) -> bytes:
    return "\0".join(filter(None, (tenant, user, str(day)))).encode("utf-8", "surrogateescape")
