"""The table of `kvloom status` at the widths of terminals."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tools.cli.status import print_table
from tools.supervisor.supervised_process import ProcessStatus

PROCESSES = [
    ProcessStatus("shard", "127-0-0-2-shard-0", 12345, "ready", 0, "127.0.0.2:43999", "127.0.0.1:36823"),
    ProcessStatus("edge", "edge", None, "restarting", 11, "[2001:db8::17]:41339", "[2001:db8::17]:39567"),
    ProcessStatus("redis", "redis", 7, "ready", 0, "unix:/home/operator/.kvloom/run/redis.sock"),
]


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_addresses_are_whole_at_every_width(width: int) -> None:
    """At 80 columns the ports were cut off, for which the command had been asked."""
    file = io.StringIO()
    print_table(Console(file=file, width=width, soft_wrap=True), PROCESSES, "name")
    shown = file.getvalue()
    for process in PROCESSES:
        assert f"{process.name} " in shown
        assert process.address in shown
        assert process.metrics_address in shown
    assert max(map(len, shown.splitlines())) <= max(width, 70)


def test_a_wide_terminal_has_one_line_a_process() -> None:
    """Rows are what tools such as grep and awk read."""
    file = io.StringIO()
    print_table(Console(file=file, width=1000), PROCESSES, "name")
    assert len(file.getvalue().splitlines()) == 1 + len(PROCESSES)
