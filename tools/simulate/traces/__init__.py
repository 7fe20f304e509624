"""Traces: files of recorded calls, which are read once and replayed as workloads.

trace.py        what all traces have in common
reading.py      reads lines and records, and reports errors in them
open_loop.py    recorded arrivals at any rate
closed_loop.py  users who play sessions
models.py       which model each call is for
mixed.py        batch jobs between the calls
mooncake.py     the format of Mooncake's traces
azure.py        the format of Azure's traces
weka.py         the format of WEKA's traces
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tools.failures import CommandError
from tools.simulate.traces.azure import BLOCK_SIZE as AZURE_BLOCK_SIZE
from tools.simulate.traces.azure import read_azure
from tools.simulate.traces.mixed import MixedWorkload
from tools.simulate.traces.models import ModelWorkload
from tools.simulate.traces.mooncake import read_mooncake
from tools.simulate.traces.reading import ReadFraction
from tools.simulate.traces.trace import HashRuns, MeasuredWorkload, Trace, TraceFormat
from tools.simulate.traces.weka import MAX_THINK_SECONDS, read_weka

__all__ = [
    "FORMATS",
    "MAX_THINK_SECONDS",
    "OPEN_LOOP_FORMATS",
    "HashRuns",
    "MeasuredWorkload",
    "MixedWorkload",
    "ModelWorkload",
    "Trace",
    "TraceFormat",
    "guess_format",
    "read_trace",
]

FORMATS: Final[tuple[TraceFormat, ...]] = ("mooncake", "weka", "azure")
OPEN_LOOP_FORMATS: Final[tuple[TraceFormat, ...]] = ("mooncake", "azure")
"""Those with arrival times."""


def guess_format(path: Path) -> TraceFormat:
    """Derive the format from the name of the file. Raises CommandError if that is not possible."""
    name = path.name.lower()
    found: list[TraceFormat] = [candidate for candidate in FORMATS if candidate in name]
    if len(found) == 1:
        return found[0]
    if not found and name.removesuffix(".gz").endswith(".csv"):
        return "azure"
    raise CommandError(
        f"{path}: the format of the trace cannot be derived from the name: use --format {'|'.join(FORMATS)}"
    )


def read_trace(
    path: Path,
    trace_format: TraceFormat,
    *,
    block_size: int | None = None,
    max_think_seconds: float = MAX_THINK_SECONDS,
    on_fraction: ReadFraction | None = None,
) -> Trace:
    """`block_size` is for traces without block ids (azure). Longer think times than `max_think_seconds` are cut (weka).
    Raises CommandError."""
    if trace_format == "azure":
        return read_azure(path, on_fraction, block_size or AZURE_BLOCK_SIZE)
    if block_size is not None:
        raise CommandError(f"--block-size is for azure traces: {trace_format} traces define the block size")
    if trace_format == "mooncake":
        return read_mooncake(path, on_fraction)
    return read_weka(path, on_fraction, max_think_seconds)
