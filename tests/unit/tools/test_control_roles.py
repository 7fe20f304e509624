"""When `kvloom up` starts a control service, and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvloom_common.config import ControlConfig, KvloomConfig
from kvloom_common.discovery.announcer import name_owner
from kvloom_common.discovery.records import ProcessRecord
from tools.failures import CommandError
from tools.supervisor.fleet_records import FleetRecords
from tools.supervisor.joining import check_one_database, check_roles
from tools.supervisor.process_specs import plan_restart, plan_stages, started_roles
from tools.supervisor.supervised_process import ProcessStatus


def config(*roles: str, enabled: bool = True, redis: str = "", database_url: str = "") -> KvloomConfig:
    made = KvloomConfig(data_dir="/here", control=ControlConfig(enabled=enabled, database_url=database_url))
    made.fabric.roles = list(roles)
    made.redis.url = redis
    return made


def stages(made: KvloomConfig) -> list[list[str]]:
    planned = plan_stages(made, Path("/here/kvloom.json"), embed_redis=False, start_timeout_seconds=1.0)
    return [[spec.name for spec in stage] for stage in planned]


def test_control_starts_before_those_who_follow_it() -> None:
    """Edges and routers would else begin without a table, and wait."""
    assert stages(config())[0] == ["control"]
    assert "router" in stages(config())[1]
    assert not any("control" in stage for stage in stages(config(enabled=False)))


def test_control_has_a_predecessor_stopped_first() -> None:
    """A SQLite database has one owner."""
    ((spec,), _) = plan_stages(config(), Path("/here/kvloom.json"), embed_redis=False, start_timeout_seconds=1.0)
    assert not spec.starts_first
    assert spec.role == "control"


def test_a_fabric_without_tenants_has_the_roles_that_it_had() -> None:
    """All roles are none that is missing."""
    assert started_roles(config(enabled=False)) == ("edge", "router", "shard", "safety")
    check_roles(config(enabled=False))
    check_roles(config())
    with pytest.raises(CommandError, match="--join"):
        check_roles(config("edge", "router", "shard", "safety"))  # control would be missing
    with pytest.raises(CommandError, match="--control"):
        check_roles(config("control", enabled=False, redis="redis://x"))


def test_a_fleet_has_one_control_service_unless_they_share_a_database() -> None:
    """Two SQLite files would be two sets of tenants."""
    elsewhere = FleetRecords(control={"west-control": ProcessRecord("west-control", "west:1", "1", "there")})
    own = FleetRecords(control={"control": ProcessRecord("control", "here:1", "1", name_owner("/here"))})
    check_one_database(config(), own)
    check_one_database(config("edge"), elsewhere)
    check_one_database(config(database_url="postgresql://db/kvloom"), elsewhere)
    with pytest.raises(CommandError, match="west-control at west:1"):
        check_one_database(config(), elsewhere)


def test_control_is_restarted_first() -> None:
    """Those who follow it then start with what its new version sends."""
    processes = [ProcessStatus(role, role, 1, "ready") for role in ("edge", "redis", "router", "control")]
    assert plan_restart(processes, []) == ["control", "router", "edge"]
