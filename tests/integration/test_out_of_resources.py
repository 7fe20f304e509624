"""What long-running processes open, write and read again while they serve survives a process without free descriptors,
a full disk and a machine on which no thread can be started. tests/e2e/test_fabric_out_of_descriptors.py tries it with
whole processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import uvloop

from kvloom.transport.local_client import connect_local
from kvloom.transport.local_socket import local_socket_name
from kvloom.v1 import router_service_pb2 as router
from kvloom_common.process.log_lines import LineWriter, render_json
from kvloom_common.process.watched_files import WatchedFiles, following
from kvloom_common.transport.local_server import LocalServer
from kvloom_common.trust.secret import FabricSecret
from kvloom_common.trust.shared_secret import SharedSecret
from router.decisions.file import DecisionWriter, RotatingFile
from safety_svc.policy_file import PolicyFile
from shard_server.engines.torch_engine.core_share import CoreShare
from tests.fakes.no_descriptors import no_free_descriptors
from tests.waiting import eventually
from tools.supervisor.readiness import edge_reason
from tools.supervisor.supervised_process import ProcessStatus

POLL_SECONDS = 0.01
POLICY = '[[rules]]\nname = "{0}"\nphrases = ["{0}"]\n'


def event(message: str) -> dict[str, Any]:
    return {"event": message, "timestamp": 0}


def test_a_log_line_that_cannot_be_written_raises_nothing(tmp_path: Path) -> None:
    """With output redirected to a file on a full disk, each log call raised where it stood, in the middle of
    serving."""
    full = Path("/dev/full").open("w")  # noqa: SIM115  (what is left in its buffer makes closing it fail)
    writer = LineWriter(full, render_json, "router")
    writer.warning(event("lost"))
    writer.error(event("lost, too"))
    writer.msg(event("outside of an event loop it is written at once"))
    with contextlib.suppress(OSError):
        full.close()
    kept = (tmp_path / "log").open("w")
    LineWriter(kept, render_json, "router").warning(event("kept"))
    kept.close()
    assert json.loads((tmp_path / "log").read_text())["event"] == "kept"


async def test_a_policy_that_could_not_be_opened_is_read_when_it_can(tmp_path: Path) -> None:
    """It counted as read, so that a new rule never came into force if the process was short of descriptors just when
    the file had changed."""
    path = tmp_path / "policy.toml"
    path.write_text(POLICY.format("old"))
    policies = PolicyFile(str(path))
    old = policies.current
    await asyncio.to_thread(int)  # the thread exists before the descriptors run out
    path.write_text(POLICY.format("brand-new"))
    with no_free_descriptors():
        await policies.reload_if_changed()
    assert policies.current is old
    await policies.reload_if_changed()
    assert policies.current is not old


async def test_files_are_followed_again_when_a_thread_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory for a thread, a watcher ended for good: keys that were removed stayed valid."""
    path = tmp_path / "keys"
    path.write_text("a")
    loaded: list[str] = []

    class Keys:
        def __init__(self) -> None:
            self.files = WatchedFiles([path], POLL_SECONDS)

        async def watch(self) -> None:
            await self.files.follow("keys", path.read_text, loaded.append)

    no_thread = refuse_threads(monkeypatch)
    async with following(Keys(), retry_seconds=POLL_SECONDS):
        await eventually(no_thread.is_set)
        monkeypatch.undo()
        path.write_text("changed")
        await eventually(lambda: loaded == ["changed"])


def refuse_threads(patch: pytest.MonkeyPatch) -> threading.Event:
    """As with a full cgroup of pids. The event is set when a thread has been refused."""
    refused = threading.Event()

    def start(_self: threading.Thread) -> None:
        refused.set()
        raise RuntimeError("can't start new thread")

    patch.setattr(threading.Thread, "start", start)
    return refused


async def test_the_policy_is_followed_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The safety service ended when its watcher failed, and with it every answer that needed a verdict."""
    path = tmp_path / "policy.toml"
    path.write_text(POLICY.format("old"))
    policies = PolicyFile(str(path), POLL_SECONDS)
    old = policies.current
    path.write_text(POLICY.format("brand-new"))
    refused = refuse_threads(monkeypatch)
    async with following(policies, retry_seconds=POLL_SECONDS):
        await eventually(refused.is_set)
        monkeypatch.undo()
        await eventually(lambda: policies.current is not old)


@pytest.mark.parametrize("lack", ["descriptors", "threads"])
async def test_decisions_that_cannot_be_written_are_dropped_and_later_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lack: str
) -> None:
    """The writer is a task of the router: its failure would end the router."""
    dropped: list[int] = []
    path = tmp_path / "decisions"
    writer = DecisionWriter(RotatingFile(path, 10_000), dropped.append, config_key="router.decision_log.path")
    task = asyncio.create_task(writer.run())
    if lack == "threads":
        refused = refuse_threads(monkeypatch)
        writer.put(b"", b"lost\n")
        await eventually(lambda: refused.is_set() and bool(dropped))
        monkeypatch.undo()
    else:
        await asyncio.to_thread(int)
        with no_free_descriptors():
            writer.put(b"", b"lost\n")
            await eventually(lambda: bool(dropped))
    writer.put(b"", b"kept\n")
    writer.close()
    await asyncio.wait_for(task, 20)
    assert path.read_bytes().endswith(b"kept\n")


async def test_a_readiness_check_without_descriptors_says_no() -> None:
    """The supervisor checks readiness during a restart; after a rotation of the secret this opens files."""
    trust = SharedSecret(FabricSecret.draw(), ("tools",), "test")
    edge = ProcessStatus("edge", "edge", 1, "ready", metrics_address="127.0.0.1:1", peer_address="127.0.0.1:1")
    with no_free_descriptors():
        assert await edge_reason(edge, trust)


async def test_a_client_without_descriptors_has_no_local_stream() -> None:
    """It then uses gRPC, which reports its own failure and retries."""
    with no_free_descriptors():
        assert await connect_local("127.0.0.1:59998", router.ListModelsResponse) is None


def test_a_local_server_accepts_again_after_a_shortage() -> None:
    """A loop that closes a listener which could not accept would leave shards that no router reaches."""
    address = "127.0.0.1:59998"

    async def echo(_stream: object) -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        server = LocalServer(echo, router.ListModelsRequest)
        await server.start(address)
        name = local_socket_name(address)
        assert name is not None
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as waiting, no_free_descriptors():
                waiting.connect(name)
                await asyncio.sleep(0.05)  # sleep: the loop sees the connection, cannot accept it, and says nothing
            stream = await connect_local(address, router.ListModelsResponse)
            assert stream is not None
            await asyncio.sleep(0.05)  # sleep: what must not be closed would be by then
            assert not stream.closed.done()
            stream.cancel()
        finally:
            await server.stop(0.0)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # that of services
        runner.run(run())


def test_the_file_of_the_core_shares_has_no_holes(tmp_path: Path) -> None:
    """Writing into a hole of a mapped file kills the process (SIGBUS) when the disk is full."""
    path = tmp_path / "cores"
    share = CoreShare(4, path)
    assert path.stat().st_blocks > 0
    assert share.begin() == 4
    share.end()


def test_engines_share_no_cores_without_descriptors(tmp_path: Path) -> None:
    """An engine that cannot open the file uses all cores instead of failing."""
    (tmp_path / "cores").touch()
    with no_free_descriptors():
        share = CoreShare(4, tmp_path / "cores")
    assert share.begin() == 4
    share.end()
