"""Clients outside the fabric that say more than they have: over gRPC, with a tenant's key, nothing that a request
claims about its answer lessens what is charged, limited or screened."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvloom.errors import KvloomError
from kvloom.transport.grpc_errors import from_rpc_error
from kvloom.v1 import router_service_pb2 as pb
from kvloom.v1.generation_pb2 import Choice, SamplingParams, StopConditions
from kvloom.v1.router_service_pb2_grpc import RouterServiceStub
from kvloom_common.tenancy.limits import Limits
from tests.fakes.fake_control import key_of
from tests.fakes.link_requests import make_submit
from tests.fakes.metered_world import FIRST, MeteredWorld, metered
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)

KEY = "kvl-outside"
PROMPT = list(range(100, 110))
BEARER = (("authorization", f"Bearer {KEY}"),)


@pytest.fixture
async def world(router_redis_url: str, tmp_path: Path) -> AsyncIterator[MeteredWorld]:
    async with metered(router_redis_url, tmp_path, "the quick fox ") as world:
        yield world


async def limited(world: MeteredWorld, **limits: int) -> RouterServiceStub:
    """A client with a key that has these limits."""
    world.control.put(key_of(KEY, "acme/search", limits=Limits(**limits)))
    identities = world.models.server.callers.identities
    assert identities is not None
    await eventually(lambda: identities.tenants.table.version == world.control.version, "the key")
    return RouterServiceStub(world.channel)


def wanted(max_tokens: int = 20, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        **{
            "model": FIRST,
            "token_ids": pb.TokenIds(ids=PROMPT),
            "request_id": "r",
            "stop": StopConditions(max_tokens=max_tokens, ignore_eos=True),
            "sampling": SamplingParams(temperature=0.0),
            **fields,
        }
    )


async def num_generated(stub: RouterServiceStub, request: pb.GenerateRequest) -> int:
    """How many tokens arrive. Raises KvloomError."""
    count = 0
    try:
        async for response in stub.Generate(request, metadata=BEARER, timeout=20):
            count += sum(len(delta.token_ids) for delta in response.deltas)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    return count


async def reason_of(stub: RouterServiceStub, request: pb.GenerateRequest) -> str:
    try:
        await num_generated(stub, request)
    except KvloomError as error:
        return error.reason_name
    return ""


async def test_every_answer_under_one_id_is_metered(world: MeteredWorld) -> None:
    """Twelve answers to one prompt under one id, each with another bias and temperature, were billed as one or two."""
    stub = await limited(world)
    count = 0
    for number in range(12):
        sampling = SamplingParams(temperature=0.1 * number, seed=7)
        count += await num_generated(stub, wanted(sampling=sampling))
    for _ in range(3):  # one that is the same in every respect was computed as well
        count += await num_generated(stub, wanted(sampling=SamplingParams(seed=7)))
    await world.until_recorded(15)
    records = await world.counted()
    assert count == 15 * 20
    assert sum(record.num_output_tokens for record in records) == count
    assert sum(record.num_prompt_tokens for record in records) == 15 * len(PROMPT)


async def test_what_other_choices_have_is_charged_as_prompt(world: MeteredWorld) -> None:
    """One choice was said to be done, the other one to have thousands of tokens: they were computed, and were on
    no bill."""
    stub = await limited(world)
    has = [101 + number % 50 for number in range(600)]
    claims = [pb.PartialChoice(index=0, done=True), pb.PartialChoice(index=1, token_ids=has)]
    assert await num_generated(stub, wanted(602, n=2, partial_choices=claims)) == 2
    await world.until_recorded(1)
    [record] = await world.counted()
    assert (record.num_prompt_tokens, record.num_output_tokens) == (len(PROMPT) + 600, 2)
    assert record.cost_nanos == 3 + 10 * (len(PROMPT) + 600 - record.num_cached_tokens) + record.num_cached_tokens + 200


@pytest.mark.parametrize("limit", ["max_prompt_tokens", "tokens_per_minute"])
async def test_claimed_output_is_limited_as_prompt_is(world: MeteredWorld, limit: str) -> None:
    """One claimed token switched the limits of prompts off."""
    stub = await limited(world, **{limit: 50})
    claims = [pb.PartialChoice(index=0, token_ids=[7] * 45)]
    assert await reason_of(stub, wanted(60, partial_choices=claims)) != ""
    long_prompt = pb.TokenIds(ids=[*range(100, 160)])
    claim = [pb.PartialChoice(index=0, token_ids=[7])]
    assert await reason_of(stub, wanted(token_ids=long_prompt, partial_choices=claim)) != ""
    assert not await world.counted()


async def test_a_claim_takes_no_request_out_of_the_limit(world: MeteredWorld) -> None:
    """As many continued answers a minute as there may be requests were believed."""
    stub = await limited(world, requests_per_minute=3)
    claim = [pb.PartialChoice(index=0, token_ids=[7])]
    outcomes = [await reason_of(stub, wanted(partial_choices=claim)) for _ in range(5)]
    assert outcomes == [""] * 3 + ["RATE_LIMITED"] * 2


async def test_claims_on_a_stream_of_many_requests_are_no_better(world: MeteredWorld) -> None:
    """`Connect` has more to claim: tokens of choices that have ended, of other models, and that are reasoning."""
    stub = await limited(world, max_prompt_tokens=50)

    async def frames() -> AsyncIterator[pb.RouterServiceConnectRequest]:
        yield pb.RouterServiceConnectRequest(hello=pb.ClientHello(client_id="c"))
        for number, count in enumerate((45, 5)):
            choice = Choice(slot=number, index=1, output_token_ids=[7] * count, num_delivered_chars=count)
            submit = make_submit(
                request_id=f"r{number}",
                model=FIRST,
                prompt_token_ids=PROMPT,
                choices=[choice],
                stop=StopConditions(max_tokens=count + 2, ignore_eos=True),
                num_ended_tokens=1000,
                num_foreign_tokens=count,
                num_ended_reasoning_tokens=500,
            )
            yield pb.RouterServiceConnectRequest(submits=[submit])

    finishes = []
    async for frame in stub.Connect(frames(), metadata=BEARER, timeout=20):
        finishes += list(frame.step.finishes)
    assert sorted(finish.slot for finish in finishes if finish.HasField("error")) == [0]
    await world.until_recorded(1)
    [record] = await world.counted()
    assert (record.num_prompt_tokens, record.num_output_tokens) == (len(PROMPT) + 5, 2)
    assert (record.num_reasoning_tokens, record.num_resumed_tokens) == (0, 0)


async def test_an_answer_that_was_delivered_is_neither_lost_nor_discarded(world: MeteredWorld) -> None:
    """Edges say which tokens have not arrived, and which answers were discarded; a client that could say so would have
    its answers for nothing."""
    stub = await limited(world)
    stream = stub.Connect(metadata=BEARER, timeout=20)
    await stream.write(pb.RouterServiceConnectRequest(hello=pb.ClientHello(client_id="c", link_id="link")))
    for name in ("lost", "discarded"):
        submit = make_submit(
            request_id=name, model=FIRST, prompt_token_ids=PROMPT, choices=[Choice(slot=1)],
            stop=StopConditions(max_tokens=20, ignore_eos=True),
        )  # fmt: skip
        await stream.write(pb.RouterServiceConnectRequest(submits=[submit]))
        while not (await stream.read()).step.finishes:
            pass
    lost = [pb.LostRequest(request_id=name, link_id=link) for name in ("lost", "discarded") for link in ("", "link")]
    names = ["discarded", "discarded@acme/search"]
    await stream.write(pb.RouterServiceConnectRequest(lost=lost, discarded=names))
    await stream.done_writing()
    while await stream.read() is not grpc.aio.EOF:
        pass
    hello = pb.ClientHello(client_id="c", link_id="link", lost=lost)
    again = stub.Connect(iter([pb.RouterServiceConnectRequest(hello=hello, discarded=names)]), metadata=BEARER)
    async for _ in again:
        pass
    await stub.Cancel(pb.CancelRequest(request_id="lost", link_id="link"), metadata=BEARER)
    await world.until_recorded(2)
    records = await world.counted()
    assert [record.num_output_tokens for record in records] == [20, 20]
    assert {record.tenant for record in records} == {"acme/search"}
    assert all(record.cost_nanos for record in records)


@pytest.mark.parametrize("has_hung", [False, True])
async def test_a_client_that_says_nothing_had_arrived_pays_unless_the_router_hung(
    world: MeteredWorld, has_hung: bool
) -> None:
    """The SDK settles what it leaves behind, and a router that hung has computed for a client that was gone."""
    stub = await limited(world)
    token = "a token of 16 chars"
    assert await num_generated(stub, wanted(20, resume_token=token)) == 20
    await world.until_recorded(1)
    if has_hung:
        world.models.server._records.suspensions.note(0.0, 10.0)
    await stub.Cancel(pb.CancelRequest(request_id="r", resume_token=token, num_received_tokens=3), metadata=BEARER)
    if has_hung:
        await world.until_recorded(2)
    [record] = await world.counted()
    assert record.num_output_tokens == (3 if has_hung else 20)
