"""Chooses the database that control uses."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from kvloom_common.config import ConfigError, KvloomConfig

FILE_NAME: Final = "control.db"
_DRIVERS: Final = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}


def database_url(config: KvloomConfig) -> URL:
    """That of the configuration, or of a SQLite file in the data directory. Raises ConfigError."""
    if not config.control.database_url:
        return URL.create(_DRIVERS["sqlite"], database=str(Path(config.data_dir) / FILE_NAME))
    try:
        return with_driver(make_url(config.control.database_url))
    except (ArgumentError, ValueError) as error:
        raise ConfigError(f"control.database_url: {error}") from None


def with_driver(url: URL) -> URL:
    """The URL with the asynchronous driver of its database. Raises ValueError, whose message has no password."""
    driver = _DRIVERS.get(url.get_backend_name())
    if driver is None:
        raise ValueError(f"{url.get_backend_name()!r} is neither postgresql nor sqlite")
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise ValueError("SQLite needs the path of a file: sqlite:///PATH, or sqlite:////PATH for an absolute one")
    return url.set(drivername=driver)
