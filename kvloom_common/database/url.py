"""Chooses the database that a service uses."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from kvloom_common.config import ConfigError

_DRIVERS: Final = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}


def database_url(configured: str, key: str, default: Path) -> URL:
    """The configured database, or a SQLite file at `default`. `key`: that of the configuration. Raises ConfigError."""
    if not configured:
        return URL.create(_DRIVERS["sqlite"], database=str(default))
    try:
        return with_driver(make_url(configured))
    except (ArgumentError, ValueError) as error:
        raise ConfigError(f"{key}: {error}") from None


def with_driver(url: URL) -> URL:
    """The URL with the asynchronous driver of its database. Raises ValueError, whose message has no password."""
    driver = _DRIVERS.get(url.get_backend_name())
    if driver is None:
        raise ValueError(f"{url.get_backend_name()!r} is neither postgresql nor sqlite")
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise ValueError("SQLite needs the path of a file: sqlite:///PATH, or sqlite:////PATH for an absolute one")
    return url.set(drivername=driver)
