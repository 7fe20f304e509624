"""The hostile neighbour of `kvloom-lab chaos`: what it sends, that it ends in time, and how its effect is judged."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
from collections import Counter

import pytest
from click.testing import CliRunner

from lab.chaos.attackers import grpc, http2
from lab.chaos.attackers.malformed import chat_request
from lab.chaos.attackers.mix import ATTACK_NAMES, attack_all
from lab.chaos.attackers.targets import Targets
from lab.chaos.checking.attack_report import attack_figures
from lab.chaos.checking.memory import MemorySamples
from lab.chaos.checking.record import Record
from lab.chaos.checking.report_text import attack_page
from lab.chaos.checking.verdicts import AnswerVerdict, Finding
from lab.chaos.clients.questions import Behaviour, Endpoint, Question, UserCall
from lab.chaos.clients.transcript import AnswerEnd, Transcript
from lab.chaos.command import chaos
from lab.chaos.fabric import clocks
from lab.chaos.fabric.faults import Disturbance, FaultKind
from lab.chaos.fabric.surroundings import STRIKES


async def test_the_attackers_survive_what_closes_on_them_and_end_in_time() -> None:
    """An attacker that fails at the first refusal, or waits for an answer forever, attacks nothing."""
    num_connections = 0

    async def close_at_once(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        writer.close()

    server = await asyncio.start_server(close_at_once, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    names = [name for name in ATTACK_NAMES if name not in ("connection_flood", "unread_streams")]
    async with asyncio.timeout(20):
        tally = await attack_all(Targets(address, address, "m", [address]), seed=1, seconds=1.5, names=names)
    server.close()
    assert num_connections > 20
    begun = {name for name in names if tally.get(f"{name}: begun")}
    assert begun == set(names)


async def test_attackers_without_a_fabric_end_in_time() -> None:
    """A fabric that is down, as during another fault, is no reason to fail."""
    async with asyncio.timeout(20):
        tally = await attack_all(
            Targets("127.0.0.1:1", "127.0.0.1:1", "m"), 1, 1.5, names=["smuggling", "rapid_resets"]
        )
    assert tally["smuggling: ConnectionRefusedError"] > 0


def test_a_call_has_literal_headers_and_framed_messages() -> None:
    """The frames are written by hand: a mistake in them would make every attack the same noise."""
    headers = http2.call_headers(3, "Cancel", host="h", authorization="x" * 300)
    assert int.from_bytes(headers[:3], "big") == len(headers) - 9
    assert headers[3:9] == b"\x01\x04\x00\x00\x00\x03"
    assert b"\x00\x05:path" + bytes((len("/kvloom.v1.RouterService/Cancel"),)) in headers
    assert b"\x0dauthorization\x7f" + bytes((300 - 127 - 128 + 128, 1)) + b"x" * 300 in headers
    frames = list(http2.call_message(3, b"m" * 20_000, compressed=True))
    assert [frame[4] for frame in frames] == [0, 1]
    body = b"".join(frame[9:] for frame in frames)
    assert body[:5] == b"\x01" + (20_000).to_bytes(4, "big")
    assert len(gzip.decompress(grpc._BOMB)) == 64_000_000


def answered(sent_at: float, ttft: float, verdict: AnswerVerdict = AnswerVerdict.OK, refusals: int = 0) -> Record:
    transcript = Transcript([], sent_at, AnswerEnd.COMPLETE, first_at=sent_at + ttft, ended_at=sent_at + ttft + 0.1)
    transcript.num_refusals = refusals
    call = UserCall(Question("q", True, 1, 1.0, 1), Endpoint.CHAT, Behaviour.PLAIN)
    return Record(call, transcript, Finding(verdict), 1, 1)


def figures(*records: Record) -> dict[str, object]:
    memory = MemorySamples()
    for at, size in ((5.0, 100_000_000), (15.0, 180_000_000), (29.0, 110_000_000)):
        memory.note(7, "edge", "edge", at, size)
    attack = Disturbance(FaultKind.HOSTILE_NEIGHBOUR, "every port", 110.0, 120.0)
    return attack_figures(records, attack, Counter({"smuggling: 400": 3}), memory, begin=100.0)


def test_users_are_compared_before_during_and_after_an_attack() -> None:
    """An answer counts as during if any part of it was."""
    found = figures(answered(101, 0.1), answered(109.95, 0.11), answered(115, 0.2, refusals=2), answered(121, 0.1))
    phases = found["phases"]
    assert isinstance(phases, dict)
    assert {name: row["requests"] for name, row in phases.items()} == {"before": 1, "during": 2, "after": 1}
    assert phases["during"]["rejections"] == 2
    assert found["ttft_p99_growth"] == pytest.approx(1.0)
    assert "beyond the goal" in str(found["verdict"])
    (row,) = found["memory"]
    assert (row["before_mb"], row["most_mb"], row["after_mb"], row["incarnations"]) == (100.0, 180.0, 110.0, 1)


def test_the_first_tokens_are_those_of_calm_tenants_and_what_they_must_not_get_is_counted() -> None:
    """A tenant at its limit waits for other reasons than the attackers."""
    calm = [dataclasses.replace(answered(at, 0.1), tenant="calm/app") for at in (101, 115)]
    scarce = dataclasses.replace(answered(116, 9.0), tenant="scarce/app")
    attack = Disturbance(FaultKind.HOSTILE_NEIGHBOUR, "every port", 110.0, 120.0)
    found = attack_figures([*calm, scarce], attack, Counter(), MemorySamples(), 100.0, {"calm/app"})
    assert found["phases"]["during"]["ttft"] == {"p50": 0.1, "p99": 0.1}
    assert found["phases"]["during"]["requests"] == 2
    report = {"attack": {**found, "over_served": 1, "mis_metered": 2}}
    text = attack_page(report)
    assert "0 wrong, lost or doubled, 1 over-served, 2 mis-metered" in text
    assert "0.1 / 0.1 s without the attackers, 0.1 / 0.1 s with them" in text


def test_attackers_of_a_fabric_with_tenants_have_a_key() -> None:
    """Otherwise all that they send is refused before it is read."""
    with_key = chat_request(Targets("", "", "m", key="kvl-attacker"))
    assert b"\r\nAuthorization: Bearer kvl-attacker\r\n" in with_key
    assert b"Authorization" not in chat_request(Targets("", "", "m"))


def test_one_wrong_answer_fails_the_verdict() -> None:
    """Slowness is a goal, correctness a promise."""
    assert str(figures(answered(101, 0.1), answered(111, 0.1))["verdict"]).startswith("passed: no answer wrong")
    assert str(figures(answered(101, 0.1), answered(111, 0.1, AnswerVerdict.WRONG))["verdict"]).startswith("FAILED")


def test_every_fault_has_a_story_and_the_list_shows_what_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users choose by this list, and a run that silently leaves a fault out proves nothing."""
    monkeypatch.setattr(clocks, "library", lambda: None)
    listed = CliRunner().invoke(chaos, ["--list-faults"])
    assert listed.exit_code == 0
    assert [line.split()[0] for line in listed.output.splitlines()] == list(FaultKind)
    (line,) = (line for line in listed.output.splitlines() if "not available" in line)
    assert line.startswith("clock-jump")
    assert "libfaketime" in line
    refused = CliRunner().invoke(chaos, ["--faults", "clock-jump"])
    assert refused.exit_code == 2
    assert "libfaketime" in refused.output


def test_faults_of_the_surroundings_have_an_injector_and_explain_no_failure_of_a_process() -> None:
    """Only those of Redis count as its faults."""
    surrounding = {kind for kind in FaultKind if kind.verb == "surround"}
    for kind, part in ((kind, kind.part) for kind in surrounding):
        assert part in ("redis", kind.value)
    assert surrounding | {kind for kind in FaultKind if kind.part == "model"} == set(STRIKES)
