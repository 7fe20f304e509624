"""Azure's LLM inference traces (github.com/Azure/AzurePublicDataset): CSV of arrivals and
lengths, without prefixes. A further column `Model` may name the model of each call.

No block of a call equals a block of another one, so that these traces show only burstiness and lengths.
"""

from __future__ import annotations

import csv
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from tools.failures import CommandError
from tools.simulate.traces.open_loop import OpenTrace
from tools.simulate.traces.reading import MAX_CALLS, MAX_TOKENS, ReadFraction, line_error, read_lines
from tools.simulate.traces.trace import HashRuns, hash_base
from tools.simulate.workload import Call

BLOCK_SIZE: Final = 512
_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MODEL_COLUMN: Final = "Model"
_SECONDS_FRACTION: Final = re.compile(r"\.(\d+)")


def read_azure(path: Path, on_fraction: ReadFraction | None = None, block_size: int = BLOCK_SIZE) -> OpenTrace:
    """Raises CommandError."""
    calls: list[Call] = []
    timestamps: list[float] = []
    places: list[int] | None = None
    for line_number, line in read_lines(path, on_fraction):
        cells = _cells(path, line_number, line)
        if places is None:
            places = _find_columns(path, line_number, cells)
            continue
        if len(cells) <= max(places):
            raise line_error(path, line_number, "", f"{len(cells)} columns, expected at least {max(places) + 1}")
        timestamp, context, generated, *model = (cells[place] for place in places)
        call_id = len(calls)
        if call_id >= MAX_CALLS:
            raise line_error(path, line_number, "", f"more than {MAX_CALLS} calls")
        num_prompt_tokens = _tokens(path, line_number, "ContextTokens", context, minimum=1)
        num_output_tokens = _tokens(path, line_number, "GeneratedTokens", generated, minimum=0)
        base = hash_base("azure", call_id)
        hashes = HashRuns((range(base, base + num_prompt_tokens // block_size),))
        calls.append(Call(call_id, num_prompt_tokens, max(1, num_output_tokens), hashes, model="".join(model)))
        timestamps.append(_seconds(path, line_number, timestamp))
    if not calls:
        raise CommandError(f"{path}: no calls in it")
    first = min(timestamps)
    return OpenTrace(calls, [timestamp - first for timestamp in timestamps], 0.0, block_size)


def _cells(path: Path, line_number: int, line: bytes) -> list[str]:
    try:
        return next(csv.reader([line.decode("utf-8-sig" if line_number == 1 else "utf-8")], strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise line_error(path, line_number, "", f"not CSV: {error}") from error


def _find_columns(path: Path, line_number: int, header: list[str]) -> list[int]:
    for column in _COLUMNS:
        if column not in header:
            raise line_error(path, line_number, column, "there is no such column in the header")
    return [header.index(column) for column in (*_COLUMNS, _MODEL_COLUMN) if column in header]


def _tokens(path: Path, line_number: int, field: str, cell: str, *, minimum: int) -> int:
    try:
        number = int(cell)
    except ValueError as error:
        raise line_error(path, line_number, field, f"expected a whole number, got {cell!r:.60}") from error
    if not minimum <= number <= MAX_TOKENS:
        raise line_error(path, line_number, field, f"{number} is not between {minimum} and {MAX_TOKENS}")
    return number


def _seconds(path: Path, line_number: int, cell: str) -> float:
    """The fraction is parsed separately, because datetime does not read seven digits."""
    whole, fraction = _SECONDS_FRACTION.sub("", cell, count=1), _SECONDS_FRACTION.search(cell)
    try:
        moment = datetime.fromisoformat(whole)
    except ValueError as error:
        raise line_error(path, line_number, "TIMESTAMP", f"expected a date and time, got {cell!r:.60}") from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp() + (float(f"0.{fraction[1]}") if fraction else 0.0)
