"""What an auth provider is asked, and what follows from its answers and from its silence."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from kvloom.enums import ErrorReason
from kvloom.errors import KvloomError
from kvloom_common.access.auth_provider import REFUSAL_SECONDS, CallerVerifier, Credentials, configured_verifier
from kvloom_common.callers import Callers
from kvloom_common.config import CallersConfig, ConfigError
from tests.fakes.plugin_site import PluginSite
from tests.waiting import eventually

GROUP = "kvloom.auth_providers"
ALICE = Credentials({"authorization": "Bearer alice"})
BOB = Credentials({"authorization": "Bearer bob"})


class ScriptedProvider:
    """Answers what the test says, once the test lets it."""

    def __init__(self) -> None:
        self.answer: object = "alice"
        self.num_asked = 0
        self.blocks = False
        self.may_answer = threading.Event()
        self.may_answer.set()

    async def authenticate(self, credentials: Credentials) -> str:
        self.num_asked += 1
        if not self.blocks:
            await eventually(self.may_answer.is_set)  # by another thread
        self.may_answer.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.provider = ScriptedProvider()
        self.verifier = self.new_verifier()

    def new_verifier(self, timeout_seconds: float = 20.0, **bounds: int) -> CallerVerifier:
        return CallerVerifier(
            "acme", self.provider, timeout_seconds=timeout_seconds, kept_seconds=60.0, now=lambda: self.now, **bounds
        )


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.provider.may_answer.set()
    world.verifier.close()


async def refusal(verifier: CallerVerifier, credentials: Credentials = ALICE) -> KvloomError:
    with pytest.raises(KvloomError) as caught:
        await verifier.verify(credentials)
    return caught.value


async def test_an_answer_is_kept_for_its_time(world: World) -> None:
    """A remote service must not be asked for every request, and someone who loses access must lose it in time."""
    assert [await world.verifier.verify(ALICE) for _ in range(3)] == ["alice"] * 3
    assert world.provider.num_asked == 1
    world.now = 60.0
    world.provider.answer = KvloomError(ErrorReason.PERMISSION_DENIED, "Not any more.")
    error = await refusal(world.verifier)
    assert (error.reason, error.message) == (ErrorReason.PERMISSION_DENIED, "Not any more.")


async def test_a_refusal_is_kept_for_a_short_time(world: World) -> None:
    """Guesses must not reach the provider at the rate of requests; a key that was just made must soon work."""
    world.provider.answer = KvloomError(ErrorReason.UNAUTHENTICATED, "Unknown.")
    for _ in range(3):
        assert (await refusal(world.verifier)).reason == ErrorReason.UNAUTHENTICATED
    assert world.provider.num_asked == 1
    world.now, world.provider.answer = REFUSAL_SECONDS, "alice"
    assert await world.verifier.verify(ALICE) == "alice"


async def test_requests_at_once_ask_once(world: World) -> None:
    """A caller that opens a hundred streams is one question."""
    world.provider.may_answer.clear()
    waiting = [asyncio.create_task(world.verifier.verify(ALICE)) for _ in range(100)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    world.provider.may_answer.set()
    assert await asyncio.gather(*waiting[1:]) == ["alice"] * 99
    assert world.provider.num_asked == 1


@pytest.mark.parametrize(
    "answer",
    [RuntimeError("alice's secret"), None, "", "x" * 257, KvloomError(ErrorReason.INTERNAL, "alice's secret")],
)
async def test_a_provider_that_fails_lets_nobody_in(world: World, answer: object) -> None:
    """The error says that it is no fault of the caller, is not kept, and no secret of it reaches caller or log."""
    world.provider.answer = answer
    with capture_logs() as lines:
        error = await refusal(world.verifier)
    assert (error.reason, error.kind.http_status) == (ErrorReason.AUTH_UNAVAILABLE, 503)
    assert error.retry_after_seconds
    assert "secret" not in error.message + str(lines)
    assert [(line["event"], line["provider"]) for line in lines] == [("auth_provider_failed", "acme")]
    world.provider.answer = "alice"
    assert await world.verifier.verify(ALICE) == "alice"


@pytest.mark.parametrize("blocks", [False, True])
async def test_a_provider_that_does_not_answer_delays_its_askers_only(world: World, blocks: bool) -> None:
    """Also one that blocks its thread: the event loop that serves tokens is not held up, and the wait is bounded."""
    world.provider.blocks = blocks
    world.provider.may_answer.clear()
    world.verifier = world.new_verifier(timeout_seconds=0.05)
    begin = time.monotonic()
    assert (await refusal(world.verifier)).reason == ErrorReason.AUTH_UNAVAILABLE
    assert time.monotonic() - begin < 10
    with pytest.raises(KvloomError, match="cannot be checked"):
        await asyncio.to_thread(world.verifier.verify_in_thread, BOB)


async def test_questions_at_a_time_are_bounded(world: World) -> None:
    """A flood of different credentials must not fill the memory of an edge whose provider is slow."""
    world.verifier = world.new_verifier(max_pending=1)
    world.provider.may_answer.clear()
    first = asyncio.create_task(world.verifier.verify(ALICE))
    await asyncio.sleep(0)
    assert (await refusal(world.verifier, BOB)).reason == ErrorReason.AUTH_UNAVAILABLE
    world.provider.may_answer.set()
    assert await first == "alice"


async def test_kept_answers_are_bounded(world: World) -> None:
    """Credentials that are never seen again must be forgotten."""
    world.verifier = world.new_verifier(max_kept=1)
    for credentials in (ALICE, BOB, ALICE):
        await world.verifier.verify(credentials)
    assert world.provider.num_asked == 3


async def test_a_thread_may_ask_too(world: World) -> None:
    """/metrics is served by threads."""
    assert await asyncio.to_thread(world.verifier.verify_in_thread, ALICE) == "alice"
    assert await world.verifier.verify(ALICE) == "alice"
    assert world.provider.num_asked == 1


async def test_too_long_credentials_are_refused_unasked(world: World) -> None:
    """They are part of what is kept."""
    error = await refusal(world.verifier, Credentials({"authorization": "x" * 20_000}))
    assert error.reason == ErrorReason.UNAUTHENTICATED
    assert not world.provider.num_asked


def test_names_are_safe_and_different() -> None:
    """A caller's name is a part of request ids and of log lines: an id of any form must not be taken for another's."""
    callers = Callers(b"key")
    names = [callers.name_of_id(found) for found in ("alice", "alice@x", "al\nice", "address-1", "a" * 65)]
    assert names[0] == "id-alice"
    assert len(set(names)) == len(names)
    assert all(name.replace("-", "").isalnum() for name in names)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def Acme(settings): raise ValueError('no url')", "cannot be made: ValueError: no url"),
        (
            "class Acme:\n    def __init__(self, s): ...\n    def authenticate(self, c): ...",
            "no `async def authenticate`",
        ),
        (
            "class Acme:\n    headers = ('X-Team',)\n    def __init__(self, s): ...\n"
            "    async def authenticate(self, c): ...",
            "`headers` of",
        ),
        ("", "has no attribute 'Acme'"),
    ],
)
def test_what_is_no_provider_is_refused_at_the_start(plugin_site: PluginSite, source: str, says: str) -> None:
    """A fabric that starts with it would refuse everyone."""
    plugin_site.install("acme_auth", GROUP, {"acme": "acme_auth:Acme"}, source)
    with pytest.raises(ConfigError, match=says):
        configured_verifier(CallersConfig(provider="acme"))


def test_keys_and_a_provider_exclude_each_other() -> None:
    """Which of them lets somebody in must be clear."""
    with pytest.raises(ConfigError, match="exclude each other"):
        configured_verifier(CallersConfig(provider="acme", api_keys_file="keys"))
    assert configured_verifier(CallersConfig()) is None
