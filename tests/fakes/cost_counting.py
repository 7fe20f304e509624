"""What code costs in calls and bytecodes, which is the same on every machine, against a committed baseline."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import Any, Final

import pytest

TOLERANCE: Final = 1.05
NUM_ROUNDS: Final = 64
"""Of what is put off, 8 or 32 frames at a time, each gets its share."""

Counts = dict[str, dict[str, float]]
"""What is counted → "calls" and "bytecodes"."""

_BASELINES: Final = Path(__file__).parents[1] / "baselines"
_PYTHON: Final = f"{sys.version_info.major}.{sys.version_info.minor}"


class CountingTransport:
    """Takes what is written."""

    def __init__(self) -> None:
        self.num_writes = 0

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        self.num_writes += bool(data)


class NoopObserver:
    """An observer whom nothing interests."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_args: None


def calls_of(work: Callable[[], None]) -> float:
    """Of Python functions and of C functions, in one round of `work`."""
    work()
    count = 0

    def note(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        for _ in range(NUM_ROUNDS):
            work()
    finally:
        sys.setprofile(None)
    return count / NUM_ROUNDS


def bytecodes_of(work: Callable[[], None]) -> float:
    """In one round of `work`."""
    work()
    count = 0

    def trace(frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for _ in range(NUM_ROUNDS):
            work()
    finally:
        sys.settrace(before)
    return count / NUM_ROUNDS


def assert_no_dearer(name: str, measured: Counts) -> None:
    """Than tests/baselines/NAME.json says of this version of Python, give or take TOLERANCE."""
    baselines = json.loads((_BASELINES / f"{name}.json").read_text())
    if _PYTHON not in baselines:
        versions = " and ".join(baselines)
        pytest.skip(f"calls and bytecodes are a version's own: the baselines are those of Python {versions}")
    for what, limits in baselines[_PYTHON].items():
        for unit, limit in limits.items():
            assert measured[what][unit] <= limit * TOLERANCE, (what, unit, measured)


def print_baseline(counts: Callable[[], Coroutine[Any, Any, Counts]]) -> None:
    """As tests/baselines has it."""
    sys.stdout.write(json.dumps({_PYTHON: asyncio.run(counts())}, indent=2) + "\n")
