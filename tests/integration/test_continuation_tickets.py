"""An answer of a client outside the fabric that continues with its ticket is one answer; with a ticket, no client gets
more computed than it is charged. (How answers fail over between processes: tests/lab/e2e/test_fabric_chaos.py.)"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvloom.v1 import router_service_pb2 as pb
from kvloom.v1.generation_pb2 import Choice, SamplingParams, StopConditions
from kvloom_common.tenancy.limits import Limits
from kvloom_common.tenancy.usage_record import UsageRecord
from tests.fakes.fake_control import key_of
from tests.fakes.link_requests import make_submit
from tests.fakes.metered_world import FIRST, MeteredWorld, metered
from tests.fakes.outside_client import PROMPT, OutsideClient, Received, generate_request
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)

NUM_PROMPT = 10
PROMPT_NANOS, CACHED_NANOS, OUTPUT_NANOS, REQUEST_NANOS = 10, 1, 100, 3


@pytest.fixture
async def world(router_redis_url: str, tmp_path: Path) -> AsyncIterator[MeteredWorld]:
    async with metered(router_redis_url, tmp_path, "the quick fox ") as world:
        yield world


async def client(
    world: MeteredWorld, key: str = "kvl-one", tenant: str = "acme/search", **limits: Any
) -> OutsideClient:
    """With a key that has these limits."""
    world.control.put(key_of(key, tenant, limits=Limits(**limits)))
    identities = world.models.server.callers.identities
    assert identities is not None
    await eventually(lambda: identities.tenants.table.version == world.control.version, "the key")
    return OutsideClient(world.channel, key)


async def left(
    world: MeteredWorld, client: OutsideClient, request: pb.GenerateRequest, after: int, num_records: int = 1
) -> Received:
    """What arrives before the client leaves. The router hears of it later: until then the name is in use."""
    received = await client.read(request, leave_after=after)
    await world.until_recorded(num_records)
    return received


def continued(request: pb.GenerateRequest, ticket: bytes, claims: list[int], **fields: Any) -> pb.GenerateRequest:
    """The request that another router gets, whose one choice has these tokens."""
    later = pb.GenerateRequest()
    later.CopyFrom(request)
    later.partial_choices.add(index=0, token_ids=claims, num_delivered_chars=len(claims) // 2)
    later.continuation_ticket = ticket
    later.MergeFrom(pb.GenerateRequest(**fields))
    return later


def cost_of(num_cached: int, num_output: int) -> int:
    new = NUM_PROMPT - num_cached
    return REQUEST_NANOS + PROMPT_NANOS * new + CACHED_NANOS * num_cached + OUTPUT_NANOS * num_output


async def counted(world: MeteredWorld, num_records: int) -> list[UsageRecord]:
    await world.until_recorded(num_records)
    return sorted(await world.counted(), key=lambda record: record.num_resumed_tokens)


async def test_a_continued_answer_is_billed_once(world: MeteredWorld) -> None:
    """Its prompt and its earlier output were charged once more, as a prompt, and what a killed router had not recorded
    was charged as nothing else."""
    one = await client(world)
    request = generate_request(FIRST, max_tokens=20)
    begun = await left(world, one, request, after=8)
    rest = await one.read(continued(request, begun.ticket, begun.token_ids))
    assert (begun.ticket != b"", rest.ticket) == (True, b"")
    assert begun.token_ids + rest.token_ids == (await one.read(generate_request(FIRST, 20, request_id="s"))).token_ids
    [answer] = [one for one in await counted(world, 3) if one.request_id.startswith("r@")]
    assert (answer.num_prompt_tokens, answer.num_output_tokens) == (NUM_PROMPT, 20)
    assert (answer.num_resumed_tokens, answer.cost_nanos) == (len(begun.token_ids), cost_of(0, 20))


async def test_a_continuation_is_not_refused_and_counts(world: MeteredWorld) -> None:
    """The request was admitted where it began. The limits per minute have counted it when the next one comes."""
    one = await client(world, requests_per_minute=2, max_prompt_tokens=NUM_PROMPT)
    request = generate_request(FIRST, max_tokens=20)
    begun = await left(world, one, request, after=8)
    assert await one.reason(continued(request, begun.ticket, begun.token_ids)) == ""
    assert await one.reason(continued(request, begun.ticket, begun.token_ids)) == ""
    assert await one.reason(generate_request(FIRST, request_id="s")) == "RATE_LIMITED"


async def test_what_is_claimed_to_have_been_received_is_paid_as_output(world: MeteredWorld) -> None:
    """A ticket of one token made thousands of claimed tokens free."""
    one = await client(world, tokens_per_minute=1000)
    request = generate_request(FIRST, max_tokens=902)
    begun = await left(world, one, request, after=1)
    more = await one.read(continued(request, begun.ticket, begun.token_ids[:1] * 900))
    assert len(more.token_ids) == 2
    [record] = await counted(world, 2)
    assert (record.num_prompt_tokens, record.num_output_tokens) == (NUM_PROMPT, 902)
    assert record.cost_nanos == cost_of(0, 902)
    long = generate_request(FIRST, request_id="s", token_ids=pb.TokenIds(ids=[7] * 200))
    assert await one.reason(long) == "RATE_LIMITED"


async def test_repetitions_are_paid(world: MeteredWorld) -> None:
    """The same ticket again and again, from nothing or from the middle: every run was computed. After a few of them it
    is not even believed."""
    one = await client(world)
    request = generate_request(FIRST, max_tokens=40)
    whole = (await one.read(request)).token_ids
    ticket = (await left(world, one, request, after=1, num_records=2)).ticket  # of another answer under the same id
    num_computed = len(whole)
    for claims in (1, 1, 20, 20, 20):
        num_computed += len((await one.read(continued(request, ticket, whole[:claims]))).token_ids)
    records = await counted(world, 7)
    assert sum(record.num_output_tokens for record in records) >= num_computed
    assert sum(bool(record.num_resumed_tokens) for record in records) == 3
    assert sum(record.num_prompt_tokens for record in records) == 6 * NUM_PROMPT + 2 * 20


async def test_a_ticket_of_another_key_or_request_makes_a_claim_a_prompt(world: MeteredWorld) -> None:
    """It is as if there was none."""
    one, thief = await client(world), await client(world, "kvl-thief", "other/app")
    request = generate_request(FIRST, max_tokens=20)
    begun = await one.read(request)
    other = generate_request(FIRST, max_tokens=20, temperature=0.7, seed=3)
    for who, wanted in ((thief, request), (one, other)):
        await who.read(continued(wanted, begun.ticket, begun.token_ids[:5]))
    records = await counted(world, 3)
    assert sorted(record.num_prompt_tokens for record in records) == [NUM_PROMPT, NUM_PROMPT + 5, NUM_PROMPT + 5]
    assert {record.num_resumed_tokens for record in records} == {0}


async def test_ended_choices_are_a_part_of_the_answer(world: MeteredWorld) -> None:
    """A router that is killed may have recorded nothing of them, and the client has paid for nothing else."""
    one = await client(world)
    request = generate_request(FIRST, max_tokens=12, n=2)
    begun = await one.read(request)
    later = continued(request, begun.ticket, begun.choices[0][:4])
    later.partial_choices.add(index=1, token_ids=begun.choices[1], done=True)
    rest = await one.read(later)
    assert len(rest.token_ids) == 8
    assert [record.num_output_tokens for record in await counted(world, 2)] == [24]


async def test_an_answer_of_a_shared_stream_continues_with_its_ticket(world: MeteredWorld) -> None:
    """The SDK sends prompts of tokens over `Connect`. There, a client can also claim tokens of other models, and that
    tokens are reasoning: with a ticket, too, it is not believed."""
    one = await client(world)
    begun = await one.connect(submit(), leave_after=6)
    await world.until_recorded(1)
    assert begun.ticket
    claims = begun.token_ids
    choice = Choice(slot=1, output_token_ids=claims, num_delivered_chars=len(claims))
    fields = {"num_foreign_tokens": len(claims), "num_ended_reasoning_tokens": 5, "num_ended_tokens": 7}
    rest = await one.connect(submit(choices=[choice], continuation_ticket=begun.ticket, **fields))
    assert len(claims) + len(rest.token_ids) == 20
    [record] = await counted(world, 2)
    assert (record.num_prompt_tokens, record.num_output_tokens) == (NUM_PROMPT, 20 + 7)
    assert (record.num_resumed_tokens, record.num_reasoning_tokens) == (len(claims) + 7, 0)


def submit(**fields: Any) -> pb.Submit:
    stop = StopConditions(max_tokens=20, ignore_eos=True)
    base: dict[str, Any] = {"choices": [Choice(slot=1)], "stop": stop, "sampling": SamplingParams(temperature=0.0)}
    return make_submit(request_id="r", model=FIRST, prompt_token_ids=PROMPT, **(base | fields))
