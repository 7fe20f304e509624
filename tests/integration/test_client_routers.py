"""The SDK with several routers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from kvloom.client.client import Client
from kvloom.client.router_channels import FAR_SECONDS, RouterChannels
from kvloom.errors import KvloomError
from kvloom.v1 import router_service_pb2
from kvloom.v1.error_reason_pb2 import ErrorReason
from tests.fakes.fake_router import FakeRouter, serve_fake_router, text_of
from tests.waiting import eventually


@pytest.fixture
async def routers() -> AsyncIterator[list[FakeRouter]]:
    """Two scripted routers."""
    async with serve_fake_router() as (first, first_address), serve_fake_router() as (second, second_address):
        first.address, second.address = first_address, second_address
        yield [first, second]


@pytest.fixture
async def gone() -> str:
    """An address at which no router listens any more."""
    async with serve_fake_router() as (_, address):
        return address


@pytest.mark.parametrize("form", [",".join, lambda addresses: addresses, " , ".join])
async def test_addresses_are_a_list_or_have_commas_between_them(
    routers: list[FakeRouter], form: Callable[[list[str]], str | list[str]]
) -> None:
    """Both notations are accepted."""
    async with Client(form([router.address for router in routers])) as client:
        assert [d.text async for d in client.generate(model="m", token_ids=[1, 2])] == [text_of(1), text_of(2), ""]


async def test_an_answer_to_token_ids_continues_at_another_router(routers: list[FakeRouter]) -> None:
    """The loop notices a pause, and gets each token once."""
    for router in routers:
        router.answers = False
    async with Client([router.address for router in routers]) as client:
        deltas = client.generate(
            model="m", token_ids=[1], request_id="mine", priority_class="batch", fairness_id="chat 7"
        )
        first_token = asyncio.create_task(anext(deltas))
        served = await eventually(lambda: [r for r in routers if r.connections and r.connections[0].submits])
        connection = served[0].connections[0]
        served[0].tokens(connection, (connection.submits[0].choices[0].slot, [7, 8]))
        assert (await first_token).token_ids == [7, 8]
        (other,) = [router for router in routers if router is not served[0]]
        rest = asyncio.create_task(anext(deltas))
        served[0].refuses = True
        connection.frames.put_nowait(None)
        await other.wait_until(lambda: any(c.submits for c in other.connections))
        again = other.connections[0].submits[0]
        assert list(again.choices[0].output_token_ids) == [7, 8]
        assert (again.request.priority_class, again.request.fairness_id) == ("batch", "chat 7")
        other.tokens(other.connections[0], (again.choices[0].slot, [9]))
        assert (await rest).token_ids == [9]
        await deltas.aclose()


async def test_calls_go_to_a_router_that_is_there(gone: str, routers: list[FakeRouter]) -> None:
    """Text is generated, models are listed and plans are made, although the first address is dead."""
    async with Client([gone, routers[0].address]) as client:
        assert [delta.text async for delta in client.generate(model="m", text="a b")] == ["a", "b", ""]
        assert [model.name for model in await client.list_models()] == ["m"]
        assert (await client.plan(model="m", text="hi")).picked_shard_id == "shard-0"


async def test_a_router_that_drains_is_not_the_last_word(routers: list[FakeRouter]) -> None:
    """Another router gets the text; an invalid request is rejected at once."""
    routers[0].fail_with = KvloomError(ErrorReason.ERROR_REASON_DRAINING, "I stop.")
    async with Client([router.address for router in routers]) as client:
        assert [delta.text async for delta in client.generate(model="m", text="a")] == ["a", ""]
        assert len(routers[0].generate_requests) == 1
        routers[1].fail_with = KvloomError(ErrorReason.ERROR_REASON_CONTENT_FILTERED, "No.")
        with pytest.raises(KvloomError) as caught:
            [delta async for delta in client.generate(model="m", text="b")]
        assert caught.value.reason == ErrorReason.ERROR_REASON_CONTENT_FILTERED
        assert len(routers[0].generate_requests) == 1


async def test_a_request_is_cancelled_wherever_it_runs(gone: str, routers: list[FakeRouter]) -> None:
    """The caller of `cancel` need not know which router has the request."""
    async with Client([gone, *(router.address for router in routers)]) as client:
        assert not await client.cancel("unknown")
        assert [[cancel.request_id for cancel in router.cancels] for router in routers] == [["unknown"], ["unknown"]]
        assert await client.cancel("known")


async def test_no_router_is_there(gone: str) -> None:
    """Every call raises ROUTER_LOST."""
    async with Client([gone, gone], connect_timeout_seconds=0.3, max_retries=0) as client:
        for prompt in ({"text": "a"}, {"token_ids": [1]}):
            with pytest.raises(KvloomError) as caught:
                [delta async for delta in client.generate(model="m", **prompt)]
            assert caught.value.reason == ErrorReason.ERROR_REASON_ROUTER_LOST
        with pytest.raises(KvloomError) as caught:
            await client.list_models()
        assert caught.value.reason == ErrorReason.ERROR_REASON_ROUTER_LOST


async def test_routers_of_other_cells_answer_while_no_near_one_can(gone: str, routers: list[FakeRouter]) -> None:
    """A far cell costs the way there and computes again what the near one has cached, so that it is for losses only."""
    near, far = routers
    async with Client([near.address], other_cells=far.address) as client:
        await client.complete(model="m", token_ids=[1])
        await far.wait_until(lambda: bool(far.connections))
        for number in range(8):
            await client.complete(model="m", token_ids=[number])
            await client.complete(model="m", text="a")
        assert (len(near.generate_requests), len(far.generate_requests)) == (8, 0)
        assert (len(near.connections[0].submits), len(far.connections[0].submits)) == (9, 0)
        near.fleet.models[0].num_ready_shards = 0
        near.connections[0].frames.put_nowait(router_service_pb2.RouterServiceConnectResponse(fleet=near.fleet))
        assert client._link is not None
        await eventually(lambda: [one.num_ready_shards for one in client._link.fleet.models] == [1] and far.connections)
        await client.complete(model="m", token_ids=[5])
        assert len(near.connections[0].submits) + len(far.connections[0].submits) == 10
    async with Client([gone], other_cells=[far.address]) as client:
        assert (await client.complete(model="m", text="a b")).text == "ab"
        assert (await client.complete(model="m", token_ids=[7])).text == text_of(7)


async def test_all_first_requests_wait_for_the_own_cell(
    routers: list[FakeRouter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that begins with several at once sends none of them far away because that cell has answered sooner."""
    monkeypatch.setattr("kvloom.client.client.NEAR_SECONDS", 60.0)
    near, far = routers
    near.refuses = True
    async with Client([near.address], other_cells=[far.address]) as client:
        first = asyncio.create_task(client.complete(model="m", token_ids=[1]))
        await far.wait_until(lambda: bool(far.connections))
        assert client._link is not None
        await eventually(lambda: client._link.connected_links)
        second = asyncio.create_task(client.complete(model="m", token_ids=[2]))
        near.refuses = False
        assert [(await one).text for one in (first, second)] == [text_of(1), text_of(2)]
        assert (len(near.connections[0].submits), len(far.connections[0].submits)) == (2, 0)


async def test_a_client_returns_to_its_own_cell(gone: str, routers: list[FakeRouter]) -> None:
    """The near routers are asked again half a minute later: nobody tells a client that they are back."""
    now = 100.0
    channels = RouterChannels([gone, routers[0].address], far_addresses=[routers[1].address], now=lambda: now)

    def addresses() -> list[str]:
        return [channels.address_of(stub) for stub in channels.stubs]

    first = addresses()
    channels.prefer(channels.stubs[2])
    assert addresses() == [first[2], *first[:2]]
    now += FAR_SECONDS
    assert addresses() == first
    channels.prefer(channels.stubs[2])
    channels.prefer(channels.stubs[2])
    assert addresses() == [first[1], first[2], first[0]]
    now += FAR_SECONDS
    assert addresses() == [first[1], first[2], first[0]]
    await channels.close()


async def test_a_tenant_of_one_cell_is_served_there_or_told_why_not(gone: str, routers: list[FakeRouter]) -> None:
    """A resident tenant's client may know both cells: the other one refuses its key, and that is no reason to fail
    while the right one is there, and the reason that it gets when that is lost."""
    other, own = routers
    refusal = KvloomError(ErrorReason.ERROR_REASON_CELL_UNAVAILABLE, "Only in own.")
    other.fail_with = other.refuses = refusal
    async with Client([other.address], other_cells=[own.address], max_retries=0) as client:
        for prompt in ({"text": "a"}, {"token_ids": [1]}):
            assert (await client.complete(model="m", **prompt)).num_output_tokens is not None
    options = {"max_retries": 0, "connect_timeout_seconds": 2.0}
    async with Client([gone], other_cells=[other.address], **options) as client:
        for prompt in ({"text": "a"}, {"token_ids": [1]}):
            with pytest.raises(KvloomError) as caught:
                await client.complete(model="m", **prompt)
            assert caught.value.reason == ErrorReason.ERROR_REASON_CELL_UNAVAILABLE
