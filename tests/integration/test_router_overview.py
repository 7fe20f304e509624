"""What operators see of a router, over real sockets: shards, requests, samples, explanations, drains."""

from __future__ import annotations

import grpc
import pytest

from kvloom.transport.grpc_errors import from_rpc_error
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.overview_pb2 import (
    ExplainRequestRequest,
    FleetSample,
    GetOverviewRequest,
    GetOverviewResponse,
)
from kvloom_common.overview.merge import merged
from kvloom_common.overview.time_parts import where_time_went
from router.core.events import ShardDescription, ShardLoad
from router.core.fleet.fleet import ShardState
from router.core.fleet.shard_health import HealthState
from router.overview.samples import FleetSamples, RequestCounts
from tests.fakes.router_world import Answer, RouterWorld, link_request
from tests.fakes.trusted_router import served_router
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)

PROMPT = list(range(40))


async def ask(world: RouterWorld, method: str, request):
    link = await world.connect("asker")
    (answer,) = await link.ask_all(method, request)
    return answer


async def start(world: RouterWorld, num_shards: int = 2):
    shards = [await world.start_shard(f"shard-{number}") for number in range(num_shards)]
    await world.start_router()
    link = await world.connect()
    await world.wait_for_shards(link, num_shards)
    return link, shards


async def test_requests_are_listed_while_they_run_and_after(world: RouterWorld) -> None:
    """An operator sees what the fabric does now, and what it has done, of all tenants or of one organisation's."""
    link, shards = await start(world)
    await world.ask(link, PROMPT, 5, request_id="done", tenant="acme/web")
    for shard in shards:
        shard.pause()
    link.submit(link_request(PROMPT, 5, request_id="open", tenant="other/web"), Answer())
    await eventually(lambda: any(len(shard.submits) and shard.num_running for shard in shards), "the submit")
    overview = await ask(world, "GetOverview", GetOverviewRequest(max_requests=10))
    assert {one.shard_id for one in overview.shards} == {"shard-0", "shard-1"}
    assert overview.num_live_requests == 1
    (running,) = overview.running
    assert (running.request_id, running.tenant, running.state) == ("open", "other/web", "prefill")
    assert not running.outcome.end
    (ended,) = overview.ended
    assert (ended.request_id, ended.state, ended.outcome.end) == ("done", "ended", "finished")
    assert overview.at_seconds - 60 < ended.arrived_at_seconds <= overview.at_seconds
    own = await ask(world, "GetOverview", GetOverviewRequest(max_requests=10, organisation="acme"))
    assert [one.request_id for one in own.ended] == ["done"]
    assert not own.running
    assert not own.shards, "the fleet is the operator's"
    assert not own.num_live_requests
    few = await ask(world, "GetOverview", GetOverviewRequest())
    assert not few.running
    assert not few.ended
    for shard in shards:
        shard.resume()


async def test_an_explanation_is_for_its_organisation(world: RouterWorld) -> None:
    """Another organisation's requests do not exist, and an own one says nothing of what others do."""
    link, _ = await start(world)
    await world.ask(link, PROMPT, 5, request_id="mine", tenant="acme/web", client_request_id="of-client")
    whole = (await ask(world, "ExplainRequest", ExplainRequestRequest(request_id="mine"))).explanation
    assert len(whole.decisions[0].plan.shards) == 2
    own = await ask(world, "ExplainRequest", ExplainRequestRequest(client_request_id="of-client", organisation="acme"))
    assert own.explanation.request_id == "mine"
    (picked,) = own.explanation.decisions[0].plan.shards
    assert not picked.cost_terms
    with pytest.raises(Exception, match="remembers no placement"):
        await ask(world, "ExplainRequest", ExplainRequestRequest(request_id="mine", organisation="acm"))
    went = where_time_went(whole, edge_seconds=whole.outcome.e2e_latency_seconds + 0.25)
    assert went is not None
    parts = {part.name: part.seconds for part in went.parts}
    assert parts["network"] == pytest.approx(0.25)
    assert sum(parts.values()) == pytest.approx(whole.outcome.e2e_latency_seconds + 0.25, abs=0.005)


async def test_a_failover_is_a_part_of_the_time(world: RouterWorld) -> None:
    """How long a request waited because its shard was lost is told apart from its decoding."""
    link, shards = await start(world)
    answer = Answer()
    for shard in shards:
        shard.pause()
    link.submit(link_request(PROMPT, 5, request_id="mine"), answer)
    await eventually(lambda: any(shard.num_running for shard in shards), "the submit")
    first = next(shard for shard in shards if shard.num_running)
    await first.stop()
    for shard in shards:
        shard.resume()
    await eventually(lambda: answer.done, "the answer")
    explained = (await ask(world, "ExplainRequest", ExplainRequestRequest(request_id="mine"))).explanation
    assert explained.outcome.num_failovers == 1
    assert 0 <= explained.outcome.moved_seconds < explained.outcome.e2e_latency_seconds
    went = where_time_went(explained)
    assert went is not None
    assert "failed over 1x" in went.why


async def test_clients_of_a_fabric_with_a_secret_see_nothing(world: RouterWorld) -> None:
    """The overview has the requests of all tenants."""
    async with served_router(world) as (_, address):
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_unary(
                "/kvloom.v1.OverviewService/GetOverview",
                request_serializer=GetOverviewRequest.SerializeToString,
                response_deserializer=GetOverviewResponse.FromString,
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(GetOverviewRequest(), timeout=10)
        assert from_rpc_error(caught.value).reason == ErrorReason.ERROR_REASON_PERMISSION_DENIED


def state(load: ShardLoad, incarnation_id: str = "a") -> ShardState:
    about = ShardDescription("shard-0", incarnation_id, "tiny", 16, 100, 8, 4096)
    return ShardState(about, False, HealthState.HEALTHY, 0.0, 0.0, {}, load)


def test_samples_are_differences_and_an_hour_long() -> None:
    """Counts become rates between samples; a process that began again counts from zero, not backwards."""
    now = [100.0]
    loads = [state(ShardLoad(num_output_tokens=50, num_prompt_tokens=10, num_available_blocks=100))]
    counts = [RequestCounts(0, 7, 1, [3, 0])]
    samples = FleetSamples(lambda: loads, lambda: counts[0], lambda: now[0])
    samples.take()
    assert not list(samples.since(0))
    now[0] += 5
    loads[0] = state(
        ShardLoad(num_output_tokens=150, num_prompt_tokens=30, num_cached_tokens=10, num_available_blocks=25)
    )
    counts[0] = RequestCounts(2, 9, 2, [4, 1])
    samples.take()
    (one,) = samples.since(0)
    assert (one.output_tokens_per_second, one.prompt_tokens_per_second, one.hit_rate) == (20, 4, 0.5)
    assert (one.kv_usage, one.num_queued, one.num_ended, one.num_failed) == (0.75, 2, 2, 1)
    assert list(one.ttft_counts) == [1, 1]
    now[0] += 5
    loads[0] = state(ShardLoad(num_output_tokens=5, num_available_blocks=100), "b")
    samples.take()
    assert next(samples.since(105)).output_tokens_per_second == 1
    for _ in range(1000):
        now[0] += 5
        samples.take()
    assert len(list(samples.since(0))) == 720


def test_routers_are_merged() -> None:
    """Shards are the same at all routers; requests add up."""
    samples = [FleetSample(at_seconds=100 + n, num_running=3, num_ended=n, ttft_counts=[n, 1]) for n in (1, 2)]
    fleet = merged(GetOverviewResponse(router_id=f"r{n}", samples=[one]) for n, one in enumerate(samples))
    (one,) = fleet.samples
    assert (one.num_running, one.num_ended, list(one.ttft_counts)) == (3, 3, [3, 2])
