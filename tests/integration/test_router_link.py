"""GrpcRouterLink over a real socket: every choice gets its own progress, and always its finish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from kvloom.errors import KvloomError
from kvloom.router_link.group import REATTACH_SECONDS
from kvloom.router_link.link import GrpcRouterLink, LinkRequest
from kvloom.v1 import generation_pb2, router_service_pb2
from kvloom.v1.error_reason_pb2 import ErrorReason
from tests.fakes.fake_router import TIMEOUT_SECONDS, FakeRouter, serve_fake_router, text_of
from tests.fakes.link_requests import link_request

LOST = ErrorReason.ERROR_REASON_ROUTER_LOST


class RecordingSink:
    def __init__(self) -> None:
        self.starts: list[tuple[int, str]] = []
        self.texts: dict[int, str] = {}
        self.ids: dict[int, list[int]] = {}
        self.logprobs: list[float] = []
        self.finishes: dict[int, generation_pb2.SequenceFinish] = {}
        self._changed = asyncio.Event()

    def on_start(self, index: int, start: generation_pb2.SequenceStart) -> None:
        assert index not in self.ids
        self.starts.append((index, start.shard_id))

    def on_tokens(
        self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[generation_pb2.TokenLogprobs]
    ) -> None:
        assert index not in self.finishes
        self.texts[index] = self.texts.get(index, "") + delta
        self.ids.setdefault(index, []).extend(token_ids)
        self.logprobs.extend(entry.logprob for entry in logprobs)
        self._changed.set()

    def on_finish(self, index: int, finish: generation_pb2.SequenceFinish) -> None:
        assert index not in self.finishes
        self.finishes[index] = finish
        self._changed.set()

    async def wait_for(self, num_finishes: int = 0, num_tokens: int = 0) -> None:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while len(self.finishes) < num_finishes or sum(map(len, self.ids.values())) < num_tokens:
                self._changed.clear()
                await self._changed.wait()


class RaisingSink(RecordingSink):
    def on_tokens(self, *_: object) -> None:
        raise RuntimeError("a bug in a sink")


def request(ids: Sequence[int], n: int = 1, num_logprobs: int | None = None) -> LinkRequest:
    sampling = generation_pb2.SamplingParams(logprobs=num_logprobs)
    return link_request("r", "m", ids, "", sampling, generation_pb2.StopConditions(), n=n)


async def connected(link: GrpcRouterLink, value: bool = True) -> None:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while link.connected is not value:
            await link.wait_fleet_change()


@pytest.fixture
async def router() -> AsyncIterator[FakeRouter]:
    async with serve_fake_router() as (fake, address):
        fake.address = address
        yield fake


@pytest.fixture
async def link(router: FakeRouter) -> AsyncIterator[GrpcRouterLink]:
    link = GrpcRouterLink(router.address, "test")
    await link.start()
    await connected(link)
    yield link
    await link.close()


async def test_choices_get_their_own_tokens_start_logprobs_and_end(link: GrpcRouterLink, router: FakeRouter) -> None:
    """All fields of a frame arrive at the right choice."""
    sink = RecordingSink()
    link.submit(request([5, 6, 7], n=2, num_logprobs=0), sink)
    await sink.wait_for(num_finishes=2)
    assert sink.ids == {0: [5, 6, 7], 1: [5, 6, 7]}
    assert sink.texts[0] == "".join(map(text_of, [5, 6, 7]))
    assert sorted(sink.starts) == [(0, "shard-0"), (1, "shard-0")]
    assert sorted(sink.logprobs) == [-2, -2, -1, -1, 0, 0]
    assert sink.finishes[0].num_output_tokens == 3
    assert router.connections[0].client_id == "test"
    assert link.fleet.models[0].name == "m"


async def test_one_frame_with_many_tokens_is_split_by_slot(link: GrpcRouterLink, router: FakeRouter) -> None:
    """`num_tokens` assigns the tokens to the slots, which may have none."""
    router.answers = False
    a, b, c = RecordingSink(), RecordingSink(), RecordingSink()
    for sink in (a, b, c):
        link.submit(request([1]), sink)
    await router.wait_until(lambda: bool(router.connections) and len(router.connections[0].submits) == 3)
    connection = router.connections[0]
    slots = [submit.choices[0].slot for submit in connection.submits]
    router.tokens(connection, (slots[0], [1, 2]), (slots[1], []), (slots[2], [3]), (999, [4]))
    await c.wait_for(num_tokens=1)
    assert (a.ids, b.ids, c.ids) == ({0: [1, 2]}, {0: []}, {0: [3]})


async def test_many_requests_at_once_share_the_stream_and_slots_are_used_again(
    link: GrpcRouterLink, router: FakeRouter
) -> None:
    """Slot numbers stay small for any number of requests, and none is allocated twice at a time."""
    for _ in range(3):
        sinks = [RecordingSink() for _ in range(50)]
        for i, sink in enumerate(sinks):
            link.submit(request([i, i + 1]), sink)
        for i, sink in enumerate(sinks):
            await sink.wait_for(num_finishes=1)
            assert sink.ids == {0: [i, i + 1]}
    assert len(router.connections) == 1
    slots = [submit.choices[0].slot for submit in router.connections[0].submits]
    assert len(slots) == 150
    assert set(slots) == set(slots[:50])


async def test_a_cancelled_slot_is_free_only_after_its_finish(link: GrpcRouterLink, router: FakeRouter) -> None:
    """Late tokens of a cancelled request must not reach the next one."""
    router.answers = False
    cancelled = RecordingSink()
    handle = link.submit(request([1], n=2), cancelled)
    link.cancel(handle)
    link.cancel(handle)
    link.cancel(12345)
    other = RecordingSink()
    link.submit(request([2]), other)
    await router.wait_until(lambda: bool(router.connections) and len(router.connections[0].submits) == 2)
    connection = router.connections[0]
    first, second = connection.submits
    old_slots = {choice.slot for choice in first.choices}
    assert second.choices[0].slot not in old_slots
    await router.wait_until(lambda: set(connection.cancelled_slots) == old_slots)
    router.tokens(connection, (second.choices[0].slot, [9]))
    await other.wait_for(num_tokens=1)  # by now the finishes of the cancelled slots are in
    reused = RecordingSink()
    link.submit(request([3]), reused)
    await router.wait_until(lambda: len(connection.submits) == 3)
    assert connection.submits[2].choices[0].slot in old_slots
    assert not cancelled.finishes


async def test_a_broken_connection_ends_every_choice_and_heals(link: GrpcRouterLink, router: FakeRouter) -> None:
    """No request waits forever; the link reconnects by itself with fresh slots."""
    router.answers = False
    sink = RecordingSink()
    link.submit(request([1], n=3), sink)
    await router.wait_until(lambda: bool(router.connections) and bool(router.connections[0].submits))
    router.connections[0].frames.put_nowait(None)
    await sink.wait_for(num_finishes=3)
    assert {finish.error.reason for finish in sink.finishes.values()} == {LOST}
    assert not link.connected
    with pytest.raises(KvloomError) as caught:
        link.submit(request([1]), RecordingSink())
    assert caught.value.reason == LOST
    router.answers = True
    await connected(link)
    again = RecordingSink()
    link.submit(request([4]), again)
    await again.wait_for(num_finishes=1)
    assert again.ids == {0: [4]}
    assert len(router.connections) == 2


async def test_only_the_router_that_was_announced_is_taken(link: GrpcRouterLink, router: FakeRouter) -> None:
    """Another process may get the port of a router that has died. The link's losses are reported to the right router,
    not to that one. A router of an earlier version, which sends no incarnation, is accepted."""
    await connected(link)
    link.identity.note_lost("lost", 3)
    router.incarnation_id = "another fabric's"
    link.expected_incarnation_id = "ours"
    router.connections[0].frames.put_nowait(None)
    await router.wait_until(lambda: len(router.connections) == 4)
    assert not link.connected
    assert not link.fleet.models
    for incarnation_id in ("ours", ""):
        router.incarnation_id = incarnation_id
        await connected(link)
        hello = router.connections[-1].hello
        assert [lost.request_id for lost in hello.lost] == (["lost"] if incarnation_id else [])
        router.connections[-1].frames.put_nowait(None)
        await connected(link, False)


async def test_a_link_may_start_before_its_router() -> None:
    """Processes start in any order; a restarted router is found on its old port."""
    async with serve_fake_router() as (_, address):
        pass
    link = GrpcRouterLink(address, "early")
    await link.start()
    assert not link.connected
    async with serve_fake_router(int(address.rpartition(":")[2])):
        await connected(link)
    await connected(link, False)
    async with serve_fake_router(int(address.rpartition(":")[2])):
        await connected(link)
        await link.close()


async def test_a_sink_that_raises_ends_only_its_own_request(
    link: GrpcRouterLink, router: FakeRouter, caplog: pytest.LogCaptureFixture
) -> None:
    """One request's bug must not break the stream, and with it all other answers."""
    bad, good = RaisingSink(), RecordingSink()
    link.submit(request([1, 2]), bad)
    link.submit(request([3, 4]), good)
    await good.wait_for(num_finishes=1)
    assert good.ids == {0: [3, 4]}
    await router.wait_until(lambda: bool(router.connections[0].cancelled_slots))
    assert not bad.finishes
    assert "A sink raised" in caplog.text


async def test_a_senseless_frame_costs_the_connection_only(
    link: GrpcRouterLink, router: FakeRouter, caplog: pytest.LogCaptureFixture
) -> None:
    """The link reconnects to a router that breaks the protocol, and open choices get an error."""
    router.answers = False
    sink = RecordingSink()
    link.submit(request([1]), sink)
    await router.wait_until(lambda: bool(router.connections) and bool(router.connections[0].submits))
    router.tokens(router.connections[0], (1, [1]))
    frame = router.connections[0].frames.get_nowait()
    frame.step.deltas.append("one too many")
    router.connections[0].frames.put_nowait(frame)
    await sink.wait_for(num_finishes=1)
    assert sink.finishes[0].error.reason == LOST
    await connected(link)
    assert "The link to the router failed" in caplog.text


async def test_closing_tells_everybody(router: FakeRouter) -> None:
    """A process that shuts down leaves no request waiting."""
    router.answers = False
    link = GrpcRouterLink(router.address, "test")
    await link.start()
    await connected(link)
    sink = RecordingSink()
    link.submit(request([1]), sink)
    await link.close()
    await link.close()
    assert sink.finishes[0].error.reason == LOST


class CancellingSink(RecordingSink):
    """Cancels another request as soon as its own first token arrives."""

    def __init__(self, link: GrpcRouterLink) -> None:
        super().__init__()
        self._link = link
        self.victim = 0

    def on_tokens(self, index, delta, token_ids, logprobs) -> None:
        self._link.cancel(self.victim)
        super().on_tokens(index, delta, token_ids, logprobs)


async def test_a_cancel_that_comes_too_late_never_hits_the_slots_next_user(
    link: GrpcRouterLink, router: FakeRouter
) -> None:
    """A request ends by itself and is cancelled in the same loop iteration: the cancel must not be sent after the slot
    is reused."""
    router.answers = False
    canceller, victim, heir = CancellingSink(link), RecordingSink(), RecordingSink()
    link.submit(request([1]), canceller)
    canceller.victim = link.submit(request([2]), victim)
    await router.wait_until(lambda: bool(router.connections) and len(router.connections[0].submits) == 2)
    connection = router.connections[0]
    first, second = (submit.choices[0].slot for submit in connection.submits)
    frame = router_service_pb2.RouterServiceConnectResponse(
        step=generation_pb2.StepFrame(
            slots=[first],
            token_ids=[7],
            deltas=["x"],
            finishes=[generation_pb2.SequenceFinish(slot=second, reason=generation_pb2.FINISH_REASON_STOP)],
        )
    )
    connection.frames.put_nowait(frame)
    await canceller.wait_for(num_tokens=1)
    link.submit(request([3]), heir)
    await router.wait_until(lambda: len(connection.submits) == 3)
    assert connection.submits[2].choices[0].slot == second
    router.tokens(connection, (second, [8]))
    await heir.wait_for(num_tokens=1)
    assert connection.cancelled_slots == []


async def test_a_router_that_accepts_and_says_nothing_is_left_within_seconds() -> None:
    """Of several routers that share a port one may hang. Every other new connection reaches it, sometimes many in a
    row, and gRPC would wait 20 seconds for each. An answer looks for a router no longer than this."""
    came = asyncio.Semaphore(0)

    async def hang(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.release()
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 30)
        finally:
            writer.close()

    hung = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = hung.sockets[0].getsockname()[1]
    link = GrpcRouterLink(f"127.0.0.1:{port}", "edge")
    await link.start()
    try:
        async with asyncio.timeout(REATTACH_SECONDS):
            for _ in range(3):
                await came.acquire()
            hung.close()  # the connections stay
            async with serve_fake_router(port):
                while not link.connected:
                    await link.wait_fleet_change()
                await link.close()
    finally:
        await link.close()
        tasks = [task for task in asyncio.all_tasks() if task.get_coro().__qualname__.endswith("hang")]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
