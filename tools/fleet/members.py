"""Asks the whole fleet: the supervisor of this data directory, those on other machines, the shards, the registry."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Final

from kvloom.v1.shard_service_pb2 import GetInfoResponse
from kvloom_common.config import ConfigError, KvloomConfig, load_config
from kvloom_common.discovery.records import ProcessRecord
from kvloom_common.trust.fabric_trust import NO_SECRET, FabricTrust
from tools.fabric_trust import trust_of
from tools.failures import EXIT_NOT_RUNNING, CommandError
from tools.fleet.view import FleetView, Machine, merged, with_loads
from tools.options import FabricFlags, choose_data_dir
from tools.supervisor.fleet_records import FleetRecords
from tools.supervisor.readiness import shard_info
from tools.supervisor.reporters import log_to_stderr
from tools.supervisor.service.client import (
    SupervisorClient,
    UnreachableError,
    local_supervisor,
    remote_supervisor,
)
from tools.supervisor.state import FabricState, RunFolder

_MAX_CONCURRENT_CALLS: Final = 32
_REGISTRY_TIMEOUT_SECONDS: Final = 5.0


@dataclasses.dataclass(frozen=True)
class FleetAccess:
    """How commands reach the fleet of a data directory. Mostly that is one machine."""

    folder: RunFolder
    config: KvloomConfig
    """The configuration of the fabric that runs there, or else of the `--config` file."""
    trust: FabricTrust
    local_only: bool

    @classmethod
    def open(cls, fabric: FabricFlags, *, local_only: bool = False) -> FleetAccess:
        """Raises CommandError."""
        log_to_stderr()
        given = fabric.load_config()
        folder = RunFolder(choose_data_dir(fabric.data_dir, given))
        # A machine without a `kvloom up` of its own finds its fleet by the Redis in its configuration.
        for path in (folder.config_path, None):
            try:
                config = load_config(path) if path is not None else given
                return cls(folder, config, trust_of(config), local_only)
            except ConfigError:
                continue
            except CommandError:
                if path is None:
                    return cls(folder, given, NO_SECRET, local_only)
        raise AssertionError("the given configuration was read before")

    async def local_state(self) -> tuple[FabricState | None, str]:
        """The current state of this data directory's fabric, and a problem. Only if its supervisor does not answer, it
        is that of the file, which may be out of date. None if no fabric runs."""
        try:
            async with local_supervisor(self.folder.run_dir) as supervisor:
                return await supervisor.state(), ""
        except (UnreachableError, OSError) as error:
            state = self.folder.read_running()
            if state is None or state.phase != "ready":
                return state, ""
            reason = error.message if isinstance(error, UnreachableError) else str(error)
            return state, f"its supervisor does not answer ({reason}): this is the last state that it wrote"

    async def records(self) -> FleetRecords:
        """Empty without a registry. Raises CommandError if it cannot be read."""
        if self.local_only or not self.config.redis.url:
            return FleetRecords()
        # Imported here, because most fabrics are one machine, whose supervisor tells all.
        import redis.exceptions

        from tools.supervisor.fleet_registry import FleetRegistry

        registry = FleetRegistry(self.config.redis, self.trust.sealer)
        try:
            async with asyncio.timeout(_REGISTRY_TIMEOUT_SECONDS):
                return await registry.read()
        except (redis.exceptions.RedisError, OSError) as error:
            raise CommandError(f"the registry cannot be read: {error or type(error).__name__}") from error
        finally:
            await registry.close()

    async def view(self, *, with_shards: bool = False) -> FleetView:
        """Everything that can be found out. With `with_shards`, shards are asked whether they drain. Raises
        CommandError if nothing runs."""
        local, problem = await self.local_state()
        problems: list[str] = []
        records = FleetRecords()
        # The registry of a killed fabric has ended with it.
        if local is not None or not self.folder.config_path.exists() or not _is_embedded(self.config):
            try:
                records = await self.records()
            except CommandError as error:
                problems.append(error.message)
        limit = asyncio.Semaphore(_MAX_CONCURRENT_CALLS)
        others = await asyncio.gather(
            *(
                self._state_of(record, limit)
                for record in records.supervisors.values()
                if local is None or record.owner != local.owner
            )
        )
        view = merged(local, dict(others), records, problems, problem)
        if not view.machines and not view.bare:
            raise CommandError(
                "; ".join([f"kvloom is not running (data directory {self.folder.data_dir})", *problems]),
                EXIT_NOT_RUNNING,
            )
        return with_loads(view, await self.shard_infos(view)) if with_shards else view

    @contextlib.asynccontextmanager
    async def supervisor_of(self, machine: Machine) -> AsyncIterator[SupervisorClient]:
        opened = (
            remote_supervisor(machine.address, machine.name, self.trust)
            if machine.address
            else local_supervisor(self.folder.run_dir)
        )
        async with opened as client:
            yield client

    async def _state_of(
        self, record: ProcessRecord, limit: asyncio.Semaphore
    ) -> tuple[str, FabricState | CommandError]:
        async with limit, remote_supervisor(record.address, record.name, self.trust) as supervisor:
            try:
                return record.name, await supervisor.state()
            except UnreachableError as error:
                return record.name, error

    async def shard_infos(self, view: FleetView) -> dict[str, GetInfoResponse | None]:
        """Asks all shards what they are and have, by name; None: one does not answer."""
        limit = asyncio.Semaphore(_MAX_CONCURRENT_CALLS)

        async def ask(address: str) -> GetInfoResponse | None:
            async with limit:
                answer = await shard_info(address, self.trust)
            return answer if isinstance(answer, GetInfoResponse) else None

        shards = {process.name: process.address for process in view.processes if process.role == "shard"}
        asked = {name: address for name, address in shards.items() if address}
        return dict(zip(asked, await asyncio.gather(*map(ask, asked.values())), strict=True))


def _is_embedded(config: KvloomConfig) -> bool:
    """True when the Redis lives and dies with one `kvloom up`."""
    return config.redis.url.startswith("unix:") and not config.safety.discover
