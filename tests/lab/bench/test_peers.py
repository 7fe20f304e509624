"""Other gateways beside ours: what is measured is shown, what could not be measured is said, and all stay local."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvloom_common.config import ModelConfig
from lab.bench.data_plane.peer_comparison import PEERS, Turns
from lab.bench.data_plane.peer_systems import System
from lab.bench.data_plane.peer_table import peers_table
from lab.bench.data_plane.run import BenchPlan
from lab.bench.data_plane.workloads import WORKLOADS, Workload
from lab.bench.peers.dynamo import DYNAMO
from lab.bench.peers.install import install, last_words
from lab.bench.peers.nginx import NGINX
from lab.bench.peers.peer import Peer, PeerError, Site
from tools.failures import CommandError

W1 = msgspec.structs.replace(WORKLOADS["W1"], num_streams=2, num_requests=2)


def report(system: str, workload: str, cpu_us: float, errors: dict[str, int] | None = None) -> dict[str, Any]:
    figures = {"cpu_us_per_token": {"sum": cpu_us}, "cpu_us_per_request": {"sum": cpu_us * 100}}
    figures |= {"added_ttft_ms": {"p50": 1.0, "p99": None}, "transit_ms": {"p99": 3.0}, "rss_kb_per_stream": 20.0}
    spread = {"cpu_us_per_token": {"sum": 2.0}, "cpu_us_per_request": {"sum": 2.0}, "transit_ms": {"p99": 1.0}}
    runs = [{"errors": errors or {}}] * 2
    num_errors = sum(sum(run["errors"].values()) for run in runs)
    return {"system": system, "version": "1.13.0", "workload": workload, "num_errors": num_errors, "num_runs": 3,
            "spread": spread, "runs": runs, **figures}  # fmt: skip


def raw_figures(num_complete: int = 2, errors: dict[str, int] | None = None) -> dict[str, Any]:
    """What the load client says of a run in which tokens took 1 ms."""
    counts = {"gateway": 100_000.0}
    return {"num_complete": num_complete, "cpu_us": counts, "switches": counts, "rss_bytes": counts, "num_reads": 1,
            "first_token_seconds": [0.001], "transit_seconds": [0.001], "wall_seconds": 1.0, "num_events": 1,
            "client_cpu_us": 1.0, "num_errors": sum((errors or {}).values()), "errors": errors or {}}  # fmt: skip


def site(tmp_path: Path, model_dir: Path | None = None, step_ms: float = 20.0) -> Site:
    return Site(
        bin_dir=tmp_path, work_dir=tmp_path, port=9000, metrics_port=9001, engine_ports=(9002, 9003),
        worker_urls=["http://127.0.0.1:9100"], model="model", model_path=model_dir or tmp_path, step_ms=step_ms,
    )  # fmt: skip


def test_what_is_missing_is_in_the_table_too() -> None:
    """A peer that cannot be installed must not just be absent. Of W1+W4 only the tokens' time is shown: its CPU is that
    of long prompts, too."""
    reports = [report("kvloom", "W1", 9.5), report("smg", "W1", 11.3), report("kvloom", "W5", 9.5)]
    reports.append(report("kvloom", "W1+W4", 20.0))
    table = peers_table(reports, {"dynamo": "It cannot be installed."}, "kvloom bench")
    assert "| 9.5 ±1.0 | 1.00 | – | 3.0 ±0.5 | 20.0 | 3.0 ±0.5 | 0 |" in table
    assert "smg 1.13.0" in table
    assert "dynamo: not measured. It cannot be installed." in table


def test_errors_are_named_below_the_table() -> None:
    """A figure that comes with errors is no figure of a gateway that works: the reader must see which."""
    table = peers_table([report("smg", "W4", 2.0, {"HTTP/1.1 503\r\n": 3, "HTTP/1.1\t503": 1})], {}, "kvloom bench")
    assert "| 8 |" in table
    assert "smg, W4: 8 times `HTTP/1.1 503`." in table


@pytest.mark.parametrize("name", list(PEERS))
def test_every_peer_serves_on_the_loopback_interface_only(name: str, tmp_path: Path) -> None:
    """A measurement opens no port to others."""
    argv = " ".join(PEERS[name].argv(site(tmp_path)))
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert "127.0.0.1" in argv + written
    assert "0.0.0.0" not in argv + written
    assert all("==" in package for package in PEERS[name].packages)


def test_dynamos_engines_keep_the_workloads_pace_and_never_end_an_answer(tmp_path: Path, model_dir: Path) -> None:
    """Peers are compared at one pace and length: a mocker of its own speed, or one that draws an end, would be another
    workload."""
    assert DYNAMO.engines is not None
    own = site(tmp_path, model_dir)
    broker, mocker = DYNAMO.engines(own)
    profile = np.load(mocker[mocker.index("--planner-profile-data") + 1])
    assert set(profile["decode_itl"].ravel()) == {20.0}
    config = msgspec.json.decode((tmp_path / "model" / "config.json").read_bytes())
    assert config["eos_token_id"] == config["vocab_size"]
    assert broker[-2:] == ("9002", "9003")
    assert "tcp://127.0.0.1:9002" in DYNAMO.env(own)["DYN_ZMQ_BROKER_URL"]


class FakeSystems:
    """Contenders that answer as told, and note whose turn it was."""

    def __init__(self, answers: dict[str, dict[str, Any] | CommandError]) -> None:
        self.answers = answers
        self.turns: list[str] = []
        self.missing: dict[str, str] = {}

    async def drive(self, workload: Workload, system: System, seed: int) -> dict[str, Any]:
        self.turns.append(system.name)
        answer = self.answers[system.name]
        if isinstance(answer, CommandError):
            raise answer
        return answer

    def turns_of(self, num_runs: int) -> Turns:
        plan = BenchPlan(model=ModelConfig(name="model", path="path"), workloads=[W1], num_runs=num_runs)
        return Turns(plan, self.drive, lambda _: None, self.missing, settle_seconds=0.0)

    def systems(self, *, has_stamps: bool = True) -> Sequence[System]:
        return [System(name, "1.0", "http://127.0.0.1:1", dict, has_stamps=has_stamps) for name in self.answers]


async def test_every_other_run_goes_in_the_opposite_order() -> None:
    """What drifts in a machine during a run must not always meet the same system."""
    fakes = FakeSystems({"kvloom": raw_figures(), "smg": raw_figures()})
    reports = await fakes.turns_of(2).measure(fakes.systems(), [W1])
    assert fakes.turns == ["kvloom", "smg", "smg", "kvloom"]
    assert [found["system"] for found in reports] == ["kvloom", "smg"]


async def test_a_peer_that_fails_is_named_and_the_others_go_on() -> None:
    """Neither a gateway that dies nor one that answers nothing ends the run, or gets a figure."""
    dead, mute = CommandError("connection refused"), raw_figures(0, {"HTTP/1.1 503": 2})
    fakes = FakeSystems({"kvloom": raw_figures(), "smg": dead, "litellm": mute, "nginx": raw_figures()})
    reports = await fakes.turns_of(1).measure(fakes.systems(), [W1])
    assert [found["system"] for found in reports] == ["kvloom", "nginx"]
    assert fakes.missing == {
        "smg, W1": "connection refused", "litellm, W1": "No request was answered: HTTP/1.1 503"
    }  # fmt: skip


async def test_one_that_does_not_survive_warming_up_is_left_out() -> None:
    """It would fail in every later turn, too; ours failing ends the command."""
    fakes = FakeSystems({"kvloom": raw_figures(), "smg": CommandError("gone")})
    ready = await fakes.turns_of(1).warm_up(fakes.systems(), W1)
    assert [system.name for system in ready] == ["kvloom"]
    assert fakes.missing == {"smg": "gone"}
    with pytest.raises(CommandError):
        await FakeSystems({"kvloom": CommandError("gone")}).turns_of(1).warm_up(fakes.systems()[:1], W1)


async def test_latencies_are_not_made_up_where_tokens_have_no_stamps() -> None:
    """A random word looks like a stamp."""
    fakes = FakeSystems({"dynamo": raw_figures()})
    (found,) = await fakes.turns_of(1).measure(fakes.systems(has_stamps=False), [W1])
    assert found["added_ttft_ms"]["p50"] is None
    assert found["cpu_us_per_token"]["sum"] > 0


async def test_a_program_that_the_system_lacks_is_unpacked_from_its_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--peers` fetches nginx itself, with no right to install anything; without apt-get it says what is missing."""
    tools = tmp_path / "bin"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    with pytest.raises(PeerError, match="no apt-get"):
        await install(NGINX, tmp_path / "cache", lambda _: None)

    def script(name: str, text: str) -> None:
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)

    program = b"#!/bin/sh\necho nginx version: nginx/1.22.1 >&2\n"
    with tarfile.open(tmp_path / "nginx.deb", "w") as archive:
        entry = tarfile.TarInfo("usr/sbin/nginx")
        entry.size, entry.mode = len(program), 0o755
        archive.addfile(entry, io.BytesIO(program))
    script("apt-get", f"/bin/cp {tmp_path}/nginx.deb .")
    script("dpkg-deb", '/bin/tar -xf "$2" -C "$3"')
    found = await install(NGINX, tmp_path / "cache", lambda _: None)
    assert (found.bin_dir, found.version) == (tmp_path / "cache" / "nginx" / "usr" / "sbin", "1.22.1")


async def test_what_cannot_be_fetched_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason in the table is the tool's own, not a stack trace."""
    (tmp_path / "apt-get").write_text("#!/bin/sh\necho E: Unable to locate package >&2\nexit 100\n")
    (tmp_path / "dpkg-deb").write_text("#!/bin/sh\n")
    for name in ("apt-get", "dpkg-deb"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    peer = Peer(name="other", about="", argv=lambda _: (), program="other", debian_package="other")
    with pytest.raises(PeerError, match="Unable to locate package"):
        await install(peer, tmp_path / "cache", lambda _: None)


def test_the_line_that_names_an_error_is_the_reason() -> None:
    """Programs say more after it."""
    assert last_words(b"start\nERROR: no room\nbye\n") == "ERROR: no room"
    assert last_words(b"") == "it said nothing"
