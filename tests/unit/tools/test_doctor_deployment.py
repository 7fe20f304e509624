"""`kvloom doctor deployment`: each thing that is wrong with a fleet is found, and what is right is not."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from kvloom.v1.shard_service_pb2 import GetInfoResponse, LoadReport, ShardInfo
from kvloom_common.config import KvloomConfig
from tests.fakes.certificates import Authority
from tools.cli import deployment
from tools.cli.deployment import (
    EXPIRES_SOON_SECONDS,
    of_certificate,
    of_machine,
    of_models,
    of_processes,
    of_redis,
    of_redis_memory,
    of_state,
    of_versions,
)
from tools.doctor.findings import DoctorFinding
from tools.fleet.view import FleetView, Machine
from tools.supervisor.state import FabricState
from tools.supervisor.supervised_process import ProcessStatus


def machine(*processes: ProcessStatus, name: str = "a", **fields: list[str]) -> Machine:
    state = FabricState(
        supervisor_pid=1, supervisor_started=0.0, phase="ready", http_url="", router_address="", model="m",
        processes=list(processes), name=name, **fields,
    )  # fmt: skip
    return Machine(name, "" if name == "a" else f"{name}:1", state)


def process(role: str, name: str = "", state: str = "ready", **fields: object) -> ProcessStatus:
    return msgspec.convert({"role": role, "name": name or role, "pid": 1, "state": state, **fields}, ProcessStatus)


def shard(name: str, state: str = "ready") -> ProcessStatus:
    return process("shard", name, state, model="m")


def info(num_available: int = 90, version: str = "") -> GetInfoResponse:
    load = LoadReport(num_available_blocks=num_available)
    return GetInfoResponse(info=ShardInfo(num_blocks=100, version=version), load=load)


def wrong(findings: Iterable[DoctorFinding]) -> list[tuple[str, str]]:
    return [(one.name, one.outcome) for one in findings if one.outcome != "ok"]


def test_a_fleet_that_is_well_has_no_complaints() -> None:
    """What is found must be worth reading."""
    view = FleetView([machine(process("edge"), process("router"), process("safety"), shard("s0"), shard("s1"))])
    infos = {"s0": info(), "s1": info()}
    assert wrong([*of_processes(view), *of_models(view, infos), of_versions(infos)]) == []


def test_processes_and_machines_that_are_in_trouble_are_named() -> None:
    """With what to do: an operator who asks is in a hurry."""
    lost = Machine("c", "c:1", None, "no route to host")
    ailing = machine(process("router", restarts=9), process("edge", state="failed"), alarms=["control is behind"])
    other = machine(process("router", "r2"), process("edge", "e2"), name="b", warnings=["no effect"], brownouts=["m"])
    found = list(of_processes(FleetView([ailing, other, lost], problems=["the registry cannot be read"])))
    assert wrong(found) == [
        ("fleet", "failed"),
        ("machine a", "failed"),
        ("model m", "warning"),
        ("machine b", "warning"),
        ("machine c", "failed"),
        ("process router", "warning"),
        ("process edge", "failed"),
    ]
    assert "kvloom logs edge" in found[-1].detail
    alone = FleetView([machine(process("edge"), process("router")), machine(process("router", "r2"), name="b")])
    assert wrong(of_processes(alone)) == [("edge", "warning")]


@pytest.mark.parametrize(
    ("shards", "free", "expected"),
    [
        ([shard("s0", "drained"), shard("s1", "asleep")], 90, [("model m", "failed")]),
        ([shard("s0"), shard("s1", "drained")], 90, [("model m", "warning")]),
        ([shard("s0"), shard("s1")], 1, [("model m", "warning")]),
        ([], 90, []),
    ],
)
def test_models_need_shards_with_room(shards: list[ProcessStatus], free: int, expected: list[tuple[str, str]]) -> None:
    """None is an outage, one is none to spare, and full ones make requests wait."""
    infos = {one.name: info(free) for one in shards}
    assert wrong(of_models(FleetView([machine(*shards)]), infos)) == expected


def test_an_upgrade_that_was_not_finished_is_found() -> None:
    """Two versions work together, and three do not."""
    assert of_versions({"s0": info(version="0.0.1"), "s1": None}).outcome == "warning"


def test_databases_of_one_machine_are_found_in_a_fleet() -> None:
    """It is the machine whose loss ends the fleet."""
    config = KvloomConfig()
    config.control.enabled = config.orchestrator.enabled = True
    config.orchestrator.database_url = "postgresql://host/db"
    assert wrong(of_state(config, 1)) == []
    assert wrong(of_state(config, 2)) == [("control database", "warning")]


def test_a_machine_without_room_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Usage records that cannot be written stop metering."""
    monkeypatch.setattr(deployment, "MIN_DISK_BYTES", 0)
    monkeypatch.setattr(deployment, "MIN_DISK_SHARE", 0.0)
    monkeypatch.setattr(deployment, "MIN_DESCRIPTORS", 1)
    assert wrong(of_machine(tmp_path)) == []
    monkeypatch.setattr(deployment, "MIN_DISK_SHARE", 1.1)
    assert wrong(of_machine(tmp_path)) == [("disk", "warning")]
    monkeypatch.setattr(deployment, "MIN_DISK_BYTES", shutil.disk_usage(tmp_path).total + 1)
    monkeypatch.setattr(deployment, "MIN_DESCRIPTORS", 2**62)
    assert wrong(of_machine(tmp_path)) == [("disk", "failed"), ("file descriptors", "warning")]


def test_a_machine_without_a_data_directory_has_a_disk_too(tmp_path: Path) -> None:
    """An operator's own machine may ask about a fleet that it finds by Redis, and has run nothing yet."""
    [disk, _] = of_machine(tmp_path / "none" / "there")
    assert str(tmp_path) in disk.detail


def test_certificates_that_end_are_found(tmp_path: Path) -> None:
    """Clients of all kinds fail at once when it is over."""
    config = KvloomConfig()
    assert wrong(of_certificate(config, 0.0)) == []
    file = tmp_path / "tls.crt"
    config.tls.certificate_file = str(file)
    assert wrong(of_certificate(config, 0.0)) == [("TLS certificate", "failed")]
    certificate, _ = Authority("ca").issue("llm.example.com", days=(-1.0, 60.0))
    file.write_bytes(certificate)
    ends_at = time.time() + 60 * 86_400.0
    assert wrong(of_certificate(config, ends_at - 2 * EXPIRES_SOON_SECONDS)) == []
    assert wrong(of_certificate(config, ends_at - 86_400.0)) == [("TLS certificate", "warning")]
    assert wrong(of_certificate(config, ends_at + 86_400.0)) == [("TLS certificate", "failed")]


async def test_a_redis_that_is_away_or_forgets_is_found() -> None:
    """While it is away nothing stops, and nobody can join; one that evicts loses the registry."""
    config = KvloomConfig()
    config.redis.url = "redis://127.0.0.1:1"
    assert wrong(await of_redis(config)) == [("Redis", "failed")]
    assert wrong(of_redis_memory({"used_memory": 99})) == []
    full = {"maxmemory": 100, "used_memory": 99, "maxmemory_policy": "noeviction"}
    for memory in (full, {**full, "used_memory": 1, "maxmemory_policy": "allkeys-lru"}):
        assert wrong(of_redis_memory(memory)) == [("Redis memory", "failed")]
