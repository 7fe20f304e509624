"""The safety service over real sockets: verdicts, halts, live reload, and a process that starts and stops cleanly."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvloom.transport.grpc_errors import from_rpc_error
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.safety_service_pb2 import (
    DECISION_ALLOW,
    DECISION_BLOCK,
    CheckWish,
    ClassifyRequest,
    ClearedText,
    PromptCheck,
    ScreenRequest,
    ScreenResponse,
)
from kvloom.v1.safety_service_pb2_grpc import SafetyServiceStub, add_SafetyServiceServicer_to_server
from kvloom_common.process.service import SERVER_OPTIONS
from safety_svc.policy_file import PolicyFile
from safety_svc.screen import CHARS_PER_SLICE
from safety_svc.server import SafetyServicer

TIMEOUT_SECONDS = 20.0
POLICY = """
[[rules]]
name = "codes"
message = "No launch codes."
phrases = ["launch code"]

[[rules]]
name = "key"
applies_to = ["answer"]
patterns = ['AKIA[0-9A-Z]{16}']
prefixes = ["AKIA"]
max_length = 20
"""


class Rig:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.policy_file = PolicyFile(str(path))
        self.stub: SafetyServiceStub

    async def screen(self) -> Screen:
        screen = Screen(self.stub.Screen())
        await screen.read()
        return screen


class Screen:
    """The stream of one router. It keeps the last policy that it has received."""

    def __init__(self, call: grpc.aio.StreamStreamCall[ScreenRequest, ScreenResponse]) -> None:
        self.call = call
        self.policy = None

    async def read(self) -> ScreenResponse:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            frame = await self.call.read()
        assert isinstance(frame, ScreenResponse), "the stream has ended"
        if frame.HasField("policy"):
            self.policy = frame.policy
        return frame

    async def ask(self, **parts: Any) -> ScreenResponse:
        await self.call.write(ScreenRequest(**parts))
        return await self.read()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    path = tmp_path / "policy.toml"
    path.write_text(POLICY)
    rig = Rig(path)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_SafetyServiceServicer_to_server(SafetyServicer(rig.policy_file), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        rig.stub = SafetyServiceStub(channel)
        yield rig
    await server.stop(None)


async def test_a_text_is_judged_by_the_policy_in_force(rig: Rig) -> None:
    """Classify with `check` judges texts for callers that have no stream."""
    answer = await rig.stub.Classify(ClassifyRequest(texts=["hello", "The LAUNCH  code?"], check=CheckWish()))
    allowed, blocked = answer.results
    assert not allowed.HasField("finding")
    assert (blocked.finding.rule, blocked.finding.message) == ("codes", "No launch codes.")
    assert answer.policy_revision == rig.policy_file.current.revision


async def test_texts_that_are_too_long_are_refused_by_name(rig: Rig) -> None:
    """The length of texts is limited, and the error has a reason and names the field."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.stub.Classify(ClassifyRequest(texts=["x" * (2**20 + 1)], check=CheckWish()))
    error = from_rpc_error(caught.value)
    assert (error.reason, error.field) == (ErrorReason.ERROR_REASON_REQUEST_TOO_LARGE, "texts")


async def test_the_first_frame_tells_the_policy_and_every_frame_is_answered(rig: Rig) -> None:
    """A router first receives the policy state, then one response frame for each of its frames."""
    screen = await rig.screen()
    assert screen.policy is not None
    assert (screen.policy.screens_prompts, screen.policy.screens_answers) == (True, True)
    checks = [PromptCheck(check_id=7, text="hi"), PromptCheck(check_id=8, text="launch code")]
    frame = await screen.ask(prompts=checks, slots=[1, 2, 3], deltas=["hello", "see AK", "the laun"])
    assert [(v.check_id, v.decision) for v in frame.prompts] == [(7, DECISION_ALLOW), (8, DECISION_BLOCK)]
    assert dict(zip(frame.slots, frame.num_clear_chars, strict=True)) == {1: 5, 2: 4, 3: 4}


async def test_an_answer_is_held_cleared_halted_and_closed(rig: Rig) -> None:
    """Text that may begin a forbidden phrase is withheld, a hit halts the answer, and closing frees the slot."""
    screen = await rig.screen()
    await screen.ask(slots=[1, 2], deltas=["the launch", "the launch"])
    frame = await screen.ask(slots=[1, 2], deltas=[" pad", " code "])
    assert dict(zip(frame.slots, frame.num_clear_chars, strict=True)) == {1: 14}
    assert [(halt.slot, halt.num_clear_chars, halt.finding.rule) for halt in frame.halts] == [(2, 4, "codes")]
    frame = await screen.ask(slots=[1, 2], deltas=["!", "late text of a halted answer"], close_slots=[1, 2])
    assert list(frame.slots) == [1]
    assert not frame.halts
    assert sorted(frame.closed_slots) == [1, 2]
    frame = await screen.ask(slots=[2], deltas=["new answer in an old slot"])
    assert list(frame.num_clear_chars) == [25]


async def test_closing_judges_what_was_held(rig: Rig) -> None:
    """A phrase at the very end is known to be a whole word only when the answer is complete."""
    screen = await rig.screen()
    await screen.ask(slots=[1, 2], deltas=["my launch code", "my launch cod"])
    frame = await screen.ask(close_slots=[1, 2, 3])
    assert [(halt.slot, halt.num_clear_chars) for halt in frame.halts] == [(1, 3)]
    assert list(frame.closed_slots) == [1, 2, 3]


async def test_a_long_prompt_does_not_hold_answers_up(rig: Rig) -> None:
    """A long prompt gets the right verdict while answers are screened concurrently."""
    screen = await rig.screen()
    filler = "a perfectly harmless sentence. " * (20 * CHARS_PER_SLICE // 31)
    checks = [PromptCheck(check_id=1, text=filler), PromptCheck(check_id=2, text=filler + "launch code")]
    frame = await screen.ask(prompts=checks, slots=[4], deltas=["hi"])
    assert list(frame.slots) == [4]
    verdicts = [verdict for _ in range(2) for verdict in (await screen.read()).prompts]
    assert [(v.check_id, v.decision) for v in verdicts] == [(1, DECISION_ALLOW), (2, DECISION_BLOCK)]


async def test_a_changed_policy_reaches_open_streams(rig: Rig) -> None:
    """After a reload, new answers are judged by the new rules, and running ones by the rules they began with."""
    screen = await rig.screen()
    before = screen.policy
    await screen.ask(slots=[1], deltas=["a"])
    rig.path.write_text(POLICY.replace("launch code", "recipe"))
    await rig.policy_file.reload_if_changed()
    await screen.read()
    assert screen.policy != before
    frame = await screen.ask(slots=[1, 2], deltas=[" recipe.", " recipe."])
    assert list(frame.slots) == [1]
    assert [halt.slot for halt in frame.halts] == [2]


async def test_a_policy_without_rules_lets_everything_through(rig: Rig) -> None:
    """Texts that were in flight when the last rule was removed still get their verdicts."""
    rig.path.write_text("")
    await rig.policy_file.reload_if_changed()
    screen = await rig.screen()
    assert screen.policy is not None
    assert not screen.policy.screens_answers
    frame = await screen.ask(prompts=[PromptCheck(check_id=1, text="launch code")], slots=[1], deltas=["launch code"])
    assert frame.prompts[0].decision == DECISION_ALLOW
    assert list(frame.num_clear_chars) == [11]


async def test_a_frame_that_makes_no_sense_ends_its_stream_only(rig: Rig) -> None:
    """A router that violates the protocol gets a reason, and other routers are not affected."""
    bad, good = await rig.screen(), await rig.screen()
    await bad.call.write(ScreenRequest(slots=[1, 2], deltas=["x"]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await bad.call.read()
    assert from_rpc_error(caught.value).reason == ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION
    assert list((await good.ask(slots=[1], deltas=["x"])).num_clear_chars) == [1]


async def test_streams_have_slots_of_their_own(rig: Rig) -> None:
    """Two routers may use the same slots, and the state of a router ends with its stream."""
    first, second = await rig.screen(), await rig.screen()
    await first.ask(slots=[1], deltas=["launch"])
    assert list((await second.ask(slots=[1], deltas=[" code "])).num_clear_chars) == [6]
    await first.call.done_writing()
    async with asyncio.timeout(TIMEOUT_SECONDS):
        assert await first.call.read() is grpc.aio.EOF
        assert await first.call.code() is grpc.StatusCode.OK


# -- the process ------------------------------------------------------------------------------------------------------


async def start(*arguments: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "safety_svc", *arguments, stdout=pipe, stderr=pipe
    )


async def test_the_process_serves_reports_and_stops(tmp_path: Path) -> None:
    """A process has a ready line, health, reflection, metrics and an audit log; SIGTERM ends it with status 0."""
    (tmp_path / "policy.toml").write_text(POLICY)
    config = tmp_path / "kvloom.json"
    config.write_text(json.dumps({"safety": {"policy_file": str(tmp_path / "policy.toml")}, "log": {"format": "json"}}))
    async with asyncio.timeout(TIMEOUT_SECONDS):
        process = await start("--config", str(config), "--port", "0", "--metrics-port", "0")
        assert process.stdout is not None
        ready = json.loads(await process.stdout.readline())
        async with grpc.aio.insecure_channel(ready["address"]) as channel:
            wanted = ClassifyRequest(texts=["my launch code"], check=CheckWish())
            answer = await SafetyServiceStub(channel).Classify(wanted)
            assert answer.results[0].finding.rule == "codes"
            health = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service="kvloom.v1.SafetyService")
            )
            assert health.status == health_pb2.HealthCheckResponse.SERVING
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            listed = await call.read()
            assert "kvloom.v1.SafetyService" in str(listed)
            call.cancel()
        assert 'kvloom_safety_blocks_total{rule="codes",target="prompt"} 1.0' in await scrape(ready["metrics_address"])
        process.send_signal(signal.SIGTERM)
        _, errors = await process.communicate()
    assert process.returncode == 0
    lines = [json.loads(line) for line in errors.decode().splitlines()]
    assert [(line["target"], line["rule"]) for line in lines if line["event"] == "prompt_blocked"] == [
        ("prompt", "codes")
    ]
    assert b"my launch" not in errors


async def scrape(address: str) -> str:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    body = await reader.read()
    writer.close()
    await writer.wait_closed()
    return body.decode()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"safety": {"policy_file": "missing.toml"}}, "missing.toml"),
        ({"safety": {"colour": "red"}}, "colour"),
    ],
)
async def test_a_process_that_cannot_start_says_why(tmp_path: Path, config: dict[str, object], says: str) -> None:
    """A failed start exits with status 1 and prints one readable line without a stack trace."""
    path = tmp_path / "kvloom.json"
    path.write_text(json.dumps(config))
    async with asyncio.timeout(TIMEOUT_SECONDS):
        process = await start("--config", str(path), "--port", "0")
        output, errors = await process.communicate()
    assert process.returncode == 1
    assert output == b""
    assert says in errors.decode()
    assert "Traceback" not in errors.decode()


async def test_skipped_text_counts_and_keeps_word_boundaries(rig: Rig):
    """Text that a router has cleared by the prefilter is not sent, but later text is judged as if it had been."""
    screen = await rig.screen()
    assert screen.policy is not None
    assert (
        list(screen.policy.answer_prefilter.beginnings),
        list(screen.policy.answer_prefilter.folded_beginnings),
    ) == (
        ["AKIA", "\\"],
        ["laun"],
    )
    cleared_texts = [ClearedText(slot=1, num_chars=5, last_char="x"), ClearedText(slot=2, num_chars=5, last_char=" ")]
    await screen.call.write(
        ScreenRequest(cleared_texts=cleared_texts, slots=[1, 2], deltas=["launch code ", "launch code "])
    )
    frame = await screen.read()
    assert (list(frame.slots), list(frame.num_clear_chars)) == ([1], [17])
    assert [(halt.slot, halt.num_clear_chars) for halt in frame.halts] == [(2, 5)]


async def test_held_text_cannot_be_skipped(rig: Rig):
    """The stream of a router that skips text while text is withheld ends, as it could show forbidden text."""
    screen = await rig.screen()
    await screen.call.write(ScreenRequest(slots=[1], deltas=["the launch"]))
    assert list((await screen.read()).num_clear_chars) == [4]
    await screen.call.write(ScreenRequest(cleared_texts=[ClearedText(slot=1, num_chars=1, last_char=" ")]))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await screen.read()
    assert from_rpc_error(raised.value).reason == ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION
