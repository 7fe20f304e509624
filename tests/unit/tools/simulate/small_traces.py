"""Traces of some calls, in the formats of the public ones."""

from __future__ import annotations

from pathlib import Path

from tests.unit.tools.simulate.test_traces import session, turn, write_lines


def small_mooncake_trace(folder: Path) -> Path:
    """Forty conversations of three calls."""
    lines = [
        {
            "timestamp": 3000 * (index // 20),
            "input_length": 2048 * (1 + index // 40),
            "output_length": 20,
            "hash_ids": [1000 * (index % 40) + block for block in range(4 * (1 + index // 40))],
        }
        for index in range(120)
    ]
    return write_lines(folder / "mooncake.jsonl", lines)


def small_weka_trace(folder: Path) -> Path:
    """Ten sessions of two calls."""
    requests = [turn(0, list(range(1, 40))), turn(9, list(range(1, 60)), think=8.0)]
    return write_lines(folder / "weka.jsonl.gz", [session(requests) for _ in range(10)])
