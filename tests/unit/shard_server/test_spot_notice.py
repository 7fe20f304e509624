"""What is taken for a notice that the machine is about to be taken away."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shard_server.spot_notice import SpotNotices, seconds_left


@pytest.mark.parametrize(
    ("text", "left"),
    [("5", 4.0), ("2.5", 1.5), ("0", -1.0), ("", 29.0), ("terminate", 29.0), ("-3", 29.0), ("inf", 29.0)],
)
def test_a_notice_counts_from_when_it_was_written(text: str, left: float) -> None:
    """It may be seen late. What is no time is a notice all the same."""
    assert seconds_left(text, written_at=100.0, now=101.0, default_seconds=30.0) == left


async def test_a_file_from_before_is_no_notice_until_it_is_written_again(tmp_path: Path) -> None:
    """After a reboot the file of the machine's last notice may still be there."""
    file = tmp_path / "notice"
    file.write_text("5")
    os.utime(file, (1000.0, 1000.0))
    times = iter((2000.0, 3000.0))

    def clock() -> float:
        now = next(times)
        if now == 2000.0:
            os.utime(file, (2999.0, 2999.0))
        return now

    assert await SpotNotices(str(file), 30.0, clock).wait() == 4.0
