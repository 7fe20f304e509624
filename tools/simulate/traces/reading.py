"""Reads lines and records from trace files, plain or gzipped, and reports errors in them. All sizes are bounded."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec

from tools.failures import CommandError

MAX_FILE_BYTES: Final = 8 << 30
"""The uncompressed size."""
MAX_LINE_BYTES: Final = 256 << 20
MAX_CALLS: Final = 5_000_000
MAX_TOKENS: Final = 1 << 24
"""The limit for one prompt or one answer."""

TokenCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
PromptTokenCount = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
BlockId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e10)]

ReadFraction = Callable[[float], None]
"""Called now and then with the share of the file that has been read, 0 to 1."""

T = TypeVar("T")


def line_error(path: Path, line_number: int, field: str, problem: str) -> CommandError:
    where = f"{path}: line {line_number}"
    return CommandError(f"{where}: {field}: {problem}" if field else f"{where}: {problem}")


def read_lines(path: Path, on_fraction: ReadFraction | None = None) -> Iterator[tuple[int, bytes]]:
    """Yields (line number from 1, line without its end) without blank lines. Raises CommandError."""
    line_number = 0
    num_bytes = 0
    try:
        size = path.stat().st_size
        with path.open("rb") as raw:
            stream = io.BufferedReader(gzip.GzipFile(fileobj=raw)) if path.suffix == ".gz" else raw
            while line := stream.readline(MAX_LINE_BYTES + 1):
                line_number += 1
                num_bytes += len(line)
                if len(line) > MAX_LINE_BYTES:
                    raise line_error(path, line_number, "", f"longer than {MAX_LINE_BYTES} bytes")
                if num_bytes > MAX_FILE_BYTES:
                    raise line_error(path, line_number, "", f"the file is larger than {MAX_FILE_BYTES} bytes")
                if on_fraction is not None and line_number % 64 == 0:
                    on_fraction(min(1.0, raw.tell() / max(size, 1)))
                if stripped := line.strip():
                    yield line_number, stripped
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise line_error(path, line_number + 1, "", f"damaged gzip: {error}") from error
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}") from error


def read_records(path: Path, record: type[T], on_fraction: ReadFraction | None = None) -> Iterator[tuple[int, T]]:
    """Yields (line number, record) from JSON lines. `record` is a msgspec.Struct. Raises CommandError that names the
    file, the line and the field."""
    decoder = msgspec.json.Decoder(record)
    for line_number, line in read_lines(path, on_fraction):
        try:
            yield line_number, decoder.decode(line)
        except msgspec.ValidationError as error:
            problem, _, place = str(error).partition(" - at `$")
            raise line_error(path, line_number, place.strip("`.") or "the line", problem) from error
        except msgspec.DecodeError as error:
            raise line_error(path, line_number, "", f"not JSON: {error}") from error
        except RecursionError as error:
            raise line_error(path, line_number, "", "nested too deeply") from error
