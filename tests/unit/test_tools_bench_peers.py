"""The table of other gateways: what is measured is shown, what could not be measured is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools.bench_peers import PEERS
from tools.bench_peers_table import BEGIN, END, peers_table, write_into_page
from tools.failures import CommandError
from tools.peers.peer import Site


def report(system: str, workload: str, cpu_us: float) -> dict[str, Any]:
    figures = {"cpu_us_per_token": {"sum": cpu_us}, "cpu_us_per_request": {"sum": cpu_us * 100}}
    figures |= {"added_ttft_ms": {"p50": 1.0, "p99": None}, "rss_kb_per_stream": 20.0}
    spread = {"cpu_us_per_token": {"sum": 2.0}, "cpu_us_per_request": {"sum": 2.0}, "rss_kb_per_stream": 2.0}
    return {"system": system, "workload": workload, "num_errors": 0, "num_runs": 3, "spread": spread, **figures}


def test_what_is_missing_is_in_the_table_too() -> None:
    """A peer that cannot be installed must not just be absent."""
    reports = [report("kvloom", "W1", 9.5), report("smg", "W1", 11.3), report("kvloom", "W5", 9.5)]
    table = peers_table(reports, {"dynamo": "It cannot be installed."}, "kvloom bench")
    assert "| 9.5 ±1.0 | 1.00 | – | 20.0 ±1.0 | 0 |" in table
    assert "smg 1.13.0" in table
    assert "dynamo: not measured. It cannot be installed." in table


def test_the_table_replaces_the_last_one_in_a_page(tmp_path: Path) -> None:
    """Only what is between the markers changes; a page without them is left alone."""
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nbehind\n")
    write_into_page(page, "new")
    assert page.read_text() == f"before\n{BEGIN}\nnew\n{END}\nbehind\n"
    page.write_text("nothing")
    with pytest.raises(CommandError):
        write_into_page(page, "new")


@pytest.mark.parametrize("name", list(PEERS))
def test_every_peer_serves_on_the_loopback_interface_only(name: str, tmp_path: Path) -> None:
    """A measurement opens no port to others."""
    site = Site(tmp_path, tmp_path, 9000, 9001, ["http://127.0.0.1:9100"], "model")
    argv = " ".join(PEERS[name].argv(site))
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert "127.0.0.1" in argv + written
    assert "0.0.0.0" not in argv + written
