"""The file of a pool: what is wrong in it is told before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvloom_common.config import ConfigError
from tools.gateway.pool import pool_of, read_pool


@pytest.mark.parametrize(
    "text",
    [
        "",
        "endpoints = []",
        '[[endpoints]]\naddress = "nonsense"',
        '[[endpoints]]\naddress = "10.0.0.1:80"\nkv_event = "tcp://10.0.0.1:5557"',
        '[[endpoints]]\naddress = "10.0.0.1:80"\n[[endpoints]]\naddress = "10.0.0.1:80"',
        "endpoints = [",
        "\x00",
    ],
)
def test_a_file_that_cannot_be_used_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    """A pool that is read again while requests run must never become another one by a slip of the pen."""
    file = tmp_path / "pool.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"pool\.toml"):
        read_pool(file)


def test_addresses_are_checked_whether_flags_or_a_file_give_them(tmp_path: Path) -> None:
    """A flag with a bad address would otherwise be found out by the first reading of its metrics."""
    with pytest.raises(ConfigError):
        pool_of(["nonsense"])
    with pytest.raises(ConfigError, match="No such file"):
        read_pool(tmp_path / "none.toml")
    assert pool_of(["10.0.0.1:80"]).endpoints[0].metrics_url == "http://10.0.0.1:80/metrics"
