"""The harness of all benches: a run, rows, and their table and JSON.

A bench declares its flags and a function that runs it and returns a `Report`:

    @experiment("vector-search", count("--chunks", 20_000, "Chunks of the store.", to="num_chunks"))
    def bench_vector_search(num_chunks: int) -> Report:
        '''Measure the index of a vector store ...'''
        return Report(rows, [TableOf(COLUMNS, rows)])
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from lab.flags import Flag, flags
from lab.pages import PAGE, write_table


class Column(msgspec.Struct, frozen=True):
    """A column of a table: the field of a row, or what `of` makes of the row."""

    heading: str
    of: str | Callable[[Any], Any]
    format: str = ""
    """A format specification, such as ".2f". A value that is None is shown as "-"."""
    unit: str = ""
    is_left: bool = False

    def cell(self, row: Any) -> str:
        if callable(self.of):
            value = self.of(row)
        else:
            value = row.get(self.of) if isinstance(row, Mapping) else getattr(row, self.of)
        return "-" if value is None else f"{format(value, self.format)}{self.unit}"


class TableOf(msgspec.Struct, frozen=True):
    columns: Sequence[Column]
    rows: Sequence[Any]
    title: str | None = None

    def render(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for column in self.columns:
            table.add_column(column.heading, justify="left" if column.is_left else "right")
        for row in self.rows:
            table.add_row(*(column.cell(row) for column in self.columns))
        return table


class Report(msgspec.Struct, frozen=True):
    """The findings of a bench."""

    data: Any
    """For `--json`."""
    parts: Sequence[TableOf | str]
    """For people, from the top."""
    for_page: tuple[str, str] | None = None
    """The name of a table of a documentation page, and the table."""
    is_right: bool = True
    """False makes the exit status 1: something happened that must not."""


def experiment(name: str, *given: Flag, page: str = "") -> Callable[[Callable[..., Report]], click.Command]:
    """Make a command of a function that gets the values of the flags and returns a report. `page` says what `--page`
    writes; without it there is no such flag."""

    def make(run: Callable[..., Report]) -> click.Command:
        @functools.wraps(run)
        def perform(as_json: bool, page: Path | None = None, **settings: Any) -> None:
            report = run(**settings)
            if page is not None and report.for_page is not None:
                write_table(page, *report.for_page)
            _show(report, as_json=as_json)

        decorated: Callable[..., Any] = click.option("--json", "as_json", is_flag=True, help="Print JSON.")(perform)
        if page:
            about = f"Write {page} into this page, between its markers."
            decorated = click.option("--page", type=PAGE, help=about)(decorated)
        return click.command(name)(flags(f"bench-{name}", *given)(decorated))

    return make


def _show(report: Report, *, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report.data), indent=2).decode())
    else:
        console = Console()
        for part in report.parts:
            if isinstance(part, str):
                console.print(part, soft_wrap=True, highlight=False, markup=False)
            else:
                console.print(part.render())
    if not report.is_right:
        raise SystemExit(1)


def show_progress(message: str) -> None:
    click.echo(message, err=True)
