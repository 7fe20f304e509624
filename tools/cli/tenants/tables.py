"""Shows results: as tables for people, or as JSON for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import click
import msgspec
from google.protobuf.message import Message

from kvloom_common.transport.plain_messages import as_plain

Columns = Mapping[str, Callable[[Any], str]]


def show_list(messages: Iterable[Message], columns: Columns, *, as_json: bool, empty: str) -> None:
    """`empty`: what to say if there are none."""
    found = list(messages)
    if as_json:
        click.echo(msgspec.json.encode([as_plain(message) for message in found]).decode())
    elif not found:
        click.echo(empty)
    else:
        _print([list(columns), *([cell(message) for cell in columns.values()] for message in found)])


def show_one(message: Message, columns: Columns, *, as_json: bool, secret: str = "") -> None:
    """`secret`: a field `secret` in JSON."""
    if as_json:
        extra = {"secret": secret} if secret else {}
        click.echo(msgspec.json.encode({**as_plain(message), **extra}).decode())
    else:
        _print([list(columns), [cell(message) for cell in columns.values()]])


def _print(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
