"""`kvloom usage show|export|reconcile`."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import datetime
import io
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

import click
import grpc.aio
import msgspec
from rich.console import Console
from rich.table import Table

from kvloom.v1 import usage_service_pb2 as pb
from kvloom.v1.usage_service_pb2_grpc import UsageServiceStub
from kvloom_common.delivery_log import FOLDER as WITNESS_FOLDER
from kvloom_common.delivery_log import read_witness, witness_files
from kvloom_common.tenancy.prices import decimal
from tools.failures import CommandError
from tools.fleet.control import control_channel
from tools.fleet.members import FleetAccess
from tools.options import FabricFlags, fabric_options, option
from tools.usage.reconcile import Reconciliation, reconcile

_PIPE_WIDTH: Final = 200
"""Columns of a table that is not for a terminal: nothing is to be cut."""

CALL_SECONDS: Final = 10.0
LIST_SECONDS: Final = 600.0


GROUPS: Final = {
    "day": (pb.USAGE_GROUP_DAY, "day"),
    "model": (pb.USAGE_GROUP_MODEL, "model"),
    "key": (pb.USAGE_GROUP_KEY, "key_id"),
    "tenant": (pb.USAGE_GROUP_TENANT, "tenant"),
    "tier": (pb.USAGE_GROUP_TIER, "tier"),
    "class": (pb.USAGE_GROUP_CLASS, "priority_class"),
}
"""By name: (what the service calls it, its field in a row)."""


@click.group()
def usage() -> None:
    """Show what tenants have used, and what it costs (docs/operate/tenancy.md)."""


def _filters(command):
    for decorate in (
        option("--tenant", "tenant", scope="usage", default="", help="Only this tenant's: ORGANISATION/PROJECT."),
        option("--org", "organisation", scope="usage", default="", help="Only those of this organisation."),
        option("--from", "first_day", scope="usage", default="", help="The first day, of UTC: 2026-11-25."),
        option("--to", "last_day", scope="usage", default="", help="The last day."),
        option(
            "--by",
            "groups",
            scope="usage",
            default="day,tenant,model",
            show_default=True,
            help=f"What to group by: {', '.join(GROUPS)}.",
        ),
        fabric_options,
    ):
        command = decorate(command)
    return command


@usage.command()
@_filters
@option("--json", "as_json", scope="usage", is_flag=True, help="Print one JSON array.")
def show(
    tenant: str,
    organisation: str,
    first_day: str,
    last_day: str,
    groups: str,
    fabric: FabricFlags,
    as_json: bool,
) -> None:
    """Show requests, tokens and costs."""
    names = _groups(groups)
    request = _request(tenant, organisation, first_day, last_day, names)
    rows = rows_of(asyncio.run(_usage(fabric, request)), names)
    if as_json:
        print(msgspec.json.encode(rows).decode())
    else:
        console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
        console.print(as_table(rows, names))


@usage.command()
@_filters
@option("--file", "file", scope="usage", type=click.Path(path_type=Path, dir_okay=False), help="Instead of printing.")
def export(
    tenant: str,
    organisation: str,
    first_day: str,
    last_day: str,
    groups: str,
    fabric: FabricFlags,
    file: Path | None,
) -> None:
    """Write the same as CSV, e.g. for a bill."""
    names = _groups(groups)
    request = _request(tenant, organisation, first_day, last_day, names)
    text = as_csv(rows_of(asyncio.run(_usage(fabric, request)), names), names)
    if file is None:
        print(text, end="")
        return
    try:
        file.write_text(text)
    except OSError as error:
        raise CommandError(f"{file} cannot be written: {error.strerror}") from error


@usage.command(name="reconcile")
@option(
    "--witness",
    "files",
    scope="usage",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A file with lines of JSON that say what was delivered.  [default: those of this data directory]",
)
@option("--since", "since", scope="usage", default="", help="Only answers that ended after this day or time of UTC.")
@option("--json", "as_json", scope="usage", is_flag=True, help="Print one JSON object.")
@fabric_options
def reconcile_command(files: tuple[Path, ...], since: str, as_json: bool, fabric: FabricFlags) -> None:
    """Compare what was metered with what edges and routers, or other witnesses, have counted as delivered.

    They count if control.witness is set. The exit status is 1 if there is a difference.
    """
    found = asyncio.run(_reconcile(fabric, files, since))
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        _print(found)
    if not found.is_exact:
        raise SystemExit(1)


def _print(found: Reconciliation) -> None:
    difference = found.num_metered_tokens - found.num_witnessed_tokens - found.num_in_flight_tokens
    print(f"metered answers      {found.num_metered:,}")
    print(f"with a witness       {found.num_witnessed:,}, of which {found.num_exact:,} are exact")
    print(f"without a witness    {found.num_without_witness:,}")
    print(f"tokens metered       {found.num_metered_tokens:,}")
    print(f"tokens delivered     {found.num_witnessed_tokens:,}")
    print(f"on their way         {found.num_in_flight_tokens:,} (of answers that were broken off)")
    print(f"difference           {difference:,}")
    for line in found.differences:
        print(f"  {line}")


def _groups(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in GROUPS:
            raise click.UsageError(f"--by cannot be {name!r}, only {', '.join(GROUPS)}")
    return names


def _request(
    tenant: str, organisation: str, first_day: str, last_day: str, groups: Sequence[str]
) -> pb.GetUsageRequest:
    for day in filter(None, (first_day, last_day)):
        _time(day)
    return pb.GetUsageRequest(
        tenant=tenant,
        organisation=organisation,
        first_day=first_day,
        last_day=last_day,
        group_by=[GROUPS[name][0] for name in groups],
    )


def _time(text: str) -> float:
    try:
        at = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise click.UsageError(f"{text!r} is no day such as 2026-11-25") from None
    return (at if at.tzinfo else at.replace(tzinfo=datetime.UTC)).timestamp()


@contextlib.asynccontextmanager
async def _service(fleet: FleetAccess) -> AsyncIterator[UsageServiceStub]:
    if not fleet.config.control.enabled:
        raise CommandError("this fabric has no tenants (control.enabled), and so keeps no usage")
    async with control_channel(fleet) as channel:
        try:
            yield UsageServiceStub(channel)
        except grpc.aio.AioRpcError as error:
            raise CommandError(f"control has not answered: {error.details()}") from error


async def _usage(fabric: FabricFlags, request: pb.GetUsageRequest) -> Sequence[pb.UsageRow]:
    async with _service(FleetAccess.open(fabric)) as service:
        found = await service.GetUsage(request, timeout=CALL_SECONDS)
    if found.is_truncated:
        click.echo("there are more rows: ask for fewer days, or one tenant", err=True)
    return found.rows


async def _reconcile(fabric: FabricFlags, files: Sequence[Path], since: str) -> Reconciliation:
    fleet = FleetAccess.open(fabric)
    data_dir = fleet.folder.data_dir
    lines = list(read_witness(files or witness_files(data_dir)))
    if not lines:
        raise CommandError(
            f"there is no witness in {data_dir / WITNESS_FOLDER}: set control.witness, or name files with --witness"
        )
    request = pb.ListAnswersRequest(ended_after=_time(since) if since else 0.0)
    answers: list[pb.MeteredAnswer] = []
    async with _service(fleet) as service:
        call: grpc.aio.UnaryStreamCall[pb.ListAnswersRequest, pb.ListAnswersResponse]
        call = service.ListAnswers(request, timeout=LIST_SECONDS)
        async for response in call:
            answers.extend(response.answers)
    return reconcile(answers, lines)


SUMS: Final = (
    "num_requests",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_output_tokens",
    "num_reasoning_tokens",
)


def rows_of(found: Sequence[pb.UsageRow], groups: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            **{group: getattr(row, GROUPS[group][1]) for group in groups},
            **{name: getattr(row, name) for name in SUMS},
            "block_seconds": round(row.block_seconds, 3),
            "cost": decimal(row.cost_nanos),
        }
        for row in found
    ]


def as_csv(rows: Sequence[dict[str, Any]], groups: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [*groups, *SUMS, "block_seconds", "cost"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_table(rows: Sequence[dict[str, Any]], groups: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    for group in groups:
        table.add_column(group, overflow="fold")
    for name in ("requests", "prompt", "cached", "output", "cost"):
        table.add_column(name, justify="right")
    for row in rows:
        sums = (f"{row[name]:,}" for name in SUMS[:4])
        table.add_row(*(str(row[group]) for group in groups), *sums, row["cost"])
    return table
