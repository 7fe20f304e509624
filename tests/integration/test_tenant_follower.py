"""How an edge or a router follows the table of tenants, beyond what every owner of it must do (tests/conformance)."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from kvloom.errors import KvloomError
from kvloom.v1.control_service_pb2 import FollowResponse
from kvloom_common.access.tenant_file import copy_path
from kvloom_common.access.tenant_follower import TenantFollower
from kvloom_common.config import ControlConfig, KvloomConfig
from kvloom_common.discovery.announcer import announced_process, process_record
from kvloom_common.process.watched_files import following
from kvloom_common.trust.secret import FabricSecret
from kvloom_common.trust.shared_secret import SharedSecret
from tests.fakes.fake_control import SEARCH_KEY, FakeControl, key_of, two_organisations
from tests.waiting import eventually
from tools.supervisor.supervised_process import ProcessStatus
from tools.supervisor.tenant_tables import MAX_BEHIND_SECONDS, not_following

pytest_plugins = ("tests.fakes.router_fixtures",)

SECRET = FabricSecret.draw()


@pytest.fixture
async def control() -> AsyncIterator[FakeControl]:
    control = FakeControl(trust=SharedSecret(SECRET, ("control",), "control"))
    control.put(*two_organisations())
    await control.start()
    yield control
    await control.stop()


def follower_of(folder: Path, config: KvloomConfig, **settings: float) -> TenantFollower:
    config.data_dir = str(folder)
    return TenantFollower(config, "router-0", SharedSecret(SECRET, ("router",), "router-0"), **settings)


def config_of(control: FakeControl) -> KvloomConfig:
    host, _, port = control.address.rpartition(":")
    return KvloomConfig(control=ControlConfig(enabled=True, host=host, port=int(port)))


async def test_the_owner_is_found_in_the_registry(control: FakeControl, router_redis_url: str, tmp_path: Path) -> None:
    """Routers on other machines know only Redis and the fabric's secret."""
    config = KvloomConfig(control=ControlConfig(enabled=True))
    config.redis.url, config.redis.key_prefix = router_redis_url, "follower-test"
    follower = follower_of(tmp_path, config)
    record = process_record(config, "control", control.address)
    sealer = SharedSecret(SECRET, ("control",), "control").sealer
    async with following(follower), announced_process(config, "control", record, sealer):
        await eventually(lambda: follower.tenants.connected, "the table")
        assert follower.tenants.of_credential(SEARCH_KEY).tenant == "acme/search"


async def test_a_process_that_starts_again_asks_only_for_what_has_changed(control: FakeControl, tmp_path: Path) -> None:
    """With a million keys a snapshot takes seconds, and a rolling restart would ask for one of every process."""
    for _ in range(2):
        follower = follower_of(tmp_path, config_of(control))
        async with following(follower):
            await eventually(lambda: follower.tenants.connected, "the connection")  # noqa: B023
    assert [(request.table_id, request.version) for request in control.requests] == [("", 0), ("table", 1)]


async def test_nothing_is_served_by_a_copy_that_is_not_current(control: FakeControl, tmp_path: Path) -> None:
    """A router that was away while a key was revoked accepted it when it came back, until the change had arrived."""
    async with following(follower := follower_of(tmp_path, config_of(control))):
        await eventually(lambda: follower.tenants.connected, "the connection")
    control.remove_key(f"id-{SEARCH_KEY}")
    control.may_send.clear()
    again = follower_of(tmp_path, config_of(control))
    assert again.tenants.of_credential(SEARCH_KEY)  # what it has kept
    async with following(again):
        await eventually(lambda: len(control.requests) == 2, "the stream")
        await asyncio.sleep(0)
        assert (again.tried.is_set(), again.tenants.connected) == (False, False)
        control.may_send.set()
        await again.tried.wait()
        with pytest.raises(KvloomError, match="not valid"):
            again.tenants.of_credential(SEARCH_KEY)


async def test_a_service_that_hangs_does_not_keep_a_process_from_serving(control: FakeControl, tmp_path: Path) -> None:
    """It has a copy, and the service may be away for a day."""
    async with following(follower := follower_of(tmp_path, config_of(control))):
        await eventually(lambda: follower.tenants.connected, "the connection")
    control.put(key_of("kvl-new", "acme/search"))
    control.may_send.clear()
    async with following(again := follower_of(tmp_path, config_of(control))):
        await again.tried.wait()
        assert not again.tenants.connected
        assert again.tenants.of_credential(SEARCH_KEY)
        control.may_send.set()


async def test_a_snapshot_counts_once_it_is_complete(control: FakeControl, tmp_path: Path) -> None:
    """While it arrives, the keys that it has not yet must still be accepted."""
    control.part_entries = 1
    follower = follower_of(tmp_path, config_of(control))
    versions: list[int] = []
    follower.tenants.on_change(lambda: versions.append(follower.tenants.table.num_keys))
    async with following(follower):
        await eventually(lambda: follower.tenants.connected, "the table")
        control.table_id = "another"
        control.put(key_of("kvl-new", "acme/search"))
        await eventually(lambda: follower.tenants.table.table_id == "another", "the other table")
    assert versions == [4, 5]


@pytest.mark.parametrize("table_id", ["table", "another"])
async def test_a_revocation_during_a_snapshot_holds_at_once(
    control: FakeControl, tmp_path: Path, table_id: str
) -> None:
    """Also for the table that is used until its end. A snapshot of another database says nothing about it."""
    async with following(follower := follower_of(tmp_path, config_of(control))):
        await eventually(lambda: follower.tenants.connected, "the table")
        version = follower.tenants.table.version
        await follower._apply(FollowResponse(table_id=table_id, version=9, begins_snapshot=True))
        revoked = FollowResponse(table_id=table_id, version=9, removed_keys=[f"id-{SEARCH_KEY}"], holds_at_once=True)
        await follower._apply(revoked)
        is_known = follower.tenants.table.key(f"id-{SEARCH_KEY}") is not None
        assert (is_known, follower.tenants.table.version) == (table_id == "another", version)


async def test_a_table_that_was_replaced_is_freed_in_parts(control: FakeControl, tmp_path: Path) -> None:
    """Freed at once, one with a million keys holds up the event loop for a sixth of a second."""
    follower = follower_of(tmp_path, config_of(control))
    async with following(follower):
        await eventually(lambda: follower.tenants.connected, "the table")
        replaced = follower.tenants.table
        control.table_id = "another"
        control.put(key_of("kvl-new", "acme/search"))
        await eventually(lambda: replaced.num_keys == 0, "that the old table is freed")
        assert follower.tenants.of_credential(SEARCH_KEY).tenant == "acme/search"


async def test_changes_larger_than_the_table_are_replaced_by_a_snapshot(
    control: FakeControl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy on disk would otherwise grow for as long as keys are made and revoked."""
    monkeypatch.setattr("kvloom_common.access.tenant_file.MIN_CHANGES_BYTES", 1000)
    follower = follower_of(tmp_path, config_of(control))
    async with following(follower):
        await eventually(lambda: follower.tenants.connected, "the table")
        for number in range(100):
            control.put(key_of(f"kvl-{number % 3}", "acme/search"))
        await eventually(lambda: len(control.requests) > 1, "another snapshot")
        await eventually(lambda: follower.tenants.table.version == control.version, "the last change")
    assert control.requests[1].table_id == ""
    path = tmp_path / "tenants" / "router-0.table"
    assert path.stat().st_size < 50_000


async def test_a_table_that_cannot_be_sent_is_not_followed(control: FakeControl, tmp_path: Path) -> None:
    """A part that was too large for gRPC ended each stream, which looked like a connection again and again: every table
    was out of date, and nothing said so."""
    follower = follower_of(tmp_path, config_of(control))
    path = copy_path(tmp_path, "router-0")
    async with following(follower):
        await eventually(lambda: follower.tenants.connected, "the table")
        control.fault = grpc.StatusCode.RESOURCE_EXHAUSTED
        await control.stop()
        await eventually(lambda: not follower.tenants.connected, "the loss")
        os.utime(path, (1.0, 1.0))
        await control.start(int(control.address.rpartition(":")[2]))
        await eventually(lambda: len(control.requests) > 3, "some attempts")
        assert not follower.tenants.connected
        assert follower.tenants.age_seconds > 0
        assert path.stat().st_mtime == 1.0
        edge, router = ProcessStatus("edge", "edge-0", 1, "ready"), ProcessStatus("router", "router-0", 2, "ready")
        assert not_following(tmp_path, [router], 1.0 + MAX_BEHIND_SECONDS) == []
        assert not_following(tmp_path, [edge, router], 91.0) == [
            "edge-0 has no copy of the table of tenants: whether it follows that of control is not known",
            "router-0 has not followed the table of tenants for 90 s: it serves by an old one (kvloom logs router-0)",
        ]
        control.fault = None
        await eventually(lambda: follower.tenants.connected, "the table again")
        assert not_following(tmp_path, [router], time.time()) == []


async def test_strangers_are_not_followed(control: FakeControl, tmp_path: Path) -> None:
    """A process that takes the port of a dead owner must not be able to add keys."""
    config = config_of(control)
    config.data_dir = str(tmp_path)
    follower = TenantFollower(config, "router-0", SharedSecret(FabricSecret.draw(), ("router",), "router-0"))
    async with following(follower):
        await follower.tried.wait()
        assert follower.tenants.table.is_empty


async def test_the_owner_learns_which_keys_were_used(control: FakeControl, tmp_path: Path) -> None:
    """Administrators revoke keys that nobody uses."""
    follower = follower_of(tmp_path, config_of(control), report_seconds=0.01)
    async with following(follower):
        await eventually(lambda: follower.tenants.connected, "the table")
        follower.tenants.of_credential(SEARCH_KEY)
        await eventually(lambda: control.uses, "the report")
    assert list(control.uses) == [f"id-{SEARCH_KEY}"]
