"""What every owner of the table of tenants must do for its followers, and what a follower makes of it."""

from __future__ import annotations

import abc
import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.access.tenant_follower import TenantFollower
from kvloom_common.config import ControlConfig, KvloomConfig
from kvloom_common.process.watched_files import following
from kvloom_common.trust.fabric_trust import NO_SECRET
from tests.waiting import eventually

TENANT = "acme/search"


class OwnedTable(abc.ABC):
    """An owner of a table with the organisation `acme` and its project `search`, over gRPC."""

    address: str

    @abc.abstractmethod
    async def add_key(self) -> tuple[str, str]:
        """The id of a new key of the project, and the key."""

    @abc.abstractmethod
    async def revoke(self, key_id: str) -> None: ...

    @abc.abstractmethod
    async def disable_tenant(self) -> None: ...

    @abc.abstractmethod
    async def stop(self) -> None:
        """It cannot be reached from now on."""

    @abc.abstractmethod
    async def start_again(self) -> None:
        """At the same address, with the same table."""


@contextlib.asynccontextmanager
async def followed(owner: OwnedTable, folder: Path, **control: float) -> AsyncIterator[TenantFollower]:
    host, _, port = owner.address.rpartition(":")
    config = KvloomConfig(data_dir=str(folder))
    config.control = ControlConfig(enabled=True, host=host, port=int(port), **control)
    follower = TenantFollower(config, "router-0", NO_SECRET)
    async with following(follower):
        yield follower


def reason_of(follower: TenantFollower, key: str) -> int:
    """Why a key is refused; 0 if it is accepted."""
    try:
        assert follower.tenants.of_credential(key).tenant == TENANT
    except KvloomError as error:
        return error.reason
    return 0


class ControlSuite:
    """A subclass has a fixture `owner`."""

    async def test_a_key_works_everywhere_at_once_and_not_after_it_is_revoked(
        self, owner: OwnedTable, tmp_path: Path
    ) -> None:
        """Who has lost a key must be able to end its use."""
        first_id, first = await owner.add_key()
        async with followed(owner, tmp_path) as follower:
            await eventually(lambda: follower.tenants.connected, "the first table")
            assert reason_of(follower, first) == 0
            assert reason_of(follower, first + "x") == ErrorReason.ERROR_REASON_UNAUTHENTICATED
            _, second = await owner.add_key()
            await eventually(lambda: not reason_of(follower, second), "the new key")
            await owner.revoke(first_id)
            await eventually(lambda: reason_of(follower, first), "the end of the first key")
            assert reason_of(follower, second) == 0
            await owner.disable_tenant()
            await eventually(lambda: reason_of(follower, second), "the end of the tenant")

    async def test_a_follower_serves_while_its_owner_is_away_and_then_catches_up(
        self, owner: OwnedTable, tmp_path: Path
    ) -> None:
        """A restart of the owner must be noticed by nobody, and what was changed meanwhile by everybody."""
        key_id, key = await owner.add_key()
        async with followed(owner, tmp_path) as follower:
            await eventually(lambda: follower.tenants.connected, "the first table")
            await owner.stop()
            await eventually(lambda: not follower.tenants.connected, "the loss")
            assert reason_of(follower, key) == 0
            await owner.start_again()
            await owner.revoke(key_id)
            await eventually(lambda: reason_of(follower, key), "the end of the key")
            await eventually(lambda: follower.tenants.connected, "the connection")
            assert follower.tenants.age_seconds == 0

    async def test_a_process_starts_with_its_copy_and_refuses_all_once_that_is_too_old(
        self, owner: OwnedTable, tmp_path: Path
    ) -> None:
        """A fabric must start without its owner, but must not serve for ever those whose keys may be revoked."""
        _, key = await owner.add_key()
        async with followed(owner, tmp_path) as follower:
            await eventually(lambda: follower.tenants.connected, "the first table")
            version = follower.tenants.table.version
        await owner.stop()
        async with followed(owner, tmp_path) as follower:
            assert follower.tenants.table.version == version
            assert reason_of(follower, key) == 0
            assert follower.tenants.age_seconds >= 0
        async with followed(owner, tmp_path, max_stale_seconds=1e-6) as follower:
            await asyncio.sleep(0)
            assert reason_of(follower, key) == ErrorReason.ERROR_REASON_AUTH_UNAVAILABLE
        async with followed(owner, tmp_path / "elsewhere") as follower:
            assert reason_of(follower, key) == ErrorReason.ERROR_REASON_AUTH_UNAVAILABLE
