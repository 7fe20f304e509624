"""Keeps the table of tenants of an edge or a router that of `control`.

follower = TenantFollower(config, "router-0", trust)
async with following(follower):       # kvloom_common/process/watched_files.py
    await follower.tried.wait()
    follower.tenants.of_credential(...)
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from pathlib import Path
from typing import Final

import grpc
import structlog
from google.protobuf.message import DecodeError

from kvloom.backoff import Backoff
from kvloom.transport.channel_options import CHANNEL_OPTIONS
from kvloom.v1 import control_service_pb2_grpc
from kvloom.v1.control_service_pb2 import FollowRequest, FollowResponse, KeyUse, ReportKeyUsesRequest
from kvloom_common.access.exposure import is_loopback
from kvloom_common.access.tenant_file import TenantFile, copy_path
from kvloom_common.access.tenants import Tenants
from kvloom_common.addresses import join_address
from kvloom_common.config import KvloomConfig
from kvloom_common.discovery.announcer import fabric_host
from kvloom_common.discovery.process_finder import ProcessFinder
from kvloom_common.tenancy.sliced_dict import NUM_SLICES
from kvloom_common.tenancy.table import EXPIRED_SECONDS, TenantTable
from kvloom_common.trust.fabric_trust import FabricTrust

log = structlog.get_logger()


ROLE: Final = "control"
CONNECT_SECONDS: Final = 5.0
"""How long a service may take for the first response."""
TRY_SECONDS: Final = 1.0
"""How long a process that has a copy waits at its start for a service that hangs."""
LONGEST_PAUSE_SECONDS: Final = 0.5
"""Between two tries to reach the service: a key that is revoked as soon as it is back must not be accepted for long."""
TOUCH_SECONDS: Final = 10.0
"""How often the copy on disk is marked as current."""
REPORT_SECONDS: Final = 30.0
MAX_PENDING_PARTS: Final = 1024
"""Parts of one set of changes. Beyond that a snapshot is asked for."""
FREED_ENTRIES: Final = 256
"""So many entries of each kind are freed between two turns of the event loop."""


class _StartAgainError(Exception):
    """The table is to be asked for from its beginning."""


def control_finder(config: KvloomConfig, own_name: str, trust: FabricTrust) -> ProcessFinder:
    """Finds the control service: the configured one, and those that the registry has."""
    host = config.control.host
    host = fabric_host(config, host) if is_loopback(host) else host
    configured = join_address(host, config.control.port) if config.control.port else ""
    return ProcessFinder(config.redis, ROLE, own_name, configured, trust.sealer)


class TenantFollower:
    """`tenants` is usable from the beginning, with the copy that this process has kept."""

    def __init__(
        self, config: KvloomConfig, own_name: str, trust: FabricTrust, report_seconds: float = REPORT_SECONDS
    ) -> None:
        """`own_name`: the process's; its copy is called after it. `control` is told every `report_seconds` which keys
        were used."""
        self._report_seconds = report_seconds
        self.tenants = Tenants(config.control.max_stale_seconds, cell=config.fabric.cell)
        self.tried = asyncio.Event()
        """Set once the table is that of `control`, or that could not be reached. Nothing should be served before: keys
        may have been revoked while this process was away."""
        self._trust = trust
        self._finder = control_finder(config, own_name, trust)
        folder = Path(config.data_dir).expanduser() if config.data_dir else Path.home() / ".kvloom"
        self._file = TenantFile(copy_path(folder, own_name))
        self.channel: grpc.aio.Channel | None = None
        """To `control`, while it is followed."""
        self._stub: control_service_pb2_grpc.ControlServiceStub | None = None
        """While there is a connection."""
        self._pending: list[FollowResponse] = []
        """Parts of changes that are not complete."""
        self._starts_again = False
        """Changes are missing."""
        self._arriving: TenantTable | None = None
        """A snapshot that is not complete."""
        self._backoff = Backoff(0.1, LONGEST_PAUSE_SECONDS, jitter=lambda: random.uniform(0.5, 1.0))
        table, current_at = self._file.load()
        if not table.is_empty:
            self.tenants.use(table, current_at)

    def control_addresses(self) -> list[str]:
        """Where the control service may be reached, best first."""
        return self._finder.candidates()

    async def watch(self) -> None:
        """Follow until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._finder.run(), name="control finder")
                tasks.create_task(self._touch(), name="tenants' copy")
                tasks.create_task(self._report_uses(), name="uses of keys")
                tasks.create_task(self._drop_expired(), name="expired keys")
                tasks.create_task(self._try(), name="first try")
                await self._finder.found.wait()
                await self._follow_all()
        finally:
            self.tenants.set_connected(False)
            self._file.close()

    async def _try(self) -> None:
        await asyncio.sleep(TRY_SECONDS)
        if not self.tenants.table.is_empty:
            self.tried.set()

    async def _follow_all(self) -> None:
        turn = 0
        while True:
            candidates = self._finder.candidates()
            started_at = time.monotonic()
            if candidates:
                address = candidates[turn % len(candidates)]
                turn += 1
                await self._follow_until_it_breaks(address)
            self.tried.set()
            await asyncio.sleep(self._backoff.next_seconds(time.monotonic() - started_at))

    async def _follow_until_it_breaks(self, address: str) -> None:
        try:
            async with self._trust.open_channel(address, ROLE, options=CHANNEL_OPTIONS) as channel:
                await self._follow(channel)
        except _StartAgainError:
            log.info("tenant_stream_reopened", address=address)
        except (grpc.aio.AioRpcError, TimeoutError, asyncio.InvalidStateError) as error:
            code = error.code().name if isinstance(error, grpc.aio.AioRpcError) else type(error).__name__
            log.warning("tenant_stream_failed", address=address, cause=code)
        except DecodeError:
            log.exception("tenant_stream_broke", address=address)
        finally:
            self.tenants.set_connected(False)
            self._stub = self.channel = None
            self._pending.clear()
            self._file.drop_snapshot()
            arriving, self._arriving = self._arriving, None
            if arriving is not None:
                await _free(arriving)

    async def _follow(self, channel: grpc.aio.Channel) -> None:
        """Raises AioRpcError, TimeoutError, and _StartAgainError."""
        wanted = FollowRequest()
        if not (self._starts_again or self._file.is_bloated):
            wanted = FollowRequest(table_id=self.tenants.table.table_id, version=self.tenants.table.version)
        self._starts_again = False
        self.channel = channel
        self._stub = control_service_pb2_grpc.ControlServiceStub(channel)
        call = self._stub.Follow(wanted)
        async with asyncio.timeout(CONNECT_SECONDS):
            await call.initial_metadata()
        async for response in call:
            await self._apply(response)
        log.info("tenant_stream_ended")

    def _connected(self) -> None:
        if not self.tenants.connected:
            self.tenants.set_connected(True)
            self._file.touch()
            log.info("tenant_table_received", version=self.tenants.table.version)
        self.tried.set()

    async def _apply(self, response: FollowResponse) -> None:
        """Between parts others have their turn: a table may be large, and requests must not wait for it. Raises
        _StartAgainError."""
        if response.begins_snapshot:
            self._arriving = TenantTable()
            self._file.begin_snapshot()
        if self._arriving is not None:
            self._arriving.apply(response)
            self._file.add_to_snapshot(response)
            if response.holds_at_once and response.table_id == self.tenants.table.table_id:
                self._amend(response)
            if response.is_complete:
                table, self._arriving = self._arriving, None
                replaced, replaced_file = self.tenants.table, self._file.complete_snapshot()
                self.tenants.use(table, time.time())
                self._connected()
                if replaced_file is not None:
                    await asyncio.to_thread(replaced_file.close)
                await _free(replaced)
            return
        table = self.tenants.table
        if response == FollowResponse(table_id=table.table_id, version=table.version, is_complete=True):
            self._connected()  # nothing has changed
            return
        if response.table_id != table.table_id or len(self._pending) >= MAX_PENDING_PARTS:
            self._starts_again = True
            raise _StartAgainError
        self._pending.append(response)
        if response.is_complete:
            parts, self._pending = self._pending, []
            is_next = response.version != table.version
            # Until the last part the table has its old version, and each entry is as it was or as it is now.
            for part in parts:
                self.tenants.table.apply(part)
                self._file.append(part)
                if part is not response:
                    await asyncio.sleep(0)
            self.tenants.changed()
            if is_next:  # only the last part of a set of changes has another version
                self._connected()
            if self._file.is_bloated:
                raise _StartAgainError

    def _amend(self, response: FollowResponse) -> None:
        """The table that a snapshot will replace gets a change already. It keeps its version."""
        table = self.tenants.table
        version = table.version
        table.apply(response)
        table.version = version
        self.tenants.changed()

    async def _report_uses(self) -> None:
        """Reports the keys that were used. A report that fails is forgotten: keys that are still in use come with the
        next one."""
        while True:
            await asyncio.sleep(self._report_seconds)
            uses = self.tenants.take_uses()
            if self._stub is None or not uses:
                continue
            report = ReportKeyUsesRequest(uses=[KeyUse(key_id=key_id, at=at) for key_id, at in uses.items()])
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self._stub.ReportKeyUses(report, timeout=CONNECT_SECONDS)

    async def _drop_expired(self) -> None:
        """Go through the keys once in EXPIRED_SECONDS, a slice at a time. `control` does not send again what is dropped
        here, so a clock that was set has to prove itself first."""
        clock = SteadyClock(time.time(), time.monotonic())
        while True:
            for number in range(NUM_SLICES):
                await asyncio.sleep(EXPIRED_SECONDS / NUM_SLICES)
                if clock.steady_seconds(time.time(), time.monotonic()) < EXPIRED_SECONDS:
                    continue
                self.tenants.table.drop_expired(number, time.time() - EXPIRED_SECONDS)

    async def _touch(self) -> None:
        while True:
            await asyncio.sleep(TOUCH_SECONDS)
            if self.tenants.connected:
                self._file.touch()


async def _free(table: TenantTable) -> None:
    """A table that is not in use any more. Freed at once, a large one would hold up the event loop. Even the parts are
    small, since most of the memory goes back to the system with the last of them."""
    number = 0
    while number < NUM_SLICES:
        number += not table.drop_some(number, FREED_ENTRIES)
        await asyncio.sleep(0)


MAX_DRIFT_SECONDS: Final = 30.0
"""Between two looks. What is less is a clock that is adjusted; what is more is one that was set."""


class SteadyClock:
    """All times are seconds: `wall` since 1970, `monotonic` those of a clock that nothing sets."""

    def __init__(self, wall: float, monotonic: float) -> None:
        self._offset = wall - monotonic
        self._since = monotonic

    def steady_seconds(self, wall: float, monotonic: float) -> float:
        """How long ago the clock was last set, or looked at first."""
        offset = wall - monotonic
        if abs(offset - self._offset) > MAX_DRIFT_SECONDS:
            self._since = monotonic
        self._offset = offset
        return monotonic - self._since
