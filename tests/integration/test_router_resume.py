"""`Generate` with `resumable` and `Resume`: whatever breaks, a client ends up with every response once, and is metered
once."""

from __future__ import annotations

import asyncio

import pytest

from kvloom.v1.router_service_pb2 import CancelRequest, GenerateResponse
from tests.fakes.fake_shard import expected_tokens
from tests.fakes.generate_stream import PROMPT, TOKEN, Stream, metered, start
from tests.fakes.router_world import TIMEOUT_SECONDS, RouterWorld
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)


async def test_a_dropped_stream_goes_on_where_it_was(world: RouterWorld) -> None:
    """The client gets the missed responses unchanged and then new ones, again and again, and is metered once."""
    await start(world)
    stream = Stream(world)
    await stream.begin()
    for count in (1, 4, 2, 7):
        await stream.read(count)
        stream.drop()
        await stream.resume()
    await stream.read_to_end()
    stream.check_whole()
    assert stream.responses[0].resume_token == TOKEN
    assert not any(response.resume_token for response in stream.responses[1:])
    assert metered(world) == (1, 30)
    assert world.metric("kvloom_router_resumed_streams_total") == 4


async def test_the_replay_is_the_same_however_often(world: RouterWorld) -> None:
    """From any position, during the answer and after its end, it is byte for byte what the first reader got."""
    await start(world)
    stream = Stream(world)
    await stream.begin()
    await stream.read_to_end()
    whole = [response.SerializeToString() for response in stream.responses]
    for after in (0, 1, 12, len(whole)):
        await stream.resume(after)
        await stream.read_to_end()
        assert [response.SerializeToString() for response in stream.responses] == whole
    assert metered(world) == (1, 30)


async def test_a_stream_that_breaks_before_its_first_response_is_resumable(world: RouterWorld) -> None:
    """The id and the token are in the initial metadata, before the engine has done anything."""
    shard = await start(world)
    shard.pause()
    stream = Stream(world, resume_token="", request_id="")
    await stream.begin()
    metadata = dict(await asyncio.wait_for(stream.call.initial_metadata(), TIMEOUT_SECONDS))
    stream.drop()
    assert metadata["kvloom-router"] == "router-0"
    stream.request.request_id = metadata["kvloom-request-id"]
    stream.request.resume_token = metadata["kvloom-resume-token"]
    await stream.resume()
    shard.resume()
    await stream.read_to_end()
    assert stream.token_ids == expected_tokens(PROMPT, 0, 30)
    assert stream.responses[0].resume_token == metadata["kvloom-resume-token"]


async def test_a_request_whose_client_never_heard_of_it_ends_at_once(world: RouterWorld) -> None:
    """No client can come back to an answer whose drawn token was never sent; with a token of its own a client can."""
    await start(world)
    stream = Stream(world)
    await stream.begin()
    await eventually(lambda: world.metric("kvloom_router_resumable_answers") == 1, "the request")
    stream.drop()
    await stream.resume(0)
    await stream.read_to_end()
    stream.check_whole()


async def test_only_the_same_caller_may_resume(world: RouterWorld) -> None:
    """Another key, another token, another id: the very answer that an unknown stream gets."""
    await start(world)
    stream = Stream(world)
    stream.metadata = (("authorization", "Bearer mine"),)
    await stream.begin()
    await stream.read(2)
    stream.drop()
    told = []
    for metadata, token in (
        ((("authorization", "Bearer theirs"),), ""),
        ((), ""),
        (stream.metadata, "another-secret-of-16"),
    ):
        thief = Stream(world)
        thief.metadata = metadata
        await thief.resume(0, token)
        told.append(await thief.error())
    unknown = Stream(world, request_id="nobody's")
    await unknown.resume(0)
    told.append(await unknown.error())
    assert {error.reason_name for error in told} == {"NOT_FOUND"}
    assert len({error.message for error in told}) == 1
    await stream.resume()
    await stream.read_to_end()
    stream.check_whole()


async def test_another_router_says_where_to_go(world: RouterWorld) -> None:
    """Streams live in the router that began them: a token that it drew names it."""
    await start(world)
    stream = Stream(world)
    await stream.resume(0, "router-7.0123456789abcdef")
    error = await stream.error()
    assert error.reason_name == "NOT_FOUND"
    assert "this is router 'router-0', the token is of router 'router-7'" in error.message


async def test_without_its_client_an_answer_ends_after_the_grace_period(world: RouterWorld) -> None:
    """An engine works without a reader no longer than that; the tokens that were generated until then are metered,
    once."""
    shard = await start(world, grace_seconds=0.2)
    stream = Stream(world, max_tokens=4000)
    await stream.begin()
    await stream.read(2)
    stream.drop()
    await eventually(lambda: shard.cancelled_slots and not shard.num_running, "the cancel")
    await stream.resume()
    assert (await stream.error()).reason_name == "NOT_FOUND"
    ended, tokens = metered(world)
    assert ended == 1
    assert tokens >= 2
    assert world.metric("kvloom_router_expired_answers_total") == 1
    assert world.metric("kvloom_router_resume_bytes") == 0


@pytest.mark.parametrize(("grace_seconds", "resumable"), [(0.0, True), (10.0, False), (10.0, None)])
async def test_what_is_not_resumable_is_cancelled_at_once(
    world: RouterWorld, grace_seconds: float, resumable: bool | None
) -> None:
    """Most clients that break off mean it: resuming is for those that ask, where it is switched on."""
    shard = await start(world, grace_seconds=grace_seconds)
    stream = Stream(world, max_tokens=4000, resumable=resumable)
    await stream.begin()
    await stream.read(2)
    assert stream.responses[0].event_number == 0
    stream.drop()
    await eventually(lambda: shard.cancelled_slots and not shard.num_running, "the cancel")


async def test_by_default_can_be_set(world: RouterWorld) -> None:
    """An operator may make all streams resumable; a client may still decline."""
    await start(world, by_default=True)
    for resumable, numbered in ((None, True), (False, False)):
        stream = Stream(world, resumable=resumable, request_id=f"{resumable}")
        await stream.begin()
        await stream.read_to_end()
        assert bool(stream.responses[0].event_number) is numbered


async def test_what_is_no_longer_kept_is_an_error_not_a_gap(world: RouterWorld) -> None:
    """Buffers are bounded: a client that asks for what is gone gets an error, and the engine does not continue without
    a reader."""
    shard = await start(world, max_response_bytes=4096)
    stream = Stream(world, max_tokens=2000)
    await stream.begin()
    await stream.read(2)
    stream.drop()
    await eventually(lambda: shard.cancelled_slots and not shard.num_running, "the cancel")
    kept = Stream(world, max_tokens=200, request_id="other")
    await kept.begin()
    await kept.read_to_end()
    await kept.resume(1)
    assert (await kept.error()).reason_name == "EVENTS_GONE"
    num_responses = len(expected_tokens(PROMPT, 0, 200))
    await kept.resume(0)
    error = await kept.error()
    assert error.reason_name == "EVENTS_GONE"
    assert error.kind.grpc_code == "OUT_OF_RANGE"
    kept.responses = [GenerateResponse()] * (num_responses - 2)
    await kept.resume()
    await kept.read_to_end()
    assert kept.responses[-1].deltas[0].finish.num_output_tokens == 200
    await kept.resume(0, "x" * 20)
    assert (await kept.error()).reason_name == "NOT_FOUND"


async def test_all_answers_together_are_bounded(world: RouterWorld) -> None:
    """The ended answers are evicted first, the oldest before the others."""
    await start(world, {"step_seconds": 0.0}, max_bytes=64 * 1024)
    for number in range(12):
        stream = Stream(world, max_tokens=100, request_id=f"number-{number}")
        await stream.begin()
        await stream.read_to_end()
        assert world.metric("kvloom_router_resume_bytes") <= 64 * 1024
    assert world.metric("kvloom_router_evicted_answers_total") > 0
    await stream.resume(0)
    await stream.read_to_end()
    assert stream.token_ids == expected_tokens(PROMPT, 0, 100)


async def test_the_later_reader_takes_over(world: RouterWorld) -> None:
    """A router is often the last to learn that a connection is dead."""
    await start(world, {"step_seconds": 0.01})
    first, second = Stream(world), Stream(world)
    await first.begin()
    await first.read(3)
    await second.resume(0)
    assert (await first.error()).reason_name == "STREAM_TAKEN_OVER"
    await second.read_to_end()
    second.check_whole()
    assert metered(world) == (1, 30)


async def test_a_position_that_was_never_reached_is_refused(world: RouterWorld) -> None:
    """A client that counts wrong must get an error."""
    await start(world)
    stream = Stream(world)
    await stream.begin()
    await stream.read_to_end()
    stream.responses *= 3
    await stream.resume()
    error = await stream.error()
    assert (error.reason_name, error.field) == ("INVALID_ARGUMENT", "starting_after")


@pytest.mark.parametrize("token", ["short", "x" * 257, "é" * 20, "a\nnewline-in-a-token"])
async def test_a_token_that_is_no_secret_is_refused(world: RouterWorld, token: str) -> None:
    """The token that binds a stream to its client must not be guessable, and must fit into metadata."""
    await start(world)
    stream = Stream(world, resume_token=token)
    await stream.begin()
    error = await stream.error()
    assert (error.reason_name, error.field) == ("INVALID_ARGUMENT", "resume_token")


async def test_a_refused_request_leaves_nothing_behind(world: RouterWorld) -> None:
    """The same request may succeed when it is made again."""
    await start(world)
    stream = Stream(world, model="gpt-9", request_id="né ", n=3)
    await stream.begin()
    assert (await stream.error()).reason_name == "MODEL_NOT_FOUND"
    assert world.metric("kvloom_router_resumable_answers") == 0
    again = Stream(world)
    await again.begin()
    await again.read_to_end()
    again.check_whole()


async def test_a_name_that_is_kept_is_resumed_not_begun_again(world: RouterWorld) -> None:
    """A client that repeats Generate must not pay for the answer twice."""
    await start(world)
    stream = Stream(world)
    await stream.begin()
    await stream.read_to_end()
    again = Stream(world)
    await again.begin()
    assert (await again.error()).reason_name == "DUPLICATE_REQUEST_ID"
    assert metered(world) == (1, 30)


async def test_an_error_is_replayed_like_the_rest(world: RouterWorld) -> None:
    """An answer that fails after its client has left ends for it as it would have."""
    await start(world, {"step_seconds": 0.005})
    stream = Stream(world, max_tokens=4000, timeout_seconds=0.3)
    await stream.begin()
    await stream.read(3)
    stream.drop()
    await eventually(lambda: metered(world)[0] == 1, "the end")
    for _ in range(2):
        await stream.resume(3)
        assert (await stream.error()).reason_name == "DEADLINE_EXCEEDED"
    assert stream.token_ids == expected_tokens(PROMPT, 0, len(stream.token_ids))
    assert metered(world) == (1, len(stream.token_ids))


async def test_cancel_ends_it_without_grace(world: RouterWorld) -> None:
    """A client that leaves for good can cancel."""
    shard = await start(world)
    stream = Stream(world, max_tokens=4000)
    await stream.begin()
    await stream.read(2)
    stream.drop()
    assert (await (await world.stub()).Cancel(CancelRequest(request_id="mine"))).found
    await eventually(lambda: not shard.num_running, "the cancel")
    await stream.resume()
    await stream.read_to_end()
    assert stream.responses[-1].deltas[0].finish.num_output_tokens == len(stream.token_ids)


async def test_a_router_that_stops_ends_what_it_keeps(world: RouterWorld) -> None:
    """Draining waits for answers; those that are left then end with a reason, not with a broken connection."""
    world.config.fabric.drain_timeout_seconds = 0.2
    await start(world)
    attended, left = Stream(world, max_tokens=4000), Stream(world, max_tokens=4000, request_id="left")
    for stream in (attended, left):
        await stream.begin()
        await stream.read(2)
    left.drop()
    world.stop.set()
    assert (await attended.error()).reason_name == "DRAINING"
    assert world.served is not None
    await asyncio.wait_for(world.served, TIMEOUT_SECONDS)
    assert world.metric("kvloom_router_resumable_answers") == 0


async def test_n_answers_resume_together(world: RouterWorld) -> None:
    """All choices of a request are in one stream: none may lose its place."""
    await start(world)
    stream = Stream(world, n=3)
    await stream.begin()
    await stream.read(4)
    stream.drop()
    await stream.resume()
    await stream.read_to_end()
    for index in range(3):
        deltas = [delta for response in stream.responses for delta in response.deltas if delta.index == index]
        assert [i for delta in deltas for i in delta.token_ids] == expected_tokens(PROMPT, index, 30)
    assert metered(world) == (1, 90)
