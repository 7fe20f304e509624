"""`kvloom-lab bench directory`: what a table with many tenants and keys costs each process that follows it."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import grpc
from rich.console import Console
from rich.table import Table

from kvloom.v1 import control_service_pb2_grpc
from kvloom.v1.control_service_pb2 import FollowRequest, FollowResponse, KeyEntry, OrganisationEntry, TenantEntry
from tools.failures import CommandError
from tools.options import option

T = TypeVar("T")
SNAPSHOTS: Final = ("first", "replaced")
_SNAPSHOT_SECONDS: Final = 300.0
_COLUMNS: Final = (
    ("seconds", "seconds"),
    ("cpu_seconds", "CPU s"),
    ("longest_stall_ms", "longest stall, ms"),
    ("longest_stall_cpu_ms", "of CPU time, ms"),
    ("resident_mib", "resident, MiB"),
)


@click.command()
@option("--keys", "num_keys", type=click.IntRange(1), default=1_000_000, show_default=True, scope="bench-directory")
@option("--tenants", "num_tenants", type=click.IntRange(1), default=100_000, show_default=True, scope="bench-directory")
@option(
    "--part-entries",
    type=click.IntRange(1),
    default=500,
    show_default=True,
    scope="bench-directory",
    help="How many entries one message has, as many as those of `control`.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def bench_directory(num_keys: int, num_tenants: int, part_entries: int, as_json: bool) -> None:
    """Send a process the table of many tenants and keys, and the same once more in place of it. Shows how long each
    takes, how long the process's event loop is held up, and its memory."""
    rows = asyncio.run(_run(num_keys, num_tenants, part_entries))
    if as_json:
        click.echo(json.dumps(rows))
    else:
        _show(rows)


class LargeTable(control_service_pb2_grpc.ControlServiceServicer):
    """Sends a table as `control` does, without a database."""

    def __init__(self, num_keys: int, num_tenants: int, part_entries: int) -> None:
        self._num_keys = num_keys
        self._tenants = [f"org-{number % max(1, num_tenants // 10)}/project-{number}" for number in range(num_tenants)]
        self._part_entries = part_entries
        self._wanted = 1
        self._changed = asyncio.Event()

    def replace(self) -> None:
        """Send it once more, as that of another database."""
        self._wanted += 1
        self._changed.set()

    async def Follow(  # noqa: N802
        self,
        request: FollowRequest,  # noqa: ARG002
        context: Any,  # noqa: ARG002
    ) -> AsyncIterator[FollowResponse]:
        sent = 0
        while True:
            while sent < self._wanted:
                sent += 1
                for part in self._parts():
                    part.table_id = f"table-{sent}"
                    yield part
            self._changed.clear()
            await self._changed.wait()

    def _parts(self) -> Iterator[FollowResponse]:
        yield FollowResponse(version=1, begins_snapshot=True, has_prices=True)
        organisations = dict.fromkeys(tenant.partition("/")[0] for tenant in self._tenants)
        for some in self._in_parts(list(organisations)):
            yield FollowResponse(version=1, organisations=[OrganisationEntry(id=one) for one in some])
        for some in self._in_parts(self._tenants):
            yield FollowResponse(version=1, tenants=[TenantEntry(id=one) for one in some])
        for some in self._in_parts(range(self._num_keys)):
            yield FollowResponse(version=1, keys=map(self._key, some))
        yield FollowResponse(version=1, is_complete=True)

    def _key(self, number: int) -> KeyEntry:
        return KeyEntry(
            id=secrets.token_hex(8),
            digest=secrets.token_bytes(32),
            tenant=self._tenants[number % len(self._tenants)],
            name=f"key {number}",
            scopes=["inference"],
        )

    def _in_parts(self, entries: Sequence[T]) -> Iterator[Sequence[T]]:
        for first in range(0, len(entries), self._part_entries):
            yield entries[first : first + self._part_entries]


async def _run(num_keys: int, num_tenants: int, part_entries: int) -> list[dict[str, Any]]:
    table = LargeTable(num_keys, num_tenants, part_entries)
    with tempfile.TemporaryDirectory(prefix="kvloom-bench-") as folder:
        server = grpc.aio.server()
        control_service_pb2_grpc.add_ControlServiceServicer_to_server(table, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            return await _followed(table, port, Path(folder))
        finally:
            await server.stop(None)


async def _followed(table: LargeTable, port: int, folder: Path) -> list[dict[str, Any]]:
    """Raises CommandError."""
    command = (sys.executable, "-P", "-m", "lab.bench.directory_follower", str(port), str(folder))
    follower = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    assert follower.stdin is not None
    assert follower.stdout is not None
    rows = []
    try:
        for snapshot in SNAPSHOTS:
            click.echo(f"sending the table ({snapshot})", err=True)
            async with asyncio.timeout(_SNAPSHOT_SECONDS):
                line = await follower.stdout.readline()
            if not line:
                raise CommandError("the follower has ended")
            rows.append({"snapshot": snapshot, **json.loads(line)})
            table.replace()
    except TimeoutError:
        raise CommandError(f"the table did not arrive within {_SNAPSHOT_SECONDS:g} s") from None
    finally:
        follower.stdin.close()
        if follower.returncode is None:
            follower.kill()
        await follower.wait()
    return rows


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table("table", *(title for _, title in _COLUMNS))
    for row in rows:
        table.add_row(row["snapshot"], *(str(row[name]) for name, _ in _COLUMNS))
    Console().print(table)
