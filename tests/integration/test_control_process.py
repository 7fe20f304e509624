"""`python -m control` as a process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sqlite3
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvloom.transport.grpc_errors import error_from_peer
from kvloom.v1 import control_service_pb2_grpc, directory_service_pb2_grpc
from kvloom.v1.control_service_pb2 import FollowRequest, FollowResponse
from kvloom.v1.directory_service_pb2 import ApiKey, CreateKeyRequest, ListKeysRequest
from kvloom_common.config import ControlConfig, KvloomConfig, dump_config
from kvloom_common.discovery.registry import ProcessRegistry
from kvloom_common.process.ready_line import ReadyLine
from kvloom_common.tenancy.table import TenantTable
from tests.fakes.forked_process import ForkedProcess, fork_service

TIMEOUT_SECONDS = 60.0


def config_file(folder: Path, database_url: str, redis_url: str = "", **control: Any) -> Path:
    config = KvloomConfig(
        data_dir=str(folder), control=ControlConfig(enabled=True, database_url=database_url, **control)
    )
    config.redis.url = redis_url
    config.redis.key_prefix = f"control-{folder.name}"
    path = folder / "kvloom.json"
    dump_config(config, path)
    return path


class Running:
    """A process that is ready."""

    def __init__(self, process: ForkedProcess, ready: ReadyLine, channel: grpc.aio.Channel) -> None:
        self.process = process
        self.ready = ready
        self.control = control_service_pb2_grpc.ControlServiceStub(channel)
        self.directory: Any = directory_service_pb2_grpc.DirectoryServiceStub(channel)
        self.health: Any = health_pb2_grpc.HealthStub(channel)

    async def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return await self.process.wait()


async def launch(path: Path, *flags: str) -> ForkedProcess:
    return await fork_service("control", ("--config", str(path), "--port", "0", *flags))


@contextlib.asynccontextmanager
async def running(path: Path, *flags: str) -> AsyncIterator[Running]:
    process = await launch(path, *flags)
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while not (line := await process.stdout.readline()).startswith(b'{"address"'):
                assert line, await process.communicate()
        ready = msgspec.json.decode(line, type=ReadyLine)
        async with grpc.aio.insecure_channel(ready.address) as channel:
            yield Running(process, ready, channel)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def read_to_its_end(call: Any) -> None:
    while await call.read():  # what it ends with is false
        pass


async def refusal(path: Path) -> str:
    """What a process says that does not start."""
    process = await launch(path)
    async with asyncio.timeout(TIMEOUT_SECONDS):
        _, stderr = await process.communicate()
    assert process.returncode == 1
    assert b"Traceback" not in stderr
    return stderr.decode()


async def test_it_keeps_what_it_is_told_over_a_restart(tmp_path: Path, database_url: str) -> None:
    """Keys outlive the process, and a follower continues with the version that it has."""
    path = config_file(tmp_path, database_url)
    table = TenantTable()
    async with running(path) as first:
        made = await first.directory.CreateKey(
            CreateKeyRequest(key=ApiKey(project="acme/search"), create_project=True), timeout=TIMEOUT_SECONDS
        )
        call = first.control.Follow(FollowRequest())
        while table.key(made.key.id) is None:
            table.apply(await call.read())
        assert await first.stop() == 0
        with pytest.raises(grpc.aio.AioRpcError) as info:
            await read_to_its_end(call)
        assert (error := error_from_peer(info.value)) is not None
        assert error.reason_name == "DRAINING"
    async with running(path) as second:
        listed = await second.directory.ListKeys(ListKeysRequest(), timeout=TIMEOUT_SECONDS)
        assert [key.id for key in listed.keys] == [made.key.id]
        call = second.control.Follow(FollowRequest(table_id=table.table_id, version=table.version))
        assert (await call.read()) == FollowResponse(table_id=table.table_id, version=table.version, is_complete=True)
        await second.directory.CreateKey(CreateKeyRequest(key=ApiKey(project="acme/search")), timeout=TIMEOUT_SECONDS)
        response = await call.read()
        assert not response.begins_snapshot
        assert len(response.keys) == 1
        call.cancel()


async def test_it_announces_itself_and_has_health_and_metrics(tmp_path: Path, redis_url: str) -> None:
    """Edges and routers find it by the registry, and operators see how it is."""
    path = config_file(tmp_path, "", redis_url)
    async with running(path, "--name", "west-control", "--metrics-port", "0") as service:
        registry = ProcessRegistry(redis_url, f"control-{tmp_path.name}", "control")
        records = {}
        async with asyncio.timeout(TIMEOUT_SECONDS):
            async for _ in registry.watch():
                if records := await registry.list_records():
                    break
        assert records["west-control"].address == service.ready.address
        answer = await service.health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING

        def metrics() -> str:
            with urllib.request.urlopen(f"http://{service.ready.metrics_address}/metrics", timeout=10.0) as response:
                return response.read().decode()

        assert "kvloom_control_followers 0.0" in await asyncio.to_thread(metrics)
        assert await service.stop() == 0
        assert not await registry.list_records()
        await registry.close()
    assert (tmp_path / "control.db").stat().st_mode & 0o077 == 0


async def test_a_second_one_on_a_sqlite_database_does_not_start(tmp_path: Path) -> None:
    """Both would grant budgets from the same rows, and neither would tell the other's followers of its changes."""
    path = config_file(tmp_path, "")
    async with running(path):
        assert "control.db" in (told := await refusal(path))
        assert "PostgreSQL" in told


async def test_databases_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    """The message must not be a stack trace, and must not have a password."""
    broken = tmp_path / "broken.db"
    broken.write_text("this is no database, and long enough to be read as one")
    assert "broken.db cannot be used" in await refusal(config_file(tmp_path, f"sqlite:///{broken}"))
    newer = tmp_path / "newer.db"
    with contextlib.closing(sqlite3.connect(newer)) as connection:
        connection.execute("CREATE TABLE schema_version (version_num VARCHAR(32) NOT NULL)")
        connection.execute("INSERT INTO schema_version VALUES ('r9999')")
        connection.commit()
    assert "newer" in await refusal(config_file(tmp_path, f"sqlite:///{newer}"))
    assert "neither" in await refusal(config_file(tmp_path, "mysql://root:secret@host/db"))


async def test_without_a_secret_it_listens_on_loopback_only(tmp_path: Path) -> None:
    """It believes whoever reaches it."""
    assert "secret" in await refusal(config_file(tmp_path, "", host="0.0.0.0"))


async def test_log_lines_have_no_secrets(tmp_path: Path) -> None:
    """Logs are copied to places that the database is not."""
    path = config_file(tmp_path, "")
    config = json.loads(path.read_text())
    config["log"] = {"format": "json", "level": "debug"}
    path.write_text(json.dumps(config))
    async with running(path) as service:
        request = CreateKeyRequest(key=ApiKey(project="acme/search"), create_project=True)
        made = await service.directory.CreateKey(request, timeout=TIMEOUT_SECONDS)
        await service.stop()
        log = b"".join(await service.process.communicate()).decode()
    assert "directory_changed" in log
    assert made.secret not in log
    assert made.secret[8:] not in log
