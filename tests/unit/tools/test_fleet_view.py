"""What commands make of the answers of a fleet's machines and of its registry: pure rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvloom.v1.shard_service_pb2 import GetInfoResponse, LoadReport, ShardInfo
from kvloom_common.config import KvloomConfig
from kvloom_common.discovery.records import ProcessRecord, RouterRecord, ShardRecord
from tools.failures import CommandError
from tools.fleet.view import merged, plan_fleet_restart, skipped_by_restart, with_loads
from tools.supervisor.fleet_records import FleetRecords
from tools.supervisor.joining import check_roles, check_secret, listening_host, prefix_of
from tools.supervisor.process_specs import plan_stages, started_roles
from tools.supervisor.readiness import roles_away, roles_missing, shards_to_register
from tools.supervisor.service.client import UnreachableError
from tools.supervisor.state import FabricState
from tools.supervisor.supervised_process import ProcessStatus


def process(name: str, state: str = "ready", port: int = 1) -> ProcessStatus:
    return ProcessStatus(name.split("-")[1], name, port, state, address=f"127.0.0.1:{port}")


def machine(letter: str, *processes: ProcessStatus, **changes: object) -> FabricState:
    state = FabricState(
        supervisor_pid=1,
        supervisor_started=1.0,
        phase="ready",
        http_url="",
        router_address="",
        model="m",
        processes=list(processes),
        name=f"{letter}-kvloom",
        owner=f"owner-{letter}",
    )
    for name, value in changes.items():
        setattr(state, name, value)
    return state


def supervisor(letter: str) -> ProcessRecord:
    return ProcessRecord(f"{letter}-kvloom", f"{letter}:1", "incarnation", f"owner-{letter}")


def shard(name: str, owner: str) -> ShardRecord:
    return ShardRecord(name, "10.0.0.9:5", "m", "incarnation", owner)


A = machine("a", process("a-router"), process("a-edge"))
B = machine("b", process("b-shard-0"), process("b-shard-1"))
RECORDS = FleetRecords(
    shards={
        "b-shard-0": shard("b-shard-0", "owner-b"),
        "c-shard-0": shard("c-shard-0", "owner-c"),
        "lonely": shard("lonely", "owner-x"),
    },
    routers={"10.0.0.1:1": RouterRecord("10.0.0.1:1", "a-router", owner="owner-a")},
    supervisors={record.name: record for record in map(supervisor, "abc")},
)
VIEW = merged(A, {"b-kvloom": B, "c-kvloom": UnreachableError("c-kvloom cannot be reached")}, RECORDS)


def test_every_machine_is_shown_once_and_what_none_of_them_started_apart() -> None:
    """A shard of a machine that cannot be reached is not one that was started by itself."""
    assert [(m.name, m.phase) for m in VIEW.machines] == [
        ("a-kvloom", "ready"),
        ("b-kvloom", "ready"),
        ("c-kvloom", "unreachable"),
    ]
    assert [p.name for p in VIEW.bare] == ["lonely"]
    assert [p.name for p in VIEW.processes] == ["a-router", "a-edge", "b-shard-0", "b-shard-1", "lonely"]


def test_a_machine_whose_requests_are_refused_is_not_ready() -> None:
    """`status` said "ready" while every request got a 503."""
    view = merged(machine("a", process("a-edge"), not_ready=["a-edge: no shard is ready"]), {}, FleetRecords())
    assert [m.phase for m in view.machines] == ["not_ready"]


def test_shards_that_drain_are_shown_as_they_see_themselves() -> None:
    """The supervisor knows only that the process runs."""
    infos = {
        "b-shard-0": GetInfoResponse(load=LoadReport(draining=True, num_running=1)),
        "b-shard-1": GetInfoResponse(load=LoadReport(draining=True)),
        "lonely": None,
    }
    states = {p.name: p.state for p in with_loads(VIEW, infos).processes}
    assert (states["b-shard-0"], states["b-shard-1"], states["lonely"]) == ("draining", "drained", "silent")
    assert states["a-edge"] == "ready"


def test_shards_whose_tokenizers_differ_are_named() -> None:
    """Routers keep the second one out, and its process looks ready."""

    def info(model: str, tokenizer: str) -> GetInfoResponse:
        return GetInfoResponse(info=ShardInfo(model=model, tokenizer_checksum=tokenizer))

    same = {"b-shard-0": info("m", "t"), "b-shard-1": info("n", "u"), "lonely": info("m", "t")}
    assert not with_loads(VIEW, same).problems
    (problem,) = with_loads(VIEW, same | {"lonely": info("m", "u")}).problems
    assert "the model m have different tokenizers (b-shard-0 against lonely)" in problem


def test_several_simulated_shards_of_one_process_are_not_taken_for_unsupervised_ones() -> None:
    """Their process has another name than they have in the registry."""
    state = machine("b", process("b-shard"))
    state.processes = [ProcessStatus("shard", "b-shards-0", 1, "ready")]
    records = FleetRecords(shards={"b-shard-7": shard("b-shard-7", "owner-b")})
    assert not merged(state, {}, records).bare


def test_a_restart_goes_machine_by_machine_and_leaves_alone_what_it_cannot_start() -> None:
    """Two machines at once could take the last shard of a model away."""
    assert [(m.name, names) for m, names in plan_fleet_restart(VIEW, [])] == [
        ("a-kvloom", ["a-router", "a-edge"]),
        ("b-kvloom", ["b-shard-0", "b-shard-1"]),
    ]
    assert [(m.name, names) for m, names in plan_fleet_restart(VIEW, ["shard"])] == [
        ("b-kvloom", ["b-shard-0", "b-shard-1"])
    ]
    assert [p.name for p in skipped_by_restart(VIEW, ["shard"])] == ["lonely"]
    assert [p.name for p in skipped_by_restart(VIEW, ["b-shard-0"])] == []


def test_a_restart_of_an_unknown_or_unsupervised_process_says_what_to_do() -> None:
    """The process may be on the machine that cannot be reached."""
    with pytest.raises(CommandError, match=r"no process called c-shard-0; there are .*; c-kvloom cannot be reached"):
        plan_fleet_restart(VIEW, ["c-shard-0"])
    with pytest.raises(CommandError, match=r"lonely at 10\.0\.0\.9:5 was not started by `kvloom up`"):
        plan_fleet_restart(VIEW, ["lonely"])


def test_a_machine_starts_only_its_roles(tmp_path: Path) -> None:
    """Without any role it starts all, as on one machine."""
    config = KvloomConfig()
    assert started_roles(config) == ("edge", "router", "shard", "safety")
    config.fabric.roles, config.shard.num_shards = ["shard", "router"], 2
    (stage,) = plan_stages(config, tmp_path / "config.json", embed_redis=False, start_timeout_seconds=1)
    assert [spec.role for spec in stage] == ["router", "shard", "shard"]


def test_only_roles_that_no_machine_has_are_missing() -> None:
    """A machine that waited for shards of another one, which is started after it, would never become ready."""
    nothing = FleetRecords()
    assert roles_missing({"edge"}, nothing, needs_safety=True) == ["router", "shard", "safety"]
    assert roles_missing({"edge", "router"}, RECORDS, needs_safety=True) == ["safety"]
    assert roles_missing({"edge", "router", "shard", "safety"}, nothing, needs_safety=True) == []


def test_a_shard_counts_as_registered_by_its_name_or_its_address() -> None:
    """A process of several simulated shards has one address of each, and a name of its own."""
    mine = [process("b-shard-0", port=7), process("b-shard-1", port=8), process("b-shards-0", port=5)]
    mine[2] = ProcessStatus("shard", "b-shards-0", 3, "ready", address="127.0.0.1:5")
    assert shards_to_register(mine, RECORDS) == ["b-shard-1"]


def test_a_role_is_away_when_none_of_its_processes_runs() -> None:
    """One of two shards that restarts does not keep requests from being served."""
    found = roles_away([process("a-shard-0"), process("a-shard-1", "restarting"), process("a-edge", "restarting")])
    assert found == ["a-edge is restarting"]


@pytest.mark.parametrize(
    ("host", "prefix"),
    [
        ("gpu1", "gpu1-"),
        ("GPU1.example.com", "gpu1-"),
        ("10.0.0.5", "10-0-0-5-"),
        ("fd00::5", "fd00-5-"),
        ("a" * 60, "a" * 31 + "-"),
    ],
)
def test_names_begin_with_what_the_machine_is_called(host: str, prefix: str) -> None:
    """Machines that are told apart by their hosts should not need another flag."""
    assert prefix_of(host) == prefix
    config = KvloomConfig()
    config.fabric.name_prefix = prefix


def test_processes_listen_where_other_machines_reach_them() -> None:
    """A name that means loopback on this machine, as on Debian, would hide the processes from the others."""
    assert listening_host("127.0.0.2") == "127.0.0.2"
    assert listening_host("localhost") in ("0.0.0.0", "[::]")
    assert listening_host("192.0.2.1") == "0.0.0.0"
    with pytest.raises(CommandError, match="cannot be resolved"):
        listening_host("no-such-host.invalid")


def test_a_machine_of_a_fleet_makes_no_secret_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would belong to another fabric, and nothing would find it."""
    monkeypatch.delenv("KVLOOM_FABRIC_SECRET", raising=False)
    config = KvloomConfig()
    config.redis.url = "redis://10.0.0.5:6379"
    with pytest.raises(CommandError, match="kvloom secret new"):
        check_secret(config, tmp_path / "secret")
    config.redis.url = "redis://127.0.0.1:6379"
    check_secret(config, tmp_path / "secret")
    config.redis.url, config.fabric.secret_file = "rediss://10.0.0.5:6379", "/etc/kvloom/fabric.secret"
    check_secret(config, tmp_path / "secret")


def test_a_part_of_a_fabric_needs_the_fleets_redis() -> None:
    """An edge alone with an embedded Redis that no other machine reaches would wait forever."""
    config = KvloomConfig()
    config.fabric.roles = ["edge"]
    with pytest.raises(CommandError, match="--role edge needs the Redis"):
        check_roles(config)
    config.redis.url = "redis://10.0.0.5"
    check_roles(config)
    config.fabric.roles, config.edge.colocate = ["shard"], True
    with pytest.raises(CommandError, match="--colocate"):
        check_roles(config)


def test_machines_that_share_no_redis_are_shards_and_the_rest() -> None:
    """Only routers find anything by names: a machine with another part would wait forever."""
    config = KvloomConfig()
    config.fabric.advertised_host = "10.0.0.5"
    config.fabric.roles = ["shard"]
    with pytest.raises(CommandError, match="--role shard needs the Redis"):
        check_roles(config)
    config.shard.port = 9400
    check_roles(config)
    config.fabric.roles = ["edge", "router", "safety"]
    with pytest.raises(CommandError, match="--shards-at"):
        check_roles(config)
    config.router.shards = ["shards:9400"]
    check_roles(config)
    config.fabric.roles, config.edge.colocate = ["edge", "safety"], True
    check_roles(config)
    config.fabric.roles, config.edge.colocate = ["edge", "safety"], False
    with pytest.raises(CommandError, match="needs the Redis"):
        check_roles(config)


def test_a_shard_is_shown_with_its_role_in_disaggregated_prefill():
    """An operator sees which shards compute prompts for others."""
    infos = {"b-shard-0": GetInfoResponse(info=ShardInfo(role="prefill"))}
    roles = {process.name: process.shard_role for process in with_loads(VIEW, infos).processes}
    assert {name: role for name, role in roles.items() if role} == {"b-shard-0": "prefill"}
